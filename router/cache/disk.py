"""L2: answers on the node's SSD, in LMDB, shared by all processes of the node.

Crash-safe in this sense: a killed process leaves the last committed state, since LMDB writes a new version of what it
changes before it points to it, and a writer's lock dies with it. Nothing is flushed to the disk at a commit (that
would cost milliseconds), so a machine that stops may leave anything: the folder's name carries the incarnation of the
node's purge marks, which is drawn anew in that case, and an old folder is removed unread. The checksum in each entry
catches the rest.

Bounded: the oldest leaves first, except that one which was asked for since it came in (as far as this process knows)
goes to the end of the queue once more (second chance).
"""

from __future__ import annotations

import contextlib
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import xxhash

from router.cache.entry import unpack
from router.cache.errors import CacheFilesError, EntryError
from router.cache.filters import Layer
from router.cache.memory import Held

__all__ = ["DiskLevel", "DiskState"]

# Before the packed entry: marks sum, confirmed at, of which boot.
_HEAD = struct.Struct("<QQQ")
_PLACE = struct.Struct(">QI")  # place in the queue, bytes charged
_U64 = struct.Struct(">Q")
# Offsets in a packed entry (entry.py): flags, expiry, fingerprint.
_FLAGS_AT = _HEAD.size + 25
_EXPIRES_AT = _HEAD.size + 34
_FINGERPRINT_AT = _HEAD.size + 42

_PAGE = 4096
# What LMDB needs beside the values: tree pages, half-empty pages, and the old version of what a reader still sees.
_MAP_FACTOR, _MAP_EXTRA = 2, 64 << 20
_SECOND_CHANCES = 16  # at most so many a put, so that its cost is bounded
_WALK = 4096  # entries visited in one read transaction; a longer one would keep old pages from being reused
_MOST_VISITED = 65_536


@dataclass(frozen=True, slots=True)
class DiskState:
    """What the level holds, for metrics and ``modalmesh cache stats``."""

    entries: int
    bytes: int
    capacity: int


