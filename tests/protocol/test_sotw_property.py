"""Whatever happens in whatever order: a state-of-the-world client that answers ends up with what it asked for."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xds.frames import encode
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.google.rpc import status_pb2
from xds.pushes import Pushes, Response
from xds.snapshot import Resource, Snapshot, content_version
from xds.sotw import SotwStream
from xds.stream import News
from xds.types import CLUSTER, ENDPOINT, ROUTE

TYPES = (CLUSTER, ENDPOINT, ROUTE)
NAMES = ("a", "b", "c", "d")

contents = st.dictionaries(st.tuples(st.sampled_from(TYPES), st.sampled_from(NAMES)), st.sampled_from((b"", b"\x08")))
names = st.sets(st.sampled_from((*NAMES, "*")))


def snapshot_of(content: dict[tuple[str, str], bytes]) -> Snapshot:
    # The bodies are no messages of their type, so nothing waits for anything: that has scripts of its own.
    return Snapshot(
        Resource(url, name, body + b"\xff", content_version(body)) for (url, name), body in sorted(content.items())
    )


class Conversation(RuleBasedStateMachine):
    """One stream; the oracle is the plain set of what the client asked for last."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pushes = Pushes()
        self.snapshot: Snapshot | None = None
        self.stream = SotwStream(None, self.pushes, self.now)
        self.asked: dict[str, frozenset[str]] = {}
        self.named: set[str] = set()
        self.holds: dict[str, dict[str, str]] = {url: {} for url in TYPES}
        self.in_flight: dict[str, Response] = {}
        self.last: dict[str, str] = {}
        self.nonces: set[str] = set()
        self.nacked: set[str] = set()

    @initialize(content=contents, early=st.booleans())
    def start(self, content: dict[tuple[str, str], bytes], early: bool) -> None:
        if early:
            self.snapshot = snapshot_of(content)
            self.stream = SotwStream(self.snapshot, self.pushes, self.now)

    def wants(self, url: str) -> tuple[frozenset[str], bool]:
        asked = self.asked.get(url, frozenset())
        return asked, "*" in asked or (url == CLUSTER and url not in self.named)

    def take(self, responses: list[Response]) -> None:
        for response in responses:
            url = response.type_url
            assert url not in self.in_flight, "two responses of one type in flight"
            assert response.nonce not in self.nonces, "a nonce was used twice"
            self.nonces.add(response.nonce)
            self.last[url] = response.nonce
            message = discovery_pb2.DiscoveryResponse.FromString(encode(response))
            assert len(message.resources) == len(response.resources)
            sent = [resource.name for resource in response.resources]
            assert len(set(sent)) == len(sent), "a name occurs twice"
            self.in_flight[url] = response
            if url == CLUSTER:
                self.holds[url].clear()
            else:
                assert sent, "an empty response says nothing"
            for resource in response.resources:
                self.holds[url][resource.name] = resource.version

    def request(self, url: str, nonce: str, error: status_pb2.Status | None = None) -> None:
        request = discovery_pb2.DiscoveryRequest(
            type_url=url,
            node=base_pb2.Node(id="n"),
            resource_names=sorted(self.asked[url]),
            response_nonce=nonce,
            error_detail=error,
        )
        self.take(self.stream.on_request(request, self.now))

    def ask(self, url: str, asked: set[str]) -> None:
        self.asked[url] = frozenset(asked)
        if asked:
            self.named.add(url)
        _, everything = self.wants(url)
        if not everything:
            self.holds[url] = {name: version for name, version in self.holds[url].items() if name in asked}

    @rule(url=st.sampled_from(TYPES), asked=names)
    def subscribe(self, url: str, asked: set[str]) -> None:
        if url in self.in_flight:
            return  # a client that has not seen the response yet sends a stale nonce: ``stale``
        self.ask(url, asked)
        self.request(url, self.last.get(url, ""))

    @rule(content=contents)
    def change(self, content: dict[tuple[str, str], bytes]) -> None:
        new = snapshot_of(content)
        changed = {} if self.snapshot is None else new.changed_since(self.snapshot)
        self.snapshot = new
        self.take(self.stream.on_snapshot(new, News(changed), self.now))

    @precondition(lambda self: bool(self.in_flight))
    @rule(data=st.data(), refuse=st.booleans(), also=st.none() | names)
    def answer(self, data: st.DataObject, refuse: bool, also: set[str] | None) -> None:
        url = data.draw(st.sampled_from(sorted(self.in_flight)))
        response = self.in_flight.pop(url)
        self.nacked = self.nacked | {url} if refuse else self.nacked - {url}
        if also is not None:
            self.ask(url, also)
        self.request(url, response.nonce, status_pb2.Status(code=3, message="no") if refuse else None)

    @precondition(lambda self: bool(self.in_flight))
    @rule(data=st.data(), asked=names)
    def stale(self, data: st.DataObject, asked: set[str]) -> None:
        url = data.draw(st.sampled_from(sorted(self.in_flight)))
        request = discovery_pb2.DiscoveryRequest(type_url=url, resource_names=sorted(asked), response_nonce="0")
        assert self.stream.on_request(request, self.now) == []

    @rule(seconds=st.sampled_from((0.1, 1.0, 6.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.stream.on_tick(self.now))

    @invariant()
    def errors_are_those_of_nacks(self) -> None:
        for url, subscription in self.stream.types.items():
            assert bool(subscription.error) == (url in self.nacked)

    def teardown(self) -> None:
        for _ in range(20):  # every answer may let something go that was kept back
            self.now += 6.0
            self.take(self.stream.on_tick(self.now))
            for url in list(self.in_flight):
                self.nacked.discard(url)
                self.request(url, self.in_flight.pop(url).nonce)
        assert not self.in_flight
        for url in self.asked:
            asked, everything = self.wants(url)
            there = self.snapshot.of_type(url) if self.snapshot is not None else {}
            wanted = {name: item.version for name, item in there.items() if everything or name in asked}
            holds = self.holds[url]
            if url != CLUSTER or ROUTE in self.nacked:
                # Removals of such a type can't be said; a refused route may refer to a cluster that went.
                holds = {name: version for name, version in holds.items() if name in there}
            assert holds == wanted


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
