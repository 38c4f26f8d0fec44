"""The rules X1 to X25 of the xDS protocol, as scripts of events on a state-of-the-world stream.

Each test is named after the rule it holds; ``test_rules_delta`` has the incremental side.
"""

from __future__ import annotations

import pytest

from tests.protocol.scripts import POLICY, SotwScript, cluster, endpoints, everything, listener, policy, route
from xds.errors import RefusedRequestError
from xds.frames import encode
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

RESOURCE = "type.googleapis.com/envoy.service.discovery.v3.Resource"


def test_x01_every_response_has_a_nonce_of_its_own() -> None:
    script = SotwScript(endpoints("a"))
    script.ask(ENDPOINT, "a")
    seen = [script.last[ENDPOINT].nonce]
    for weight in (1, 0, 1, 0):
        script.ack(ENDPOINT)
        script.change(endpoints("a", weight))
        seen.append(script.last[ENDPOINT].nonce)
    assert all(seen)
    assert len(set(seen)) == 5


def test_x01_a_nonce_of_another_stream_means_nothing() -> None:
    script = SotwScript(endpoints("a"))
    script.ask(ENDPOINT, "a")
    old = script.last[ENDPOINT].nonce
    script.reconnect()
    assert script.ask(ENDPOINT, "a", nonce=old) == ["EDS +a"]


def test_x02_the_node_is_needed_once() -> None:
    script = SotwScript(cluster("a"))
    stream = script.stream
    with pytest.raises(RefusedRequestError, match="node is missing"):
        stream.on_request(discovery_pb2.DiscoveryRequest(type_url=CLUSTER), 0.0)  # type: ignore[attr-defined]
    script.ask(CLUSTER)
    stream.on_request(discovery_pb2.DiscoveryRequest(type_url=LISTENER), 0.0)  # type: ignore[attr-defined]
    assert stream.node.id == "n"


def test_x03_who_comes_back_with_the_version_of_everything_is_not_sent_it_again() -> None:
    script = SotwScript(cluster("a"), listener("l"), endpoints("a"))
    script.ask(CLUSTER)
    version = script.last[CLUSTER].version
    script.reconnect()
    assert script.ask(CLUSTER, version=version) == []
    assert script.holds(CLUSTER) == {"a"}
    assert script.described(CLUSTER).acked_version == version
    assert script.change(cluster("a"), cluster("b"), listener("l"), endpoints("a")) == ["CDS +a +b"]


