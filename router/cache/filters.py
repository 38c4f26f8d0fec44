"""The layered filter of one node: a file that all its processes share, and that a «no» can be believed of.

A «no» must never be wrong, so:

- A key is added before any store gets it. Adding takes the node's lock, since two processes that set bits in one byte
  would lose one of them; looking up takes none.
- The filter answers «maybe» to everything until someone who has walked all stores says it is complete.
- Bits live in shared memory of the kernel, so a killed process loses none. A machine that stopped may have: on another
  boot the filter is taken only if it was closed in order and its checksum fits; else it begins empty and incomplete.
- Keys can't be removed, so a filter fills up. A new **generation** is built beside the old one: from the moment it
  exists every addition goes to both, each process copies in what its own memory holds, one of them copies in the
  shared stores; only then is the old one dropped.

Files: ``control`` (which generation counts), ``generation-N``, ``lock``, ``rotation``, ``users/ID`` (one for each
process, locked while it lives: the kernel unlocks it when it dies).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import xxhash

from router.cache.bloom import COARSE, FINE, Bits, Geometry
from router.cache.errors import CacheFilesError

__all__ = ["FilterState", "Layer", "LayeredFilter", "boot_id"]

_MAGIC = b"MMFILT1\0"
# magic, boot id, checksum of the current generation's bits, closed in order, geometry (2 × log2 bits and hashes)
_HEADER = struct.Struct("<8s36sQI4B")
_GEOMETRY = (COARSE.log2_bits, COARSE.hashes, FINE.log2_bits, FINE.hashes)
# Two 32-bit words that are read without the lock: 2 × current generation + complete; next generation, 0: none.
_WORDS_AT = 64
_CONTROL_SIZE = mmap.PAGESIZE
_GENERATION_SIZE = COARSE.size + FINE.size


class Layer(IntEnum):
    """Which filter a fingerprint belongs to."""

    COARSE = 0
    """Text and image requests."""
    FINE = 1
    """Composites with audio (and video)."""


@dataclass(frozen=True, slots=True)
class FilterState:
    """How full a filter is, for metrics and ``modalmesh cache stats``."""

    layer: str
    generation: int
    complete: bool
    fill: float
    """Share of bits set."""
    rate: float
    """Estimated false-positive rate: fill to the power of the number of hashes."""
    keys: int
    """Estimated number of keys: −m/k · ln(1 − fill)."""


def boot_id() -> str:
    """Return what differs from one boot of the machine to the next; 36 characters."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class _Generation:
    """One generation's file, mapped."""

    __slots__ = ("layers", "map", "number", "path")

    def __init__(self, directory: Path, number: int, *, create: bool = False) -> None:
        self.number = number
        self.path = directory / f"generation-{number:08}"
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, _GENERATION_SIZE)  # a full disk must say so here, not by SIGBUS
            self.map = mmap.mmap(descriptor, _GENERATION_SIZE)
        finally:
            os.close(descriptor)
        whole = memoryview(self.map)
        self.layers = (
            Bits(COARSE, whole[: COARSE.size]),
            Bits(FINE, whole[COARSE.size :]),
        )

    def checksum(self) -> int:
        return xxhash.xxh3_64_intdigest(self.map)


