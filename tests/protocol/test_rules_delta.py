"""The rules X1 to X25 of the xDS protocol, as scripts of events on a delta stream.

Each test is named after the rule it holds; ``test_rules_sotw`` has the state-of-the-world side.
"""

from __future__ import annotations

import pytest

from tests.protocol.scripts import POLICY, Script, cluster, endpoints, everything, listener, policy, route
from xds.delta import RESUME_GRACE
from xds.errors import RefusedRequestError
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.snapshot import Snapshot
from xds.store import SnapshotStore
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE


def test_x01_every_response_has_a_nonce_of_its_own_stream() -> None:
    script = Script(policy("a"))
    seen: list[str] = []
    script.ask(POLICY, "*")
    for text in "23456":
        seen.append(script.last[POLICY].nonce)
        script.ack(POLICY)
        script.change(policy("a", text))
    assert all(seen)
    assert len(set(seen)) == len(seen)


def test_x01_the_same_content_again_has_another_nonce_on_the_same_stream() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    first = script.last[POLICY].nonce
    script.ack(POLICY)
    assert script.ask(POLICY, "a") == ["Policy +a"]
    assert script.last[POLICY].nonce != first


def test_x02_the_node_is_taken_from_the_first_request_and_kept() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    later = discovery_pb2.DeltaDiscoveryRequest(type_url=CLUSTER)
    script.out(script.stream.on_request(later, script.now))  # type: ignore[attr-defined]
    assert script.stream.node.id == "n"


def test_x02_a_first_request_without_a_node_is_refused() -> None:
    request = discovery_pb2.DeltaDiscoveryRequest(type_url=POLICY)
    with pytest.raises(RefusedRequestError, match="node is missing"):
        Script().stream.on_request(request, 0.0)  # type: ignore[attr-defined]


def test_x03_equal_versions_after_reconnecting_are_not_sent_but_new_subscriptions_are() -> None:
    script = Script(endpoints("a"), endpoints("b"))
    held = {"a": script.versions(ENDPOINT)["a"]}
    assert script.ask(ENDPOINT, "a", "b", held=held) == ["EDS +b"]


def test_x04_a_nack_is_known_by_its_error_alone() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    # Subscribing to another name while acknowledging looks like an old version in the state-of-the-world protocol.
    assert script.ack(POLICY, "b") == ["Policy -b"]
    assert script.stream.types[POLICY].error == ""
    script.nack(POLICY, "bad b")
    assert script.stream.types[POLICY].error == "bad b"


def test_x05_nothing_is_sent_without_a_change() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    assert script.ack(POLICY) == []
    assert script.change(policy("a")) == []
    assert script.wait(3600) == []


def test_x05_a_change_that_was_taken_back_is_not_sent() -> None:
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "*")
    assert script.change(policy("a", "2"), policy("b", "2")) == []
    assert script.change(policy("a"), policy("b", "2")) == []
    assert script.ack(POLICY) == ["Policy +b"]


def test_x05_what_was_refused_is_not_sent_again_until_it_changes() -> None:
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "*")
    assert script.nack(POLICY, "bad") == []
    assert script.wait(3600) == []
    assert script.change(policy("a"), policy("b", "2")) == ["Policy +b"]
    assert script.stream.types[POLICY].error == "bad"
    script.ack(POLICY)
    assert script.stream.types[POLICY].error == ""


def test_x06_the_newest_request_decides() -> None:
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "a")
    script.ask(POLICY, "b", drop=["a"])
    assert script.ack(POLICY) == ["Policy +b"]
    script.ack(POLICY)
    assert script.change(policy("a", "2"), policy("b")) == []


def test_x07_a_stale_nonce_acknowledges_nothing_but_its_subscriptions_count() -> None:
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "a")
    old = script.last[POLICY].nonce
    script.ack(POLICY)
    script.change(policy("a", "2"), policy("b"))
    current = script.last[POLICY].nonce
    assert script.ask(POLICY, "b", nonce=old, error="too late") == []
    assert script.stream.types[POLICY].error == ""
    assert script.stream.types[POLICY].in_flight is not None
    assert script.ask(POLICY, nonce=current) == ["Policy +b"]


def test_x08_a_newly_asked_name_is_sent_though_it_was_sent_unasked() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    script.ack(POLICY)
    assert script.ask(POLICY, "a") == ["Policy +a"]


def test_x09_an_empty_first_request_for_clusters_means_everything() -> None:
    script = Script(cluster("a"), cluster("b"))
    assert script.ask(CLUSTER) == ["CDS +a +b"]


