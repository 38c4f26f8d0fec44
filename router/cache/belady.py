"""The best that any cache could do on a trace: evict the key whose next use lies furthest ahead (Bélády, 1966)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

__all__ = ["belady_hits"]


def belady_hits(keys: Sequence[int], capacity: int) -> int:
    """Return the hits of the optimal replacement that must admit every key; O(n log n).

    Args:
        keys: The references, in order.
        capacity: Keys held at once, at least 1.
    """
    never = len(keys)
    following = [never] * len(keys)
    seen: dict[int, int] = {}
    for position in range(len(keys) - 1, -1, -1):
        following[position] = seen.get(keys[position], never)
        seen[keys[position]] = position
    held: dict[int, int] = {}  # key → position of its next use
    heap: list[tuple[int, int]] = []
    hits = 0
    for position, key in enumerate(keys):
        if key in held:
            hits += 1
        elif len(held) >= capacity:
            while True:
                use, candidate = heappop(heap)
                if held.get(candidate) == -use:
                    del held[candidate]
                    break
        held[key] = following[position]
        heappush(heap, (-following[position], key))
    return hits
