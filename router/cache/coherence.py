"""Marks that make a stored answer worthless, in memory that all processes of a node share.

A table of counters. Purging a key, or a tag (a service, a model version), adds one to its counter; an answer carries
the sum of the counters of its key and tags **as they were before it was computed**. As counters only rise, an equal sum
means that nothing was purged since: also not while the answer was being computed, which closes the race between a
purge and a late store. Checking costs one read a mark, in every process, without a message.

Two keys may share a counter; then a purge of one costs a miss of the other. The table's ``incarnation`` is drawn anew
when its memory may have been lost (another boot, not closed in order); answers on disk carry it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import xxhash

from router.cache.errors import CacheFilesError
from router.cache.filters import boot_id

__all__ = ["Marks", "mark_of"]

_SLOTS = 1 << 16
_MAGIC = b"MMMARK1\0"
_HEADER = struct.Struct("<8s36sQQI")  # magic, boot, incarnation, checksum, closed in order
_SIZE = mmap.PAGESIZE + 4 * _SLOTS


def mark_of(kind: str, name: bytes) -> int:
    """Return the counter that stands for a key or tag.

    Args:
        kind: ``key``, ``service``, ``model``, …
        name: Which one.
    """
    return xxhash.xxh3_64_intdigest(name, seed=xxhash.xxh3_64_intdigest(kind.encode())) % _SLOTS


class Marks:
    """The table, as one process sees it. Safe under threads.

    Args:
        path: The file; its directory must be there.
        boot: What ``boot_id`` says; a parameter for tests.

    Raises:
        CacheFilesError: The file can't be used.
    """

    def __init__(self, path: Path, *, boot: str | None = None) -> None:
        self._boot = (boot or boot_id()).encode("ascii")[:36].ljust(36)
        self._mutex = threading.Lock()
        try:
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Held in common by all who use the table, and alone by whoever opens or closes it.
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _SIZE)
                self._map = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
            self._slots = memoryview(self._map)[mmap.PAGESIZE :].cast("I")
            self._open()
            self._users = os.open(path.with_suffix(".users"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._users, fcntl.LOCK_SH)
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        except OSError as error:
            raise CacheFilesError(
                f"the table of purge marks {path} can't be used: {error.strerror or error}",
                hint="check that its directory is writable and that the disk has room",
            ) from error

    def _open(self) -> None:
        magic, boot, self.incarnation, checksum, clean = _HEADER.unpack_from(self._map)
        trustworthy = magic == _MAGIC and (checksum == self._checksum() if clean else boot == self._boot)
        if not trustworthy:
            self._map[mmap.PAGESIZE :] = bytes(4 * _SLOTS)
            self.incarnation = int.from_bytes(os.urandom(8), "little")
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, self._boot, self.incarnation, 0, 0)
        self._map.flush(0, mmap.PAGESIZE)

    def sum(self, marks: Sequence[int]) -> int:
        """Return the sum of the counters: take it before an answer is looked up or computed."""
        slots = self._slots
        total = 0
        for mark in marks:
            total += slots[mark]
        return total

    def purge(self, marks: Sequence[int]) -> None:
        """Make everything that carries one of these marks worthless, in all processes of the node, at once."""
        with self._mutex:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                for mark in marks:
                    self._slots[mark] = (self._slots[mark] + 1) & 0xFFFFFFFF
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def purge_all(self) -> None:
        """Make everything worthless."""
        self.purge(range(_SLOTS))

    def close(self) -> None:
        """Leave; the last one to leave writes the checksum."""
        with self._mutex, contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                self._map.flush()
                self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, self._boot, self.incarnation, self._checksum(), 1)
                self._map.flush(0, mmap.PAGESIZE)
            os.close(self._users)
            os.close(self._lock)

    def _checksum(self) -> int:
        return xxhash.xxh3_64_intdigest(memoryview(self._map)[mmap.PAGESIZE :])
