"""The few parts of gRPC over HTTP/2 that an ADS stream needs: message prefix, status codes, headers.

Why not grpcio: it gives no control over DATA bytes, and here each message is one zstd frame under HTTP
content-encoding (see frames.py). Wire format: https://grpc.github.io/grpc/core/md_doc__p_r_o_t_o_c_o_l-_h_t_t_p2.html
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote, unquote

from xds.errors import RefusedRequestError

__all__ = ["DELTA_PATH", "SOTW_PATH", "Deframer", "Status", "decode_message", "prefixed", "trailers"]

DELTA_PATH: Final = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
SOTW_PATH: Final = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"

_PREFIX_LENGTH: Final = 5
_MAX_STATUS_MESSAGE: Final = 1024


class Status(enum.IntEnum):
    """The gRPC status codes that are sent here."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


def prefixed(message: bytes) -> bytes:
    """Return the message behind its prefix: flag 0 (no gRPC compression) and four bytes of length."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def trailers(status: int, message: str = "") -> list[tuple[str, str]]:
    """Return the trailers that end a stream; the message is percent-encoded as the specification says."""
    result = [("grpc-status", str(int(status)))]
    if message:
        result.append(("grpc-message", quote(message[:_MAX_STATUS_MESSAGE], safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~\"")))
    return result


def decode_message(value: str) -> str:
    """Return the text of a ``grpc-message`` header."""
    return unquote(value, errors="replace")


class Deframer:
    """Cuts a byte stream into messages.

    Args:
        limit: Longest message, in bytes; a longer one is refused as soon as its prefix is read.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def whole(self, data: bytes) -> bytes | None:
        """Return the message if the data is exactly one, the usual case; else None, and ``feed`` must follow."""
        if self._buffer or len(data) < _PREFIX_LENGTH or data[0] != 0:
            return None
        length = int.from_bytes(data[1:_PREFIX_LENGTH], "big")
        return data[_PREFIX_LENGTH:] if length == len(data) - _PREFIX_LENGTH and length <= self._limit else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete now.

        Raises:
            RefusedRequestError: A message is too long (RESOURCE_EXHAUSTED) or compressed by gRPC (UNIMPLEMENTED).
        """
        self._buffer += data
        while len(self._buffer) >= _PREFIX_LENGTH:
            length = int.from_bytes(self._buffer[1:_PREFIX_LENGTH], "big")
            if self._buffer[0] != 0:
                raise RefusedRequestError(
                    "a message is compressed by gRPC", grpc_status=Status.UNIMPLEMENTED, hint="send it uncompressed"
                )
            if length > self._limit:
                raise RefusedRequestError(
                    f"a message has {length} bytes, the limit is {self._limit}", grpc_status=Status.RESOURCE_EXHAUSTED
                )
            end = _PREFIX_LENGTH + length
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_PREFIX_LENGTH:end])
            del self._buffer[:end]
            yield message
