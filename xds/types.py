"""Type URLs, their short names, and the order in which types are pushed.

The order is «make before break» (Envoy's xDS protocol, «Eventual consistency considerations»): what is referred to
comes before what refers to it, and what nobody refers to any more goes last.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "CLUSTER",
    "COMPLETE_STATE",
    "ENDPOINT",
    "EXTENSION_CONFIG",
    "LEGACY_WILDCARD",
    "LISTENER",
    "PUSH_ORDER",
    "REMOVED_LAST",
    "ROUTE",
    "SECRET",
    "push_rank",
    "short_name",
]

_PREFIX: Final = "type.googleapis.com/"

LISTENER: Final = _PREFIX + "envoy.config.listener.v3.Listener"
ROUTE: Final = _PREFIX + "envoy.config.route.v3.RouteConfiguration"
CLUSTER: Final = _PREFIX + "envoy.config.cluster.v3.Cluster"
ENDPOINT: Final = _PREFIX + "envoy.config.endpoint.v3.ClusterLoadAssignment"
SECRET: Final = _PREFIX + "envoy.extensions.transport_sockets.tls.v3.Secret"
EXTENSION_CONFIG: Final = _PREFIX + "envoy.config.core.v3.TypedExtensionConfig"

PUSH_ORDER: Final = (CLUSTER, ENDPOINT, LISTENER, ROUTE)
"""Types not listed come after these, by name."""

REMOVED_LAST: Final = (CLUSTER, ENDPOINT)
"""Removals of these wait until listeners and routes, which may refer to them, are acknowledged."""

LEGACY_WILDCARD: Final = frozenset({LISTENER, CLUSTER})
"""Types for which an empty first request means «*» («How the client specifies what resources to return»)."""

COMPLETE_STATE: Final = frozenset({LISTENER, CLUSTER})
"""Types whose state-of-the-world responses are complete: what is absent is deleted. Responses of every other type may
hold only what changed («Grouping Resources into Responses»)."""

_SHORT: Final = {
    LISTENER: "LDS",
    ROUTE: "RDS",
    CLUSTER: "CDS",
    ENDPOINT: "EDS",
    SECRET: "SDS",
    EXTENSION_CONFIG: "ECDS",
}


def push_rank(type_url: str) -> tuple[int, str]:
    """Return the sort key that puts types into push order."""
    return (PUSH_ORDER.index(type_url) if type_url in PUSH_ORDER else len(PUSH_ORDER), type_url)


def short_name(type_url: str) -> str:
    """Return the discovery service's short name (``CDS``), or the message's own name for other types."""
    return _SHORT.get(type_url) or type_url.rpartition("/")[2].rpartition(".")[2]
