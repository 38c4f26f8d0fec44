"""Maps: read and written from user space.

Keys and values are bytes; ``layout`` packs them. A per-CPU map has one value for each possible CPU: ``get_per_cpu``
and ``items_per_cpu`` return them all, ``total`` and ``totals`` their sum.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from ctypes import byref, c_uint32, create_string_buffer
from errno import E2BIG, EEXIST, EINVAL, ENOENT, ENOSPC, EOPNOTSUPP
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

from bpf.errors import BpfError, MapFullError
from bpf.libbpf import BatchOpts, MapInfo, check, from_errno, info, lib, possible_cpus

__all__ = ["Map", "Summable"]

_PER_CPU: Final = frozenset({5, 6, 10, 21})
"""BPF_MAP_TYPE_PERCPU_HASH, PERCPU_ARRAY, LRU_PERCPU_HASH, PERCPU_CGROUP_STORAGE."""

_ARRAYS: Final = frozenset({2, 6})
"""BPF_MAP_TYPE_ARRAY, PERCPU_ARRAY: every index exists, nothing is deleted."""

_NOEXIST: Final = 1  # BPF_NOEXIST
_ENOTSUPP: Final = 524  # the kernel's own, not in errno.h
_BATCH: Final = 4096
"""Entries a call: a batch takes no lock for longer than one entry, but its buffers are copied at once."""
_MAP_FULL_HINT: Final = "the mesh has more entries than the map holds; what is in it keeps working"


class Summable(Protocol):
    """A structure of ``layout`` that adds up."""

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the structure in ``data``."""
        ...

    def __add__(self, other: Self) -> Self:
        """Return the sum."""
        ...


_S = TypeVar("_S", bound=Summable)


