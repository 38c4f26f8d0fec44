"""Replaying a trace against the policies, to choose one and a size for it before a cache is deployed. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from router.cache.adaptive import HISTORY_FLOOR, HISTORY_PER_KEY, Adaptive
from router.cache.belady import belady_hits
from router.cache.lruk import LruK

__all__ = ["POLICIES", "Row", "default_capacities", "replay", "simulate"]


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy reached with one capacity."""

    policy: str
    capacity: int
    hits: int
    references: int

    @property
    def ratio(self) -> float:
        """Hits of all references, 0 to 1."""
        return self.hits / self.references


def replay(cache: LruK[int, None] | Adaptive[int, None], keys: Sequence[int]) -> int:
    """Return the hits; a miss puts the key in."""
    hits = 0
    get, put = cache.get, cache.put
    for key in keys:
        if get(key, 0) is None:
            hits += 1
        else:
            put(key, None)
    return hits


def _lruk(k: int, *, bounded: bool) -> Callable[[Sequence[int], int], int]:
    def run(keys: Sequence[int], capacity: int) -> int:
        history = max(HISTORY_FLOOR, HISTORY_PER_KEY * capacity) if bounded else None
        return replay(LruK(capacity, k=k, history=history), keys)

    return run


POLICIES: dict[str, Callable[[Sequence[int], int], int]] = {
    "LRU": _lruk(1, bounded=True),
    "LRU-2": _lruk(2, bounded=False),
    "LRU-3": _lruk(3, bounded=False),
    "adaptive": lambda keys, capacity: replay(Adaptive(capacity), keys),
    "best possible": belady_hits,
}
"""LRU-2 and LRU-3 with full history; adaptive as the cache runs it, with its bound (``adaptive.HISTORY_FLOOR``)."""


def default_capacities(keys: Sequence[int], *, points: int = 8) -> list[int]:
    """Return capacities that span the trace: from 1/128 of its distinct keys to all of them, each twice the last."""
    distinct = len(set(keys))
    return sorted({max(1, distinct >> shift) for shift in range(points)})


def simulate(keys: Sequence[int], capacities: Sequence[int], policies: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for each capacity and policy, as it is reached.

    Args:
        keys: The references, in order.
        capacities: Keys held at once.
        policies: Of ``POLICIES``; all of them if none is given.
    """
    for capacity in capacities:
        for name in policies or POLICIES:
            yield Row(name, capacity, POLICIES[name](keys, capacity), len(keys))
