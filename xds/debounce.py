"""When a change goes out: at once after a time of quiet; in a burst, once it is over.

An operator's single change must not wait, and a rollout that changes something every few milliseconds must not be sent
piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LONGEST", "QUIET", "Debounce"]

QUIET = 0.1
"""Seconds: a change goes at once if the one before is that long ago; else all go when none has come for that long."""

LONGEST = 10.0
"""Seconds that a change waits at most while others keep coming."""


@dataclass(slots=True)
class Debounce:
    """Notes changes; ``due`` says when to send what has gathered."""

    quiet: float = QUIET
    longest: float = LONGEST
    due: float | None = None
    _last: float | None = None
    _first_waiting: float | None = None

    def note(self, now: float) -> None:
        """Take note of a change."""
        quiet = self._last is None or now - self._last >= self.quiet
        if self._first_waiting is None:
            self._first_waiting = now
            self.due = now if quiet else now + self.quiet
        else:
            self.due = min(now + self.quiet, self._first_waiting + self.longest)
        self._last = now

    def sent(self) -> None:
        """What had gathered was sent."""
        self.due = self._first_waiting = None
