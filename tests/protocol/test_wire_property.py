"""The decoders take any bytes: they give a message, or refuse with an error of ours."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from xds import health
from xds.delta import DeltaStream
from xds.errors import RefusedRequestError
from xds.grpc_wire import Deframer, prefixed
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Pushes
from xds.snapshot import Resource, Snapshot, content_version
from xds.sotw import SotwStream
from xds.types import CLUSTER, ENDPOINT, LISTENER

SNAPSHOT = Snapshot(
    Resource(url, name, b"\xff", content_version(name.encode())) for url in (CLUSTER, ENDPOINT) for name in "ab"
)


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_messages_come_out_however_they_are_cut(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(prefixed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    deframer, found = Deframer(1000), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        piece = stream[start:end]
        whole = deframer.whole(piece)
        found += [whole] if whole is not None else list(deframer.feed(piece))
    assert found == messages


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_any_bytes_are_messages_or_refused(pieces: list[bytes]) -> None:
    deframer = Deframer(50)
    with contextlib.suppress(RefusedRequestError):
        for piece in pieces:
            for message in deframer.feed(piece):
                assert len(message) <= 50
            assert len(deframer._buffer) <= 55


@given(st.binary(max_size=200))
def test_a_health_request_is_a_name_or_refused(data: bytes) -> None:
    with contextlib.suppress(RefusedRequestError):
        assert isinstance(health.decode_request(data), str)


words = st.sampled_from(["", "a", "b", "*", "c", "\N{SNOWMAN}"])
types = st.sampled_from(["", CLUSTER, ENDPOINT, LISTENER, "x"])
deltas = st.builds(
    discovery_pb2.DeltaDiscoveryRequest,
    node=st.sampled_from([None, base_pb2.Node(id="n")]),
    type_url=types,
    resource_names_subscribe=st.lists(words, max_size=3),
    resource_names_unsubscribe=st.lists(words, max_size=3),
    initial_resource_versions=st.dictionaries(words, words, max_size=3),
    response_nonce=st.sampled_from(["", "1", "2", "3", "x"]),
)
sotws = st.builds(
    discovery_pb2.DiscoveryRequest,
    node=st.sampled_from([None, base_pb2.Node(id="n")]),
    type_url=types,
    resource_names=st.lists(words, max_size=3),
    version_info=st.sampled_from(["", "x", SNAPSHOT.version(CLUSTER)]),
    response_nonce=st.sampled_from(["", "1", "2", "3", "x"]),
)


@given(st.lists(deltas, max_size=8))
def test_no_requests_break_the_delta_machine(requests: list[discovery_pb2.DeltaDiscoveryRequest]) -> None:
    stream = DeltaStream(SNAPSHOT, Pushes(), 0.0)
    with contextlib.suppress(RefusedRequestError):
        for now, request in enumerate(requests):
            stream.on_request(request, float(now))
            stream.on_tick(float(now))


@given(st.lists(sotws, max_size=8))
def test_no_requests_break_the_sotw_machine(requests: list[discovery_pb2.DiscoveryRequest]) -> None:
    stream = SotwStream(SNAPSHOT, Pushes(), 0.0)
    with contextlib.suppress(RefusedRequestError):
        for now, request in enumerate(requests):
            stream.on_request(request, float(now))
            stream.on_tick(float(now))
