"""The default policy: whichever of LRU and LRU-K does better on what is being asked for now.

Two key-only shadows of full size, one LRU, one LRU-K, replay every reference. The cache holds the values and imitates
the shadow that leads: what it evicts is a key that the leader no longer holds (adaptive replacement by imitation:
Subramanian, Smaragdakis and Loh, MICRO 2006). Such a key always exists, because the shadows have the same capacity and
have both just taken the newest key in.

The leader is the shadow with more hits among the references that only one of them answered, older ones counting less:
each such reference multiplies the lead by ``1 - 1 / memory`` before it adds or takes one. ``memory`` is the number of
keys held, from 64 to 4096: a lead must be won in about the time in which the contents turn over, not faster, or it
would be noise, and not more slowly, or a change of habits would be followed too late.

Evicted keys keep their reference times while there are at most ``history`` of them: 16384, or 8 for each key held if
that is more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar, overload

from router.cache.lruk import LruK

__all__ = ["HISTORY_FLOOR", "HISTORY_PER_KEY", "Adaptive"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")

HISTORY_FLOOR = 16_384
HISTORY_PER_KEY = 8

_MEMORY_FLOOR = 64
_MEMORY_CEILING = 4096


class Adaptive(Generic[K, V]):
    """A cache of bounded weight. Not safe under threads: ``memory.MemoryLevel`` adds the lock.

    Args:
        capacity: The sum of weights held at once.
        k: The K of the LRU-K shadow.
    """

    __slots__ = (
        "_entries",
        "_keep_factor",
        "_lead",
        "_lost_by_lru",
        "_lost_by_lruk",
        "_lru",
        "_lru_weight",
        "_lruk",
        "_lruk_keys",
        "_put_lruk",
        "_refer_lruk",
        "_resize_at",
        "_weight",
        "capacity",
    )

    def __init__(self, capacity: int, *, k: int = 3) -> None:
        if capacity < 1:
            raise ValueError("capacity starts at 1")
        self.capacity = capacity
        self._entries: dict[K, tuple[V, int]] = {}  # value, weight
        self._weight = 0
        self._lru: OrderedDict[K, int] = OrderedDict()  # key → weight, least recent first
        self._lru_weight = 0
        self._lruk: LruK[K, None] = LruK(capacity, k=k, history=HISTORY_FLOOR)
        self._lruk_keys = self._lruk.keys()  # a live view
        self._refer_lruk = self._lruk.get
        self._put_lruk = self._lruk.put
        # Keys of the cache that a shadow holds no longer, first lost first.
        self._lost_by_lru: OrderedDict[K, None] = OrderedDict()
        self._lost_by_lruk: OrderedDict[K, None] = OrderedDict()
        self._lead = 0.0  # of LRU over LRU-K
        self._keep_factor = 1 - 1 / _MEMORY_FLOOR
        self._resize_at = _MEMORY_FLOOR

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    @property
    def weight(self) -> int:
        """The sum of weights held."""
        return self._weight

    @property
    def leader(self) -> str:
        """``lru`` or ``lru-k``; while they are level, ``lru-k``."""
        return "lru" if self._lead > 0 else "lru-k"

    @overload
    def peek(self, key: K) -> V | None: ...
    @overload
    def peek(self, key: K, default: D) -> V | D: ...
    def peek(self, key: K, default: D | None = None) -> V | D | None:
        """Return the value without counting a reference."""
        entry = self._entries.get(key)
        return default if entry is None else entry[0]

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: D | None = None) -> V | D | None:
        """Return the value and count a reference. A miss counts nothing: the ``put`` that follows it does."""
        entry = self._entries.get(key)
        if entry is None:
            return default
        lru = self._lru
        if key in lru:
            lru.move_to_end(key)
            if self._refer_lruk(key, 0) is None:
                return entry[0]
            self._lead = self._lead * self._keep_factor + 1
            self._into_lruk(key, entry[1], 1)
        else:
            if self._refer_lruk(key, 0) is None:
                self._lead = self._lead * self._keep_factor - 1
            else:
                self._into_lruk(key, entry[1], 1)
            self._into_lru(key, entry[1])
        return entry[0]

    def put(self, key: K, value: V, weight: int = 1, references: int = 1) -> Sequence[K]:
        """Store a value and count a reference; return the keys that had to go.

        Args:
            key: What it is found under.
            value: Replaces the one that is there.
            weight: At least 1. A value heavier than the capacity is not stored; the key is returned if it was there.
            references: Count this many at once: a key that is loaded ahead carries a history, or it is the first to go.
        """
        if weight < 1 or references < 1:
            raise ValueError("weight and references start at 1")
        if weight > self.capacity:
            return (key,) if self.discard(key) else ()
        entries = self._entries
        in_lru = key in self._lru
        in_lruk = key in self._lruk_keys
        if in_lru is not in_lruk:
            self._lead = self._lead * self._keep_factor + (1 if in_lru else -1)
        old = entries.get(key)
        if old is not None:
            self._weight -= old[1]
        entries[key] = (value, weight)
        self._weight = held = self._weight + weight
        self._into_lru(key, weight)
        self._into_lruk(key, weight, references)
        return self._evict() if held > self.capacity else ()

    def discard(self, key: K) -> bool:
        """Remove a key, its history too; return whether it was there."""
        weight = self._lru.pop(key, 0)
        self._lru_weight -= weight
        self._lruk.discard(key)
        self._lost_by_lru.pop(key, None)
        self._lost_by_lruk.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._weight -= entry[1]
        return True

    def clear(self) -> None:
        """Remove everything, the history and the lead too."""
        for mapping in (self._entries, self._lru, self._lost_by_lru, self._lost_by_lruk):
            mapping.clear()
        self._lruk.clear()
        self._weight = self._lru_weight = 0
        self._lead = 0.0

    def _into_lru(self, key: K, weight: int) -> None:
        lru, lost = self._lru, self._lost_by_lru
        held = self._lru_weight + weight - lru.pop(key, 0)
        lru[key] = weight
        if lost:
            lost.pop(key, None)
        while held > self.capacity:
            gone, its_weight = lru.popitem(last=False)
            held -= its_weight
            if gone in self._entries:
                lost[gone] = None
        self._lru_weight = held

    def _into_lruk(self, key: K, weight: int, references: int) -> None:
        lost = self._lost_by_lruk
        if lost:
            lost.pop(key, None)
        for gone in self._put_lruk(key, None, weight, references):
            if gone in self._entries:
                lost[gone] = None
        if len(self._lruk_keys) > self._resize_at:
            self._resize()

    def _resize(self) -> None:
        keys = len(self._lruk)
        self._resize_at = keys + keys // 8
        self._keep_factor = 1 - 1 / min(max(keys, _MEMORY_FLOOR), _MEMORY_CEILING)
        self._lruk.history = max(HISTORY_FLOOR, HISTORY_PER_KEY * keys)

    def _evict(self) -> list[K]:
        if self._lead > 0:
            lost, other = self._lost_by_lru, self._lost_by_lruk
        else:
            lost, other = self._lost_by_lruk, self._lost_by_lru
        entries, held = self._entries, self._weight
        evicted: list[K] = []
        while held > self.capacity:
            key, _ = lost.popitem(last=False)
            if other:
                other.pop(key, None)
            held -= entries.pop(key)[1]
            evicted.append(key)
        self._weight = held
        return evicted
