"""LRU-K (O'Neil, O'Neil and Weikum, SIGMOD 1993), exact, in O(log n) amortised.

The victim is the key whose K-th last reference is oldest; a key with fewer than K references counts as oldest of all;
among equals the least recently used goes. Keys that were evicted keep their reference times, up to a stated bound.

Why it is fast: a key's K-th last reference only moves forward, so a heap may hold outdated, lower values. A hit does
not touch the heap; an eviction takes the top, and puts it back with today's value if it is outdated. Each such extra
step is paid for by a hit. Keys with fewer than K references wait in LRU order and need no heap (except behind a window,
which hands them over out of order).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, KeysView, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar, overload

__all__ = ["LruK"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")

# A hit appends to a key's reference times, and cuts them back to K only now and then.
_SLACK = 6

# Dead heap entries are swept out when they outnumber the living, and are at least this many.
_SWEEP_FROM = 64


class _Node(Generic[K, V]):
    __slots__ = ("alive", "in_window", "key", "times", "value", "weight")

    def __init__(self, key: K, value: V | None, weight: int, times: list[int]) -> None:
        self.key = key
        self.value = value  # None once it is evicted
        self.weight = weight
        self.times = times  # oldest first; the last K count
        self.alive = True
        self.in_window = False


class LruK(Generic[K, V]):
    """A cache of bounded weight. Not safe under threads: ``memory.MemoryLevel`` adds the lock.

    Args:
        capacity: The sum of weights held at once.
        k: The K of LRU-K; 1 is LRU.
        history: How many evicted keys keep their reference times (first evicted, first forgotten); None: all of them.
        window: Share of the capacity that is a plain LRU for new keys, whose victim then competes in the LRU-K part.
        correlated: A reference at most this many references after the key's last one overwrites its newest time
            instead of adding one (the paper's correlated reference period).
    """

    __slots__ = (
        "_clock",
        "_dead",
        "_ghosts",
        "_heap",
        "_history",
        "_longest",
        "_main_weight",
        "_nodes",
        "_special",
        "_window",
        "_window_weight",
        "_young",
        "capacity",
        "correlated",
        "k",
        "main_capacity",
        "window_capacity",
    )

    def __init__(
        self, capacity: int, *, k: int = 3, history: int | None = None, window: float = 0.0, correlated: int = 0
    ) -> None:
        if capacity < 1 or k < 1 or correlated < 0 or not 0 <= window < 1 or (history is not None and history < 0):
            raise ValueError("capacity and k start at 1, history and correlated at 0, window is from 0 to below 1")
        self.capacity = capacity
        self.k = k
        self.correlated = correlated
        self.window_capacity = max(1, int(capacity * window)) if window and capacity > 1 else 0
        self.main_capacity = capacity - self.window_capacity
        self._history = history
        self._special = bool(self.window_capacity or correlated)
        self._longest = k + _SLACK
        self._clock = 0
        self._dead = 0
        self._main_weight = 0
        self._window_weight = 0
        self._nodes: dict[K, _Node[K, V]] = {}
        self._window: OrderedDict[K, _Node[K, V]] = OrderedDict()  # least recent first
        self._young: OrderedDict[K, _Node[K, V]] = OrderedDict()  # fewer than K references, least recent first
        # (K-th last reference or 0, last reference, node), outdated at times; the last differs between nodes, so
        # nodes are never compared.
        self._heap: list[tuple[int, int, _Node[K, V]]] = []
        self._ghosts: OrderedDict[K, _Node[K, V]] = OrderedDict()  # first evicted first

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[K]:
        return iter(self._nodes)

    def keys(self) -> KeysView[K]:
        """Return a live view of the keys held."""
        return self._nodes.keys()

    @property
    def weight(self) -> int:
        """The sum of weights held."""
        return self._main_weight + self._window_weight

    @property
    def ghosts(self) -> int:
        """How many evicted keys still have a history."""
        return len(self._ghosts)

    @property
    def history(self) -> int | None:
        """How many may have; None: all."""
        return self._history

    @history.setter
    def history(self, bound: int | None) -> None:
        self._history = bound
        while bound is not None and len(self._ghosts) > bound:
            self._ghosts.popitem(last=False)

    @overload
    def peek(self, key: K) -> V | None: ...
    @overload
    def peek(self, key: K, default: D) -> V | D: ...
    def peek(self, key: K, default: D | None = None) -> V | D | None:
        """Return the value without counting a reference."""
        node = self._nodes.get(key)
        return default if node is None else node.value

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: D | None = None) -> V | D | None:
        """Return the value and count a reference. A miss counts nothing: the ``put`` that follows it does."""
        node = self._nodes.get(key)
        if node is None:
            return default
        self._clock = now = self._clock + 1
        times = node.times
        if self._special:
            self._touch(node, now)
            return node.value
        times.append(now)
        references = len(times)
        if references > self.k:
            if references > self._longest:
                del times[: -self.k]
        elif references < self.k:
            self._young.move_to_end(key)
        else:
            self._young.pop(key, None)
            heappush(self._heap, (times[0], now, node))
        return node.value

    def put(self, key: K, value: V, weight: int = 1, references: int = 1) -> Sequence[K]:
        """Store a value and count a reference; return the keys that had to go (with a window, maybe this one).

        Args:
            key: What it is found under.
            value: Replaces the one that is there.
            weight: At least 1. A value heavier than the LRU-K part is not stored; the key is returned if it was there.
            references: Count this many at once: a key that is loaded ahead carries a history, or it is the first to go.
        """
        node = self._nodes.get(key)
        if node is not None or references != 1 or self._special or not 0 < weight <= self.capacity:
            return self._put_unusual(key, value, weight, references)
        # From here on what put_unusual says once more in clear: a new key in a plain cache, without further calls.
        self._clock = now = self._clock + 1
        node = self._ghosts.pop(key, None)
        if node is None:
            node = _Node(key, value, weight, [now])
        else:
            node.value = value
            node.weight = weight
            node.times.append(now)
        evicted = self._evict(self.capacity - weight) if self._main_weight + weight > self.capacity else ()
        self._nodes[key] = node
        self._main_weight += weight
        times = node.times
        if len(times) < self.k:
            self._young[key] = node
        else:
            heappush(self._heap, (times[-self.k], now, node))
        return evicted

    def discard(self, key: K, *, forget: bool = True) -> bool:
        """Remove a key; return whether it was there.

        Args:
            key: The key.
            forget: Its history goes too.
        """
        if forget:
            self._ghosts.pop(key, None)
        node = self._nodes.pop(key, None)
        if node is None:
            return False
        if node.in_window:
            del self._window[key]
            self._window_weight -= node.weight
        else:
            self._main_weight -= node.weight
            if self._young.pop(key, None) is None:
                self._bury(node)
        if not forget and self._history != 0:
            # A new node: the old one's place in the heap is dead.
            self._ghosts[key] = _Node(key, None, 0, node.times[-self.k :])
            self.history = self._history
        return True

    def clear(self) -> None:
        """Remove everything, the history too."""
        for mapping in (self._nodes, self._window, self._young, self._ghosts):
            mapping.clear()
        self._heap.clear()
        self._dead = self._main_weight = self._window_weight = 0

    def _touch(self, node: _Node[K, V], now: int) -> None:
        """Count a reference where there is a window or a correlated reference period."""
        times = node.times
        if now - times[-1] <= self.correlated:
            times[-1] = now
        else:
            times.append(now)
            if len(times) > self._longest:
                del times[: -self.k]
        if node.in_window:
            self._window.move_to_end(node.key)
        elif node.key in self._young:
            if len(times) < self.k:
                self._young.move_to_end(node.key)
            else:
                del self._young[node.key]
                heappush(self._heap, (times[-self.k], now, node))

    def _put_unusual(self, key: K, value: V, weight: int, references: int) -> Sequence[K]:
        if weight < 1 or references < 1:
            raise ValueError("weight and references start at 1")
        if weight > self.main_capacity:
            return (key,) if self.discard(key) else ()
        node = self._nodes.get(key)
        if node is not None:
            return self._replace(node, value, weight, references)
        self._clock = now = self._clock + references
        first = now - references + 1
        node = self._ghosts.pop(key, None)
        if node is None:
            node = _Node(key, value, weight, [])
        else:
            node.value = value
            node.weight = weight
            if self.correlated and first - node.times[-1] <= self.correlated:
                del node.times[-1]
        node.times += range(max(first, now - self.k + 1), now + 1)
        self._nodes[key] = node
        if not self.window_capacity:
            evicted = self._evict(self.capacity - weight)
            self._enter_main(node)
            return evicted
        node.in_window = True
        self._window[key] = node
        self._window_weight += weight
        return self._shrink()

    def _enter_main(self, node: _Node[K, V]) -> None:
        node.in_window = False
        self._main_weight += node.weight
        times, k = node.times, self.k
        if len(times) >= k:
            heappush(self._heap, (times[-k], times[-1], node))
        elif self.window_capacity:
            heappush(self._heap, (0, times[-1], node))
        else:
            self._young[node.key] = node

    def _replace(self, node: _Node[K, V], value: V, weight: int, references: int) -> Sequence[K]:
        node.value = value
        heavier = weight - node.weight
        node.weight = weight
        if node.in_window:
            self._window_weight += heavier
        else:
            self._main_weight += heavier
        for _ in range(references):
            self.get(node.key)
        return self._shrink() if heavier > 0 else ()

    def _shrink(self) -> Sequence[K]:
        while self._window_weight > self.window_capacity:
            _, node = self._window.popitem(last=False)
            self._window_weight -= node.weight
            self._enter_main(node)
        return self._evict(self.main_capacity) if self._main_weight > self.main_capacity else ()

    def _evict(self, limit: int) -> list[K]:
        k, young, heap, ghosts, history = self.k, self._young, self._heap, self._ghosts, self._history
        evicted: list[K] = []
        while self._main_weight > limit:
            if young:
                key, node = young.popitem(last=False)
                times = node.times
            else:
                _, last, node = heap[0]
                times = node.times
                if not node.alive:
                    heappop(heap)
                    self._dead -= 1
                    continue
                if times[-1] != last:
                    heapreplace(heap, (times[-k] if len(times) >= k else 0, times[-1], node))
                    continue
                heappop(heap)
                key = node.key
            del self._nodes[key]
            self._main_weight -= node.weight
            evicted.append(key)
            if history == 0:
                continue
            if len(times) > k:
                del times[:-k]
            node.value = None
            ghosts[key] = node
            if history is not None and len(ghosts) > history:
                ghosts.popitem(last=False)
        return evicted

    def _bury(self, node: _Node[K, V]) -> None:
        node.alive = False
        self._dead += 1
        if self._dead > _SWEEP_FROM and self._dead * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[2].alive]
            heapify(self._heap)
            self._dead = 0
