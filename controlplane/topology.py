"""Whether the graph of the mesh is sound: no circles where there must be none, and no request that hops too often.

Edges: gateway → host, host → destination (rules, mirrors, semantic routes; what is delegated is among the rules
already), service → what it calls, service → its fallback. A hop is an edge on the way from the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from controlplane.compile.tiers import variants
from controlplane.errors import CallCycleError, FallbackCycleError, HopsError
from controlplane.model import LEVEL_HEADER, Match, Mesh, Route, Rule, Service, overlap
from modalmesh.base.errors import DocumentError

__all__ = ["find_faults", "reached"]

_Edges = Mapping[str, tuple[str, ...]]

# From the gateway to the host; the way from there on has as many edges as it names services.
_TO_HOST = 1


def find_faults(mesh: Mesh) -> Iterator[DocumentError]:
    """Yield everything that is wrong with the graph; names that there are not are somebody else's to report."""
    services = mesh.by_name
    yield from _fallback_circles(services)
    if mesh.default_tier not in {tier.name for tier in mesh.tiers}:
        return
    paths = _Paths({name: _next(service, services) for name, service in services.items()})
    for route in mesh.routes:
        hosts = [host for host in route.hosts if mesh.has_tiers(host, route)]
        if hosts:
            yield from _hops(mesh, route, hosts[0], paths)
    yield from _call_circles(mesh, services, paths)


def reached(mesh: Mesh, route: Route, rule: Rule) -> list[str]:
    """Return the services to which a rule may send requests, sorted: its own, and those of semantic routes."""
    names = {place.service for place in rule.places}
    if rule.destinations:
        for choice in mesh.semantic_routes:
            if any(overlap(host, other) for host in route.hosts for other in choice.hosts):
                names.update(service.service for service in choice.services)
    return sorted(names)


def _next(service: Service, services: Mapping[str, Service]) -> tuple[str, ...]:
    found = {*service.calls, *((service.fallback,) if service.fallback else ())}
    return tuple(sorted(name for name in found if name in services))


def _fallback_circles(services: Mapping[str, Service]) -> Iterator[DocumentError]:
    done: set[str] = set()
    for name in sorted(services):
        way: list[str] = []
        at: str | None = name
        while at is not None and at in services and at not in done and at not in way:
            way.append(at)
            at = services[at].fallback
        if at in way:
            circle = [*way[way.index(at) :], at]
            what = f"fallbacks go in a circle: {' → '.join(circle)}"
            hint = "take «fallback» away from one of them: the last one always answers"
            yield FallbackCycleError(what, hint=hint, where=services[at].where)
        done.update(way)


@dataclass(slots=True)
class _Paths:
    """The longest way from each service on, in edges; None where it has no end."""

    edges: _Edges
    longest: dict[str, tuple[str, ...] | None] = field(default_factory=dict)

    def from_(self, start: str) -> tuple[str, ...] | None:
        """Return the services on the longest way from a service on, with itself; no recursion: chains may be long."""
        work: list[tuple[str, bool]] = [(start, False)]
        open_: set[str] = set()
        while work:
            name, after = work.pop()
            if after:
                open_.discard(name)
                following = [self.longest[other] for other in self.edges[name]]
                ends = [way for way in following if way is not None]
                endless = name in self.longest or len(ends) < len(following)
                self.longest[name] = None if endless else (name, *max(ends, key=len, default=()))
            elif name not in self.longest:
                open_.add(name)
                work.append((name, True))
                for other in self.edges[name]:
                    if other in open_:
                        self.longest[other] = None  # a circle; looked at again when it is left
                    work.append((other, False))
        return self.longest[start]


def _hops(mesh: Mesh, route: Route, host: str, paths: _Paths) -> Iterator[DocumentError]:
    """Yield a fault for each rule some of whose requests may hop more often than their tier allows."""
    for rule in route.rules:
        ways = [way for name in reached(mesh, route, rule) if name in paths.edges and (way := paths.from_(name))]
        if not ways:
            continue
        way = max(ways, key=len)
        hops = _TO_HOST + len(way)
        known = [match for match in rule.matches if _level_is_known(mesh, match)]
        tiers = {tier.name: tier for match in known for tier, _ in variants(mesh, match)}
        if not tiers:
            continue
        tight = min(tiers.values(), key=lambda tier: (tier.max_hops, tier.name))
        if hops > tight.max_hops:
            shown = " → ".join(("gateway", host, *way))
            what = f"{hops} hops, but tier {tight.name!r} allows {tight.max_hops}: {shown}"
            hint = "shorten the chain of calls, match other tiers only, or raise «maxHops» in a QosPolicy"
            yield HopsError(what, hint=hint, where=rule.where)


def _level_is_known(mesh: Mesh, match: Match) -> bool:
    level = dict(match.headers).get(LEVEL_HEADER)
    return level is None or any(tier.name == level.text for tier in mesh.tiers)


def _call_circles(mesh: Mesh, services: Mapping[str, Service], paths: _Paths) -> Iterator[DocumentError]:
    """Yield each circle of calls that requests of tiers come to, once."""
    tiered = {
        name
        for route in mesh.routes
        if any(mesh.has_tiers(host, route) for host in route.hosts)
        for rule in route.rules
        for name in reached(mesh, route, rule)
        if name in services
    }
    seen: set[frozenset[str]] = set()
    for start in sorted(tiered):
        if paths.from_(start) is not None:
            continue
        for circle in _circles(start, paths.edges):
            edges = zip(circle, (*circle[1:], circle[0]), strict=True)
            only_fallbacks = all(services[one].fallback == other for one, other in edges)
            if frozenset(circle) not in seen and not only_fallbacks:
                seen.add(frozenset(circle))
                what = f"calls go in a circle: {' → '.join((*circle, circle[0]))}"
                hint = f"requests of tiers come to {start!r}: their hops would have no end; break it at one «calls»"
                yield CallCycleError(what, hint=hint, where=services[circle[0]].where)


def _circles(start: str, edges: _Edges) -> Iterator[tuple[str, ...]]:
    """Yield circles that can be reached from a service, by depth-first search; each begins with its least name."""
    way: list[str] = []
    done: set[str] = set()
    work: list[tuple[str, bool]] = [(start, False)]
    while work:
        name, after = work.pop()
        if after:
            way.pop()
            done.add(name)
        elif name in way:
            circle = way[way.index(name) :]
            least = circle.index(min(circle))
            yield (*circle[least:], *circle[:least])
        elif name not in done:
            way.append(name)
            work.append((name, True))
            work.extend((other, False) for other in reversed(edges[name]))