def test_x03_names_are_answered_whatever_the_version() -> None:
    script = SotwScript(cluster("a"), cluster("b"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    versions = {url: script.last[url].version for url in (CLUSTER, ENDPOINT)}
    script.reconnect()
    assert script.ask(CLUSTER, "*", "a", version=versions[CLUSTER]) == ["CDS +a +b"]
    assert script.ask(ENDPOINT, "a", version=versions[ENDPOINT]) == ["EDS +a"]


def test_x03_equal_input_gives_equal_versions_and_a_part_has_another() -> None:
    one, other = SotwScript(cluster("a"), cluster("b")), SotwScript(cluster("b"), cluster("a"))
    one.ask(CLUSTER)
    other.ask(CLUSTER)
    assert one.last[CLUSTER].version == other.last[CLUSTER].version
    one.reconnect()
    one.ask(CLUSTER, "a")
    assert one.last[CLUSTER].version != other.last[CLUSTER].version


def test_x04_a_nack_is_known_by_its_error_alone() -> None:
    script = SotwScript(endpoints("a"), endpoints("b"))
    script.ask(ENDPOINT, "a")
    script.ack(ENDPOINT)
    script.change(endpoints("a", 2), endpoints("b"))
    # The document's example: the version of before, another name, no error.
    old = script.version[ENDPOINT]
    assert script.ask(ENDPOINT, "a", "b", nonce=script.last[ENDPOINT].nonce, version=old) == ["EDS +b"]
    assert script.stream.types[ENDPOINT].error == ""
    assert script.nack(ENDPOINT, "bad b") == []
    assert script.stream.types[ENDPOINT].error == "bad b"


def test_x05_nothing_is_sent_without_a_change_nor_after_a_nack() -> None:
    script = SotwScript(cluster("a"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    assert script.nack(CLUSTER) == []
    assert script.ack(ENDPOINT) == []
    assert script.change(cluster("a"), endpoints("a")) == []
    assert script.wait(3600) == []
    assert script.change(cluster("a", 2), endpoints("a")) == ["CDS +a", "EDS +a"]


def test_x05_a_change_that_was_taken_back_is_not_sent() -> None:
    script = SotwScript(cluster("a"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    assert script.change(cluster("a", 2), endpoints("a", 2)) == []
    assert script.change(cluster("a"), endpoints("a")) == []
    assert script.ack(CLUSTER) == []
    # Endpoints of the cluster were asked for by its first response already.
    assert script.ack(ENDPOINT) == []


def test_x06_the_newest_request_decides() -> None:
    script = SotwScript(endpoints("a"), endpoints("b"))
    script.ask(ENDPOINT, "a")
    assert script.ack(ENDPOINT, "b") == ["EDS +b"]
    script.ack(ENDPOINT)
    assert script.change(endpoints("a", 2), endpoints("b")) == []
    assert script.change(endpoints("a", 2), endpoints("b", 2)) == ["EDS +b"]


def test_x07_a_stale_nonce_gets_no_answer_and_changes_nothing() -> None:
    script = SotwScript(endpoints("a"), endpoints("b"))
    script.ask(ENDPOINT, "a")
    old = script.last[ENDPOINT].nonce
    script.ack(ENDPOINT)
    script.change(endpoints("a", 2), endpoints("b"))
    current = script.last[ENDPOINT].nonce
    assert script.ask(ENDPOINT, "a", "b", nonce=old, error="too late") == []
    assert script.ask(ENDPOINT, "a", "b") == []
    assert script.stream.types[ENDPOINT].in_flight is not None
    assert script.stream.types[ENDPOINT].names == {"a"}
    assert script.ask(ENDPOINT, "a", "b", nonce=current) == ["EDS +b"]


def test_x08_a_newly_asked_name_is_sent_though_it_is_unchanged() -> None:
    script = SotwScript(endpoints("a"), endpoints("b"), cluster("c"))
    script.ask(ENDPOINT, "a")
    script.ack(ENDPOINT)
    assert script.again(ENDPOINT, "a", "b") == ["EDS +b"]
    script.ack(ENDPOINT)
    script.ask(CLUSTER)
    script.ack(CLUSTER)
    assert script.again(CLUSTER, "*", "c") == ["CDS +c"]


def test_x09_the_four_steps_of_the_document() -> None:
    script = SotwScript(cluster("A"), cluster("B"))
    assert script.ask(CLUSTER) == ["CDS +A +B"]
    script.ack(CLUSTER)
    assert script.again(CLUSTER, "*", "A") == ["CDS +A +B"]
    script.ack(CLUSTER)
    assert script.again(CLUSTER, "A") == []
    assert script.change(cluster("A"), cluster("B", 2)) == []
    assert script.change(cluster("A", 2), cluster("B", 2)) == ["CDS +A"]
    script.ack(CLUSTER)
    # Empty again, but not as at first: names were given.
    assert script.again(CLUSTER) == []
    assert script.change(cluster("A", 3), cluster("B", 3)) == []


def test_x09_an_empty_first_request_means_everything_for_listeners_and_clusters_only() -> None:
    script = SotwScript(listener("l"), endpoints("a"), policy("p"))
    assert script.ask(LISTENER) == ["LDS +l"]
    assert script.ack(LISTENER) == []
    assert script.change(listener("l"), listener("m"), endpoints("a"), policy("p")) == ["LDS +l +m"]
    assert script.ask(ENDPOINT) == []
    assert script.ask(POLICY, "*") == ["Policy +p"]


def test_x10_clusters_and_listeners_are_complete_state() -> None:
    script = SotwScript(cluster("a"), cluster("b"), listener("l"))
    script.ask(CLUSTER)
    script.ack(CLUSTER)
    assert script.change(cluster("a"), cluster("b", 2), listener("l")) == ["CDS +a +b"]
    script.ack(CLUSTER)
    assert script.change(cluster("b", 2), listener("l")) == ["CDS +b"]
    script.ack(CLUSTER)
    assert script.change(listener("l")) == ["CDS"]
    script.ack(CLUSTER)
    script.ask(LISTENER)
    script.ack(LISTENER)
    assert script.change() == ["LDS"]


def test_x10_endpoints_and_routes_come_in_parts_and_their_removal_says_nothing() -> None:
    script = SotwScript(endpoints("a"), endpoints("b"), route("r"))
    script.ask(ENDPOINT, "a", "b")
    script.ask(ROUTE, "r")
    script.ack(ENDPOINT)
    script.ack(ROUTE)
    assert script.change(endpoints("a"), endpoints("b", 2), route("r")) == ["EDS +b"]
    script.ack(ENDPOINT)
    assert script.change(endpoints("a"), route("r")) == []


def test_x11_no_name_occurs_twice() -> None:
    script = SotwScript(cluster("a"), policy("p"))
    assert script.ask(CLUSTER, "a", "*", "a") == ["CDS +a"]
    assert script.ask(POLICY, "p", "p", "*") == ["Policy +p"]


def test_x12_what_does_not_exist_is_sent_when_it_appears() -> None:
    script = SotwScript(endpoints("a"))
    assert script.ask(ENDPOINT, "a", "b") == ["EDS +a"]
    script.ack(ENDPOINT)
    assert script.change(endpoints("a"), endpoints("b")) == ["EDS +b"]


def test_x12_a_request_before_anything_exists_may_change_its_mind() -> None:
    script = SotwScript()
    assert script.ask(ROUTE, "r") == []
    assert script.ask(ROUTE, "r", "s") == []
    assert script.change(route("s")) == ["RDS +s"]


def test_x13_a_name_dropped_and_asked_for_again_is_sent_again() -> None:
    script = SotwScript(endpoints("a"), endpoints("b"))
    script.ask(ENDPOINT, "a", "b")
    script.ack(ENDPOINT)
    assert script.again(ENDPOINT, "a") == []
    assert script.again(ENDPOINT, "a", "b") == ["EDS +b"]


def test_x14_dropping_names_needs_no_answer() -> None:
    script = SotwScript(cluster("a"), cluster("b"))
    script.ask(CLUSTER, "a", "b")
    script.ack(CLUSTER)
    assert script.again(CLUSTER, "b") == []
    assert script.change(cluster("a", 2), cluster("b")) == []


def test_x15_a_version_of_something_else_skips_nothing() -> None:
    script = SotwScript(cluster("a"))
    assert script.ask(CLUSTER, version="0123456789abcdef") == ["CDS +a"]


def test_x16_the_version_is_that_of_the_content() -> None:
    script = SotwScript(cluster("a"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    assert script.snapshot is not None
    for url in (CLUSTER, ENDPOINT):
        assert script.last[url].version == script.snapshot.version(url) != ""


def test_x17_a_state_of_the_world_response_has_no_place_for_aliases() -> None:
    script = SotwScript(policy("a", aliases=["other"]))
    script.ask(POLICY, "a")
    message = discovery_pb2.DiscoveryResponse.FromString(encode(script.last[POLICY]))
    assert [item.type_url for item in message.resources] == [POLICY]


def test_x18_endpoints_of_a_changed_cluster_are_sent_again() -> None:
    script = SotwScript(cluster("a"), cluster("b"), endpoints("a"), endpoints("b"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a", "b")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    new = (cluster("a", 2), cluster("b"), endpoints("a"), endpoints("b"))
    assert script.change(*new) == ["CDS +a +b", "EDS +a"]


def test_x18_routes_of_a_changed_listener_are_sent_again() -> None:
    script = SotwScript(listener("l", route="r"), route("r"))
    script.ask(LISTENER)
    script.ask(ROUTE, "r")
    script.ack(LISTENER)
    script.ack(ROUTE)
    assert script.change(listener("l", route="r", prefix="x"), route("r")) == ["LDS +l", "RDS +r"]


def test_x19_what_is_referred_to_goes_first_and_what_is_stale_goes_last() -> None:
    script = everything(SotwScript)
    script.again(ENDPOINT, "old", "new")  # type: ignore[attr-defined]
    new = (cluster("new"), endpoints("new"), listener("l", route="r", prefix="x"), route("r", "new"), policy("p"))
    # The old cluster is repeated: left out, it would be deleted while routes refer to it.
    assert script.change(*new) == ["CDS +new +old", "EDS +new"]
    script.ack(ENDPOINT)
    assert script.ack(CLUSTER) == ["LDS +l", "RDS +r"]
    assert script.ack(LISTENER) == []
    assert script.ack(ROUTE) == ["CDS +new"]
    assert script.snapshot is not None
    assert script.last[CLUSTER].version == script.snapshot.version(CLUSTER)


def test_x19_a_removal_alone_waits_for_routes_too() -> None:
    script = everything(SotwScript)
    new = (endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    assert script.change(*new) == ["RDS +r"]
    assert script.nack(ROUTE) == []
    newer = (endpoints("old"), listener("l", route="r"), route("r", "newer"), policy("p"))
    assert script.change(*newer) == ["RDS +r"]
    assert script.ack(ROUTE) == ["CDS"]


def test_x19_a_removal_that_was_taken_back_in_time_is_never_sent() -> None:
    script = everything(SotwScript)
    script.change(endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    back = (cluster("old"), endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    assert script.change(*back) == []
    assert script.ack(ROUTE) == []


@pytest.mark.parametrize(
    "feature",
    ["xds.config.resource-in-sotw", "envoy.config.resource-in-sotw", "xds.config.supports-resource-ttl"],
)
def test_x20_a_ttl_travels_to_clients_that_understand_it(feature: str) -> None:
    script = SotwScript(endpoints_with_ttl := policy("a", ttl=4.0), policy("b"), features=[feature])
    script.ask(POLICY, "a", "b")
    message = discovery_pb2.DiscoveryResponse.FromString(encode(script.last[POLICY]))
    wrapped, plain = message.resources
    assert (wrapped.type_url, plain.type_url) == (RESOURCE, POLICY)
    inside = discovery_pb2.Resource.FromString(wrapped.value)
    assert (inside.name, inside.ttl.seconds, inside.resource.value) == ("a", 4, endpoints_with_ttl.body)
    script.ack(POLICY)
    assert script.wait(2.0) == ["Policy ~a"]
    (beat,) = discovery_pb2.DiscoveryResponse.FromString(encode(script.last[POLICY])).resources
    inside = discovery_pb2.Resource.FromString(beat.value)
    assert not inside.HasField("resource")
    assert inside.version == script.last[POLICY].version


def test_x20_others_get_the_plain_resource_and_no_heartbeat() -> None:
    script = SotwScript(policy("a", ttl=4.0))
    script.ask(POLICY, "a")
    (item,) = discovery_pb2.DiscoveryResponse.FromString(encode(script.last[POLICY])).resources
    assert item.type_url == POLICY
    script.ack(POLICY)
    assert script.wait(60.0) == []


def test_x21_an_aggregated_stream_needs_a_type_and_keeps_types_apart() -> None:
    script = SotwScript(endpoints("a"), cluster("a"))
    with pytest.raises(RefusedRequestError, match="type_url is missing"):
        script.ask("")
    script.ask(ENDPOINT, "a")
    script.ask(CLUSTER)
    script.ack(ENDPOINT)
    assert script.stream.types[CLUSTER].in_flight is not None


def test_x22_one_changed_endpoint_brings_its_whole_endpoint_set_and_no_other() -> None:
    script = SotwScript(endpoints("a", ports=(1, 2, 3)), endpoints("b", ports=(4,)))
    script.ask(ENDPOINT, "a", "b")
    script.ack(ENDPOINT)
    assert script.change(endpoints("a", ports=(1, 2, 9)), endpoints("b", ports=(4,))) == ["EDS +a"]
    assert script.last[ENDPOINT].resources == (endpoints("a", ports=(1, 2, 9)),)


def test_x23_what_comes_from_a_file_is_not_waited_for() -> None:
    script = SotwScript(cluster("a", file="/a.yaml"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    script.ack(ENDPOINT)
    # Were it waited for, the watchdog would wait for ever with it.
    assert script.stream.overdue(script.now + 20.0, 5.0, 20.0) == CLUSTER
    script.ack(CLUSTER)
    assert script.change(cluster("a", 2, file="/a.yaml"), endpoints("a")) == ["CDS +a"]


def test_x25_a_proxyless_client_asks_by_name_from_listener_to_endpoints() -> None:
    everything_there = (listener("svc", route="r"), route("r"), cluster("c"), cluster("other"), endpoints("c"))
    script = SotwScript(*everything_there)
    for url, name, short in (
        (LISTENER, "svc", "LDS"),
        (ROUTE, "r", "RDS"),
        (CLUSTER, "c", "CDS"),
        (ENDPOINT, "c", "EDS"),
    ):
        assert script.ask(url, name) == [f"{short} +{name}"]
        assert script.ack(url) == []
    changed = (*everything_there[:3], cluster("other", 2), endpoints("c"))
    assert script.change(*changed) == []


def test_x25_a_listener_that_does_not_exist_is_answered_at_once() -> None:
    script = SotwScript(cluster("c"))
    assert script.ask(LISTENER, "nothing") == ["LDS"]
    script.ack(LISTENER)
    assert script.change(cluster("c"), listener("nothing")) == ["LDS +nothing"]
