"""Bloom filters over fingerprints that are hashes already: a lookup only reads bits.

The classic filter, not a blocked one: a blocked filter touches one cache line, but its false-positive rate is above
(1 − e^(−kn/m))^k, the rate that the sizes here were chosen for; in Python the cache misses are not what takes time.

Bit i of k is ``a + i·b mod m`` (Kirsch and Mitzenmacher 2006). a and b come from the fingerprint's two halves by one
multiplication each: FNV-1a stirs the last bytes of its input only into some of its bits, and a product's high bits
depend on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
from numpy.typing import NDArray

__all__ = ["COARSE", "FINE", "Bits", "Geometry", "positions"]

_HALVES = Struct("<QQ")
_MASK64 = (1 << 64) - 1
_BIT = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)

# Odd 64-bit constants with about as many ones as zeros: the golden ratio, and two of the xxHash primes.
_A = 0x9E3779B97F4A7C15
_B = 0xC2B2AE3D27D4EB4F
_C = 0x165667B19E3779F9


@dataclass(frozen=True, slots=True)
class Geometry:
    """How large a filter is and how often it hashes."""

    log2_bits: int
    hashes: int

    @property
    def bits(self) -> int:
        """M."""
        return 1 << self.log2_bits

    @property
    def size(self) -> int:
        """Bytes."""
        return self.bits >> 3

    def rate(self, keys: int) -> float:
        """Return the false-positive rate to be expected with so many keys: (1 − e^(−kn/m))^k."""
        return float((1 - math.exp(-self.hashes * keys / self.bits)) ** self.hashes)

    def keys_at(self, rate: float) -> int:
        """Return how many keys bring the rate there; the inverse of ``rate``."""
        return int(-math.log(1 - rate ** (1 / self.hashes)) * self.bits / self.hashes)


COARSE = Geometry(23, 3)
"""1 MB, 3 hashes: text and image requests."""

FINE = Geometry(25, 7)
"""4 MB, 7 hashes: composites with audio."""


def positions(fingerprint: bytes, geometry: Geometry) -> list[int]:
    """Return the bits that stand for a fingerprint of 16 bytes: what ``Bits`` does, written for reading."""
    low, high = _HALVES.unpack(fingerprint)
    shift = 64 - geometry.log2_bits
    first = ((low ^ high) * _A & _MASK64) >> shift
    step = ((low + high * _B & _MASK64) * _C & _MASK64) >> shift | 1
    return [(first + turn * step) % geometry.bits for turn in range(geometry.hashes)]


class Bits:
    """A filter in somebody's memory. Adding is not atomic: whoever shares the memory must hold a lock to add.

    Args:
        geometry: Its size and hashes.
        buffer: ``geometry.size`` bytes, writable to add.
    """

    __slots__ = ("_array", "_bytes", "_hashes", "_mask", "_shift", "geometry")

    def __init__(self, geometry: Geometry, buffer: bytearray | memoryview) -> None:
        self.geometry = geometry
        self._bytes = memoryview(buffer)
        if self._bytes.nbytes != geometry.size:
            raise ValueError(f"a filter of {geometry.size} bytes was given {self._bytes.nbytes}")
        self._array: NDArray[np.uint8] = np.frombuffer(self._bytes, np.uint8)
        self._shift = 64 - geometry.log2_bits
        self._mask = geometry.bits - 1
        self._hashes = range(geometry.hashes - 1)

    def holds(self, fingerprint: bytes) -> bool:
        """Return False only if it was never added."""
        low, high = _HALVES.unpack(fingerprint)
        data = self._bytes
        place = ((low ^ high) * _A & _MASK64) >> self._shift
        if not data[place >> 3] >> (place & 7) & 1:
            return False
        step = ((low + high * _B & _MASK64) * _C & _MASK64) >> self._shift | 1
        mask = self._mask
        for _ in self._hashes:
            place = place + step & mask
            if not data[place >> 3] >> (place & 7) & 1:
                return False
        return True

    def add(self, fingerprint: bytes) -> None:
        """Set its bits."""
        data = self._bytes
        for place in positions(fingerprint, self.geometry):
            data[place >> 3] |= 1 << (place & 7)

    def holds_many(self, fingerprints: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return ``holds`` for each: [n]."""
        found = np.ones(len(fingerprints), np.bool_)
        for index, bit in self._places(fingerprints):
            found &= (self._array[index] & bit) != 0
        return found

    def add_many(self, fingerprints: Sequence[bytes]) -> None:
        """Set the bits of all."""
        for index, bit in self._places(fingerprints):
            np.bitwise_or.at(self._array, index, bit)

    def fill(self) -> float:
        """Return the share of bits that are set, 0 to 1."""
        words = self._array.view(np.uint64)
        return int(np.bitwise_count(words).sum(dtype=np.int64)) / self.geometry.bits

    def _places(self, fingerprints: Sequence[bytes]) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint8]]]:
        """Yield, for each hash in turn, byte and bit of every fingerprint."""
        halves = np.frombuffer(b"".join(fingerprints), "<u8").reshape(-1, 2)
        low, high = halves[:, 0], halves[:, 1]
        shift, mask, three, seven = (np.uint64(number) for number in (self._shift, self._mask, 3, 7))
        place = ((low ^ high) * np.uint64(_A)) >> shift
        step = ((low + high * np.uint64(_B)) * np.uint64(_C)) >> shift | np.uint64(1)
        for _ in range(self.geometry.hashes):
            yield place >> three, _BIT[place & seven]
            place = (place + step) & mask
