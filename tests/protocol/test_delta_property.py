"""Whatever happens in whatever order: a client that answers ends up with what it asked for; no promise is broken."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xds.delta import DeltaStream
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.google.rpc import status_pb2
from xds.pushes import Pushes, Response
from xds.snapshot import Resource, Snapshot, content_version
from xds.stream import News
from xds.types import CLUSTER, ROUTE

POLICY = "type.googleapis.com/example.Policy"
TYPES = (POLICY, CLUSTER, ROUTE)
NAMES = ("a", "b", "c", "d")

contents = st.dictionaries(st.tuples(st.sampled_from(TYPES), st.sampled_from(NAMES)), st.sampled_from((b"", b"\x08")))
names = st.sets(st.sampled_from((*NAMES, "*")))


def snapshot_of(content: dict[tuple[str, str], bytes]) -> Snapshot:
    # The bodies are no messages of their type, so nothing waits for anything: that has scripts of its own.
    return Snapshot(
        Resource(url, name, body + b"\xff", content_version(body)) for (url, name), body in sorted(content.items())
    )


class Conversation(RuleBasedStateMachine):
    """One stream; the oracle is the plain set of what the client asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pushes = Pushes()
        self.snapshot: Snapshot | None = None
        self.stream = DeltaStream(None, self.pushes, self.now)
        self.asked: dict[str, set[str]] = {}
        self.holds: dict[str, dict[str, str]] = {url: {} for url in TYPES}
        self.in_flight: dict[str, Response] = {}
        self.nonces: set[str] = set()
        self.nacked: set[str] = set()

    @initialize(content=contents, early=st.booleans())
    def start(self, content: dict[tuple[str, str], bytes], early: bool) -> None:
        if early:
            self.snapshot = snapshot_of(content)
            self.stream = DeltaStream(self.snapshot, self.pushes, self.now)

    def take(self, responses: list[Response]) -> None:
        for response in responses:
            url = response.type_url
            assert url not in self.in_flight, "two responses of one type in flight"
            assert response.nonce not in self.nonces, "a nonce was used twice"
            self.nonces.add(response.nonce)
            sent = [resource.name for resource in response.resources]
            everything = [*sent, *response.removed]
            assert len(set(everything)) == len(everything), "a name occurs twice"
            self.in_flight[url] = response
            for resource in response.resources:
                self.holds[url][resource.name] = resource.version
            for name in response.removed:
                self.holds[url].pop(name, None)

    def request(self, url: str, **fields: object) -> None:
        request = discovery_pb2.DeltaDiscoveryRequest(type_url=url, node=base_pb2.Node(id="n"), **fields)  # type: ignore[arg-type]
        self.take(self.stream.on_request(request, self.now))

    def prune(self, url: str) -> None:
        """A client forgets what it no longer asks for."""
        asked = self.asked[url]
        if "*" not in asked:
            self.holds[url] = {name: version for name, version in self.holds[url].items() if name in asked}

    @rule(url=st.sampled_from(TYPES), subscribe=names, drop=names)
    def subscribe(self, url: str, subscribe: set[str], drop: set[str]) -> None:
        drop = drop - subscribe
        if url not in self.asked:
            drop = set()
            self.asked[url] = set(subscribe) or ({"*"} if url == CLUSTER else set())
        else:
            self.asked[url] = (self.asked[url] | subscribe) - drop
        self.prune(url)
        self.request(url, resource_names_subscribe=sorted(subscribe), resource_names_unsubscribe=sorted(drop))
        self.prune(url)

    @rule(content=contents)
    def change(self, content: dict[tuple[str, str], bytes]) -> None:
        new = snapshot_of(content)
        changed = {} if self.snapshot is None else new.changed_since(self.snapshot)
        self.snapshot = new
        self.take(self.stream.on_snapshot(new, News(changed), self.now))

    @precondition(lambda self: bool(self.in_flight))
    @rule(data=st.data(), refuse=st.booleans(), stale=st.booleans())
    def answer(self, data: st.DataObject, refuse: bool, stale: bool) -> None:
        url = data.draw(st.sampled_from(sorted(self.in_flight)))
        error = status_pb2.Status(code=3, message="no") if refuse else None
        if stale:
            self.request(url, response_nonce="0", error_detail=error)
            return
        response = self.in_flight.pop(url)
        self.nacked = self.nacked | {url} if refuse else self.nacked - {url}
        self.request(url, response_nonce=response.nonce, error_detail=error)

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
                self.request(url, response_nonce=self.in_flight.pop(url).nonce)
        assert not self.in_flight
        for url in self.asked:
            there = self.snapshot.of_type(url) if self.snapshot is not None else {}
            wanted = {
                name: resource.version
                for name, resource in there.items()
                if "*" in self.asked[url] or name in self.asked[url]
            }
            stale = {name: version for name, version in self.holds[url].items() if name not in wanted}
            if url == CLUSTER and ROUTE in self.nacked:
                # A refused route may refer to them still.
                self.holds[url] = {name: v for name, v in self.holds[url].items() if name not in stale}
            assert self.holds[url] == wanted


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
