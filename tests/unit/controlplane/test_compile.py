from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from controlplane import documents as documents_module
from controlplane.compile import Compiled, GatewayOptions, Options, Vectors, compile_mesh
from controlplane.compile.clusters import ROUTER_CLUSTER
from controlplane.compile.endpoints import load_assignment, needs_dns
from controlplane.compile.filters import CORS, FAULT
from controlplane.compile.policy import POLICY, descriptions
from controlplane.compile.routes import CLUSTER_HEADER, EXT_PROC, INFERENCE_PATH, compile_routes
from controlplane.directory import Source
from controlplane.merge import merge
from controlplane.model import Destination, Endpoint, Match, Mesh, Route, Rule, SemanticRoute, SemanticService, Service
from controlplane.model import TextMatch as Text
from router.policy import parse
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.config.route.v3 import route_components_pb2
from xds.pb.envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2, processing_mode_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

IP = Service("ip", (Endpoint("10.0.0.1", 80, 3, (("a", "b"),)), Endpoint("10.0.0.2", 81)))
DNS = Service("dns", (Endpoint("10.0.0.1", 80), Endpoint("backend", 81)))
GRPC = Service("grpc", (Endpoint("::1", 80),), protocol="grpc")
TO_IP = (Destination("ip"),)


def choice(*hosts: str) -> SemanticRoute:
    services = (
        SemanticService("grpc", "model-g", ("text",), "the first"),
        SemanticService("ip", "model-i", ("image", "text"), "the second"),
    )
    return SemanticRoute("s", hosts, "auto", 2, (("image", 0.1), ("text", 0.25)), services, (("text", "grpc"),))


def mesh(*rules: Rule, hosts: tuple[str, ...] = ("a.example",), semantic: tuple[str, ...] = ()) -> Mesh:
    routes = (Route("r", hosts, rules),) if rules else ()
    return Mesh((DNS, GRPC, IP), routes, (choice(*semantic),) if semantic else ())


VECTORS = Vectors("00112233aabbccdd", 2, {"the first": [0.6, 0.8], "the second": [1.0, 0.0]})


@pytest.fixture
def compiled(options: Options) -> Callable[[Mesh], Compiled]:
    return lambda given_mesh: compile_mesh(given_mesh, VECTORS, options)


def clusters(result: Compiled) -> dict[str, cluster_pb2.Cluster]:
    found = result.envoy.of_type(CLUSTER)
    return {name: cluster_pb2.Cluster.FromString(resource.body) for name, resource in found.items()}


def test_services_with_addresses_come_by_eds_and_those_with_names_hold_their_endpoints(
    compiled: Callable[[Mesh], Compiled],
) -> None:
    result = compiled(mesh())
    assert sorted(result.envoy.of_type(ENDPOINT)) == ["grpc", "ip"]
    found = clusters(result)
    assert sorted(found) == ["dns", "grpc", "ip", ROUTER_CLUSTER]
    assert found["ip"].type == cluster_pb2.Cluster.EDS
    assert found["ip"].eds_cluster_config.eds_config.HasField("ads")
    assert found["dns"].type == cluster_pb2.Cluster.STRICT_DNS
    assert found["dns"].load_assignment == load_assignment(DNS)
    assert needs_dns(mesh(), DNS)


def test_endpoints_carry_weights_and_labels(compiled: Callable[[Mesh], Compiled]) -> None:
    body = compiled(mesh()).envoy.of_type(ENDPOINT)["ip"].body
    (locality,) = endpoint_pb2.ClusterLoadAssignment.FromString(body).endpoints
    first, second = locality.lb_endpoints
    assert (first.endpoint.address.socket_address.address, first.load_balancing_weight.value) == ("10.0.0.1", 3)
    assert json_format.MessageToDict(first.metadata.filter_metadata["envoy.lb"]) == {"a": "b"}
    assert (second.endpoint.address.socket_address.port_value, second.load_balancing_weight.value) == (81, 1)


def test_only_grpc_services_are_asked_for_their_health(compiled: Callable[[Mesh], Compiled]) -> None:
    found = clusters(compiled(mesh()))
    assert [check.WhichOneof("health_checker") for check in found["grpc"].health_checks] == ["grpc_health_check"]
    assert not found["ip"].health_checks
    assert not found["dns"].health_checks


def virtual_host(given_mesh: Mesh, host: str = "a.example") -> route_components_pb2.VirtualHost:
    (found,) = (item for item in compile_routes(given_mesh).virtual_hosts if item.domains == [host])
    return found


def shown(route: route_components_pb2.Route) -> tuple[str, str, str, bool]:
    """Path, header, where to, and whether the router is asked."""
    match = route.match
    path = getattr(match, match.WhichOneof("path_specifier") or "")
    headers = " ".join(header.name for header in match.headers)
    to = (
        route.route.cluster
        or route.route.cluster_header
        or "+".join(c.name for c in route.route.weighted_clusters.clusters)
    )
    return path, headers, to, EXT_PROC in route.typed_per_filter_config


