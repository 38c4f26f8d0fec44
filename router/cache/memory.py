"""L1: answers in this process's memory, under the adaptive policy. Safe under threads and asyncio."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.cache.adaptive import Adaptive
from router.cache.entry import Entry

__all__ = ["Held", "MemoryLevel"]


@dataclass(slots=True)
class Held:
    """An answer on this node, and what is known of its standing."""

    entry: Entry
    marks_sum: int
    """The sum of its purge marks (``coherence.Marks``) when it was last known to be good."""
    confirmed_ns: int
    """When this node last knew it to be what the shared tier holds; monotonic clock of the machine."""


class MemoryLevel:
    """Answers by key.

    Args:
        capacity: Bytes, by ``Entry.weight``.
    """

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._policy: Adaptive[bytes, Held] = Adaptive(capacity)
        self.capacity = capacity
        self.evicted = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._policy)

    @property
    def weight(self) -> int:
        """Bytes held."""
        return self._policy.weight

    @property
    def leader(self) -> str:
        """The policy that is imitated now."""
        return self._policy.leader

    def get(self, key: bytes, now_ms: int) -> Held | None:
        """Return the answer and count a reference; one that has expired is removed.

        Args:
            key: 32 bytes.
            now_ms: Wall clock.
        """
        with self._lock:
            held = self._policy.get(key)
            if held is None:
                return None
            if held.entry.expires_ms <= now_ms:
                self._policy.discard(key)
                self.expired += 1
                return None
            return held

    def put(self, key: bytes, held: Held, *, references: int = 1) -> bool:
        """Store an answer; return whether it is in (one that is larger than the level is not).

        Args:
            key: 32 bytes.
            held: The answer.
            references: How many uses it begins with: a prewarmed answer needs a history, or it is the first to go.
        """
        with self._lock:
            gone = self._policy.put(key, held, held.entry.weight, references)
            self.evicted += len(gone)
            return key in self._policy

    def discard(self, key: bytes) -> bool:
        """Remove an answer; return whether it was there."""
        with self._lock:
            return self._policy.discard(key)

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._policy.clear()

    def entries(self) -> Sequence[Entry]:
        """Return all entries, to copy their fingerprints into a new generation of the filter."""
        with self._lock:
            return [held.entry for key in self._policy if (held := self._policy.peek(key))]

    def sweep(self, is_worthless: Callable[[Held], bool]) -> int:
        """Remove what has become worthless; return how many."""
        with self._lock:
            keys = [key for key in self._policy if (held := self._policy.peek(key)) and is_worthless(held)]
        return sum(self.discard(key) for key in keys)
