"""What one client is told stands for others in its place: a fleet is told what each would be told alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.scripts import POLICY, cluster, endpoints, listener, policy, route
from xds.delta import DeltaStream
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.google.rpc import status_pb2
from xds.pushes import Pushes, Response
from xds.snapshot import Resource, Snapshot
from xds.sotw import SotwStream
from xds.stream import News
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

NAMES = "abc"
TYPES = (CLUSTER, ENDPOINT, LISTENER, ROUTE, POLICY)

resources = st.one_of(
    st.builds(cluster, st.sampled_from(NAMES), st.integers(1, 2)),
    st.builds(endpoints, st.sampled_from(NAMES), st.integers(0, 2)),
    st.builds(endpoints, st.sampled_from(NAMES), st.integers(0, 2)),
    st.builds(
        lambda name, prefix: listener(name, route=name, prefix=prefix), st.sampled_from(NAMES), st.sampled_from("xy")
    ),
    st.builds(route, st.sampled_from(NAMES), st.sampled_from("xy")),
    st.builds(policy, st.sampled_from(NAMES), st.sampled_from("12")),
)
worlds = st.lists(resources, max_size=8, unique_by=lambda item: (item.type_url, item.name))
asked_by_all = st.dictionaries(st.sampled_from(TYPES), st.sets(st.sampled_from("abc*")), min_size=2)
edits = st.lists(resources, max_size=2, unique_by=lambda item: (item.type_url, item.name))
removals = st.sets(st.sampled_from([(url, name) for url in TYPES for name in NAMES]), max_size=2)
steps = st.tuples(edits, removals)


class Client:
    """One stream and what it has not answered."""

    def __init__(self, snapshot: Snapshot, pushes: Pushes, delta: bool, asked: dict[str, set[str]]) -> None:
        self.stream = DeltaStream(snapshot, pushes, 0.0) if delta else SotwStream(snapshot, pushes, 0.0)
        self.asked = asked
        self.unanswered: list[Response] = []
        for url in asked:
            self.note(self.request(url))

    def request(self, url: str, nonce: str = "", refuse: bool = False) -> list[Response]:
        error = status_pb2.Status(code=3, message="no") if refuse else None
        node = base_pb2.Node(id="n")
        if isinstance(self.stream, DeltaStream):
            subscribe = [] if nonce else sorted(self.asked[url])
            delta = discovery_pb2.DeltaDiscoveryRequest(
                node=node, type_url=url, resource_names_subscribe=subscribe, response_nonce=nonce, error_detail=error
            )
            return self.stream.on_request(delta, 0.0)
        sotw = discovery_pb2.DiscoveryRequest(
            node=node, type_url=url, resource_names=sorted(self.asked[url]), response_nonce=nonce, error_detail=error
        )
        return self.stream.on_request(sotw, 0.0)

    def note(self, responses: list[Response]) -> list[str]:
        self.unanswered += responses
        return [
            f"{item.type_url} {[(r.name, r.version) for r in item.resources]} {item.removed} {item.version}"
            for item in responses
        ]


@settings(max_examples=300, deadline=None)
@given(worlds, st.booleans(), asked_by_all, st.lists(steps, max_size=8), st.data())
def test_a_fleet_is_told_what_each_would_be_alone(
    start: list[Resource],
    delta: bool,
    asked: dict[str, set[str]],
    history: list[tuple[list[Resource], set[tuple[str, str]]]],
    data: st.DataObject,
) -> None:
    snapshot = Snapshot(start)
    pushes = Pushes()
    together = [Client(snapshot, pushes, delta, asked) for _ in range(3)]
    alone = [Client(snapshot, Pushes(), delta, asked) for _ in range(3)]
    for changed, removed in history:
        for one, other in zip(together, alone, strict=True):
            for answer in data.draw(st.lists(st.sampled_from(["ack", "nack"]), max_size=6)):
                if one.unanswered:
                    first, second = one.unanswered.pop(0), other.unanswered.pop(0)
                    told = one.note(one.request(first.type_url, first.nonce, answer == "nack"))
                    assert told == other.note(other.request(second.type_url, second.nonce, answer == "nack"))
        new = snapshot.updated(changed, removed)
        news = News(new.changed_since(snapshot))
        for one, other in zip(together, alone, strict=True):
            told = one.note(one.stream.on_snapshot(new, news, 0.0))
            assert told == other.note(other.stream.on_snapshot(new, News(news.changed), 0.0))
        snapshot = new


def test_a_removal_is_told_to_each_when_its_own_routes_allow() -> None:
    before = Snapshot([endpoints("a"), endpoints("b"), route("r")])
    after = before.updated((), [(ENDPOINT, "a")])
    pushes = Pushes()
    asked = {ENDPOINT: {"a", "b"}, ROUTE: {"r"}}
    done, busy = (Client(before, pushes, delta=True, asked=asked) for _ in range(2))
    for client in (done, busy):
        client.request(ENDPOINT, client.unanswered[0].nonce)
    done.request(ROUTE, done.unanswered[1].nonce)
    news = News(after.changed_since(before))
    (response,) = done.stream.on_snapshot(after, news, 0.0)
    assert response.removed == ("a",)
    assert busy.stream.on_snapshot(after, news, 0.0) == []  # its route may refer to it
    assert busy.request(ROUTE, busy.unanswered[1].nonce)[0].removed == ("a",)
