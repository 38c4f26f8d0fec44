"""The mesh as it should be: what all documents together say, checked. The vocabulary of the control plane.

Immutable, and compared by content: where something was said is carried along for messages but makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.kinds.semantic_route import Modality
from modalmesh.base.errors import Where

__all__ = [
    "Destination",
    "Endpoint",
    "Match",
    "Mesh",
    "Modality",
    "Route",
    "Rule",
    "SemanticRoute",
    "SemanticService",
    "Service",
    "TextMatch",
    "overlap",
]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place where a service runs; labels are sorted by name."""

    host: str
    port: int
    weight: int = 1
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """A service: what Envoy calls a cluster.

    Attributes:
        protocol: ``grpc`` (its health is asked for with ``grpc.health.v1``) or ``h2c`` (it is not asked for).
        calls: Services that it calls.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    protocol: str = "h2c"
    calls: tuple[str, ...] = ()
    where: Where | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TextMatch:
    """Equal to ``text``, or beginning with it; an empty prefix asks only that it is there."""

    text: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """All that is given must hold; headers are sorted by name."""

    path: TextMatch | None = None
    headers: tuple[tuple[str, TextMatch], ...] = ()


@dataclass(frozen=True, slots=True)
class Destination:
    """A service and its share of the requests."""

    service: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests that any of the matches fits go to the destinations; ``timeout_ms`` None: the gateway's default."""

    name: str
    matches: tuple[Match, ...]
    destinations: tuple[Destination, ...]
    timeout_ms: int | None = None


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
class Mesh:
    """Everything, each sorted by name."""

    services: tuple[Service, ...]
    routes: tuple[Route, ...]
    semantic_routes: tuple[SemanticRoute, ...]

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
