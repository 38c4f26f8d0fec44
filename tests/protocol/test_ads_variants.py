"""Over real sockets: the state-of-the-world variant, bursts, the watchdog's way, health, draining, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import h2.events
import hpack
import pytest
import zstandard

from modalmesh.base.settings import split_address
from tests.protocol.test_ads_sockets import (
    HEADERS,
    POLICY,
    Holder,
    RawPeer,
    client_of,
    counted,
    group_of,
    message_of,
    node,
    policy,
    put,
    serving,
    until,
)
from xds.client import AdsClient
from xds.errors import ListenError, TlsError
from xds.grpc_wire import SOTW_PATH, prefixed
from xds.listening import Tls, client_context
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.xds import status_pb2
from xds.server import AdsServer, Limits
from xds.snapshot import Resource, Snapshot
from xds.store import SnapshotStore
from xds.watchdog import RESETS

HEALTH = "/grpc.health.v1.Health/"


def sotw_of(data: bytes) -> discovery_pb2.DiscoveryResponse:
    return discovery_pb2.DiscoveryResponse.FromString(data[5:])


def decompressed(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(frame)


class SotwPeer(RawPeer):
    """A state-of-the-world client made by hand."""

    def say(self, *names: str, answers: discovery_pb2.DiscoveryResponse | None = None, first: bool = False) -> None:
        request = discovery_pb2.DiscoveryRequest(type_url=POLICY, resource_names=names)
        if first:
            request.node.CopyFrom(node("raw"))
        if answers is not None:
            request.version_info, request.response_nonce = answers.version_info, answers.nonce
        self.send(prefixed(request.SerializeToString()))


async def test_both_variants_are_served_on_one_port() -> None:
    async with serving(policy("a"), policy("b")) as server:
        peer = await SotwPeer.connect(server)
        peer.open(path=SOTW_PATH)
        peer.say("a", "b", first=True)
        await peer.read(lambda: len(peer.data) == 1)
        first = sotw_of(decompressed(peer.data[0]))
        assert [item.type_url for item in first.resources] == [POLICY, POLICY]
        peer.say("a", "b", answers=first)
        await until(lambda: server.clients()[0].types[0].state == status_pb2.SYNCED)
        await put(server, policy("a"), policy("b", "2"))
        await peer.read(lambda: len(peer.data) == 2)
        second = sotw_of(decompressed(peer.data[1]))
        assert len(second.resources) == 1
        # Recognised by its bytes: the same names between another version and nonce.
        peer.say("a", "b", answers=second)
        await until(lambda: server.clients()[0].types[0].state == status_pb2.SYNCED)
        # The same length, other names.
        await put(server, policy("a", "3"), policy("b", "3"), policy("c", "3"))
        await peer.read(lambda: len(peer.data) == 3)
        peer.say("a", "c", answers=sotw_of(decompressed(peer.data[2])))
        await peer.read(lambda: len(peer.data) == 4)
        assert len(sotw_of(decompressed(peer.data[3])).resources) == 1
        await peer.close()


async def test_a_burst_is_merged_for_everybody() -> None:
    holder = Holder()
    async with serving(policy("a", "0")) as server, client_of(server.address, holder):
        await until(lambda: holder.held == {"a": "0"})
        await asyncio.sleep(0.15)
        for number in range(1, 21):
            server.set_snapshot("router", Snapshot([policy("a", str(number))]))
        await until(lambda: holder.held == {"a": "20"})
        # The first went at once, the others together.
        assert len(holder.updates) == 3


async def test_what_waits_for_its_time_is_stale() -> None:
    holder = Holder()
    slow = SnapshotStore(quiet=60.0)
    server = AdsServer("127.0.0.1:0", group_of, store=slow)
    await server.start()
    server.set_snapshot("router", Snapshot([policy("a", "0")]))
    async with client_of(server.address, holder):
        await until(lambda: [item.types[0].state for item in server.clients()] == [status_pb2.SYNCED])
        latest = Snapshot([policy("a", "1")])
        server.set_snapshot("router", latest)
        (state,) = server.clients()[0].types
        assert (state.state, state.current_version) == (status_pb2.STALE, latest.version(POLICY))
    await server.close()


async def test_a_client_that_does_not_answer_is_reset_later_and_later_and_then_gets_plain_bytes() -> None:
    async with serving(policy("a"), limits=Limits(ack_timeout=0.05)) as server:
        for _ in range(RESETS):
            peer = await RawPeer.connect(server)
            peer.open()
            peer.ask("*")
            await peer.read(lambda peer=peer: peer.saw(h2.events.StreamReset))  # type: ignore[misc]
            assert peer.headers[0]["content-encoding"] == "zstd"
            await peer.close()
        peer = await RawPeer.connect(server)
        peer.open()
        peer.ask("*")
        await peer.read(lambda: bool(peer.data))
        assert "content-encoding" not in peer.headers[0]
        assert [item.name for item in message_of(peer.data[0]).resources] == ["a"]
        # Plain bytes can't fail silently: no answer, no reset.
        before = counted("ack_timeout")
        await asyncio.sleep(0.6)
        assert counted("ack_timeout") == before
        await peer.close()


async def test_a_slow_client_delays_nobody_and_gets_the_latest() -> None:
    holder = Holder()
    async with serving(policy("a", "0")) as server, client_of(server.address, holder):
        slow = await RawPeer.connect(server)
        slow.open(accept_encoding=None)
        slow.ask("*")
        await slow.read(lambda: bool(slow.data))
        for number in range(1, 4):
            await put(server, policy("a", str(number)))
            await until(lambda number=number: holder.held == {"a": str(number)})  # type: ignore[misc]
        slow.ask(nonce=message_of(slow.data[0]).nonce, first=False)
        await slow.read(lambda: len(slow.data) == 2)
        assert message_of(slow.data[1]).resources[0].version == policy("a", "3").version
        await slow.close()


# --- health


async def test_health_says_whether_there_is_something_to_serve() -> None:
    server = AdsServer("127.0.0.1:0", group_of)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        check = channel.unary_unary(HEALTH + "Check")
        watch = channel.unary_stream(HEALTH + "Watch")(b"", timeout=10)
        assert await check(b"", timeout=5) == b"\x08\x02"
        assert await watch.read() == b"\x08\x02"
        server.set_snapshot("router", Snapshot([policy("a")]))
        assert await watch.read() == b"\x08\x01"
        service = b"envoy.service.discovery.v3.AggregatedDiscoveryService"
        assert await check(b"\x0a" + bytes([len(service)]) + service, timeout=5) == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\x0a\x05other", timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        unknown = channel.unary_stream(HEALTH + "Watch")(b"\x0a\x05other", timeout=5)
        assert await unknown.read() == b"\x08\x03"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\xff\xff", timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        unknown.cancel()
        closing = asyncio.create_task(server.close(drain=0.3))
        assert await watch.read() == b"\x08\x02"
        watch.cancel()
    await closing


# --- draining


async def test_draining_lets_streams_go_on_and_new_ones_go_elsewhere() -> None:
    server = AdsServer("127.0.0.1:0", group_of)
    await server.start()
    server.set_snapshot("router", Snapshot([policy("a")]))
    peer = await RawPeer.connect(server)
    peer.open()
    peer.ask("*")
    await peer.read(lambda: len(peer.data) == 1)
    await asyncio.sleep(0.12)
    closing = asyncio.create_task(server.close(drain=0.5))
    # By hand: after GOAWAY, h2 takes nothing more.
    raw = await peer.reader.readuntil((2**31 - 1).to_bytes(4, "big") + b"\0\0\0\0")
    assert raw[-14] == 0x7
    request = discovery_pb2.DeltaDiscoveryRequest(
        type_url=POLICY, response_nonce=message_of(decompressed(peer.data[0])).nonce
    )
    body = prefixed(request.SerializeToString())
    peer.writer.write(len(body).to_bytes(3, "big") + b"\0\0\0\0\0\1" + body)
    await until(lambda: [item.types[0].state for item in server.clients()] == [status_pb2.SYNCED])
    server.set_snapshot("router", Snapshot([policy("a", "2")]))
    header = await asyncio.wait_for(peer.reader.readexactly(9), 5.0)
    assert (header[3], header[5:]) == (0x0, b"\0\0\0\1")
    await asyncio.wait_for(peer.reader.readexactly(int.from_bytes(header[:3], "big")), 5.0)
    block = hpack.Encoder().encode(HEADERS.items())
    peer.writer.write(len(block).to_bytes(3, "big") + b"\1\4\0\0\0\3" + block)
    refused = await asyncio.wait_for(peer.reader.readexactly(13), 5.0)
    assert (refused[3], refused[5:]) == (0x3, b"\0\0\0\3" + b"\0\0\0\7")  # RST_STREAM, REFUSED_STREAM
    await peer.close()
    await closing


# --- TLS


def tls(folder: Path, name: str, ca: str | None = None) -> Tls:
    return Tls(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{ca}.pem" if ca else None)


@contextlib.asynccontextmanager
async def secured(own: Tls, *resources: Resource, listen: str = "127.0.0.1:0") -> AsyncIterator[AdsServer]:
    server = AdsServer(listen, group_of, tls=own, limits=Limits(handshake=2.0))
    await server.start()
    server.set_snapshot("router", Snapshot(resources))
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def secure_client(address: str, holder: Holder, context: ssl.SSLContext) -> AsyncIterator[AdsClient]:
    client = AdsClient(address, node(), {POLICY: holder}, max_backoff=0.1, tls=context)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_client_that_trusts_the_root_is_served_over_tls(certificates: Path) -> None:
    holder = Holder()
    noise = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))
    async with (
        secured(tls(certificates, "server"), policy("a", noise)) as server,
        secure_client(server.address, holder, client_context(certificates / "ca.pem")),
    ):
        await until(lambda: holder.held == {"a": noise})
        await put(server, policy("a", "2"))
        await until(lambda: holder.held == {"a": "2"})


async def test_with_roots_for_clients_only_those_with_a_certificate_are_served(certificates: Path) -> None:
    holder, stranger = Holder(), Holder()
    ca = certificates / "ca.pem"
    async with (
        secured(tls(certificates, "server", "ca"), policy("a")) as server,
        secure_client(server.address, stranger, client_context(ca)) as outside,
        secure_client(server.address, holder, client_context(ca, tls(certificates, "client"))),
    ):
        await until(lambda: holder.held == {"a": "1"})
        await asyncio.sleep(0.3)
        assert not outside.connected
        assert stranger.held == {}


async def test_cleartext_and_http1_get_nothing_from_a_tls_port(certificates: Path) -> None:
    before = counted("tls")
    async with secured(tls(certificates, "server"), policy("a")) as server:
        host, port = split_address(server.address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))  # no ALPN
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        with contextlib.suppress(OSError):
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()
        await until(lambda: counted("tls") == before + 1)


async def test_other_machines_are_listened_to_only_with_client_certificates(certificates: Path) -> None:
    with pytest.raises(ListenError, match="not authenticated"):
        await AdsServer("0.0.0.0:0", group_of, tls=tls(certificates, "server")).start()
    async with secured(tls(certificates, "server", "ca"), listen="0.0.0.0:0") as server:
        assert server.address.startswith("0.0.0.0:")


async def test_a_certificate_that_cannot_be_used_is_named(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"missing\.pem"):
        await AdsServer("127.0.0.1:0", group_of, tls=Tls(tmp_path / "missing.pem", certificates / "ca.key")).start()
    with pytest.raises(TlsError, match=r"missing\.pem"):
        client_context(tmp_path / "missing.pem")
