"""Routes → the gateway's one RouteConfiguration.

Each host becomes a virtual host. Where a SemanticRoute is for the host, every rule that takes inference requests
becomes three routes, tried in this order:

1. *chosen*: the inference path, and the router has set ``x-modalmesh-cluster``: to the cluster it names;
2. *infer*: the inference path: the body is buffered and shown to the router, which sets that header and has Envoy look
   for a route again; if it can't, the request goes to the rule's own destination (fail open);
3. the rule itself, with nothing shown to the router.

The listener has the ext_proc filter disabled; only a route that configures it (2, and 1 so that looking again changes
nothing) turns it on. So a request without a route, or for any other method, never costs a round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controlplane.compile.protobuf import duration, packed
from controlplane.model import Destination, Match, Mesh, Route, Rule, TextMatch, overlap
from xds.pb.envoy.config.route.v3 import route_components_pb2, route_pb2
from xds.pb.envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2
from xds.pb.envoy.type.matcher.v3 import string_pb2

__all__ = [
    "BODY_LIMIT",
    "CLUSTER_HEADER",
    "DEFAULT_TIMEOUT_MS",
    "EXT_PROC",
    "INFERENCE_PATH",
    "ROUTE_CONFIGURATION",
    "STREAM_IDLE_TIMEOUT_MS",
    "compile_routes",
]

ROUTE_CONFIGURATION = "modalmesh-gateway"

CLUSTER_HEADER = "x-modalmesh-cluster"
"""Set by the router only: the listener removes it from what clients send."""

EXT_PROC = "envoy.filters.http.ext_proc"

INFERENCE_PATH = "/inference.GRPCInferenceService/ModelInfer"
"""KServe v2's unary inference: the one method whose body the router understands so far."""

BODY_LIMIT = 16 << 20
"""Bytes of a body that is shown to the router; a larger one is answered with 413. A 12 MiB picture fits."""

DEFAULT_TIMEOUT_MS = 15_000

STREAM_IDLE_TIMEOUT_MS = 60_000
"""The listener's; a route that may take longer says so itself, or it would be cut off while its backend computes."""

_SHOW_TO_ROUTER = packed(ext_proc_pb2.ExtProcPerRoute(overrides=ext_proc_pb2.ExtProcOverrides()))


def compile_routes(mesh: Mesh) -> route_pb2.RouteConfiguration:
    """Return the routes of the gateway; a host's port makes no difference."""
    configuration = route_pb2.RouteConfiguration(name=ROUTE_CONFIGURATION, ignore_port_in_host_matching=True)
    hosts = sorted((host, route) for route in mesh.routes for host in route.hosts)
    configuration.virtual_hosts.extend(_virtual_host(mesh, host, route) for host, route in hosts)
    return configuration


def _virtual_host(mesh: Mesh, host: str, route: Route) -> route_components_pb2.VirtualHost:
    semantic = any(overlap(host, other) for choice in mesh.semantic_routes for other in choice.hosts)
    virtual_host = route_components_pb2.VirtualHost(name=host, domains=[host])
    if semantic:
        # Here and not on the route: it must not change when Envoy looks for a route again.
        virtual_host.request_body_buffer_limit.value = BODY_LIMIT
    for rule in route.rules:
        virtual_host.routes.extend(_routes(f"{route.name}.{rule.name}", rule, semantic=semantic))
    return virtual_host


def _routes(name: str, rule: Rule, *, semantic: bool) -> Iterator[route_components_pb2.Route]:
    for match in rule.matches:
        if semantic and _takes_inference(match):
            chosen = _route(f"{name}.chosen", _inference_match(match), rule)
            chosen.match.headers.add(name=CLUSTER_HEADER, present_match=True)
            chosen.route.cluster_header = CLUSTER_HEADER  # takes the place of the destination: they share a oneof
            infer = _route(f"{name}.infer", _inference_match(match), rule)
            for route in (chosen, infer):
                route.typed_per_filter_config[EXT_PROC].CopyFrom(_SHOW_TO_ROUTER)
                yield route
        yield _route(name, _match(match), rule)


def _takes_inference(match: Match) -> bool:
    path = match.path
    if path is None:
        return True
    return INFERENCE_PATH.startswith(path.text) if path.prefix else path.text == INFERENCE_PATH


def _route(name: str, match: route_components_pb2.RouteMatch, rule: Rule) -> route_components_pb2.Route:
    timeout_ms = DEFAULT_TIMEOUT_MS if rule.timeout_ms is None else rule.timeout_ms
    # The backend has no use for it.
    route = route_components_pb2.Route(name=name, match=match, request_headers_to_remove=[CLUSTER_HEADER])
    route.route.timeout.CopyFrom(duration(timeout_ms))
    if timeout_ms > STREAM_IDLE_TIMEOUT_MS:
        route.route.idle_timeout.CopyFrom(duration(timeout_ms))
    _send_to(route.route, rule.destinations)
    return route


def _send_to(action: route_components_pb2.RouteAction, destinations: Sequence[Destination]) -> None:
    if len(destinations) == 1:
        action.cluster = destinations[0].service
        return
    for destination in destinations:
        item = action.weighted_clusters.clusters.add(name=destination.service)
        item.weight.value = destination.weight


def _match(match: Match) -> route_components_pb2.RouteMatch:
    message = route_components_pb2.RouteMatch()
    if match.path is None:
        message.prefix = "/"
    elif match.path.prefix:
        message.prefix = match.path.text
    else:
        message.path = match.path.text
    _add_headers(message, match)
    return message


def _inference_match(match: Match) -> route_components_pb2.RouteMatch:
    message = route_components_pb2.RouteMatch(path=INFERENCE_PATH)
    _add_headers(message, match)
    return message


def _add_headers(message: route_components_pb2.RouteMatch, match: Match) -> None:
    for name, text in match.headers:
        header = message.headers.add(name=name)
        if text.prefix and not text.text:
            header.present_match = True
        else:
            header.string_match.CopyFrom(_string_match(text))


def _string_match(text: TextMatch) -> string_pb2.StringMatcher:
    return string_pb2.StringMatcher(prefix=text.text) if text.prefix else string_pb2.StringMatcher(exact=text.text)