def test_without_semantic_route_the_router_is_never_asked() -> None:
    found = virtual_host(mesh(Rule("x", (Match(),), TO_IP), semantic=()))
    assert [shown(route) for route in found.routes] == [("/", "", "ip", False)]
    assert not found.HasField("request_body_buffer_limit")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (None, True),
        (Text("/", prefix=True), True),
        (Text("/inference.GRPCInferenceService/", prefix=True), True),
        (Text(INFERENCE_PATH, prefix=True), True),
        (Text(INFERENCE_PATH), True),
        (Text(INFERENCE_PATH + "x", prefix=True), False),
        (Text("/other"), False),
        (Text("/inference.GRPCInferenceService/ModelReady"), False),
    ],
)
def test_rules_that_take_inference_become_three_routes(path: Text | None, asked: bool) -> None:
    found = virtual_host(mesh(Rule("x", (Match(path),), TO_IP), semantic=("*",)))
    plain = (path.text if path else "/", "", "ip", False)
    inference = [(INFERENCE_PATH, CLUSTER_HEADER, CLUSTER_HEADER, True), (INFERENCE_PATH, "", "ip", True)]
    assert [shown(route) for route in found.routes] == [*(inference if asked else []), plain]
    assert found.request_body_buffer_limit.value == 16 << 20


def test_the_headers_of_a_rule_hold_for_each_of_its_routes() -> None:
    match = Match(None, ((":method", Text("POST")), ("x-a", Text("", prefix=True))))
    found = virtual_host(mesh(Rule("x", (match,), TO_IP), semantic=("*",)))
    assert [shown(route)[1] for route in found.routes] == [
        f":method x-a {CLUSTER_HEADER}",
        ":method x-a",
        ":method x-a",
    ]
    method, present = found.routes[2].match.headers
    assert method.string_match.exact == "POST"
    assert present.present_match


@pytest.mark.parametrize(
    ("semantic", "asked"),
    [("*", True), ("a.example", True), ("*.example", True), ("b.example", False), ("*.a.example", False)],
)
def test_only_hosts_of_a_semantic_route_ask_the_router(semantic: str, asked: bool) -> None:
    found = virtual_host(mesh(Rule("x", (Match(),), TO_IP), semantic=(semantic,)))
    assert any(EXT_PROC in route.typed_per_filter_config for route in found.routes) is asked


def test_a_host_pattern_asks_when_a_semantic_route_is_for_one_of_its_hosts() -> None:
    found = virtual_host(mesh(Rule("x", (Match(),), TO_IP), hosts=("*",), semantic=("a.example",)), "*")
    assert len(found.routes) == 3


def test_every_route_has_a_time_limit_and_removes_the_routers_header() -> None:
    rules = (Rule("x", (Match(),), TO_IP), Rule("y", (Match(),), TO_IP, timeout_ms=90_000))
    found = virtual_host(mesh(*rules, semantic=("*",)))
    assert [route.route.timeout.ToMilliseconds() for route in found.routes] == [5_000] * 3 + [90_000] * 3
    # The listener's idle limit of 60 s would cut a longer request off.
    assert [route.route.idle_timeout.ToMilliseconds() for route in found.routes] == [0] * 3 + [90_000] * 3
    assert all(route.request_headers_to_remove == [CLUSTER_HEADER] for route in found.routes)


def test_several_destinations_share_by_weight() -> None:
    (route,) = virtual_host(mesh(Rule("x", (Match(),), (Destination("ip", 3), Destination("dns", 1))))).routes
    assert [(item.name, item.weight.value) for item in route.route.weighted_clusters.clusters] == [
        ("ip", 3),
        ("dns", 1),
    ]


def test_the_listener(compiled: Callable[[Mesh], Compiled]) -> None:
    (resource,) = compiled(mesh()).envoy.of_type(LISTENER).values()
    listener = listener_pb2.Listener.FromString(resource.body)
    manager = hcm.HttpConnectionManager()
    assert listener.filter_chains[0].filters[0].typed_config.Unpack(manager)
    assert manager.codec_type == hcm.HttpConnectionManager.HTTP2
    *by_route, last = manager.http_filters
    assert [item.name for item in by_route] == [CORS, FAULT, EXT_PROC]
    assert last.name == "envoy.filters.http.router"
    # Else a request without a route would be shown to the router.
    assert all(item.disabled for item in by_route)
    processor = ext_proc_pb2.ExternalProcessor()
    assert by_route[2].typed_config.Unpack(processor)
    assert processor.failure_mode_allow
    assert processor.processing_mode.request_body_mode == processing_mode_pb2.ProcessingMode.BUFFERED
    assert processor.max_message_timeout.ToMilliseconds() == 2500
    # As a filter it would come after the route was picked by the forged header.
    (early,) = manager.early_header_mutation_extensions
    assert CLUSTER_HEADER.encode() in early.typed_config.value
    assert list(compiled(mesh()).envoy.of_type(ROUTE)) == [manager.rds.route_config_name]


