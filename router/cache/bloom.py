"""Bloom filters over fingerprints that are hashes already: a lookup only reads bits.

The classic filter, not a blocked one: a blocked filter touches one cache line, but its false-positive rate is above
(1 − e^(−kn/m))^k, the rate that the sizes here were chosen for; in Python the cache misses are not what takes time.

The fingerprint's two halves are joined and multiplied once; the product's highest bits say which bit of a byte, the
next ones the first byte, the next ones the (odd) step to the next byte (double hashing, Kirsch and Mitzenmacher 2006).
All bits of a key lie at one place in their bytes, so a lookup is: and the k bytes, and look at one bit. The filter is
thereby eight filters of m/8 bits with a share of 1/8 of the keys each, whose rate is the same. The multiplication is
there because FNV-1a stirs the last bytes of its input only into some of its bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
from numpy.typing import NDArray

__all__ = ["COARSE", "FINE", "Bits", "Geometry", "positions"]

_HALVES = Struct("<QQ")
_MASK64 = (1 << 64) - 1
_BIT = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)

# 2^64 divided by the golden ratio: odd, with about as many ones as zeros.
_STIR = 0x9E3779B97F4A7C15


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
    stirred = (low ^ high) * _STIR & _MASK64
    log2_bytes = geometry.log2_bits - 3
    bit = stirred >> 61
    first = stirred >> (61 - log2_bytes)
    step = stirred >> (61 - 2 * log2_bytes) | 1
    return [(first + turn * step) % geometry.size * 8 + bit for turn in range(geometry.hashes)]


class Bits:
    """A filter in somebody's memory. Adding is not atomic: whoever shares the memory must hold a lock to add.

    Args:
        geometry: Its size and hashes.
        buffer: ``geometry.size`` bytes, writable to add.
    """

    __slots__ = ("_array", "_bytes", "_first_at", "_mask", "_step_at", "_turns", "geometry")

    def __init__(self, geometry: Geometry, buffer: bytearray | memoryview) -> None:
        self.geometry = geometry
        self._bytes = memoryview(buffer)
        if self._bytes.nbytes != geometry.size:
            raise ValueError(f"a filter of {geometry.size} bytes was given {self._bytes.nbytes}")
        self._array: NDArray[np.uint8] = np.frombuffer(self._bytes, np.uint8)
        log2_bytes = geometry.log2_bits - 3
        self._first_at = 61 - log2_bytes
        self._step_at = 61 - 2 * log2_bytes
        self._mask = geometry.size - 1
        self._turns = range(geometry.hashes - 1)

    def holds(self, fingerprint: bytes) -> bool:
        """Return False only if it was never added."""
        low, high = _HALVES.unpack(fingerprint)
        stirred = (low ^ high) * _STIR & _MASK64
        data, mask = self._bytes, self._mask
        place = stirred >> self._first_at & mask
        byte = data[place] & 1 << (stirred >> 61)
        if not byte:
            return False
        step = stirred >> self._step_at & mask | 1
        for _ in self._turns:
            place = place + step & mask
            byte &= data[place]
        return bool(byte)

    def add(self, fingerprint: bytes) -> None:
        """Set its bits."""
        data = self._bytes
        for place in positions(fingerprint, self.geometry):
            data[place >> 3] |= 1 << (place & 7)

    def holds_many(self, fingerprints: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return ``holds`` for each: [n]."""
        bit, place, step = self._many(fingerprints)
        for turn in range(self.geometry.hashes):
            if turn:
                place += step
                place &= self._mask
            bit &= self._array.take(place)
        return bit.astype(np.bool_)

    def add_many(self, fingerprints: Sequence[bytes]) -> None:
        """Set the bits of all."""
        bit, place, step = self._many(fingerprints)
        for _ in range(self.geometry.hashes):
            np.bitwise_or.at(self._array, place, bit)
            place += step
            place &= self._mask

    def fill(self) -> float:
        """Return the share of bits that are set, 0 to 1."""
        words = self._array.view(np.uint64)
        return int(np.bitwise_count(words).sum(dtype=np.int64)) / self.geometry.bits

    def _many(self, fingerprints: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return, for every fingerprint, its bit, its first byte and its step."""
        halves = np.frombuffer(b"".join(fingerprints), "<u8").reshape(-1, 2)
        stirred = (halves[:, 0] ^ halves[:, 1]) * np.uint64(_STIR)
        mask = np.uint64(self._mask)
        place = (stirred >> np.uint64(self._first_at) & mask).view(np.int64)
        step = (stirred >> np.uint64(self._step_at) & mask | np.uint64(1)).view(np.int64)
        return _BIT.take((stirred >> np.uint64(61)).view(np.int64)), place, step
