"""Routes → the gateway's one RouteConfiguration.

Each host becomes a virtual host. Where a SemanticRoute is for the host, every rule that takes inference requests
becomes three routes, tried in this order:

1. *chosen*: the inference path, and the router has set ``x-modalmesh-cluster``: to the cluster it names;
2. *infer*: the inference path: the body is buffered and shown to the router, which sets that header and has Envoy look
   for a route again; if it can't, the request goes to the rule's own destination (fail open);
3. the rule itself, with nothing shown to the router.

Where a host has tiers, each of these is made for each tier (``compile/tiers.py``), with its time limits, retries and
clusters; what is known to be a stream has a route of its own, without a limit on the whole.

The listener has the ext_proc filter disabled; only a route that configures it (2, and 1 so that looking again changes
nothing) turns it on. So a request without a route, or for any other method, never costs a round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from controlplane.compile.actions import add_edits, answer, set_action
from controlplane.compile.filters import CORS, FAULT, cors_config, fault_config
from controlplane.compile.matches import route_match
from controlplane.compile.protobuf import duration, packed
from controlplane.compile.tiers import count_pass, guards, variants
from controlplane.model import Match, Mesh, Route, Rule, Service, TextMatch, Tier, overlap
from controlplane.regex import matches_regex
from xds.pb.envoy.config.route.v3 import route_components_pb2, route_pb2
from xds.pb.envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2

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

STREAMING_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
"""KServe v2's streaming inference."""

_EVENTS = TextMatch(".*text/event-stream.*", regex=True)
"""What a client accepts that waits for server-sent events."""

BODY_LIMIT = 16 << 20
"""Bytes of a body that is shown to the router; a larger one is answered with 413. A 12 MiB picture fits."""

DEFAULT_TIMEOUT_MS = 5_000
"""Of a request whose route sets none."""

STREAM_IDLE_TIMEOUT_MS = 60_000
"""The listener's; a route that may take longer says so itself, or it would be cut off while its backend computes."""

_SHOW_TO_ROUTER = packed(ext_proc_pb2.ExtProcPerRoute(overrides=ext_proc_pb2.ExtProcOverrides()))


def compile_routes(mesh: Mesh, port: int = 0) -> route_pb2.RouteConfiguration:
    """Return the routes of the gateway; the port in a request's authority makes no difference.

    Args:
        mesh: What shall be.
        port: Of the listener; rules for another one are left out. 0: it has none.
    """
    configuration = route_pb2.RouteConfiguration(name=ROUTE_CONFIGURATION, ignore_port_in_host_matching=True)
    hosts = sorted((host, route) for route in mesh.routes for host in route.hosts)
    services = mesh.by_name
    configuration.virtual_hosts.extend(_virtual_host(mesh, services, host, route, port) for host, route in hosts)
    return configuration


def _virtual_host(
    mesh: Mesh, services: Mapping[str, Service], host: str, route: Route, port: int
) -> route_components_pb2.VirtualHost:
    semantic = any(overlap(host, other) for choice in mesh.semantic_routes for other in choice.hosts)
    virtual_host = route_components_pb2.VirtualHost(name=host, domains=[host])
    if semantic:
        # Here and not on the route: it must not change when Envoy looks for a route again.
        virtual_host.request_body_buffer_limit.value = BODY_LIMIT
    tiered = mesh.has_tiers(host, route)
    if tiered:
        virtual_host.routes.extend(guards(mesh))
    for rule in route.rules:
        for match in rule.matches:
            if match.port not in (None, port):
                continue
            pairs = variants(mesh, match) if tiered else [(None, match)]
            for tier, exact in pairs:
                compiler = _RuleCompiler(f"{route.name}.{rule.name}", rule, tier, services)
                virtual_host.routes.extend(compiler.routes(exact, semantic=semantic and bool(rule.destinations)))
    return virtual_host


class _RuleCompiler:
    """One rule, for the requests of one tier or for all → Envoy's routes."""

    def __init__(self, name: str, rule: Rule, tier: Tier | None, services: Mapping[str, Service]) -> None:
        self._name = f"{name}@{tier.name}" if tier else name
        self._rule = rule
        self._tier = tier
        self._services = services

    def routes(self, match: Match, *, semantic: bool) -> Iterator[route_components_pb2.Route]:
        """Return the routes for one match."""
        if semantic and _takes(match, INFERENCE_PATH):
            only = _only(match, INFERENCE_PATH)
            chosen = self._route(f"{self._name}.chosen", only)
            chosen.match.headers.add(name=CLUSTER_HEADER, present_match=True)
            chosen.route.cluster_header = CLUSTER_HEADER  # takes the place of the destination: they share a oneof
            infer = self._route(f"{self._name}.infer", only)
            for route in (chosen, infer):
                route.typed_per_filter_config[EXT_PROC].CopyFrom(_SHOW_TO_ROUTER)
                yield route
        if self._tier and self._rule.destinations:
            # What is known to be a stream, before all else: it takes as long as it takes.
            if _takes(match, STREAMING_PATH):
                yield self._route(f"{self._name}.stream", _only(match, STREAMING_PATH), stream=True)
            if "accept" not in dict(match.headers):
                events = replace(match, headers=tuple(sorted((*match.headers, ("accept", _EVENTS)))))
                yield self._route(f"{self._name}.events", events, stream=True)
        yield self._route(self._name, match)

    def _route(self, name: str, match: Match, *, stream: bool = False) -> route_components_pb2.Route:
        rule, tier = self._rule, self._tier
        route = route_components_pb2.Route(name=name, match=route_match(match))
        add_edits(route, rule.headers)
        if rule.fault:
            route.typed_per_filter_config[FAULT].CopyFrom(fault_config(rule.fault))
        if rule.cors:
            route.typed_per_filter_config[CORS].CopyFrom(cors_config(rule.cors))
        if answer(route, rule):
            return route
        # The backend has no use for it.
        route.request_headers_to_remove.append(CLUSTER_HEADER)
        if tier:
            count_pass(route, tier)
        self._limit(route.route, stream=stream)
        set_action(route, rule, self._services, tier)
        return route

    def _limit(self, action: route_components_pb2.RouteAction, *, stream: bool) -> None:
        """Set time limits: the rule's, else the tier's, else the default; of a stream only that of idleness."""
        rule, tier = self._rule, self._tier
        timeout_ms = 0 if stream else rule.timeout_ms
        if timeout_ms is None:
            timeout_ms = tier.budget_ms if tier else DEFAULT_TIMEOUT_MS
        action.timeout.CopyFrom(duration(timeout_ms))
        if not timeout_ms and tier:
            action.idle_timeout.CopyFrom(duration(tier.idle_ms))
        elif timeout_ms > STREAM_IDLE_TIMEOUT_MS:
            action.idle_timeout.CopyFrom(duration(timeout_ms))


def _takes(match: Match, wanted: str) -> bool:
    """Return whether a match takes requests for a path."""
    path = match.path
    if path is None:
        return True
    if path.regex:
        return matches_regex(path.text, wanted)
    asked, text = (wanted.lower(), path.text.lower()) if match.ignore_case else (wanted, path.text)
    if path.prefix and match.segments:
        return f"{asked}/".startswith(f"{text.rstrip('/')}/")
    return asked.startswith(text) if path.prefix else asked == text


def _only(match: Match, path: str) -> Match:
    """Return a match, of one path only."""
    return replace(match, path=TextMatch(path), ignore_case=False)