def test_x09_an_empty_first_request_for_endpoints_means_nothing() -> None:
    script = Script(endpoints("a"))
    assert script.ask(ENDPOINT) == []
    assert script.change(endpoints("a", 2)) == []


def test_x09_the_four_steps_of_the_document() -> None:
    script = Script(cluster("A"), cluster("B"))
    assert script.ask(CLUSTER) == ["CDS +A +B"]
    script.ack(CLUSTER)
    assert script.ask(CLUSTER, "A") == ["CDS +A"]
    script.ack(CLUSTER)
    assert script.change(cluster("A"), cluster("B", 2)) == ["CDS +B"]
    script.ack(CLUSTER)
    assert script.ask(CLUSTER, drop=["*"]) == []
    assert script.change(cluster("A", 2), cluster("B", 3)) == ["CDS +A"]
    script.ack(CLUSTER)
    assert script.ask(CLUSTER, drop=["A"]) == []
    assert script.change(cluster("A", 3), cluster("B", 4)) == []
    assert script.ask(CLUSTER) == []
    assert script.change(cluster("A", 4), cluster("B", 5)) == []


def test_x09_the_wildcard_asked_for_later_brings_everything() -> None:
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "a")
    script.ack(POLICY)
    assert script.ask(POLICY, "*") == ["Policy +a +b"]


def test_x09_without_the_wildcard_the_client_holds_only_what_it_named() -> None:
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "*", "a")
    script.ack(POLICY)
    script.ask(POLICY, drop=["*"])
    assert script.holds(POLICY) == {"a"}
    script.change(policy("a"))
    assert script.ask(POLICY, "*") == ["Policy +a"]


def test_x11_no_name_occurs_twice() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "a", "*", "a")
    names = [resource.name for resource in script.last[POLICY].resources]
    assert names == ["a"]


def test_x12_a_name_that_does_not_exist_is_removed_and_sent_when_it_appears() -> None:
    script = Script(policy("other"))
    assert script.ask(POLICY, "a") == ["Policy -a"]
    script.ack(POLICY)
    assert script.change(policy("other"), policy("a")) == ["Policy +a"]


def test_x13_a_resubscribed_name_is_sent_again() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    script.ack(POLICY)
    assert script.ask(POLICY, "a") == ["Policy +a"]
    script.ack(POLICY)
    assert script.ask(POLICY, drop=["a"]) == []
    assert script.ask(POLICY, "a") == ["Policy +a"]


def test_x14_unsubscribing_needs_no_answer_and_unknown_names_are_ignored() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    assert script.ack(POLICY, drop=["a", "never"]) == []
    assert script.change(policy("a", "2")) == []


def test_x14_a_name_dropped_under_the_wildcard_is_answered() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*", "a", "missing")
    script.ack(POLICY)
    assert script.ask(POLICY, drop=["a", "missing", "never"]) == ["Policy +a -missing"]
    script.ack(POLICY)
    assert script.change(policy("a", "2")) == ["Policy +a"]


def test_x15_coming_back_with_everything_equal_brings_nothing() -> None:
    script = Script(cluster("a"), endpoints("a"), listener("l"), route("r"), policy("p"))
    held = {url: script.versions(url) for url in (CLUSTER, ENDPOINT, LISTENER, ROUTE, POLICY)}
    script.reconnect()
    for url, names in ((CLUSTER, ["*"]), (ENDPOINT, ["a"]), (LISTENER, []), (ROUTE, ["r"]), (POLICY, ["*"])):
        assert script.ask(url, *names, held=held[url]) == []
    assert script.wait(3600) == []
    for url in held:
        state = script.described(url)
        assert script.snapshot is not None
        assert state.acked_version == state.sent_version == script.snapshot.version(url) != ""


def test_x15_coming_back_brings_what_changed_and_what_went() -> None:
    script = Script(policy("same"), policy("new"), policy("changed", "2"))
    held = {
        "same": policy("same").version,
        "changed": policy("changed", "1").version,
        "gone": policy("gone").version,
    }
    assert script.ask(POLICY, "*", held=held) == ["Policy +changed +new -gone"]


def test_x15_versions_of_names_that_are_not_asked_for_are_ignored() -> None:
    script = Script(endpoints("a"))
    assert script.ask(ENDPOINT, "a", held={"a": endpoints("a").version, "stray": "0"}) == []


