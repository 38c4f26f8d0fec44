"""What silence after compressed responses means, client by client: whom to reset when, and who gets plain bytes.

Why this exists: an Envoy that can't decompress a message drops it without a word. No ACK comes, and nothing but a new
stream, on which everything is sent again, heals that. A client to which this happens three times in a row has a reason
that resets don't cure, and is served without compression.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

__all__ = ["RESETS", "Watchdog"]

RESETS: Final = 3
"""Resets in a row after which a client gets plain bytes."""

_CLIENTS: Final = 4096
"""Clients in trouble that are remembered; the longest untroubled is forgotten."""

_PLAIN_FOR: Final = 3600.0
"""Seconds after which compression is tried again."""


@dataclass(slots=True)
class _Trouble:
    type_url: str
    resets: int
    plain_since: float | None = None


class Watchdog:
    """Remembers clients, by any name that survives their streams."""

    def __init__(self) -> None:
        self._troubles: OrderedDict[str, _Trouble] = OrderedDict()

    def patience(self, client: str) -> float:
        """Return by what the usual time limits are multiplied: 1, doubled with each reset in a row."""
        trouble = self._troubles.get(client)
        return 1.0 if trouble is None else float(2**trouble.resets)

    def was_reset(self, client: str, type_url: str, now: float) -> bool:
        """Book a reset because a response of the type had no answer; return whether plain bytes follow from it."""
        trouble = self._troubles.setdefault(client, _Trouble(type_url, 0))
        self._troubles.move_to_end(client)
        trouble.type_url = type_url
        trouble.resets += 1
        if len(self._troubles) > _CLIENTS:
            self._troubles.popitem(last=False)
        if trouble.resets < RESETS:
            return False
        trouble.plain_since = now
        return True

    def was_answered(self, client: str, type_url: str) -> None:
        """Book an answer on a compressed stream: if it is to what was not answered before, the trouble is over."""
        trouble = self._troubles.get(client)
        if trouble is not None and trouble.type_url == type_url and trouble.plain_since is None:
            del self._troubles[client]

    def wants_plain(self, client: str, now: float) -> bool:
        """Return whether the client is to be served without compression."""
        trouble = self._troubles.get(client)
        if trouble is None or trouble.plain_since is None:
            return False
        if now - trouble.plain_since < _PLAIN_FOR:
            return True
        del self._troubles[client]
        return False
