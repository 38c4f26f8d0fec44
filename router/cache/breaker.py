"""A circuit breaker: when something fails again and again, stop asking it for a while. Pure: ``now`` is a parameter."""

from __future__ import annotations

__all__ = ["Breaker"]


class Breaker:
    """Closed: all may pass. Open: none may. Half open: one may, and its outcome decides.

    Args:
        failures: So many in a row open it.
        pause: Seconds that it is open the first time; doubled each time the try after it fails.
        longest: Seconds that it is open at most.
    """

    __slots__ = ("_failures", "_longest", "_misses", "_pause", "_pause_now", "_trying_until", "_until", "opened")

    def __init__(self, *, failures: int = 3, pause: float = 0.25, longest: float = 5.0) -> None:
        self._failures = failures
        self._pause = self._pause_now = pause
        self._longest = longest
        self._misses = 0
        self._until = 0.0
        self._trying_until = 0.0
        self.opened = 0
        """How often it has opened."""

    @property
    def is_open(self) -> bool:
        """Whether the last word was a failure too many."""
        return self._misses >= self._failures

    def may_pass(self, now: float) -> bool:
        """Return whether to ask now; true while open means: you are the one who tries.

        Args:
            now: Seconds on a monotonic clock.
        """
        if not self.is_open:
            return True
        if now < self._until or now < self._trying_until:
            return False
        self._trying_until = now + self._pause_now  # a try that never comes back must not keep it open for ever
        return True

    def succeeded(self) -> None:
        """Close it."""
        self._misses = 0
        self._pause_now = self._pause
        self._trying_until = 0.0

    def failed(self, now: float) -> None:
        """Count a failure; open it if that is one too many."""
        self._misses += 1
        if self._misses < self._failures:
            return
        if self._misses == self._failures:
            self.opened += 1
        else:
            self._pause_now = min(self._longest, self._pause_now * 2)
        self._misses = min(self._misses, self._failures + 1)
        self._until = now + self._pause_now
        self._trying_until = 0.0