def test_x18_endpoints_of_a_changed_cluster_are_sent_again() -> None:
    script = Script(cluster("a"), cluster("b"), endpoints("a"), endpoints("b"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a", "b")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    assert script.change(cluster("a", 2), cluster("b"), endpoints("a"), endpoints("b")) == ["CDS +a", "EDS +a"]


def test_x18_a_clusters_service_name_names_its_endpoints() -> None:
    script = Script(cluster("a", service="svc"), endpoints("svc"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "svc")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    assert script.change(cluster("a", 2, service="svc"), endpoints("svc")) == ["CDS +a", "EDS +svc"]


def test_x18_only_clusters_with_endpoint_discovery_wait_for_endpoints() -> None:
    script = Script(cluster("a", kind=cluster_pb2.Cluster.STATIC), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    assert script.change(cluster("a", 2, kind=cluster_pb2.Cluster.STATIC), endpoints("a")) == ["CDS +a"]


def test_x18_endpoints_in_flight_are_sent_again_after_their_ack() -> None:
    script = Script(cluster("a"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    script.ack(CLUSTER)
    assert script.change(cluster("a", 2), endpoints("a")) == ["CDS +a"]
    assert script.ack(ENDPOINT) == ["EDS +a"]


def test_x18_endpoints_are_sent_again_when_their_cluster_changed_while_the_client_was_away() -> None:
    script = Script(cluster("a", 2), cluster("b"), endpoints("a"), endpoints("b"))
    assert script.ask(CLUSTER, "*", held={"a": cluster("a").version, "b": cluster("b").version}) == ["CDS +a"]
    # The client says what it holds before it knows that the cluster has changed.
    assert script.ask(ENDPOINT, "a", "b", held=script.versions(ENDPOINT)) == ["EDS +a"]


def test_x18_routes_of_a_changed_listener_are_sent_again() -> None:
    script = Script(listener("l", route="r"), route("r"))
    script.ask(LISTENER)
    script.ask(ROUTE, "r")
    script.ack(LISTENER)
    script.ack(ROUTE)
    assert script.change(listener("l", route="r", prefix="x"), route("r")) == ["LDS +l", "RDS +r"]


def test_x19_what_is_referred_to_goes_first_and_what_is_stale_goes_last() -> None:
    script = everything()
    script.ask(ENDPOINT, "new")
    script.ack(ENDPOINT)
    assert script.change(
        cluster("new"), endpoints("new"), listener("l", route="r", prefix="x"), route("r", "new"), policy("p", "2")
    ) == ["CDS +new", "EDS +new", "Policy +p"]
    # The cluster is acknowledged when it is warm: from then on routes may refer to it.
    script.ack(ENDPOINT)
    assert script.ack(CLUSTER) == ["LDS +l", "RDS +r"]
    assert script.ack(LISTENER) == []
    assert script.ack(ROUTE) == ["CDS -old", "EDS -old"]


def test_x19_stale_clusters_stay_while_a_refused_route_may_refer_to_them() -> None:
    script = everything()
    assert script.change(listener("l", route="r"), route("r", "new"), policy("p")) == ["RDS +r"]
    assert script.nack(ROUTE) == []
    assert script.wait(60) == []
    assert script.change(listener("l", route="r"), route("r", "newer"), policy("p")) == ["RDS +r"]
    assert script.ack(ROUTE) == ["CDS -old", "EDS -old"]


def test_x19_after_coming_back_stale_clusters_wait_for_routes_to_be_asked_for() -> None:
    script = Script(cluster("new"), endpoints("new"), route("r", "new"))
    held = {"old": "1", "new": cluster("new").version}
    assert script.ask(CLUSTER, "*", held=held) == []
    assert script.ask(ROUTE, "r", held={"r": "1"}) == ["RDS +r"]
    assert script.ack(ROUTE) == []
    assert script.wait(RESUME_GRACE) == ["CDS -old"]


def test_x21_a_request_without_a_type_is_refused() -> None:
    with pytest.raises(RefusedRequestError, match="type_url is missing"):
        Script().ask("")


def test_x21_an_aggregated_stream_keeps_types_apart() -> None:
    script = Script(policy("a"), cluster("a"))
    script.ask(POLICY, "*")
    assert script.ask(CLUSTER) == ["CDS +a"]
    assert script.ack(POLICY) == []
    assert script.stream.types[CLUSTER].in_flight is not None


def test_x10_an_empty_answer_of_the_wildcard_means_there_is_nothing() -> None:
    script = Script(cluster("a"))
    script.ask(CLUSTER)
    script.ack(CLUSTER)
    assert script.change() == ["CDS -a"]
    script.ack(CLUSTER)
    assert script.holds(CLUSTER) == set()


def test_x11_a_name_and_its_alias_are_one_resource() -> None:
    script = Script.without_snapshot()
    script.ask(POLICY, "a", "other", "old", held={"old": "0"})
    assert script.change(policy("a", aliases=["other"])) == ["Policy +a -old"]


def test_x16_an_answer_without_the_nonce_answers_nothing() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    response = script.last[POLICY]
    assert response.nonce
    assert response.version == script.snapshot.version(POLICY)  # type: ignore[union-attr]
    script.ask(POLICY)
    assert script.stream.types[POLICY].in_flight is response
    script.ask(POLICY, nonce=response.nonce)
    assert script.stream.types[POLICY].in_flight is None


def test_x17_an_alias_brings_its_resource_and_lets_it_go() -> None:
    script = Script(policy("a", aliases=["other", "third"]), policy("b"))
    assert script.ask(POLICY, "other") == ["Policy +a"]
    assert script.last[POLICY].resources[0].aliases == ("other", "third")
    script.ack(POLICY)
    assert script.change(policy("a", "2", aliases=["other", "third"]), policy("b", "2")) == ["Policy +a"]
    assert script.ack(POLICY, "third", drop=["other"]) == ["Policy +a"]
    script.ack(POLICY, drop=["third"])
    assert script.change(policy("a", "3", aliases=["other", "third"]), policy("b")) == []


def test_x17_an_alias_that_appears_later_is_sent() -> None:
    script = Script(policy("b"))
    assert script.ask(POLICY, "other") == ["Policy -other"]
    script.ack(POLICY)
    assert script.change(policy("a", aliases=["other"]), policy("b")) == ["Policy +a"]
    script.ack(POLICY)
    assert script.change(policy("b")) == ["Policy -a"]


def test_x18_a_cluster_without_changes_brings_no_endpoints() -> None:
    script = everything()
    assert script.change(cluster("old"), endpoints("old"), listener("l", route="r", prefix="x"), route("r", "old")) == [
        "LDS +l",
        "RDS +r",
        "Policy -p",
    ]


def test_x20_a_resource_with_a_ttl_is_confirmed_without_its_body() -> None:
    script = Script(policy("a", ttl=10.0), policy("b"))
    script.ask(POLICY, "*")
    script.ack(POLICY)
    assert script.wait(4.9) == []
    assert script.wait(0.1) == ["Policy ~a"]
    assert script.last[POLICY].resources[0].version == policy("a", ttl=10.0).version
    script.ack(POLICY)
    assert script.wait(5.0) == ["Policy ~a"]
    script.ack(POLICY)
    assert script.change(policy("b")) == ["Policy -a"]
    script.ack(POLICY)
    assert script.wait(60.0) == []


def test_x20_a_client_that_comes_back_holding_it_hears_of_it() -> None:
    script = Script(policy("a", ttl=10.0))
    assert script.ask(POLICY, "*", held=script.versions(POLICY)) == []
    assert script.wait(0.0) == []
    assert script.wait(5.0) == ["Policy ~a"]


def test_x22_one_changed_endpoint_brings_its_whole_endpoint_set() -> None:
    script = Script(endpoints("a", ports=(1, 2, 3)), endpoints("b", ports=(4,)))
    script.ask(ENDPOINT, "a", "b")
    script.ack(ENDPOINT)
    assert script.change(endpoints("a", ports=(1, 2, 9)), endpoints("b", ports=(4,))) == ["EDS +a"]
    (sent,) = script.last[ENDPOINT].resources
    assert sent == endpoints("a", ports=(1, 2, 9))


def test_x23_what_comes_from_a_file_is_not_waited_for() -> None:
    # Such a subscription has neither stream nor ACK; the server neither sends nor expects anything.
    script = Script(cluster("a", file="/a.yaml"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    assert script.change(cluster("a", 2, file="/a.yaml"), endpoints("a")) == ["CDS +a"]


def test_x24_what_no_client_should_have_to_refuse_is_not_sent() -> None:
    store = SnapshotStore()
    store.set("g", Snapshot([cluster("a"), endpoints("a", ports=(1,)), cluster("b"), endpoints("b")]), 0.0)
    store.take(0.0)
    bad = [cluster("a"), endpoints("a", ports=(65536,)), cluster("b", 2), endpoints("b")]
    store.set("g", Snapshot(bad), 1.0)
    (change,) = store.take(1.0)
    assert change.changed == {CLUSTER: {"b"}}
    assert change.snapshot.of_type(ENDPOINT)["a"] == endpoints("a", ports=(1,))
    assert [(fault.name, fault.reason, fault.replaced) for fault in change.faults] == [
        ("a", "an endpoint's port 65536 is above 65535", True)
    ]


def test_x25_a_resource_of_an_unknown_type_is_sent_as_it_is() -> None:
    # What a client supports is its affair: features that it does not know it ignores.
    script = Script(policy("a", "\u2400"))
    assert script.ask(POLICY, "a") == ["Policy +a"]