class Map:
    """A map by its descriptor, which is closed with ``close`` (or never, if libbpf's object owns it).

    Attributes:
        name: As the kernel keeps it: at most 15 characters.
        id: The kernel's number for it.
    """

    def __init__(self, fd: int, *, owned: bool = True) -> None:
        found = info(fd, MapInfo)
        self.fd = fd
        self.name: str = found.name.decode()
        self.id: int = found.id
        self.type: int = found.type
        self.key_size: int = found.key_size
        self.value_size: int = found.value_size
        self.max_entries: int = found.max_entries
        self._owned = owned
        self._copies = possible_cpus() if self.type in _PER_CPU else 1
        # The kernel rounds each CPU's value up to eight bytes.
        self._stride = (self.value_size + 7) // 8 * 8 if self.type in _PER_CPU else self.value_size

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the map pinned at ``path``.

        Raises:
            BpfError: There is none.
        """
        return cls(check(lib().bpf_obj_get(os.fsencode(path)), f"open of map {path}"))

    def __repr__(self) -> str:
        return f"<Map {self.name} id {self.id}>"

    def close(self) -> None:
        """Close the descriptor; the map stays while it is pinned or in use."""
        if self._owned:
            os.close(self.fd)
            self._owned = False

    def pin(self, path: Path) -> None:
        """Give the map a name in a bpf file system."""
        check(lib().bpf_obj_pin(self.fd, os.fsencode(path)), f"pin of map {self.name} at {path}")

    # ---- one entry

    def get(self, key: bytes) -> bytes | None:
        """Return the value; of a per-CPU map use ``get_per_cpu``."""
        values = self.get_per_cpu(key)
        return values[0] if values else None

    def get_per_cpu(self, key: bytes) -> list[bytes] | None:
        """Return the value of every CPU."""
        self._check_size(key, self.key_size, "key")
        buffer = create_string_buffer(self._stride * self._copies)
        result = lib().bpf_map_lookup_elem(self.fd, key, buffer)
        if result == -ENOENT:
            return None
        check(result, f"lookup in map {self.name}")
        return self._split(buffer.raw)

    def total(self, key: bytes, kind: type[_S]) -> _S | None:
        """Return the sum over all CPUs."""
        values = self.get_per_cpu(key)
        return _sum(values, kind) if values else None

    def set(self, key: bytes, value: bytes) -> None:
        """Write an entry; in a per-CPU map, the same value for every CPU.

        Raises:
            MapFullError: There is no room for another entry.
        """
        self._update(key, value, 0)

    def add(self, key: bytes, value: bytes) -> bool:
        """Write an entry unless there is one; say whether it was written."""
        try:
            self._update(key, value, _NOEXIST)
        except BpfError as error:
            if error.errno == EEXIST:
                return False
            raise
        return True

    def delete(self, key: bytes) -> bool:
        """Remove an entry; say whether there was one."""
        self._check_size(key, self.key_size, "key")
        result = lib().bpf_map_delete_elem(self.fd, key)
        if result == -ENOENT:
            return False
        check(result, f"removal from map {self.name}")
        return True

    # ---- many entries

    def keys(self) -> Iterator[bytes]:
        """Yield the keys; entries that come or go meanwhile may be missed or seen twice."""
        key = None
        following = create_string_buffer(self.key_size)
        # Bounded: if the key just read is removed, the kernel starts again from the first.
        for _ in range(2 * self.max_entries + 1):
            result = lib().bpf_map_get_next_key(self.fd, key, following)
            if result == -ENOENT:
                return
            check(result, f"walk through map {self.name}")
            key = following.raw
            yield key

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return all entries (of a per-CPU map, the first CPU's)."""
        return [(key, values[0]) for key, values in self.items_per_cpu()]

    def items_per_cpu(self) -> list[tuple[bytes, list[bytes]]]:
        """Return all entries with every CPU's value."""
        try:
            return self._lookup_batches()
        except BpfError as error:
            if error.errno not in (EINVAL, EOPNOTSUPP, _ENOTSUPP):
                raise
        # The map's type has no batches.
        found = ((key, self.get_per_cpu(key)) for key in self.keys())
        return list({key: values for key, values in found if values is not None}.items())

    def totals(self, kind: type[_S]) -> dict[bytes, _S]:
        """Return all entries, each summed over all CPUs."""
        return {key: _sum(values, kind) for key, values in self.items_per_cpu()}

    def set_many(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Write entries, in order, a system call for some thousands of them.

        Raises:
            MapFullError: There was no room for one of them; those before it are written.
        """
        pairs = list(entries)
        for key, value in pairs:
            self._check_size(key, self.key_size, "key")
            self._check_size(value, self.value_size, "value")
        what = f"update of map {self.name}"

        def update(some: list[tuple[bytes, bytes]]) -> tuple[int, int]:
            keys = b"".join(key for key, _ in some)
            values = b"".join(self._spread(value) for _, value in some)
            count = c_uint32(len(some))
            options = BatchOpts(sz=ctypes.sizeof(BatchOpts))
            result = lib().bpf_map_update_batch(self.fd, keys, values, byref(count), byref(options))
            return result, count.value

        self._in_batches(pairs, update, lambda pair: self.set(*pair), what)

    def delete_many(self, keys: Iterable[bytes]) -> None:
        """Remove entries; those that don't exist are passed over."""
        wanted = list(keys)
        for key in wanted:
            self._check_size(key, self.key_size, "key")

        def remove(some: list[bytes]) -> tuple[int, int]:
            count = c_uint32(len(some))
            options = BatchOpts(sz=ctypes.sizeof(BatchOpts))
            result = lib().bpf_map_delete_batch(self.fd, b"".join(some), byref(count), byref(options))
            return result, count.value

        self._in_batches(wanted, remove, self.delete, f"removal from map {self.name}")

    def clear(self) -> None:
        """Remove every entry (of an array: write zeros)."""
        if self.type in _ARRAYS:
            zero = bytes(self.value_size)
            self.set_many([(key, zero) for key in self.keys()])
        else:
            self.delete_many(list(self.keys()))

    # ---- inside

    def _check_size(self, data: bytes, size: int, what: str) -> None:
        # The kernel reads that many bytes whatever we pass.
        if len(data) != size:
            raise ValueError(f"map {self.name}: {what} has {len(data)} bytes, not {size}")

    def _spread(self, value: bytes) -> bytes:
        return value if self.type not in _PER_CPU else value.ljust(self._stride, b"\0") * self._copies

    def _split(self, raw: bytes) -> list[bytes]:
        return [raw[cpu * self._stride :][: self.value_size] for cpu in range(self._copies)]

    def _update(self, key: bytes, value: bytes, flags: int) -> None:
        self._check_size(key, self.key_size, "key")
        self._check_size(value, self.value_size, "value")
        result = lib().bpf_map_update_elem(self.fd, key, self._spread(value), flags)
        full = result in (-E2BIG, -ENOSPC)
        check(
            result,
            f"update of map {self.name}",
            MapFullError if full else BpfError,
            _MAP_FULL_HINT if full else "",
        )

    def _in_batches(
        self,
        entries: list[_T],
        batch: Callable[[list[_T]], tuple[int, int]],
        single: Callable[[_T], object],
        what: str,
    ) -> None:
        """Do ``batch`` on slices; where it stops, do one entry by itself (its error is the precise one) and go on."""
        start = 0
        while start < len(entries):
            some = entries[start : start + _BATCH]
            result, done = batch(some)
            if result >= 0:
                start += len(some)
                continue
            if -result in (EINVAL, EOPNOTSUPP, _ENOTSUPP) and not self._knows_batches():
                for entry in some:
                    single(entry)
                start += len(some)
                continue
            if done >= len(some):
                raise from_errno(-result, what)
            single(entries[start + done])
            start += done + 1

    def _knows_batches(self) -> bool:
        """Say whether the map's type has batch operations, by an empty one."""
        count = c_uint32(0)
        options = BatchOpts(sz=ctypes.sizeof(BatchOpts))
        return bool(lib().bpf_map_update_batch(self.fd, b"", b"", byref(count), byref(options)) == 0)

    def _lookup_batches(self) -> list[tuple[bytes, list[bytes]]]:
        size = max(min(_BATCH, self.max_entries), 1)
        found: dict[bytes, list[bytes]] = {}
        position = None
        following = create_string_buffer(max(self.key_size, 4))
        entry = self._stride * self._copies
        options = BatchOpts(sz=ctypes.sizeof(BatchOpts))
        while True:
            keys, values = create_string_buffer(size * self.key_size), create_string_buffer(size * entry)
            count = c_uint32(size)
            result = lib().bpf_map_lookup_batch(
                self.fd, position, following, keys, values, byref(count), byref(options)
            )
            if result == -ENOSPC and size < 2 * self.max_entries:
                size *= 2  # one hash bucket holds more than the buffer
                continue
            if result != -ENOENT:
                check(result, f"walk through map {self.name}")
            raw_keys, raw_values = keys.raw, values.raw
            for index in range(count.value):
                key = raw_keys[index * self.key_size :][: self.key_size]
                found[key] = self._split(raw_values[index * entry :][:entry])
            if result == -ENOENT:
                return list(found.items())
            position = create_string_buffer(following.raw, len(following))


_T = TypeVar("_T")


def _sum(values: list[bytes], kind: type[_S]) -> _S:
    first, *others = (kind.unpack(value) for value in values)
    for other in others:
        first = first + other
    return first
