"""Reads structures out of an object's BTF (Documentation/bpf/btf.rst), enough to compare layouts."""

from __future__ import annotations

import struct
from typing import Any

_STRUCT = 4
# What follows the common part, by kind: bytes, and whether that is for each member.
_EXTRA = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}


def section(elf: bytes, name: str) -> bytes:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + index * size) for index in range(count)]
    texts = headers[names][4]
    for header in headers:
        start = texts + header[0]
        if elf[start : elf.index(b"\0", start)] == name.encode():
            return elf[header[4] : header[4] + header[5]]
    raise KeyError(name)


class Btf:
    """Structures by name: size, and offset of each member in bytes."""

    def __init__(self, elf: bytes) -> None:
        data = section(elf, ".BTF")
        length, types_at, types_size, texts_at, _ = struct.unpack_from("<5I", data, 4)
        types, texts = data[length + types_at :][:types_size], data[length + texts_at :]

        def text(at: int) -> str:
            return texts[at : texts.index(b"\0", at)].decode()

        self.structs: dict[str, tuple[int, dict[str, int]]] = {}
        position = 0
        while position < len(types):
            name, info, size = struct.unpack_from("<3I", types, position)
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            position += 12
            members: list[tuple[Any, ...]] = []
            if kind == _STRUCT:
                members = [struct.unpack_from("<3I", types, position + index * _EACH[kind]) for index in range(count)]
            position += _EXTRA.get(kind, 0) + _EACH.get(kind, 0) * count
            if kind == _STRUCT:
                self.structs[text(name)] = size, {text(member[0]): (member[2] & 0xFFFFFF) // 8 for member in members}
