"""What the cache counts. Labels come from enumerations in the code, so their number is bounded."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from modalmesh.base.metrics import REGISTRY

__all__ = ["BUDGET", "FILTER", "LEVELS", "LOOKUPS", "SHARED", "STORES"]

LOOKUPS = Counter("modalmesh_cache_lookups", "Lookups, by what answered them.", ["result"], registry=REGISTRY)
STORES = Counter(
    "modalmesh_cache_stores",
    "Answers offered for storing, by level and result.",
    ["level", "result"],
    registry=REGISTRY,
)
FILTER = Gauge(
    "modalmesh_cache_filter",
    "The layered filter: share of bits set, estimated false-positive rate and keys, saturated (0 or 1).",
    ["layer", "what"],
    registry=REGISTRY,
)
LEVELS = Gauge("modalmesh_cache_level", "Entries and bytes of a level.", ["level", "what"], registry=REGISTRY)
SHARED = Gauge(
    "modalmesh_cache_shared",
    "The shared tier: connected, current, breaker_open (0 or 1), lag_ms, pending_purges.",
    ["what"],
    registry=REGISTRY,
)
BUDGET = Counter(
    "modalmesh_cache_never_seen", "Never-seen requests, by what became of them.", ["result"], registry=REGISTRY
)
