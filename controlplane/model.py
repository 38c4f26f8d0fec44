"""The mesh as it should be: what all documents together say, checked. The vocabulary of the control plane.

Immutable, and compared by content: where something was said is carried along for messages but makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from controlplane.kinds.semantic_route import Modality
from modalmesh.base.errors import Where

__all__ = [
    "LEVEL_HEADER",
    "ConnectionPool",
    "Cors",
    "Destination",
    "Endpoint",
    "Fault",
    "HashOn",
    "HeaderEdits",
    "LoadBalancer",
    "Match",
    "Mesh",
    "Mirror",
    "Modality",
    "OutlierDetection",
    "Redirect",
    "Response",
    "Retries",
    "Rewrite",
    "Route",
    "Rule",
    "SemanticRoute",
    "SemanticService",
    "Service",
    "Subset",
    "TextMatch",
    "Tier",
    "TrafficPolicy",
    "overlap",
]

LEVEL_HEADER: Final = "x-qos-level"
"""In which a request says its tier."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Sorted by name."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place where a service runs; ``locality`` is ``region/zone/subzone``, as far as it is known."""

    host: str
    port: int
    weight: int = 1
    labels: Labels = ()
    locality: str = ""


@dataclass(frozen=True, slots=True)
class HashOn:
    """What of a request a hash is made of.

    Attributes:
        kind: Which of them.
        name: Of the header, cookie or query parameter; of ``source`` empty.
        path: Of a cookie that Envoy makes.
        ttl_ms: Of a cookie that Envoy makes; None: it takes only those that are there.
    """

    kind: Literal["header", "cookie", "query", "source"]
    name: str = ""
    path: str = ""
    ttl_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LoadBalancer:
    """How one of a service's endpoints is picked; ``hash_on`` and ``size`` are for ring hash and Maglev.

    ``size`` is the smallest ring, or the table; None: Envoy's default.
    """

    kind: Literal["round_robin", "least_request", "random", "ring_hash", "maglev"]
    hash_on: HashOn | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class ConnectionPool:
    """Limits of what may be under way to a service at once; None: Envoy's default."""

    max_connections: int | None = None
    max_pending_requests: int | None = None
    max_requests: int | None = None
    max_retries: int | None = None
    max_requests_per_connection: int | None = None
    max_concurrent_streams: int | None = None
    connect_timeout_ms: int | None = None
    idle_timeout_ms: int | None = None
    max_connection_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OutlierDetection:
    """When an endpoint is left out for a while; None: Envoy's default, 0 of a count: never for this reason."""

    consecutive_5xx: int | None = None
    consecutive_gateway_errors: int | None = None
    consecutive_local_failures: int | None = None
    split_local: bool = False
    interval_ms: int | None = None
    base_ejection_ms: int | None = None
    max_ejection_percent: int | None = None
    min_health_percent: int | None = None


@dataclass(frozen=True, slots=True)
class TrafficPolicy:
    """What a DestinationRule says; what is None is left to the tier, then to the default."""

    load_balancer: LoadBalancer | None = None
    pool: ConnectionPool | None = None
    outlier: OutlierDetection | None = None


