from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import extension_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.config.route.v3 import route_components_pb2, route_pb2
from xds.pb.envoy.extensions.transport_sockets.tls.v3 import secret_pb2
from xds.types import CLUSTER, ENDPOINT, EXTENSION_CONFIG, LISTENER, ROUTE, SECRET
from xds.validation import problem_of


def assignment(
    change: Callable[[endpoint_components_pb2.LbEndpoint], object], priority: int = 0
) -> endpoint_pb2.ClusterLoadAssignment:
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name="x")
    locality = message.endpoints.add(priority=priority)
    item = locality.lb_endpoints.add()
    item.endpoint.address.socket_address.address = "127.0.0.1"
    item.endpoint.address.socket_address.port_value = 1
    change(item)
    return message


def routes(*hosts: route_components_pb2.VirtualHost) -> Message:
    return route_pb2.RouteConfiguration(name="x", virtual_hosts=hosts)


def host(name: str = "h", *domains: str, matches: bool = True) -> route_components_pb2.VirtualHost:
    made = route_components_pb2.VirtualHost(name=name, domains=domains)
    entry = made.routes.add()
    if matches:
        entry.match.prefix = "/"
    return made


def pipe(path: str) -> listener_pb2.Listener:
    message = listener_pb2.Listener(name="x")
    message.address.pipe.path = path
    return message


def timeout(seconds: int) -> cluster_pb2.Cluster:
    message = cluster_pb2.Cluster(name="x")
    message.connect_timeout.seconds = seconds
    return message


def weight(value: int) -> Callable[[endpoint_components_pb2.LbEndpoint], object]:
    def change(item: endpoint_components_pb2.LbEndpoint) -> None:
        item.load_balancing_weight.value = value

    return change


def port(value: int) -> Callable[[endpoint_components_pb2.LbEndpoint], object]:
    def change(item: endpoint_components_pb2.LbEndpoint) -> None:
        item.endpoint.address.socket_address.port_value = value

    return change


TYPED = extension_pb2.TypedExtensionConfig(name="x")
TYPED.typed_config.type_url = "type.googleapis.com/x"


@pytest.mark.parametrize(
    ("type_url", "message", "problem"),
    [
        (CLUSTER, timeout(1), ""),
        (CLUSTER, timeout(0), "connect_timeout is not above zero"),
        (CLUSTER, cluster_pb2.Cluster(name="y"), "is named 'y' inside"),
        (CLUSTER, cluster_pb2.Cluster(name="x", load_assignment=assignment(weight(0))), "load_balancing_weight"),
        (ENDPOINT, assignment(lambda _: None), ""),
        (ENDPOINT, endpoint_pb2.ClusterLoadAssignment(cluster_name="y"), "is named 'y' inside"),
        (ENDPOINT, assignment(weight(0)), "load_balancing_weight is below 1"),
        (ENDPOINT, assignment(port(65_536)), "port 65536 is above 65535"),
        (ENDPOINT, assignment(lambda item: item.endpoint.ClearField("address")), "address is missing"),
        (ENDPOINT, assignment(lambda _: None, priority=129), "priority 129 is above 128"),
        (LISTENER, pipe("/x"), ""),
        (LISTENER, pipe(""), "pipe has no path"),
        (LISTENER, listener_pb2.Listener(name="y"), "is named 'y' inside"),
        (ROUTE, routes(host("h", "*")), ""),
        (ROUTE, route_pb2.RouteConfiguration(name="y"), "is named 'y' inside"),
        (ROUTE, routes(host("", "*")), "a virtual host has no name"),
        (ROUTE, routes(host("h")), "'h' has no domains"),
        (ROUTE, routes(host("h", "a"), host("i", "a")), "domain 'a' occurs twice"),
        (ROUTE, routes(host("h", "*", matches=False)), "'h' matches no path"),
        (SECRET, secret_pb2.Secret(name="x"), ""),
        (SECRET, secret_pb2.Secret(name="y"), "is named 'y' inside"),
        (EXTENSION_CONFIG, TYPED, ""),
        (EXTENSION_CONFIG, extension_pb2.TypedExtensionConfig(name="x"), "typed_config is missing"),
    ],
)
def test_what_is_known_to_be_wrong_is_named(type_url: str, message: Message, problem: str) -> None:
    found = problem_of(type_url, "x", message.SerializeToString())
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize("type_url", [CLUSTER, ENDPOINT, LISTENER, ROUTE, SECRET, EXTENSION_CONFIG])
def test_what_does_not_parse_is_named(type_url: str) -> None:
    assert problem_of(type_url, "x", b"\xff") == "is not a message of its type"


def test_types_of_others_are_their_affair_but_need_a_name() -> None:
    assert problem_of("type.googleapis.com/example.Policy", "x", b"\xff") == ""
    assert problem_of("type.googleapis.com/example.Policy", "", b"") == "has no name"
