"""``QosPolicy``: what each tier of requests may cost, and what happens to it when something fails.

A tier that is not named has the built-in policy (``merge/qos.py``); of a built-in tier that is named, what is left out
stays built in.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from controlplane.kinds.actions import RetriesEntry
from controlplane.kinds.base import HostPattern, Kind, Milliseconds, Model, Name
from controlplane.kinds.destination_rule import Count, CountOrZero, OutlierEntry

__all__ = ["MOST_HOPS", "QosPolicy", "TierEntry"]

MOST_HOPS = 16
"""The guard against loops is a regular expression, whose size Envoy limits."""


class CircuitBreakerEntry(Model):
    """What may be under way to one service at once; more is refused at once."""

    max_connections: Count | None = None
    max_pending_requests: Count | None = None
    max_requests: Count | None = None
    max_retries: CountOrZero | None = None


class OnFailureEntry(Model):
    """What happens when a backend fails."""

    retries: RetriesEntry | None = None
    """``attempts: 0``: none. A rule of a VirtualService that has its own has its way."""
    circuit_breaker: CircuitBreakerEntry | None = None
    outlier_detection: OutlierEntry | None = None


class TierEntry(Model):
    """One tier."""

    latency_budget: Milliseconds | None = None
    """A unary request is cut off then, unless its rule sets a timeout."""
    max_hops: Annotated[int, Field(ge=1, le=MOST_HOPS)] | None = None
    stream_idle_timeout: Milliseconds | None = None
    """A stream is cut off when nothing has come for so long; it has no other limit."""
    priority: Literal["high", "default"] | None = None
    on_failure: OnFailureEntry | None = None


class QosPolicySpec(Model):
    """What is to be."""

    hosts: Annotated[list[HostPattern], Field(default_factory=list)]
    """Hosts with tiers, besides those of which a rule matches ``x-qos-level``."""
    default_tier: Name | None = None
    """Of requests without level, or with one that there is not."""
    tiers: Annotated[dict[Name, TierEntry], Field(default_factory=dict)]


class QosPolicy(Kind):
    """The document."""

    api_version: Literal["modalmesh.io/v1alpha1"]
    kind: Literal["QosPolicy"]
    spec: QosPolicySpec
