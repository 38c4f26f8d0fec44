"""A walker over protobuf's wire format that makes no objects of what it passes.

Why not the protobuf classes: a request's tensors are megabytes, and the router wants three short fields of them and the
place where the model's name stands. Source of the rules: protobuf's «Encoding» page. Stricter than a protobuf parser in
that groups (deprecated, and none of the messages read here has one) are refused, and so is a message of absurdly many
fields, which would hold the process up for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from router.errors import KServeError

__all__ = ["MOST_FIELDS", "Budget", "Field", "encode_varint", "walk"]

VARINT, FIXED64, BYTES, _GROUP_START, _GROUP_END, FIXED32 = range(6)

MOST_FIELDS = 4096
"""Fields read of one request, nested ones included. A real one has some dozens; each costs about a microsecond."""

_LONGEST_VARINT = 10  # 64 bits, seven a byte
_LONGEST_TAG = 5  # 32 bits; lengths likewise


class Field(NamedTuple):
    """One field.

    ``value`` is empty for all but length-delimited fields; ``start`` and ``end`` enclose tag and value in the message.
    """

    number: int
    wire_type: int
    value: memoryview
    start: int
    end: int


class Budget:
    """How many more fields may be read."""

    __slots__ = ("_left",)

    def __init__(self, fields: int = MOST_FIELDS) -> None:
        self._left = fields

    def spend(self) -> None:
        """Count one field.

        Raises:
            KServeError: It is one too many.
        """
        self._left -= 1
        if self._left < 0:
            raise KServeError(f"more than {MOST_FIELDS} fields in one message")


def walk(message: memoryview, budget: Budget) -> Iterator[Field]:
    """Yield the message's fields in the order in which they stand.

    Raises:
        KServeError: The bytes break the wire format, or the budget is spent.
    """
    at, end = 0, len(message)
    nothing = message[:0]
    while at < end:
        budget.spend()
        start = at
        tag, at = _varint(message, at, _LONGEST_TAG)
        number, wire_type = tag >> 3, tag & 7
        if number == 0 or tag >= 1 << 32:
            raise KServeError(f"byte {start}: {number} is no field number")
        value = nothing
        if wire_type == BYTES:
            length, at = _varint(message, at, _LONGEST_TAG)
            if length > end - at:
                raise KServeError(f"byte {start}: field {number} is longer than its message")
            value = message[at : at + length]
            at += length
        elif wire_type == VARINT:
            _, at = _varint(message, at, _LONGEST_VARINT)
        elif wire_type in (FIXED64, FIXED32):
            at += 8 if wire_type == FIXED64 else 4
            if at > end:
                raise KServeError(f"byte {start}: field {number} is longer than its message")
        else:
            raise KServeError(f"byte {start}: field {number} has wire type {wire_type}, which is not read")
        yield Field(number, wire_type, value, start, at)


def _varint(message: memoryview, at: int, longest: int) -> tuple[int, int]:
    """Return the varint at ``at`` and the place behind it."""
    value = shift = 0
    for place in range(at, min(at + longest, len(message))):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise KServeError(f"byte {at}: a number has no end")


def encode_varint(value: int) -> bytes:
    """Return ``value`` (not negative) as a varint."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
