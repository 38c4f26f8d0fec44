"""Peers that ask for too much, in either variant; and two servers that say the same."""

from __future__ import annotations

import asyncio

import pytest

from tests.protocol.test_ads_sockets import POLICY, Holder, RawPeer, client_of, message_of, node, policy, serving, until
from tests.protocol.test_ads_variants import decompressed
from xds.grpc_wire import DELTA_PATH, SOTW_PATH, prefixed
from xds.pb.envoy.service.discovery.v3 import discovery_pb2

DELTA, SOTW = "delta", "sotw"


def request(variant: str, type_url: str, names: list[str]) -> bytes:
    if variant == DELTA:
        return discovery_pb2.DeltaDiscoveryRequest(
            node=node("raw"), type_url=type_url, resource_names_subscribe=names
        ).SerializeToString()
    return discovery_pb2.DiscoveryRequest(node=node("raw"), type_url=type_url, resource_names=names).SerializeToString()


async def send_all(peer: RawPeer, data: bytes) -> None:
    """Send a long message, waiting for credit."""
    while data:
        window = min(peer.h2.local_flow_control_window(1), 16_384)
        if not window:
            seen = len(peer.events)
            await peer.read(lambda seen=seen: len(peer.events) > seen)  # type: ignore[misc]
            continue
        peer.h2.send_data(1, data[:window])
        data = data[window:]
        peer.flush()
        await peer.writer.drain()


@pytest.mark.parametrize("variant", [DELTA, SOTW])
async def test_a_hundred_thousand_names_end_the_stream_and_nothing_else(variant: str) -> None:
    holder = Holder()
    async with serving(policy("a")) as server, client_of(server.address, holder):
        peer = await RawPeer.connect(server)
        peer.open(path=DELTA_PATH if variant == DELTA else SOTW_PATH)
        await peer.read(lambda: peer.h2.local_flow_control_window(1) > 65_535)
        await send_all(peer, prefixed(request(variant, POLICY, [f"name-{number:06d}" for number in range(100_000)])))
        await peer.read(lambda: bool(peer.headers))
        assert peer.headers[0]["grpc-status"] == "8"
        await until(lambda: holder.held == {"a": "1"})
        assert len(server.clients()) == 1
        await peer.close()


@pytest.mark.parametrize("variant", [DELTA, SOTW])
async def test_types_without_end_end_the_stream(variant: str) -> None:
    async with serving(policy("a")) as server:
        peer = await RawPeer.connect(server)
        peer.open(path=DELTA_PATH if variant == DELTA else SOTW_PATH)
        for number in range(100):
            peer.send(prefixed(request(variant, f"type.googleapis.com/x.T{number}", ["a"])))
        await peer.read(lambda: any("grpc-status" in headers for headers in peer.headers))
        assert peer.headers[-1]["grpc-status"] == "8"
        await until(lambda: not server.clients())
        await peer.close()


@pytest.mark.parametrize("variant", [DELTA, SOTW])
async def test_bytes_of_the_wrong_kind_end_the_stream(variant: str) -> None:
    async with serving(policy("a")) as server:
        peer = await RawPeer.connect(server)
        peer.open(path=DELTA_PATH if variant == DELTA else SOTW_PATH)
        peer.send(prefixed(b"\x0a\xff\xff"))
        await peer.read(lambda: bool(peer.headers))
        assert peer.headers[0]["grpc-status"] == "3"
        await peer.close()


async def test_two_servers_with_the_same_input_say_the_same() -> None:
    said = []
    for resources in ([policy("a"), policy("b", "2")], [policy("b", "2"), policy("a")]):
        async with serving(*resources) as server:
            peer = await RawPeer.connect(server)
            peer.open()
            peer.ask("*")
            await peer.read(lambda peer=peer: bool(peer.data))  # type: ignore[misc]
            said.append(message_of(decompressed(peer.data[0])))
            await peer.close()
    assert said[0] == said[1]


async def test_a_client_that_moves_to_another_server_is_sent_nothing_again() -> None:
    async with serving(policy("a"), policy("b")) as one, serving(policy("b"), policy("a")) as other:
        peer = await RawPeer.connect(one)
        peer.open()
        peer.ask("*")
        await peer.read(lambda: bool(peer.data))
        held = {item.name: item.version for item in message_of(decompressed(peer.data[0])).resources}
        await peer.close()
        moved = await RawPeer.connect(other)
        moved.open()
        again = discovery_pb2.DeltaDiscoveryRequest(
            node=node("raw"), type_url=POLICY, resource_names_subscribe=["*"], initial_resource_versions=held
        )
        moved.send(prefixed(again.SerializeToString()))
        await until(lambda: bool(other.clients()))
        await asyncio.sleep(0.1)
        await moved.read(lambda: bool(moved.headers))
        assert moved.data == []
        await moved.close()
