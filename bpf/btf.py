"""Reads types out of BTF (Documentation/bpf/btf.rst): members' places in structures, enumerations' values.

Why: tracing programs read fields of kernel structures, whose places differ from kernel to kernel, on nodes that have no
kernel headers. The kernel describes itself in ``/sys/kernel/btf/vmlinux``; nothing else is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bpf.errors import ObjectError

__all__ = ["Btf", "Struct", "of_kernel", "of_object"]

_MAGIC: Final = 0xEB9F
_ARRAY, _STRUCT, _UNION, _ENUM, _ENUM64 = 3, 4, 5, 6, 19
# What follows the common part of a type, by kind: bytes once, and bytes for each member.
_ONCE: Final = {1: 4, _ARRAY: 12, 14: 4, 17: 4}
_EACH: Final = {_STRUCT: 12, _UNION: 12, _ENUM: 8, 13: 8, 15: 12, _ENUM64: 12}


@dataclass(frozen=True, slots=True)
class Struct:
    """A structure: its size, and where each named member begins, both in bytes (anonymous members' members count)."""

    size: int
    offsets: dict[str, int]


class Btf:
    """The types in one blob of BTF.

    Args:
        data: As in ``/sys/kernel/btf/vmlinux`` or in an object's ``.BTF``.

    Raises:
        ObjectError: It is no BTF.
    """

    def __init__(self, data: bytes) -> None:
        try:
            magic, _, _, header, types_at, types_size, texts_at, texts_size = struct.unpack_from("=HBBIIIII", data)
        except struct.error as error:
            raise ObjectError(f"BTF is cut off: {error}") from error
        if magic != _MAGIC:
            raise ObjectError(f"BTF begins with {magic:#x}, not {_MAGIC:#x}")
        self._types = data[header + types_at :][:types_size]
        self._texts = data[header + texts_at :][:texts_size]
        self._places: list[int] = [0]  # by type number; 0 is void
        self._by_name: dict[tuple[int, bytes], int] = {}
        self._index()

    def _index(self) -> None:
        position = 0
        unpack = struct.Struct("=III").unpack_from
        while position < len(self._types):
            name, info, _ = unpack(self._types, position)
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            self._places.append(position)
            if name and kind in (_STRUCT, _UNION, _ENUM, _ENUM64):
                text = self._texts[name : self._texts.index(b"\0", name)]
                self._by_name.setdefault((kind, text), position)
            position += 12 + _ONCE.get(kind, 0) + _EACH.get(kind, 0) * count

    def _text(self, at: int) -> str:
        return self._texts[at : self._texts.index(b"\0", at)].decode()

    def structure(self, name: str) -> Struct:
        """Return a structure.

        Raises:
            KeyError: There is none of that name.
        """
        position = self._by_name[_STRUCT, name.encode()]
        (size,) = struct.unpack_from("=I", self._types, position + 8)
        return Struct(size, dict(self._members(position, 0)))

    def _members(self, position: int, base: int) -> Iterator[tuple[str, int]]:
        (info,) = struct.unpack_from("=I", self._types, position + 4)
        for index in range(info & 0xFFFF):
            name, kind, place = struct.unpack_from("=III", self._types, position + 12 + 12 * index)
            offset = (
                base + (place & 0xFFFFFF if info >> 31 else place) // 8
            )  # with bit fields, the upper byte is a width
            if name:
                yield self._text(name), offset
                continue
            inner = self._places[kind]
            (inner_info,) = struct.unpack_from("=I", self._types, inner + 4)
            if inner_info >> 24 & 0x1F in (_STRUCT, _UNION):
                yield from self._members(inner, offset)

    def enumeration(self, name: str) -> dict[str, int]:
        """Return an enumeration's values by name.

        Raises:
            KeyError: There is none of that name.
        """
        position = self._by_name[_ENUM, name.encode()]
        (info,) = struct.unpack_from("=I", self._types, position + 4)
        pairs = (struct.unpack_from("=Ii", self._types, position + 12 + 8 * index) for index in range(info & 0xFFFF))
        return {self._text(text): value for text, value in pairs}


def of_kernel(path: Path = Path("/sys/kernel/btf/vmlinux")) -> Btf:
    """Return the running kernel's types.

    Raises:
        ObjectError: The kernel doesn't describe itself.
    """
    try:
        return Btf(path.read_bytes())
    except OSError as error:
        raise ObjectError(
            f"{path} can't be read: {error.strerror}", hint="the kernel needs CONFIG_DEBUG_INFO_BTF"
        ) from error


def of_object(elf: bytes) -> Btf:
    """Return the types of an object file (64 bits).

    Raises:
        ObjectError: It has none.
    """
    (table,) = struct.unpack_from("=Q", elf, 0x28)
    size, count, names = struct.unpack_from("=3H", elf, 0x3A)
    headers = [struct.unpack_from("=IIQQQQ", elf, table + index * size) for index in range(count)]
    for name, _, _, _, start, length in headers:
        text = headers[names][4] + name
        if elf[text : elf.index(b"\0", text)] == b".BTF":
            return Btf(elf[start : start + length])
    raise ObjectError("the object has no BTF")
