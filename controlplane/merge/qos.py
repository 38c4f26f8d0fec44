"""QosPolicies and the built-in table → tiers, and what routes may do with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from controlplane.documents import Document, Path
from controlplane.errors import FieldError, TierLeakError, UnknownNameError, UnknownTierError
from controlplane.kinds.base import full_name, milliseconds
from controlplane.kinds.qos_policy import CircuitBreakerEntry, QosPolicy, TierEntry
from controlplane.merge.actions import DEFAULT_RETRY_ON, retries
from controlplane.merge.context import Claims, Context
from controlplane.merge.destinations import outlier_detection
from controlplane.model import (
    LEVEL_HEADER,
    ConnectionPool,
    Match,
    OutlierDetection,
    Retries,
    Route,
    Tier,
)

__all__ = ["BUILT_IN", "SUBSET_PREFIX", "Qos", "check_levels", "merge_qos"]

SUBSET_PREFIX: Final = "qos-"
"""A subset of this name and a tier's is that tier's alone."""

_RETRY_ON: Final = tuple(sorted(DEFAULT_RETRY_ON))

BUILT_IN: Final = (
    # The limits are the lowest: what is over them is refused, so of all tiers it is shed first.
    Tier(
        "best-effort",
        budget_ms=5_000,
        max_hops=8,
        idle_ms=60_000,
        retries=Retries(3, _RETRY_ON, (503,), base_ms=100, max_ms=1_000),
        pool=ConnectionPool(max_pending_requests=64, max_requests=128, max_retries=32),
        outlier=OutlierDetection(consecutive_5xx=10, interval_ms=10_000, base_ejection_ms=30_000),
    ),
    Tier(
        "elastic",
        budget_ms=300,
        max_hops=4,
        idle_ms=30_000,
        retries=Retries(3, _RETRY_ON, (503,), base_ms=10, max_ms=80),
        outlier=OutlierDetection(consecutive_5xx=5, interval_ms=5_000, base_ejection_ms=15_000),
    ),
    Tier(
        "realtime",
        budget_ms=50,
        max_hops=2,
        idle_ms=10_000,
        retries=None,
        pool=ConnectionPool(max_pending_requests=512, max_requests=512, max_retries=0),
        outlier=OutlierDetection(
            consecutive_5xx=3, consecutive_gateway_errors=3, interval_ms=1_000, base_ejection_ms=5_000
        ),
        high_priority=True,
    ),
)
"""Budget, hops and the kind of reaction are the specification's table; the other figures are ours."""

_DEFAULT_TIER: Final = "elastic"


@dataclass(frozen=True, slots=True)
class Qos:
    """Tiers by name, that of requests without a level, and the hosts that have tiers in any case."""

    tiers: tuple[Tier, ...]
    default: str
    hosts: tuple[str, ...]


def merge_qos(context: Context, documents: Sequence[tuple[Document, QosPolicy]]) -> Qos:
    """Return what the documents say, over the built-in table; each tier has one document, and so has the default."""
    names: Claims[None] = Claims("QosPolicy", context.problems)
    tiers: Claims[Tier] = Claims("tier", context.problems)
    defaults: Claims[str] = Claims("default tier:", context.problems)
    hosts: set[str] = set()
    built_in = {tier.name: tier for tier in BUILT_IN}
    for document, content in documents:
        names.claim(full_name(content), None, document.where(("metadata", "name")))
        hosts.update(content.spec.hosts)
        for name, entry in content.spec.tiers.items():
            path: Path = ("spec", "tiers", name)
            tiers.claim(name, _tier(name, entry, built_in.get(name)), document.where(path))
            if name not in built_in:
                _check_complete(context, document, path, entry)
        if content.spec.default_tier is not None:
            defaults.claim("of the mesh", content.spec.default_tier, document.where(("spec", "defaultTier")))
    merged = {**built_in, **{tier.name: tier for tier in tiers.in_order()}}
    default = next(iter(defaults.in_order()), _DEFAULT_TIER)
    if default not in merged:
        _, where = defaults.taken["of the mesh"]
        hint = f"one of {', '.join(sorted(merged))}, or add it under «tiers»"
        context.note(UnknownNameError(f"there is no tier {default!r}", hint=hint, where=where))
    return Qos(tuple(merged[name] for name in sorted(merged)), default, tuple(sorted(hosts)))


def _check_complete(context: Context, document: Document, path: Path, entry: TierEntry) -> None:
    for field, value in (("latencyBudget", entry.latency_budget), ("maxHops", entry.max_hops)):
        if value is None:
            what = f"tier {path[-1]!r} is not built in and has no «{field}»"
            context.note(FieldError(what, hint="add it", where=document.where(path)))


def _tier(name: str, entry: TierEntry, built_in: Tier | None) -> Tier:
    if built_in is None:
        built_in = replace(next(tier for tier in BUILT_IN if tier.name == _DEFAULT_TIER), name=name)
    failure = entry.on_failure
    tier = replace(
        built_in,
        budget_ms=milliseconds(entry.latency_budget) if entry.latency_budget else built_in.budget_ms,
        max_hops=entry.max_hops or built_in.max_hops,
        idle_ms=milliseconds(entry.stream_idle_timeout) if entry.stream_idle_timeout else built_in.idle_ms,
        high_priority=built_in.high_priority if entry.priority is None else entry.priority == "high",
    )
    if failure and failure.retries:
        tier = replace(tier, retries=retries(failure.retries) if failure.retries.attempts else None)
    if failure and failure.circuit_breaker:
        tier = replace(tier, pool=_pool(failure.circuit_breaker))
    if failure and failure.outlier_detection:
        tier = replace(tier, outlier=outlier_detection(failure.outlier_detection))
    return tier


def _pool(entry: CircuitBreakerEntry) -> ConnectionPool:
    return ConnectionPool(
        max_connections=entry.max_connections,
        max_pending_requests=entry.max_pending_requests,
        max_requests=entry.max_requests,
        max_retries=entry.max_retries,
    )


def check_levels(context: Context, routes: Iterable[Route], qos: Qos) -> None:
    """Note every rule that matches a level otherwise than exactly, or one that there is not, or leaks between tiers."""
    known = {tier.name for tier in qos.tiers}
    for route in routes:
        for rule in route.rules:
            for match in rule.matches:
                level = dict(match.headers).get(LEVEL_HEADER)
                if level and (level.prefix or level.regex):
                    what = f"{LEVEL_HEADER} is matched otherwise than by «exact»"
                    hint = "write one match per tier, so that no request is taken for one of another tier"
                    context.note(FieldError(what, hint=hint, where=rule.where))
                elif level and level.text not in known:
                    what = f"tier {level.text!r} has no policy"
                    hint = f"one of {', '.join(sorted(known))}, or add it to a QosPolicy"
                    context.note(UnknownTierError(what, hint=hint, where=rule.where))
            levels = {_level(match) for match in rule.matches}
            for place in rule.places:
                subset = place.subset or ""
                own = subset.removeprefix(SUBSET_PREFIX)
                if subset.startswith(SUBSET_PREFIX) and own in known and levels != {own}:
                    what = f"requests of other tiers than {own!r} would reach subset {subset!r} of {place.service!r}"
                    hint = f"match «{LEVEL_HEADER}: {{exact: {own}}}», or name another subset"
                    context.note(TierLeakError(what, hint=hint, where=rule.where))


def _level(match: Match) -> str | None:
    level = dict(match.headers).get(LEVEL_HEADER)
    return level.text if level else None
