"""What keeps a flood of never-seen keys from wearing out cache and backend. Pure: ``now`` is a parameter.

- ``MissBudget``: how many never-seen requests a tenant may send to a backend.
- ``Doorkeeper``: an answer enters L1 only when its key is asked for twice.
- Closed sets are in ``cache.py``, because a «no» about them needs the filters.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from router.cache.bloom import Bits, Geometry

__all__ = ["GO_ON", "Charge", "Doorkeeper", "MissBudget"]

_MANY_TENANTS = 10_000


@dataclass(frozen=True, slots=True)
class Charge:
    """Whether a never-seen request may go on, and if not, after how many seconds it is worth trying again."""

    allowed: bool
    retry_after: float = 0.0


GO_ON = Charge(allowed=True)


class MissBudget:
    """A token bucket for each tenant.

    Args:
        rate: Never-seen requests a second; 0: no limit, and they are only counted.
        burst: How many may come at once.
        tenants: Buckets kept. A tenant that was pushed out by others begins with a full bucket again, so this is
            meant to be larger than the number of tenants that there are.
    """

    def __init__(self, rate: float, burst: int, *, tenants: int = _MANY_TENANTS) -> None:
        if rate < 0 or burst < 1 or tenants < 1:
            raise ValueError("rate starts at 0, burst and tenants at 1")
        self.rate = rate
        self.burst = burst
        self.charged = 0
        self.refused = 0
        self._tenants = tenants
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, at what time

    def charge(self, tenant: str, now: float) -> Charge:
        """Take one token, if there is one.

        Args:
            tenant: Whose.
            now: Seconds on a monotonic clock.
        """
        self.charged += 1
        if not self.rate:
            return GO_ON
        tokens, then = self._buckets.pop(tenant, (float(self.burst), now))
        tokens = min(self.burst, tokens + max(0.0, now - then) * self.rate)
        allowed = tokens >= 1
        self._buckets[tenant] = (tokens - 1 if allowed else tokens, now)
        if len(self._buckets) > self._tenants:
            self._buckets.popitem(last=False)
        if allowed:
            return GO_ON
        self.refused += 1
        return Charge(allowed=False, retry_after=(1 - tokens) / self.rate)


class Doorkeeper:
    """Remembers, in fixed memory, which keys were asked for lately.

    Two Bloom filters, an old and a new one. When the new one has taken ``keys`` keys, the old one is dropped: what was
    asked for is remembered for at least ``keys`` other keys, and at most twice that.

    Args:
        keys: See above. With 16 bits a key and 4 hashes, 2 in 1000 keys pass at their first request.
    """

    def __init__(self, keys: int = 65_536) -> None:
        self._geometry = Geometry(max(10, math.ceil(math.log2(keys * 16))), 4)
        self._keys = keys
        self._taken = 0
        self._new = Bits(self._geometry, bytearray(self._geometry.size))
        self._old = Bits(self._geometry, bytearray(self._geometry.size))

    def asked_before(self, key: bytes) -> bool:
        """Return whether the key was asked for lately, and remember that it was.

        Args:
            key: At least 16 bytes that are spread evenly; the first 16 count.
        """
        key = key[:16]
        if self._new.holds(key):
            return True
        before = self._old.holds(key)
        self._new.add(key)
        self._taken += 1
        if self._taken >= self._keys:
            self._old, self._new = self._new, Bits(self._geometry, bytearray(self._geometry.size))
            self._taken = 0
        return before