class LayeredFilter:
    """The node's filter, as one process sees it. Safe under threads.

    Args:
        directory: Is made if it is not there; one filter of one node.
        boot: What ``boot_id`` says; a parameter for tests.

    Raises:
        CacheFilesError: The directory can't be used.
    """

    def __init__(self, directory: Path, *, boot: str | None = None) -> None:
        self._directory = directory
        self._boot = (boot or boot_id()).encode("ascii")[:36].ljust(36)
        self._mutex = threading.RLock()
        self._depth = 0
        self._closed = False
        try:
            (directory / "users").mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self._locked():
                alone = not self._living_users()
                self._control = self._open_control(alone=alone)
                self._words = memoryview(self._control)[_WORDS_AT : _WORDS_AT + 8].cast("I")
                self._user, self._user_path = self._register()
                self._word = self._words[0]
                self._current = _Generation(directory, self._word >> 1)
                self._next: _Generation | None = None
                # What a process holds when it begins goes to both: it holds nothing.
                self._copied_to = self._words[1]
                self._tell_copied(self._copied_to)
        except OSError as error:
            raise CacheFilesError(
                f"the filter's directory {directory} can't be used: {error.strerror or error}",
                hint="check that it is writable and that the disk has 10 MB",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def complete(self) -> bool:
        """Whether a «no» means anything yet."""
        return bool(self._words[0] & 1)

    @property
    def generation(self) -> int:
        """The number of the one in force."""
        return self._words[0] >> 1

    @property
    def token(self) -> tuple[int, int]:
        """What changes when a generation is begun or put in force.

        Who stores a key takes it before adding the key; if it is another one after storing, the key may have been
        added to a filter that was already being left, and must be added once more.
        """
        return self._words[0] >> 1, self._words[1]

    def maybe(self, layer: Layer, fingerprint: bytes) -> bool:
        """Return False only if no store holds it.

        Args:
            layer: Which filter.
            fingerprint: 16 bytes.
        """
        if self._words[0] != self._word:
            self._follow()
        return self._current.layers[layer].holds(fingerprint) or not self._word & 1

    def maybe_many(self, layer: Layer, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return ``maybe`` for each."""
        if self._words[0] != self._word:
            self._follow()
        if not self._word & 1:
            return [True] * len(fingerprints)
        return cast("list[bool]", self._current.layers[layer].holds_many(fingerprints).tolist())

    def add(self, layer: Layer, fingerprint: bytes) -> None:
        """Make ``maybe`` true for it, in every process of the node. Call it before a store gets the key."""
        with self._locked():
            self._current.layers[layer].add(fingerprint)
            if self._next:
                self._next.layers[layer].add(fingerprint)

    def add_many(self, layer: Layer, fingerprints: Sequence[bytes]) -> None:
        """Add all of them."""
        if not fingerprints:
            return
        with self._locked():
            self._current.layers[layer].add_many(fingerprints)
            if self._next:
                self._next.layers[layer].add_many(fingerprints)

    def mark_complete(self) -> None:
        """Say that every key of every store is in: from now on a «no» counts."""
        with self._locked():
            self._words[0] |= 1
            self._word = self._words[0]

    def mark_incomplete(self) -> None:
        """Say that there may be keys that it does not know: «maybe» to everything, in every process."""
        with self._locked():
            self._words[0] &= ~1
            self._word = self._words[0]

    def states(self) -> list[FilterState]:
        """Return how full each layer is; reads all 5 MB, about 1 ms."""
        if self._words[0] != self._word:
            self._follow()
        current, word = self._current, self._word
        states = []
        for layer in Layer:
            bits = current.layers[layer]
            fill = bits.fill()
            geometry: Geometry = bits.geometry
            keys = -geometry.bits / geometry.hashes * math.log1p(-min(fill, 1 - 1 / geometry.bits))
            states.append(
                FilterState(
                    layer=layer.name.lower(),
                    generation=word >> 1,
                    complete=bool(word & 1),
                    fill=fill,
                    rate=fill**geometry.hashes,
                    keys=round(keys),
                )
            )
        return states

    # A new generation.

    @contextlib.contextmanager
    def rotating(self) -> Iterator[bool]:
        """Hold the right to build the next generation, one process of the node at a time; false: another has it."""
        descriptor = os.open(self._directory / "rotation", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    @property
    def building(self) -> int:
        """The generation that is being built, 0: none. One that a dead process began is there too: go on with it."""
        return self._words[1]

    def begin_generation(self) -> int:
        """Begin the next generation, if none is begun; from now on every addition goes to both. Return its number."""
        with self._locked():
            if not self._words[1]:
                number = (self._words[0] >> 1) + 1
                self._next = _Generation(self._directory, number, create=True)
                self._words[1] = number
            return self._words[1]

    def copy_into_next(self, layer: Layer, fingerprints: Sequence[bytes]) -> None:
        """Add keys that a store holds to the generation that is being built."""
        if not fingerprints:
            return
        with self._locked():
            if self._next:
                self._next.layers[layer].add_many(fingerprints)

    @property
    def owes_a_copy(self) -> bool:
        """Whether this process has yet to copy in what its own memory holds."""
        return self._words[1] != 0 and self._words[1] != self._copied_to

    def copied(self, number: int) -> None:
        """Say that what this process holds in its memory is in that generation."""
        with self._locked():
            self._copied_to = number
            self._tell_copied(number)

    def finish_generation(self) -> bool:
        """Put the next generation in force, if every living process has copied; the caller has copied the stores.

        Returns:
            False: A process has yet to copy; try again later.
        """
        with self._locked():
            number = self._words[1]
            if not number or self._next is None:
                return False
            if any(copied != number for copied in self._living_users()):
                return False
            old = self._current
            self._current, self._next = self._next, None
            # One store each: a process that dies between them leaves a state that the next call repairs.
            self._words[0] = number << 1 | (self._words[0] & 1)
            self._words[1] = 0
            self._word = self._words[0]
            with contextlib.suppress(OSError):
                old.path.unlink()  # others keep it mapped until they look
            return True

    def close(self) -> None:
        """Leave; the last one to leave writes the checksum."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError), self._locked():
                fcntl.flock(self._user, fcntl.LOCK_UN)
                with contextlib.suppress(OSError):
                    self._user_path.unlink()
                if not self._living_users():
                    # What was being built is not covered by the checksum.
                    self._words[1] = 0
                    self._current.map.flush()
                    header = (_MAGIC, self._boot, self._current.checksum(), 1, *_GEOMETRY)
                    self._control[: _HEADER.size] = _HEADER.pack(*header)
                    self._control.flush()
            os.close(self._user)
            os.close(self._lock)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the node's lock, and see what other processes have changed."""
        with self._mutex:
            if not self._depth:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._depth += 1
            try:
                if hasattr(self, "_current"):
                    if self._words[0] != self._word:
                        self._follow()
                    number = self._words[1]
                    if number and number == self._words[0] >> 1:
                        self._words[1] = number = 0  # whoever put it in force died before saying so
                    if number and (self._next is None or self._next.number != number):
                        self._next = _Generation(self._directory, number)
                    elif not number:
                        self._next = None
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _follow(self) -> None:
        """Another process has put a new generation in force, or has said that it is complete."""
        with self._mutex:
            for _ in range(8):  # the file may be gone again before it is opened; the next number is there then
                word = self._words[0]
                if word >> 1 != self._current.number:
                    if self._next is not None and self._next.number == word >> 1:
                        self._current = self._next
                    else:
                        try:
                            self._current = _Generation(self._directory, word >> 1)
                        except FileNotFoundError:
                            continue
                self._word = word
                return
            raise CacheFilesError(f"generation {self._words[0] >> 1} is missing in {self._directory}")

    def _open_control(self, *, alone: bool) -> mmap.mmap:
        path = self._directory / "control"
        if alone and not self._is_trustworthy(path):
            self._begin_empty(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            control = mmap.mmap(descriptor, _CONTROL_SIZE)
        finally:
            os.close(descriptor)
        # Open: as long as this is 0, only this boot of the machine can trust the bits.
        control[: _HEADER.size] = _HEADER.pack(_MAGIC, self._boot, 0, 0, *_GEOMETRY)
        control.flush()
        return control

    def _is_trustworthy(self, path: Path) -> bool:
        try:
            data = path.read_bytes()
            if len(data) != _CONTROL_SIZE:
                return False
            magic, boot, checksum, clean, *geometry = _HEADER.unpack_from(data)
            word, building = struct.unpack_from("<II", data, _WORDS_AT)
            if magic != _MAGIC or tuple(geometry) != _GEOMETRY or not word >> 1:
                return False
            generation = _Generation(self._directory, word >> 1)
            if building:
                _Generation(self._directory, building)  # a file that is not there, or cut short, is found here
        except (OSError, ValueError, struct.error):
            return False
        return generation.checksum() == checksum if clean else bool(boot == self._boot)

    def _begin_empty(self, path: Path) -> None:
        # After all that there were: a process must never take a new file for one that it knows.
        numbers = [int(old.name.rpartition("-")[2]) for old in self._directory.glob("generation-*")]
        number = max(numbers, default=0) + 1
        _Generation(self._directory, number, create=True)
        control = bytearray(_CONTROL_SIZE)
        _HEADER.pack_into(control, 0, _MAGIC, self._boot, 0, 0, *_GEOMETRY)
        struct.pack_into("<II", control, _WORDS_AT, number << 1, 0)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(control)
        temporary.replace(path)
        for old in self._directory.glob("generation-*"):
            if old.name != f"generation-{number:08}":
                old.unlink(missing_ok=True)

    def _register(self) -> tuple[int, Path]:
        path = self._directory / "users" / f"{os.getpid()}-{os.urandom(4).hex()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor, path

    def _tell_copied(self, number: int) -> None:
        os.pwrite(self._user, struct.pack("<I", number), 0)

    def _living_users(self) -> list[int]:
        """Return, for each process that uses the filter, the generation that it has copied its memory into."""
        copied = []
        for path in (self._directory / "users").iterdir():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                data = os.pread(descriptor, 4, 0)
                copied.append(struct.unpack("<I", data)[0] if len(data) == 4 else 0)
            else:
                path.unlink(missing_ok=True)  # it died
            finally:
                os.close(descriptor)
        return copied
