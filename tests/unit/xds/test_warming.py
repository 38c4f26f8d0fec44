from __future__ import annotations

from tests.protocol.scripts import Script, SotwScript, cluster, endpoints, listener, policy, route
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE
from xds.warming import awaited_names


def test_the_watchdog_does_not_count_while_the_client_waits_for_the_server() -> None:
    script = SotwScript(cluster("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")  # not there: nothing is sent, the cluster can't get warm, no ACK can come
    script.now += 60.0
    assert script.stream.overdue(script.now, 5.0, 20.0) is None
    assert script.change(cluster("a"), endpoints("a")) == ["EDS +a"]
    # From here on it counts.
    assert script.stream.overdue(script.now + 4.9, 5.0, 20.0) is None
    assert script.stream.overdue(script.now + 5.0, 5.0, 20.0) == ENDPOINT
    script.ack(ENDPOINT)
    assert script.stream.overdue(script.now + 19.9, 5.0, 20.0) is None
    assert script.stream.overdue(script.now + 20.0, 5.0, 20.0) == CLUSTER


def test_a_client_that_does_not_ask_for_what_it_should_wait_for_may_have_lost_the_response() -> None:
    script = Script(cluster("a"), endpoints("a"))
    script.ask(CLUSTER)
    assert script.stream.overdue(script.now + 20.0, 5.0, 20.0) == CLUSTER


def test_a_delta_client_is_told_what_is_missing_and_waits_for_nothing() -> None:
    script = Script(cluster("a"))
    script.ask(CLUSTER)
    assert script.ask(ENDPOINT, "a") == ["EDS -a"]
    script.ack(ENDPOINT)
    assert script.stream.overdue(script.now + 20.0, 5.0, 20.0) == CLUSTER


def test_a_listener_waits_for_routes_that_wait_for_clusters() -> None:
    script = Script(cluster("a"), endpoints("a"), listener("l", route="r"), route("r"))
    script.ask(CLUSTER)
    script.ask(LISTENER)
    script.now += 5.0
    assert script.wait(0.0) == ["LDS +l"]
    assert script.ask(ROUTE, "r") == []
    assert script.stream.types[ROUTE].fresh
    script.stream.types[CLUSTER].armed += 100.0
    assert script.stream.overdue(script.now + 60.0, 5.0, 20.0) is None


def test_the_routes_of_a_proxyless_clients_listener_count_too() -> None:
    message = listener_pb2.Listener(name="svc")
    message.api_listener.api_listener.Pack(
        http_connection_manager_pb2.HttpConnectionManager(
            rds=http_connection_manager_pb2.Rds(route_config_name="svc-routes")
        )
    )
    assert awaited_names(LISTENER, message.SerializeToString()) == ("svc-routes",)


def test_other_types_and_broken_bodies_wait_for_nothing() -> None:
    assert policy("a").awaits == ()
    assert awaited_names(CLUSTER, b"\xff") == ()
