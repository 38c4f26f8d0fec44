from __future__ import annotations

import pytest

from modalmesh.base.errors import DocumentError
from xds.consumer import Consumer, Update
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.snapshot import Resource, content_version
from xds.types import CLUSTER, LISTENER

NODE = base_pb2.Node(id="router-1")


def response(
    *items: tuple[str, bytes], removed: tuple[str, ...] = (), nonce: str = "1", type_url: str = CLUSTER
) -> discovery_pb2.DeltaDiscoveryResponse:
    made = discovery_pb2.DeltaDiscoveryResponse(type_url=type_url, nonce=nonce, removed_resources=removed)
    for name, body in items:
        made.MergeFromString(Resource(type_url, name, body, content_version(body)).wire)
    return made


def test_a_stream_begins_with_one_request_per_type_and_the_node_once() -> None:
    consumer = Consumer(NODE, {LISTENER: lambda _: None, CLUSTER: lambda _: None}, {LISTENER: ["l"]})
    requests = consumer.first_requests()
    assert [request.type_url for request in requests] == [CLUSTER, LISTENER]
    assert [request.HasField("node") for request in requests] == [True, False]
    assert [list(request.resource_names_subscribe) for request in requests] == [["*"], ["l"]]


def test_an_update_is_handed_over_and_acknowledged() -> None:
    seen: list[Update] = []
    consumer = Consumer(NODE, {CLUSTER: seen.append})
    answer = consumer.on_response(response(("a", b"1"), ("b", b"2"), removed=("c",), nonce="7"))
    assert seen == [Update(CLUSTER, {"a": b"1", "b": b"2"}, frozenset({"c"}))]
    assert (answer.type_url, answer.response_nonce, answer.HasField("error_detail")) == (CLUSTER, "7", False)


def test_an_empty_first_response_is_handed_over_and_later_ones_are_not() -> None:
    seen: list[Update] = []
    consumer = Consumer(NODE, {CLUSTER: seen.append})
    consumer.on_response(response())
    consumer.on_response(response(nonce="2"))
    assert seen == [Update(CLUSTER, {}, frozenset())]


def test_the_next_stream_names_what_is_held() -> None:
    consumer = Consumer(NODE, {CLUSTER: lambda _: None})
    consumer.on_response(response(("a", b"1"), ("b", b"2")))
    consumer.on_response(response(("a", b"3"), removed=("b",), nonce="2"))
    assert dict(consumer.first_requests()[0].initial_resource_versions) == {"a": content_version(b"3")}


def refusing(seen: list[Update], bad: set[bytes]) -> Consumer:
    def handler(update: Update) -> None:
        if bad & set(update.changed.values()):
            raise DocumentError("policy is wrong", hint="write a right one")
        seen.append(update)

    return Consumer(NODE, {CLUSTER: handler})


def test_a_refused_update_is_answered_with_the_handlers_text_and_handed_over_with_the_next() -> None:
    seen: list[Update] = []
    consumer = refusing(seen, {b"bad"})
    consumer.on_response(response(("gone", b"0"), ("b", b"0")))
    answer = consumer.on_response(response(("a", b"1"), ("b", b"bad"), removed=("gone",), nonce="2"))
    assert answer.error_detail.message == "policy is wrong; write a right one [MM1200]"
    assert answer.response_nonce == "2"
    # The server does not send a and the removal again.
    answer = consumer.on_response(response(("b", b"good"), nonce="3"))
    assert not answer.HasField("error_detail")
    assert seen[-1] == Update(CLUSTER, {"a": b"1", "b": b"good"}, frozenset({"gone"}))


def test_refused_versions_are_not_claimed_on_the_next_stream() -> None:
    consumer = refusing([], {b"bad"})
    consumer.on_response(response(("a", b"1"), ("b", b"1")))
    consumer.on_response(response(("a", b"bad"), removed=("b",), nonce="2"))
    held = dict(consumer.first_requests()[0].initial_resource_versions)
    assert held == {"a": content_version(b"1"), "b": content_version(b"1")}


def test_what_was_refused_on_one_stream_is_not_handed_over_on_the_next() -> None:
    seen: list[Update] = []
    consumer = refusing(seen, {b"bad"})
    consumer.on_response(response(("a", b"1")))
    consumer.on_response(response(("a", b"bad"), nonce="2"))
    # Meanwhile the server went back to what is held, so it has nothing to say about a.
    consumer.first_requests()
    assert not consumer.on_response(response(("b", b"1"))).HasField("error_detail")
    assert seen[-1].changed == {"b": b"1"}


def test_a_handler_that_breaks_refuses_instead_of_ending_the_client() -> None:
    def handler(update: Update) -> None:
        raise KeyError("oops")

    answer = Consumer(NODE, {CLUSTER: handler}).on_response(response(("a", b"1")))
    assert answer.error_detail.message == "KeyError: 'oops'"


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (response(("a", b"1"), ("a", b"2")), "occurs twice"),  # X11
        (response(("a", b"1"), removed=("a",)), "occurs twice"),
        (response(("a", b"1"), type_url=LISTENER), "not asked for"),
    ],
)
def test_responses_that_break_the_protocol_are_refused(bad: discovery_pb2.DeltaDiscoveryResponse, text: str) -> None:
    seen: list[Update] = []
    answer = Consumer(NODE, {CLUSTER: seen.append}).on_response(bad)
    assert text in answer.error_detail.message
    assert seen == []


def test_a_resource_of_another_type_is_refused() -> None:
    mixed = response(("a", b"1"))
    mixed.resources[0].resource.type_url = LISTENER
    answer = Consumer(NODE, {CLUSTER: lambda _: None}).on_response(mixed)
    assert LISTENER in answer.error_detail.message


def test_a_client_without_handlers_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="nothing to ask for"):
        Consumer(NODE, {})