class DiskLevel:
    """Answers by key. Safe under threads and processes; one object a process and folder (LMDB's rule).

    Args:
        directory: Its folders lie here.
        capacity: Bytes of entries, rounded up to pages as LMDB stores them.
        incarnation: ``Marks.incarnation``.
        boot: ``filters.boot_id()``: monotonic times of another boot mean nothing.

    Raises:
        CacheFilesError: The folder can't be used.
    """

    def __init__(self, directory: Path, capacity: int, *, incarnation: int, boot: str) -> None:
        self.capacity = capacity
        self._boot = xxhash.xxh3_64_intdigest(boot.encode())
        self._mutex = threading.Lock()
        self._visited: set[bytes] = set()
        self.dropped = 0
        """Entries that found no room."""
        path = directory / f"answers-{incarnation:016x}"
        try:
            for old in directory.glob("answers-*"):
                if old != path:
                    shutil.rmtree(old, ignore_errors=True)
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._env = lmdb.open(
                str(path),
                map_size=capacity * _MAP_FACTOR + _MAP_EXTRA,
                max_dbs=4,
                max_readers=512,
                sync=False,
                metasync=False,
                mode=0o600,
                readahead=False,
            )
            self._env.reader_check()  # readers that died keep old pages from being reused
            self._values = self._env.open_db(b"values")
            self._places = self._env.open_db(b"places")
            self._order = self._env.open_db(b"order")
            self._counts = self._env.open_db(b"counts")
        except (OSError, lmdb.Error) as error:
            raise CacheFilesError(
                f"the answers in {path} can't be opened: {error}", hint="remove the folder; it is only a cache"
            ) from error

    def get(self, key: bytes, now_ms: int) -> Held | None:
        """Return the answer, unless it has expired or its bytes are damaged.

        Args:
            key: 32 bytes.
            now_ms: Wall clock.
        """
        try:
            with self._env.begin(db=self._values, buffers=True) as transaction:
                data = transaction.get(key)
                if data is None or int.from_bytes(data[_EXPIRES_AT : _EXPIRES_AT + 8], "little") <= now_ms:
                    return None
                marks_sum, confirmed_ns, boot = _HEAD.unpack_from(data)
                entry = unpack(data[_HEAD.size :])
        except (lmdb.Error, EntryError, struct.error):
            return None
        if len(self._visited) < _MOST_VISITED:
            self._visited.add(key)
        return Held(entry, marks_sum, confirmed_ns if boot == self._boot else 0)

    def put(self, key: bytes, packed: bytes, *, marks_sum: int, confirmed_ns: int) -> bool:
        """Store an answer; return whether it is in.

        Args:
            key: 32 bytes.
            packed: ``entry.pack``; in a filter already.
            marks_sum: As in ``Held``.
            confirmed_ns: As in ``Held``.
        """
        data = _HEAD.pack(marks_sum, confirmed_ns, self._boot) + packed
        charge = _charge(len(data))
        if charge > self.capacity:
            self.dropped += 1
            return False
        with self._mutex:
            for relieve in (self._halve, self._drop_all, None):
                try:
                    self._put(key, data, charge)
                except lmdb.MapFullError:
                    if relieve and self._relieved(relieve):
                        continue
                except lmdb.Error:
                    pass
                else:
                    return True
                break
        self.dropped += 1
        return False

    def _put(self, key: bytes, data: bytes, charge: int) -> None:
        with self._env.begin(write=True) as transaction:
            self._remove(transaction, key)
            self._make_room(transaction, self.capacity - charge)
            transaction.put(key, data, db=self._values)
            self._enqueue(transaction, key, charge)
            _add(transaction, self._counts, charge)

    @staticmethod
    def _relieved(relieve: Callable[[], None]) -> bool:
        try:
            relieve()
        except lmdb.Error:
            return False
        return True

    def _halve(self) -> None:
        """Make room in a map that fragments have filled: in small steps, because a removal needs pages itself."""
        while True:
            with self._env.begin(write=True) as transaction:
                held = _count(transaction, self._counts)
                if held <= self.capacity // 2:
                    return
                self._make_room(transaction, max(self.capacity // 2, held - self.capacity // 16))

    def _drop_all(self) -> None:
        with self._env.begin(write=True) as transaction:
            for database in (self._values, self._places, self._order, self._counts):
                transaction.drop(database, delete=False)

    def delete(self, keys: Iterable[bytes]) -> int:
        """Remove answers; return how many were there."""
        removed = 0
        with self._mutex, contextlib.suppress(lmdb.Error), self._env.begin(write=True) as transaction:
            for key in keys:
                removed += self._remove(transaction, key)
        return removed

    def clear(self) -> None:
        """Remove everything."""
        with self._mutex:
            self._drop_all()

    def sweep(self, now_ms: int, *, most: int = 256) -> int:
        """Remove what has expired among the oldest; return how many.

        Args:
            now_ms: Wall clock.
            most: How many to look at.
        """
        with self._env.begin(buffers=True) as transaction:
            cursor = transaction.cursor(db=self._order)
            expired = []
            for _, (_, key) in zip(range(most), cursor, strict=False):
                data = transaction.get(key, db=self._values)
                if data is None or int.from_bytes(data[_EXPIRES_AT : _EXPIRES_AT + 8], "little") <= now_ms:
                    expired.append(bytes(key))
        return self.delete(expired) if expired else 0

    def fingerprints(self) -> Iterator[tuple[Layer, bytes]]:
        """Yield layer and fingerprint of every answer, to fill a filter; what is added meanwhile may be missing."""
        start = b""
        while True:
            found: list[tuple[Layer, bytes]] = []
            with self._env.begin(db=self._values, buffers=True) as transaction:
                cursor = transaction.cursor()
                more = cursor.set_range(start) if start else cursor.first()
                while more and len(found) < _WALK:
                    data = cursor.value()
                    layer = Layer.FINE if data[_FLAGS_AT] & 2 else Layer.COARSE
                    found.append((layer, bytes(data[_FINGERPRINT_AT : _FINGERPRINT_AT + 16])))
                    start = bytes(cursor.key()) + b"\0"
                    more = cursor.next()
            yield from found
            if not more:
                return

    def state(self) -> DiskState:
        """Return what it holds."""
        with self._env.begin() as transaction:
            entries = transaction.stat(self._values)["entries"]
            return DiskState(entries, _count(transaction, self._counts), self.capacity)

    def close(self) -> None:
        """Flush and leave."""
        with self._mutex, contextlib.suppress(lmdb.Error):
            self._env.sync(True)
            self._env.close()

    def _remove(self, transaction: lmdb.Transaction, key: bytes) -> bool:
        place = transaction.pop(key, db=self._places)
        if place is None:
            return False
        number, charge = _PLACE.unpack(place)
        transaction.delete(_U64.pack(number), db=self._order)
        transaction.delete(key, db=self._values)
        _add(transaction, self._counts, -charge)
        return True

    def _enqueue(self, transaction: lmdb.Transaction, key: bytes, charge: int) -> None:
        with transaction.cursor(db=self._order) as cursor:
            number = _U64.unpack(cursor.key())[0] + 1 if cursor.last() else 1
        transaction.put(_U64.pack(number), key, db=self._order, append=True)
        transaction.put(key, _PLACE.pack(number, charge), db=self._places)

    def _make_room(self, transaction: lmdb.Transaction, limit: int) -> None:
        chances = _SECOND_CHANCES
        while _count(transaction, self._counts) > limit:
            with transaction.cursor(db=self._order) as cursor:
                if not cursor.first():
                    return
                number, key = bytes(cursor.key()), bytes(cursor.value())
            if chances and key in self._visited:
                chances -= 1
                self._visited.discard(key)
                place = transaction.get(key, db=self._places)
                if place is not None:
                    transaction.delete(number, db=self._order)
                    self._enqueue(transaction, key, _PLACE.unpack(place)[1])
                    continue
            self._visited.discard(key)
            if not self._remove(transaction, key):
                transaction.delete(number, db=self._order)


def _charge(length: int) -> int:
    """Return the bytes that LMDB takes for a value: over half a page it gets pages of its own."""
    return -(-(length + 16) // _PAGE) * _PAGE if length > _PAGE // 2 - 100 else length + 200


def _count(transaction: lmdb.Transaction, counts: lmdb._Database) -> int:
    data = transaction.get(b"bytes", db=counts)
    return _U64.unpack(data)[0] if data else 0


def _add(transaction: lmdb.Transaction, counts: lmdb._Database, difference: int) -> None:
    transaction.put(b"bytes", _U64.pack(max(0, _count(transaction, counts) + difference)), db=counts)
