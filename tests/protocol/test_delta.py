"""What the delta machine decides where the protocol leaves it open; the protocol’s own rules: test_rules_delta."""

from __future__ import annotations

import pytest

from tests.protocol.scripts import POLICY, Script, cluster, endpoints, everything, listener, policy, route
from xds.delta import DeltaStream
from xds.errors import RefusedRequestError
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Pushes
from xds.snapshot import Snapshot
from xds.stream import MAX_TYPES, WARM_LIMIT
from xds.subscription import MAX_NAMES
from xds.types import CLUSTER, ENDPOINT, ROUTE


def test_streams_that_are_told_the_same_share_the_response() -> None:
    pushes, snapshot = Pushes(), Snapshot([policy("a")])
    request = discovery_pb2.DeltaDiscoveryRequest(
        node=base_pb2.Node(id="n"), type_url=POLICY, resource_names_subscribe=["*"]
    )
    first = DeltaStream(snapshot, pushes, 0.0).on_request(request, 0.0)
    second = DeltaStream(snapshot, pushes, 1.0).on_request(request, 1.0)
    assert first[0] is second[0]


def test_going_back_to_what_was_in_force_before_a_nack_is_sent() -> None:
    script = Script(policy("a", "good"))
    script.ask(POLICY, "*")
    script.ack(POLICY)
    script.change(policy("a", "bad"))
    script.nack(POLICY)
    assert script.change(policy("a", "good")) == ["Policy +a"]


def test_a_fresh_client_of_an_empty_group_gets_an_empty_answer() -> None:
    script = Script()
    assert script.ask(CLUSTER) == ["CDS"]
    assert script.ack(CLUSTER) == []
    assert script.ask(POLICY, "*") == ["Policy"]


def test_before_there_is_a_snapshot_nothing_is_answered_or_removed() -> None:
    script = Script.without_snapshot()
    assert script.ask(POLICY, "*", held={"a": policy("a").version, "b": "old"}) == []
    assert script.ask(CLUSTER) == []
    assert script.ask(ENDPOINT, "x") == []
    assert script.wait(3600) == []
    assert script.change(policy("a"), policy("b")) == ["CDS", "EDS -x", "Policy +b"]


def test_a_removal_that_was_taken_back_in_time_is_never_sent() -> None:
    script = everything()
    script.change(listener("l", route="r"), route("r", "new"), policy("p"))
    back = (cluster("old"), endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    assert script.change(*back) == []
    assert script.ack(ROUTE) == []


def test_without_listeners_and_routes_clusters_are_removed_at_once() -> None:
    script = Script(cluster("a"))
    script.ask(CLUSTER)
    script.ack(CLUSTER)
    assert script.change() == ["CDS -a"]


def test_a_cluster_that_does_not_get_warm_stops_routes_for_a_while_only() -> None:
    script = everything()
    new = (cluster("old", 2), endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    assert script.change(*new) == ["CDS +old", "EDS +old"]
    assert script.wait(WARM_LIMIT - 0.1) == []
    assert script.wait(0.1) == ["RDS +r"]


def test_a_refused_cluster_does_not_stop_routes() -> None:
    script = everything()
    new = (cluster("old", 2), endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    script.change(*new)
    assert script.nack(CLUSTER) == ["RDS +r"]


def test_changes_behind_a_response_in_flight_gather_and_the_latest_wins() -> None:
    script = Script(policy("a"), policy("b"), policy("c"))
    script.ask(POLICY, "*")
    assert script.change(policy("a", "2"), policy("b"), policy("c")) == []
    assert script.change(policy("a", "3"), policy("b", "2"), policy("c")) == []
    assert script.change(policy("a", "1"), policy("b", "3")) == []
    assert script.ack(POLICY) == ["Policy +b -c"]
    assert script.last[POLICY].resources[0] == policy("b", "3")


def test_a_nack_lets_gathered_changes_go() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    script.change(policy("a", "2"))
    assert script.nack(POLICY) == ["Policy +a"]


def test_a_response_without_answer_is_overdue() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    assert script.stream.overdue(script.now + 9.9, 10.0, 20.0) is None
    assert script.stream.overdue(script.now + 10.0, 10.0, 20.0) == POLICY
    script.ack(POLICY)
    assert script.stream.overdue(script.now + 99.0, 10.0, 20.0) is None


def test_a_change_that_a_client_does_not_want_leaves_it_current() -> None:
    script = Script(endpoints("a"), endpoints("b"))
    script.ask(ENDPOINT, "a")
    script.ack(ENDPOINT)
    assert script.change(endpoints("a"), endpoints("b", 2)) == []
    assert script.snapshot is not None
    assert script.described(ENDPOINT).acked_version == script.snapshot.version(ENDPOINT)


def test_names_and_types_are_bounded() -> None:
    script = Script()
    with pytest.raises(RefusedRequestError) as caught:
        script.ask(POLICY, *(str(number) for number in range(MAX_NAMES + 1)))
    assert caught.value.grpc_status == 8
    script = Script()
    for number in range(MAX_TYPES):
        script.ask(f"type.googleapis.com/example.T{number}", "*")
    with pytest.raises(RefusedRequestError):
        script.ask("type.googleapis.com/example.OneMore", "*")
