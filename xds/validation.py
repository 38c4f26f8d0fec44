"""What is known to be wrong with a resource before any client sees it.

Clients differ in what they check, and none can be relied on to check anything (X24): Envoy validates its constraints,
proxyless gRPC others. So a resource that does not parse, carries another name, or breaks a constraint of Envoy's API
that a mistake in a document could break, is refused here. The constraints are those of the ``validate`` rules in
Envoy's ``.proto`` files; checking all of them is Envoy's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import address_pb2, extension_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.config.route.v3 import route_pb2
from xds.pb.envoy.extensions.transport_sockets.tls.v3 import secret_pb2
from xds.types import CLUSTER, ENDPOINT, EXTENSION_CONFIG, LISTENER, ROUTE, SECRET

__all__ = ["problem_of"]

_MAX_PORT: Final = 65_535
_MAX_PRIORITY: Final = 128


def problem_of(type_url: str, name: str, body: bytes) -> str:
    """Return what is wrong with a resource, in one line; "" if nothing is known to be, or the type is not known."""
    if not name:
        return "has no name"
    check = _CHECKS.get(type_url)
    if check is None:
        return ""
    try:
        return check(name, body)
    except DecodeError:
        return "is not a message of its type"


def _cluster(name: str, body: bytes) -> str:
    message = cluster_pb2.Cluster.FromString(body)
    if message.name != name:
        return _misnamed(message.name)
    if message.HasField("connect_timeout") and message.connect_timeout.ToNanoseconds() <= 0:
        return "connect_timeout is not above zero"
    if message.HasField("load_assignment"):
        return _assignment(message.load_assignment)
    return ""


def _endpoint(name: str, body: bytes) -> str:
    message = endpoint_pb2.ClusterLoadAssignment.FromString(body)
    return _misnamed(message.cluster_name) if message.cluster_name != name else _assignment(message)


def _assignment(message: endpoint_pb2.ClusterLoadAssignment) -> str:
    for locality in message.endpoints:
        if locality.priority > _MAX_PRIORITY:
            return f"priority {locality.priority} is above {_MAX_PRIORITY}"
        for item in locality.lb_endpoints:
            if item.HasField("load_balancing_weight") and item.load_balancing_weight.value < 1:
                return "an endpoint's load_balancing_weight is below 1"
            if item.HasField("endpoint"):
                problem = _address(item.endpoint.address)
                if problem:
                    return f"an endpoint's {problem}"
    return ""


def _address(address: address_pb2.Address) -> str:
    kind = address.WhichOneof("address")
    if kind is None:
        return "address is missing"
    if kind == "socket_address":
        if not address.socket_address.address:
            return "address is empty"
        if address.socket_address.port_value > _MAX_PORT:
            return f"port {address.socket_address.port_value} is above {_MAX_PORT}"
    if kind == "pipe" and not address.pipe.path:
        return "pipe has no path"
    return ""


def _listener(name: str, body: bytes) -> str:
    message = listener_pb2.Listener.FromString(body)
    if message.name != name:
        return _misnamed(message.name)
    if message.HasField("address"):
        return _address(message.address)
    return ""


def _route(name: str, body: bytes) -> str:
    message = route_pb2.RouteConfiguration.FromString(body)
    if message.name != name:
        return _misnamed(message.name)
    seen: set[str] = set()
    for host in message.virtual_hosts:
        if not host.name:
            return "a virtual host has no name"
        if not host.domains:
            return f"virtual host {host.name!r} has no domains"
        twice = next((domain for domain in host.domains if domain in seen), None)
        if twice is not None:
            return f"domain {twice!r} occurs twice"
        seen.update(host.domains)
        if any(item.match.WhichOneof("path_specifier") is None for item in host.routes):
            return f"a route of virtual host {host.name!r} matches no path"
    return ""


def _secret(name: str, body: bytes) -> str:
    message = secret_pb2.Secret.FromString(body)
    return _misnamed(message.name) if message.name != name else ""


def _extension(name: str, body: bytes) -> str:
    message = extension_pb2.TypedExtensionConfig.FromString(body)
    if message.name != name:
        return _misnamed(message.name)
    return "" if message.HasField("typed_config") else "typed_config is missing"


def _misnamed(inside: str) -> str:
    return f"is named {inside!r} inside"


_CHECKS: Final[dict[str, Callable[[str, bytes], str]]] = {
    CLUSTER: _cluster,
    ENDPOINT: _endpoint,
    EXTENSION_CONFIG: _extension,
    LISTENER: _listener,
    ROUTE: _route,
    SECRET: _secret,
}