def test_the_router_accepts_the_policies(compiled: Callable[[Mesh], Compiled]) -> None:
    result = compiled(mesh(Rule("x", (Match(),), TO_IP), semantic=("*",)))
    ((name, resource),) = result.router.of_type(POLICY).items()
    policy = parse(name, resource.body)
    assert (policy.name, policy.hosts, policy.model, policy.top_k) == ("s", ("*",), "auto", 2)
    assert (policy.fingerprint, policy.dimension) == ("00112233aabbccdd", 2)
    assert [(item.service_id, item.cluster, item.model) for item in policy.services] == [
        ("grpc", "grpc", "model-g"),
        ("ip", "ip", "model-i"),
    ]
    assert {str(modality): service.service_id for modality, service in policy.defaults.items()} == {"text": "grpc"}


def test_without_vectors_there_are_no_policies_and_all_else(options: Options) -> None:
    semantic = mesh(Rule("x", (Match(),), TO_IP), semantic=("*",))
    assert compile_mesh(semantic, None, options).router.type_urls == ()
    assert compile_mesh(semantic, None, options).envoy == compile_mesh(semantic, VECTORS, options).envoy


def test_descriptions_are_sorted_and_each_once() -> None:
    given_mesh = replace(mesh(semantic=("*",)), semantic_routes=(choice("a"), choice("b")))
    assert descriptions(given_mesh) == ("the first", "the second")


DOCUMENTS = (
    {
        "services": [
            {
                "name": name,
                "endpoints": [
                    {"host": f"10.0.{number}.{host}", "port": 80, "weight": host, "tags": ["protocol=grpc", "b", "a=1"]}
                    for host in range(1, 4)
                ],
                "calls": ["ip", "grpc"],
            }
            for number, name in enumerate(("ip", "grpc", "other"))
        ]
    },
    {
        "apiVersion": "networking.istio.io/v1",
        "kind": "VirtualService",
        "metadata": {"name": "r"},
        "spec": {
            "hosts": ["a.example", "b.example", "*"],
            "http": [
                {
                    "match": [{"headers": {"x-a": {"exact": "1"}, "x-b": {}}, "method": {"exact": "POST"}}],
                    "route": [{"destination": {"host": "ip"}}],
                }
            ],
        },
    },
    {
        "apiVersion": "modalmesh.io/v1alpha1",
        "kind": "SemanticRoute",
        "metadata": {"name": "s"},
        "spec": {
            "hosts": ["*", "a.example"],
            "thresholds": {"text": 0.3, "image": 0.2, "audio": 0.1},
            "services": [
                {"service": "ip", "model": "m", "modalities": ["text", "image"], "description": "the first"},
                {"service": "grpc", "model": "m", "modalities": ["image", "text"], "description": "the second"},
            ],
            "defaults": {"text": "ip", "image": "grpc"},
        },
    },
)
"""In each list here but ``http``, ``match`` and ``route`` the order means nothing, nor does it in a mapping."""


def reordered(value: Any, shuffle: random.Random, *, ordered: bool = False) -> Any:
    if isinstance(value, dict):
        items = [
            (key, reordered(item, shuffle, ordered=key in ("http", "match", "route"))) for key, item in value.items()
        ]
        shuffle.shuffle(items)
        return dict(items)
    if isinstance(value, (list, tuple)):
        items = [reordered(item, shuffle) for item in value]
        if not ordered:
            shuffle.shuffle(items)
        return items
    return value


def compiled_from(documents: Any) -> Compiled:
    text = yaml.safe_dump_all(documents, sort_keys=False)
    result = merge(Source(documents_module.parse(text.encode(), "f.yaml"), ()))
    assert result.mesh is not None, result.problems
    gateway = GatewayOptions("127.0.0.1:10000", Path("/run/access.log"), 2500)
    return compile_mesh(result.mesh, VECTORS, Options(gateway, Path("/run/router.sock")))


@given(st.randoms(use_true_random=False))
def test_what_means_the_same_gives_the_same_bytes(shuffle: random.Random) -> None:
    assert compiled_from(reordered(DOCUMENTS, shuffle)) == compiled_from(DOCUMENTS)


def test_the_order_of_rules_means_something() -> None:
    rules = (Rule("x", (Match(),), TO_IP), Rule("y", (Match(),), TO_IP))
    assert compile_routes(mesh(*rules)) != compile_routes(mesh(*reversed(rules)))


def test_a_change_of_one_service_changes_only_its_endpoints(compiled: Callable[[Mesh], Compiled]) -> None:
    before = compiled(mesh())
    moved = replace(IP, endpoints=(Endpoint("10.0.0.9", 80),))
    after = compiled(replace(mesh(), services=(DNS, GRPC, moved)))
    assert after.envoy.changed_since(before.envoy) == {ENDPOINT: frozenset({"ip"})}
    assert compiled(mesh()) == before