@dataclass(frozen=True, slots=True)
class Subset:
    """The endpoints of a service that carry all of some labels, and the policy for them (the service's filled in)."""

    name: str
    labels: Labels
    policy: TrafficPolicy = TrafficPolicy()
    where: Where | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Service:
    """A service: what Envoy calls a cluster.

    Attributes:
        protocol: ``grpc`` (its health is asked for with ``grpc.health.v1``) or ``h2c`` (it is not asked for).
        calls: Services that it calls.
        fallback: The service whose endpoints take over when too few of its own are well.
        addresses: Virtual addresses by which it is known in the mesh.
        subsets: Sorted by name.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    protocol: str = "h2c"
    calls: tuple[str, ...] = ()
    fallback: str | None = None
    addresses: tuple[str, ...] = ()
    policy: TrafficPolicy = TrafficPolicy()
    subsets: tuple[Subset, ...] = ()
    where: Where | None = field(default=None, compare=False)

    def subset(self, name: str) -> Subset | None:
        """Return the subset of a name."""
        return next((subset for subset in self.subsets if subset.name == name), None)

    def selected(self, subset: str | None) -> tuple[Endpoint, ...]:
        """Return the endpoints that a subset selects; None: all."""
        found = self.subset(subset) if subset else None
        labels = set(found.labels) if found else set()
        return tuple(endpoint for endpoint in self.endpoints if _has(endpoint, labels))


def _has(endpoint: Endpoint, labels: set[tuple[str, str]]) -> bool:
    """Return whether an endpoint carries labels; a version is also given by its bare name (``v2.3``)."""
    own = set(endpoint.labels)
    return all(label in own or (label[0] == "version" and (label[1], "true") in own) for label in labels)


@dataclass(frozen=True, slots=True, order=True)
class TextMatch:
    """Equal to ``text``, or beginning with it, or fitting it as a whole as a regular expression (RE2).

    An empty prefix asks only that it is there.
    """

    text: str
    prefix: bool = False
    regex: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """All that is given must hold; headers and parameters are sorted by name.

    Attributes:
        path: Without the query.
        ignore_case: Of the path.
        headers: Each must fit; ``:method`` and ``:authority`` are among them.
        without: None may fit.
        query: Parameters of the query.
        port: Of the listener.
        segments: The prefix ends where a segment of the path does: ``/a`` takes ``/a/b`` and not ``/ab``.
    """

    path: TextMatch | None = None
    headers: tuple[tuple[str, TextMatch], ...] = ()
    without: tuple[tuple[str, TextMatch], ...] = ()
    query: tuple[tuple[str, TextMatch], ...] = ()
    port: int | None = None
    ignore_case: bool = False
    segments: bool = False


@dataclass(frozen=True, slots=True)
class HeaderEdits:
    """What happens to headers, first to those of the request, then to those of the response; sorted by name."""

    set: Labels = ()
    add: Labels = ()
    remove: tuple[str, ...] = ()
    response_set: Labels = ()
    response_add: Labels = ()
    response_remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Destination:
    """A service, or a subset of it, and its share of the requests."""

    service: str
    weight: int = 1
    subset: str | None = None
    headers: HeaderEdits = HeaderEdits()


@dataclass(frozen=True, slots=True)
class Mirror:
    """A share of the requests, in millionths, is sent there too; nobody waits for the answers."""

    service: str
    subset: str | None = None
    millionths: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Retries:
    """Attempts after the first; ``on`` as Envoy names the reasons, ``statuses`` of HTTP. No base: Envoy's back-off."""

    attempts: int
    on: tuple[str, ...]
    statuses: tuple[int, ...] = ()
    per_try_ms: int | None = None
    base_ms: int | None = None
    max_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a share of the requests, in millionths, on purpose; 0: to none."""

    delay_ms: int = 0
    delay_millionths: int = 0
    abort_status: int = 0
    abort_grpc: int | None = None
    abort_millionths: int = 0


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What the backend sees in place of what was asked for.

    ``path`` takes the place of what matched of the path; ``pattern`` (RE2) and ``substitution`` that of a part of it;
    ``full_path`` that of all of it.
    """

    path: str | None = None
    pattern: str | None = None
    substitution: str = ""
    authority: str | None = None
    full_path: str | None = None


@dataclass(frozen=True, slots=True)
class Redirect:
    """An answer that names another place; what is None stays as it was asked for."""

    path: str | None = None
    prefix: str | None = None
    authority: str | None = None
    scheme: str | None = None
    port: int | None = None
    code: int = 301


@dataclass(frozen=True, slots=True)
class Response:
    """An answer given at once."""

    status: int
    body: str = ""


@dataclass(frozen=True, slots=True)
class Cors:
    """What browsers are told of other origins' pages."""

    origins: tuple[TextMatch, ...]
    methods: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    expose: tuple[str, ...] = ()
    max_age_s: int | None = None
    credentials: bool | None = None
    forward_unmatched: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to requests that any of the matches fits.

    Attributes:
        destinations: Where they go, unless ``redirect`` or ``response`` answers them.
        timeout_ms: Until the answer has come as a whole; 0: no limit but idle ones; None: the default.
    """

    name: str
    matches: tuple[Match, ...]
    destinations: tuple[Destination, ...] = ()
    timeout_ms: int | None = None
    retries: Retries | None = None
    fault: Fault | None = None
    mirrors: tuple[Mirror, ...] = ()
    headers: HeaderEdits = HeaderEdits()
    rewrite: Rewrite | None = None
    redirect: Redirect | None = None
    response: Response | None = None
    cors: Cors | None = None
    where: Where | None = field(default=None, compare=False)

    @property
    def places(self) -> tuple[Destination | Mirror, ...]:
        """Everywhere its requests are sent."""
        return (*self.destinations, *self.mirrors)


@dataclass(frozen=True, slots=True)
class Route:
    """Rules for the requests to some hosts, in order."""

    name: str
    hosts: tuple[str, ...]
    rules: tuple[Rule, ...]
    where: Where | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SemanticService:
    """A service that may be chosen by content."""

    service: str
    model: str
    modalities: tuple[Modality, ...]
    description: str
    where: Where | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SemanticRoute:
    """What the content of requests to some hosts may choose between; thresholds and defaults sorted by modality."""

    name: str
    hosts: tuple[str, ...]
    model: str
    top_k: int
    thresholds: tuple[tuple[Modality, float], ...]
    services: tuple[SemanticService, ...]
    defaults: tuple[tuple[Modality, str], ...]
    where: Where | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Tier:
    """What requests of one level may cost, and what happens when a backend fails.

    Attributes:
        budget_ms: A unary request is cut off then, unless its rule sets a timeout.
        max_hops: Edges from the gateway to the last service.
        idle_ms: A stream is cut off when nothing has come for so long.
        retries: None: none.
    """

    name: str
    budget_ms: int
    max_hops: int
    idle_ms: int
    retries: Retries | None = None
    pool: ConnectionPool = ConnectionPool()
    outlier: OutlierDetection = OutlierDetection()
    high_priority: bool = False


@dataclass(frozen=True, slots=True)
class Mesh:
    """Everything, each sorted by name.

    Attributes:
        default_tier: Name of the tier of requests without a level, or with one that there is not.
        tiered_hosts: Hosts (patterns too) that have tiers though none of their rules matches a level.
    """

    services: tuple[Service, ...]
    routes: tuple[Route, ...]
    semantic_routes: tuple[SemanticRoute, ...]
    tiers: tuple[Tier, ...] = ()
    default_tier: str = ""
    tiered_hosts: tuple[str, ...] = ()

    def has_tiers(self, host: str, route: Route) -> bool:
        """Return whether requests to a host of a route are told apart by their level."""
        named = any(overlap(host, other) for other in self.tiered_hosts)
        return named or any(
            name == LEVEL_HEADER for rule in route.rules for match in rule.matches for name, _ in match.headers
        )

    def fallbacks(self, service: Service) -> tuple[Service, ...]:
        """Return the services that take over one after the other."""
        if service.fallback is None:
            return ()
        services, found = self.by_name, [service]
        while (name := found[-1].fallback) is not None:
            found.append(services[name])
        return tuple(found[1:])

    def tier(self, name: str) -> Tier:
        """Return the tier of a name."""
        return next(tier for tier in self.tiers if tier.name == name)

    @property
    def by_name(self) -> Mapping[str, Service]:
        """The services by name."""
        return {service.name: service for service in self.services}


def overlap(one: str, other: str) -> bool:
    """Return whether some host fits both patterns (a name, ``*.`` and a name, or ``*``)."""
    if one == other or "*" in (one, other):
        return True
    if one.startswith("*.") and other.startswith("*."):
        return one.endswith(other[1:]) or other.endswith(one[1:])
    name, pattern = (other, one) if one.startswith("*.") else (one, other)
    return pattern.startswith("*.") and name.endswith(pattern[1:]) and len(name) > len(pattern) - 1
