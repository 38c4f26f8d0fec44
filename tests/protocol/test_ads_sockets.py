"""Server and client over real sockets: what is on the wire, coming back, refusals, hostile peers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import hyperframe.frame
import pytest
import zstandard
from google.protobuf.any_pb2 import Any as AnyMessage

from modalmesh.base.errors import DocumentError
from modalmesh.base.metrics import REGISTRY
from modalmesh.base.settings import split_address
from xds.client import AdsClient, Update, fetch
from xds.errors import FetchError, ListenError, UnreachableError
from xds.grpc_wire import DELTA_PATH, prefixed
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.xds import status_pb2
from xds.server import AdsServer, Limits
from xds.snapshot import Resource, Snapshot

POLICY = "type.googleapis.com/example.Policy"
OTHER = "type.googleapis.com/example.Other"

HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": DELTA_PATH,
    ":authority": "x",
    "content-type": "application/grpc",
    "te": "trailers",
    "accept-encoding": "zstd",
}


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mm", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def node(identifier: str = "n", role: str = "router") -> base_pb2.Node:
    made = base_pb2.Node(id=identifier)
    made.metadata["role"] = role
    return made


def group_of(of: base_pb2.Node) -> str:
    role = of.metadata["role"] if "role" in of.metadata.fields else "envoy"
    if role == "stranger":
        raise DocumentError("strangers have no group")
    return str(role)


def policy(name: str, text: str = "1", type_url: str = POLICY) -> Resource:
    return Resource.of(type_url, name, AnyMessage(type_url=text))


def text_of(body: bytes) -> str:
    return AnyMessage.FromString(body).type_url


@contextlib.asynccontextmanager
async def serving(
    *resources: Resource, listen: str = "127.0.0.1:0", limits: Limits | None = None
) -> AsyncIterator[AdsServer]:
    server = AdsServer(listen, group_of, limits=limits)
    await server.start()
    server.set_snapshot("router", Snapshot(resources))
    try:
        yield server
    finally:
        await server.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 — what is waited for is another party's state
            await asyncio.sleep(0.005)


async def put(server: AdsServer, *resources: Resource) -> None:
    """Set the snapshot and wait until it is served: a change soon after another waits for a while."""
    snapshot = Snapshot(resources)
    server.set_snapshot("router", snapshot)
    await until(lambda: server.snapshot("router") == snapshot)


def counted(reason: str) -> float:
    return REGISTRY.get_sample_value("modalmesh_xds_ended_total", {"reason": reason}) or 0.0


class Holder:
    """A consumer that keeps what it is told."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.held: dict[str, str] = {}
        self.refuse: set[str] = set()

    def __call__(self, update: Update) -> None:
        texts = {name: text_of(body) for name, body in update.changed.items()}
        if self.refuse & set(texts.values()):
            raise DocumentError("not like this")
        self.updates.append(update)
        self.held.update(texts)
        for name in update.removed:
            self.held.pop(name, None)


@contextlib.asynccontextmanager
async def client_of(address: str, holder: Holder, identifier: str = "n") -> AsyncIterator[AdsClient]:
    client = AdsClient(address, node(identifier), {POLICY: holder}, max_backoff=0.1)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class RawPeer:
    """A client made by hand: sends what a test wants, keeps every DATA frame as it came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.data: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.events: list[h2.events.Event] = []
        self.closed = False
        self.give_credit = True

    @classmethod
    async def connect(cls, server: AdsServer, window: int | None = None) -> Self:
        host, port = split_address(server.address)
        if port:
            peer = cls(*await asyncio.open_connection(host, port))
        else:
            peer = cls(*await asyncio.open_unix_connection(host))
        if window is not None:
            peer.h2.local_settings = h2.settings.Settings(
                client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
            )
        peer.h2.initiate_connection()
        peer.flush()
        return peer

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def open(self, stream_id: int = 1, **changes: str | None) -> None:
        changed = {name.strip("_").replace("_", "-"): value for name, value in changes.items()}
        headers = {**HEADERS, **{(":" + n if ":" + n in HEADERS else n): v for n, v in changed.items()}}
        self.h2.send_headers(stream_id, [(name, value) for name, value in headers.items() if value is not None])
        self.flush()

    def send(self, data: bytes, stream_id: int = 1, *, end: bool = False) -> None:
        self.h2.send_data(stream_id, data, end_stream=end)
        self.flush()

    def ask(self, *names: str, nonce: str = "", first: bool = True, stream_id: int = 1, type_url: str = POLICY) -> None:
        request = discovery_pb2.DeltaDiscoveryRequest(
            type_url=type_url, resource_names_subscribe=names, response_nonce=nonce
        )
        if first:
            request.node.CopyFrom(node("raw"))
        self.send(prefixed(request.SerializeToString()), stream_id)

    async def read(self, done: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not done() and not self.closed:
                data = await self.reader.read(65536)
                if not data:
                    self.closed = True
                    return
                for event in self.h2.receive_data(data):
                    self.events.append(event)
                    if isinstance(event, h2.events.DataReceived):
                        self.data.append(event.data)
                        if self.give_credit:
                            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                        self.headers.append({str(name): str(value) for name, value in event.headers})
                self.flush()

    def saw(self, kind: type[h2.events.Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def complete(data: bytes) -> bool:
    return len(data) >= 5 and len(data) == 5 + int.from_bytes(data[1:5], "big")


def message_of(data: bytes) -> discovery_pb2.DeltaDiscoveryResponse:
    flag, length = struct.unpack(">BI", data[:5])
    assert (flag, length) == (0, len(data) - 5)
    return discovery_pb2.DeltaDiscoveryResponse.FromString(data[5:])


# --- what is on the wire


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_each_message_is_an_independent_zstd_frame(transport: str, folder: Path) -> None:
    listen = "127.0.0.1:0" if transport == "tcp" else f"unix:{folder}/xds.sock"
    async with serving(policy("a"), policy("b"), listen=listen) as server:
        peer = await RawPeer.connect(server)
        peer.open()
        peer.ask("*")
        await peer.read(lambda: len(peer.data) == 1)
        server.set_snapshot("router", Snapshot([policy("a", "2")]))
        peer.ask(nonce="1", first=False)
        await peer.read(lambda: len(peer.data) == 2)
        await peer.close()
    assert peer.headers[0] == {":status": "200", "content-type": "application/grpc", "content-encoding": "zstd"}
    # Backwards, each with a decompressor of its own: no frame needs another.
    second, first = (
        message_of(zstandard.ZstdDecompressor().decompress(frame, max_output_size=1 << 20))
        for frame in reversed(peer.data)
    )
    assert [resource.name for resource in first.resources] == ["a", "b"]
    assert [resource.name for resource in second.resources] == ["a"]
    assert list(second.removed_resources) == ["b"]


@pytest.mark.parametrize("accept", [None, "gzip, br", "zstd;q=0"])
async def test_without_zstd_messages_are_plain(accept: str | None) -> None:
    async with serving(policy("a")) as server:
        peer = await RawPeer.connect(server)
        peer.open(accept_encoding=accept)
        peer.ask("*")
        await peer.read(lambda: bool(peer.data))
        await peer.close()
    assert "content-encoding" not in peer.headers[0]
    assert [resource.name for resource in message_of(peer.data[0]).resources] == ["a"]


async def test_clients_share_the_very_same_bytes() -> None:
    async with serving(policy("a")) as server:
        peers = [await RawPeer.connect(server) for _ in range(3)]
        for peer in peers:
            peer.open()
            peer.ask("*")
            await peer.read(lambda peer=peer: bool(peer.data))  # type: ignore[misc]
            await peer.close()
    assert peers[0].data == peers[1].data == peers[2].data


async def test_one_connection_carries_many_clients() -> None:  # a relay in front of many Envoys
    async with serving(policy("a")) as server:
        peer = await RawPeer.connect(server)
        for stream_id in (1, 3, 5):
            peer.open(stream_id)
            peer.ask("*", stream_id=stream_id)
        await peer.read(lambda: len(peer.data) == 3)
        assert len(server.clients()) == 3
        await peer.close()
        await until(lambda: not server.clients())


@pytest.mark.parametrize("window", [1, 100, 20_000, 65_535])
async def test_a_narrow_window_delays_but_does_not_lose(window: int) -> None:
    text = "x" * 200 if window == 1 else "".join(map(chr, range(0x4E00, 0x4E00 + 15_000)))
    async with serving(policy("a", text)) as server:
        peer = await RawPeer.connect(server, window)
        peer.open(accept_encoding=None)
        peer.ask("*")
        await peer.read(lambda: complete(b"".join(peer.data)))
        await peer.close()
    assert text_of(message_of(b"".join(peer.data)).resources[0].resource.value) == text


async def test_pushes_keep_to_the_window_of_a_client_that_gives_no_credit() -> None:
    def noise(number: int) -> str:
        return "".join(chr(0x4E00 + (number * 5003 + index * 7919) % 20_000) for index in range(4000))

    async with serving(policy("a", noise(0))) as server:
        peer = await RawPeer.connect(server)
        peer.give_credit = False
        peer.open(accept_encoding=None)
        peer.ask("*")
        received = 0
        for number in range(1, 6):
            await peer.read(lambda: complete(b"".join(peer.data)))
            message = b"".join(peer.data)
            received += len(message)
            peer.data.clear()
            peer.ask(nonce=message_of(message).nonce, first=False)
            await put(server, policy("a", noise(number)))
        # Five messages of 12 kB fit; h2 would have raised had the sixth come whole.
        assert received == 5 * len(message)
        with contextlib.suppress(TimeoutError):
            await peer.read(lambda: bool(peer.data), 0.3)
        assert peer.data == []
        peer.h2.increment_flow_control_window(received)
        peer.h2.increment_flow_control_window(received, 1)
        peer.flush()
        await peer.read(lambda: complete(b"".join(peer.data)))
        assert text_of(message_of(b"".join(peer.data)).resources[0].resource.value) == noise(5)
        await peer.close()


# --- a client's life


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_a_client_gets_everything_and_then_what_changes(transport: str, folder: Path) -> None:
    listen = "127.0.0.1:0" if transport == "tcp" else f"unix:{folder}/xds.sock"
    holder = Holder()
    async with serving(policy("a"), policy("b"), listen=listen) as server, client_of(server.address, holder) as client:
        await until(lambda: holder.held == {"a": "1", "b": "1"})
        assert client.connected
        server.set_snapshot("router", Snapshot([policy("a", "2"), policy("c")]))
        await until(lambda: holder.held == {"a": "2", "c": "1"})
        assert set(holder.updates[-1].changed) == {"a", "c"}
        assert holder.updates[-1].removed == {"b"}
        await until(lambda: server.clients()[0].types[0].state == status_pb2.SYNCED)


async def test_equal_snapshots_push_nothing() -> None:
    holder = Holder()
    async with serving(policy("a")) as server, client_of(server.address, holder):
        await until(lambda: holder.held == {"a": "1"})
        server.set_snapshot("router", Snapshot([policy("a")]))
        server.set_snapshot("elsewhere", Snapshot([policy("z")]))
        server.set_snapshot("router", Snapshot([policy("a"), policy("b")]))
        await until(lambda: "b" in holder.held)
        assert [set(update.changed) for update in holder.updates] == [{"a"}, {"b"}]


async def test_a_refusal_is_seen_and_the_last_good_kept() -> None:
    holder = Holder()
    holder.refuse = {"bad"}
    async with serving(policy("a")) as server, client_of(server.address, holder):
        await until(lambda: [found.types[0].state for found in server.clients()] == [status_pb2.SYNCED])
        good = server.clients()[0].types[0].acked_version
        server.set_snapshot("router", Snapshot([policy("a", "bad")]))
        await until(lambda: server.clients()[0].types[0].state == status_pb2.NACKED)
        state = server.clients()[0].types[0]
        assert state.last_error == "not like this [MM1200]"
        assert state.acked_version == good
        assert state.sent_version == state.current_version != good
        assert holder.held == {"a": "1"}
        server.set_snapshot("router", Snapshot([policy("a", "2")]))
        await until(lambda: server.clients()[0].types[0].state == status_pb2.SYNCED)
        assert holder.held == {"a": "2"}
        assert server.clients()[0].types[0].last_error == ""


async def test_a_restarted_server_sends_only_what_differs(folder: Path) -> None:
    listen = f"unix:{folder}/xds.sock"
    holder = Holder()
    async with contextlib.AsyncExitStack() as clients:
        async with serving(policy("a"), policy("b"), listen=listen):
            client = await clients.enter_async_context(client_of(listen, holder))
            await until(lambda: holder.held == {"a": "1", "b": "1"})
        await until(lambda: not client.connected)
        assert holder.held == {"a": "1", "b": "1"}
        sent = REGISTRY.get_sample_value("modalmesh_xds_responses_total", {"type": "Policy"})
        async with serving(policy("a"), policy("b"), listen=listen) as server:
            await until(lambda: [c.types[0].state for c in server.clients()] == [status_pb2.SYNCED])
            assert REGISTRY.get_sample_value("modalmesh_xds_responses_total", {"type": "Policy"}) == sent
            state = server.clients()[0].types[0]
            assert state.acked_version == state.current_version != ""
        async with serving(policy("b"), policy("c"), listen=listen):
            await until(lambda: holder.held == {"b": "1", "c": "1"})
    assert len(holder.updates) == 2
    assert set(holder.updates[-1].changed) == {"c"}


async def test_a_server_without_a_snapshot_takes_nothing_away(folder: Path) -> None:
    listen = f"unix:{folder}/xds.sock"
    holder = Holder()
    async with contextlib.AsyncExitStack() as clients:
        async with serving(policy("a"), listen=listen):
            await clients.enter_async_context(client_of(listen, holder))
            await until(lambda: holder.held == {"a": "1"})
        starting = AdsServer(listen, group_of)
        await starting.start()
        await until(lambda: len(starting.clients()) == 1)
        assert holder.held == {"a": "1"}
        starting.set_snapshot("router", Snapshot([policy("a", "2")]))
        await until(lambda: holder.held == {"a": "2"})
        await starting.close()


async def test_fetch_returns_everything_once() -> None:
    async with serving(policy("a"), policy("b", "2")) as server:
        bodies = await fetch(server.address, node(), POLICY, 5.0)
        assert {name: text_of(body) for name, body in bodies.items()} == {"a": "1", "b": "2"}
        assert await fetch(server.address, node(), POLICY, 5.0, names=["b", "missing"]) == {"b": policy("b", "2").body}
        assert await fetch(server.address, node(), OTHER, 5.0) == {}
        await until(lambda: not server.clients())


async def test_fetch_says_why_it_failed(folder: Path) -> None:
    with pytest.raises(UnreachableError, match="nobody answers"):
        await fetch(f"unix:{folder}/none.sock", node(), POLICY, 5.0)
    async with serving() as server:
        with pytest.raises(FetchError, match="strangers have no group"):
            await fetch(server.address, node(role="stranger"), POLICY, 5.0)
        with pytest.raises(FetchError, match=r"no answer .* within 0\.1 s"):
            await fetch(server.address, node(role="later"), POLICY, 0.1)


async def test_a_large_configuration_travels_in_both_directions() -> None:
    many = [policy(f"a-rather-long-resource-name-{number}", str(number)) for number in range(5000)]
    holder = Holder()
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(*many))
        client = await stack.enter_async_context(client_of(server.address, holder))
        await until(lambda: len(holder.held) == 5000)
        # The next first request names 5000 versions: more than a flow control window.
        for connection in list(server._connections):
            connection.transport.abort()
        await until(lambda: not client.connected)
        await until(lambda: [found.types[0].state for found in server.clients()] == [status_pb2.SYNCED])
        assert len(holder.updates) == 1


# --- where it listens


async def test_a_taken_address_is_refused(folder: Path) -> None:
    async with serving() as first:
        with pytest.raises(ListenError, match="in use"):
            await AdsServer(first.address, group_of).start()
    async with serving(listen=f"unix:{folder}/xds.sock") as first:
        with pytest.raises(ListenError, match="in use"):
            await AdsServer(first.address, group_of).start()


async def test_a_socket_left_behind_is_replaced_and_private(folder: Path) -> None:
    path = folder / "xds.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with serving(policy("a"), listen=f"unix:{path}") as server:
        assert path.stat().st_mode & 0o777 == 0o600
        assert set(await fetch(server.address, node(), POLICY, 5.0)) == {"a"}
    assert not path.exists()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.1:18000", "[::]:0", "example.org:80", "nonsense"])
async def test_only_loopback_is_listened_on(listen: str) -> None:
    with pytest.raises(ListenError):
        await AdsServer(listen, group_of).start()


# --- hostile and broken peers; after each, the server serves the next client


@contextlib.asynccontextmanager
async def unharmed(limits: Limits | None = None, listen: str = "127.0.0.1:0") -> AsyncIterator[AdsServer]:
    async with serving(policy("a"), limits=limits, listen=listen) as server:
        yield server
        assert set(await fetch(server.address, node(), POLICY, 5.0)) == {"a"}
        await until(lambda: not server.clients() and not server._connections)


async def raw_answer(server: AdsServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*split_address(server.address))
    writer.write(data)
    answer = bytearray()
    async with asyncio.timeout(5.0):
        with contextlib.suppress(ConnectionResetError):
            while chunk := await reader.read(65536):
                answer += chunk
    writer.close()
    return bytes(answer)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n\r\n",
        b"POST / HTTP/1.0\r\n\r\n",
        b"PRI * HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 100,
    ],
    ids=["http1", "h2c-upgrade", "http10", "almost", "tls", "zeros"],
)
async def test_what_is_not_http2_gets_no_answer(data: bytes) -> None:
    async with unharmed() as server:
        assert await raw_answer(server, data) == b""


async def test_garbage_after_the_preface_ends_the_connection() -> None:
    async with unharmed() as server:
        answer = await raw_answer(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096)
        assert b"HTTP/1" not in answer


async def test_a_preface_in_pieces_is_accepted() -> None:
    async with unharmed() as server:
        peer = RawPeer(*await asyncio.open_connection(*split_address(server.address)))
        peer.h2.initiate_connection()
        for byte in peer.h2.data_to_send():
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
        peer.open()
        peer.ask("*")
        await peer.read(lambda: bool(peer.data))
        await peer.close()


async def test_silence_before_the_preface_ends_the_connection() -> None:
    async with unharmed(Limits(handshake=0.1)) as server:
        assert await raw_answer(server, b"PRI *") == b""


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/envoy.service.cluster.v3.ClusterDiscoveryService/DeltaClusters", "12"),
        ("/nonsense", "12"),
    ],
)
async def test_other_methods_are_not_implemented(path: str, status: str) -> None:
    async with unharmed() as server:
        peer = await RawPeer.connect(server)
        peer.open(path=path)
        await peer.read(lambda: peer.saw(h2.events.StreamEnded))
        await peer.close()
    assert peer.headers[0]["grpc-status"] == status
    assert path in peer.headers[0]["grpc-message"]
    assert DELTA_PATH in peer.headers[0]["grpc-message"]


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"method": "GET"}, {":status": "415"}),
        ({"content_type": "application/json"}, {":status": "415"}),
        ({"content_encoding": "gzip"}, {"grpc-status": "12"}),
        ({"grpc_encoding": "gzip"}, {"grpc-status": "12"}),
    ],
)
async def test_what_is_not_understood_is_refused(changes: dict[str, str], answer: dict[str, str]) -> None:
    async with unharmed() as server:
        peer = await RawPeer.connect(server)
        peer.open(1, **changes)
        await peer.read(lambda: peer.saw(h2.events.StreamEnded))
        await peer.close()
    assert answer.items() <= peer.headers[0].items()


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (prefixed(b"\x0a\xff\xff"), "3", "not a DeltaDiscoveryRequest"),
        (prefixed(b""), "3", "type_url is missing"),
        (prefixed(discovery_pb2.DeltaDiscoveryRequest(type_url=POLICY).SerializeToString()), "3", "node is missing"),
        (b"\x01\0\0\0\x01x", "12", "compressed"),
        (b"\0\xff\xff\xff\xff", "8", "4294967295 bytes"),
    ],
    ids=["truncated", "empty", "no-node", "compressed", "oversized"],
)
async def test_a_bad_message_ends_its_stream_only(data: bytes, status: str, text: str) -> None:
    async with unharmed() as server:
        peer = await RawPeer.connect(server)
        peer.open()
        peer.send(data)
        await peer.read(lambda: len(peer.headers) == 1)
        assert peer.headers[0]["grpc-status"] == status
        assert text in peer.headers[0]["grpc-message"].replace("%20", " ")
        peer.open(3)
        peer.ask("*", stream_id=3)
        await peer.read(lambda: bool(peer.data))
        await peer.close()


async def test_huge_headers_end_the_connection() -> None:
    async with unharmed() as server:
        peer = await RawPeer.connect(server)
        block = hpack.Encoder().encode([*HEADERS.items(), ("x-huge", "x" * 200_000)], huffman=False)
        pieces = [block[start : start + 16_384] for start in range(0, len(block), 16_384)]
        first = hyperframe.frame.HeadersFrame(1, pieces[0])
        rest = [hyperframe.frame.ContinuationFrame(1, piece) for piece in pieces[1:]]
        rest[-1].flags.add("END_HEADERS")
        peer.writer.write(b"".join(frame.serialize() for frame in (first, *rest)))
        await peer.read(lambda: peer.saw(h2.events.ConnectionTerminated))
        await peer.close()
    assert peer.headers == []


async def test_a_header_that_is_not_text_is_no_reason_to_crash() -> None:
    async with unharmed() as server:
        peer = await RawPeer.connect(server)
        headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        peer.h2.send_headers(1, [*headers, (b"x", b"\xff\xfe")])
        peer.flush()
        peer.ask("*")
        await peer.read(lambda: bool(peer.data) or peer.closed)
        await peer.close()


async def test_a_stream_without_requests_is_ended() -> None:
    async with unharmed(Limits(first_request=0.1)) as server:
        peer = await RawPeer.connect(server)
        peer.open()
        await peer.read(lambda: len(peer.headers) == 1)
        await peer.close()
    assert peer.headers[0]["grpc-status"] == "4"


async def test_a_half_closed_stream_is_ended_well() -> None:
    async with unharmed() as server:
        peer = await RawPeer.connect(server)
        peer.open()
        peer.ask("*")
        await peer.read(lambda: bool(peer.data))
        peer.send(b"", end=True)
        await peer.read(lambda: len(peer.headers) == 2)
        await peer.close()
    assert peer.headers[1]["grpc-status"] == "0"


async def test_a_response_that_nobody_answers_resets_the_stream() -> None:
    before = counted("ack_timeout")
    async with unharmed(Limits(ack_timeout=0.2)) as server:
        peer = await RawPeer.connect(server)
        peer.open()
        peer.ask("*")
        await peer.read(lambda: peer.saw(h2.events.StreamReset))
        await peer.close()
    assert counted("ack_timeout") == before + 1


async def test_a_client_that_gives_no_credit_costs_one_response_and_its_stream() -> None:
    noise = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))
    async with unharmed(Limits(write_timeout=0.3)) as server:
        peer = await RawPeer.connect(server)
        peer.give_credit = False
        peer.open(accept_encoding=None)
        await put(server, policy("a"), *(policy(str(n), noise) for n in range(20)))
        peer.ask("*")
        await peer.read(lambda: bool(peer.data))
        for number in range(10):
            server.set_snapshot("router", Snapshot([policy("a"), *(policy(str(n), noise) for n in range(number))]))
        await peer.read(lambda: peer.saw(h2.events.StreamReset))
        assert sum(map(len, peer.data)) <= 65_535
        await peer.close()
        await put(server, policy("a"))


async def test_a_peer_that_never_reads_is_cut_off(folder: Path) -> None:
    before = counted("overflow")
    # A unix socket: the kernel keeps less for the peer than with TCP.
    async with unharmed(listen=f"unix:{folder}/xds.sock") as server:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.connect(split_address(server.address)[0])
        loop = asyncio.get_running_loop()
        peer = h2.connection.H2Connection()
        peer.initiate_connection()
        await loop.sock_sendall(sock, peer.data_to_send())
        for _ in range(2000):
            peer.ping(b"12345678")
        pings = peer.data_to_send()
        async with asyncio.timeout(20.0):
            with contextlib.suppress(OSError):
                while counted("overflow") == before:
                    await loop.sock_sendall(sock, pings)
                    await asyncio.sleep(0)
        sock.close()
    assert counted("overflow") == before + 1


async def test_streams_opened_and_abandoned_without_end_cost_the_connection() -> None:
    async with unharmed() as server:
        peer = await RawPeer.connect(server)
        for stream_id in range(1, 1001, 2):
            peer.h2.send_headers(stream_id, list(HEADERS.items()))
            peer.h2.reset_stream(stream_id)
        peer.flush()
        await peer.read(lambda: peer.saw(h2.events.ConnectionTerminated))
        await peer.close()


async def test_a_client_with_nothing_to_hear_keeps_its_stream() -> None:
    async with serving(policy("a")) as server:
        client = AdsClient(server.address, node("quiet"), {POLICY: lambda update: None}, keepalive=0.05)
        task = asyncio.create_task(client.run())
        await until(lambda: client.connected)
        since = server.clients()[0].connected_since
        await asyncio.sleep(0.5)  # many silences
        assert server.clients()[0].connected_since == since
        task.cancel()


async def test_a_silent_peer_is_pinged_and_then_given_up() -> None:
    before = counted("keepalive")
    async with unharmed(Limits(keepalive_idle=0.1, keepalive_timeout=0.2)) as server:
        peer = await RawPeer.connect(server)
        reader = peer.reader
        async with asyncio.timeout(5.0):
            data = b""
            while chunk := await reader.read(65536):  # reads, and never answers
                data += chunk
        assert b"modalmsh" in data
        await peer.close()
    assert counted("keepalive") == before + 1


async def test_a_peer_that_stops_reading_is_forgotten_with_all_that_waits_for_it(folder: Path) -> None:
    noise = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))
    limits = Limits(write_timeout=0.2)
    async with unharmed(limits, listen=f"unix:{folder}/xds.sock") as server:
        await put(server, policy("a"), *(policy(str(number), noise) for number in range(50)))
        peer = await RawPeer.connect(server, 2**31 - 1)
        peer.h2.increment_flow_control_window(2**30)
        peer.open(accept_encoding=None)
        peer.ask("*")
        await until(lambda: len(server._connections) == 1)
        await until(lambda: not server._connections)
        await peer.close()
        await put(server, policy("a"))


async def test_a_peer_that_answers_pings_stays() -> None:
    async with serving(policy("a"), limits=Limits(keepalive_idle=0.05, keepalive_timeout=0.1)) as server:
        holder = Holder()
        async with client_of(server.address, holder) as client:
            await until(lambda: holder.held == {"a": "1"})
            before = counted("keepalive")
            await asyncio.sleep(0.6)
            assert client.connected
            assert counted("keepalive") == before


async def test_connections_are_bounded() -> None:
    async with serving(policy("a"), limits=Limits(max_connections=2)) as server:
        peers = [await RawPeer.connect(server) for _ in range(2)]
        await until(lambda: len(server._connections) == 2)
        assert await raw_answer(server, b"") == b""
        await peers[0].close()
        await until(lambda: len(server._connections) == 1)
        assert set(await fetch(server.address, node(), POLICY, 5.0)) == {"a"}
        await peers[1].close()


async def test_a_mistake_in_one_group_function_costs_its_connection_only() -> None:
    def broken(of: base_pb2.Node) -> str:
        if of.id == "raw":
            raise KeyError(of.id)
        return "router"

    server = AdsServer("127.0.0.1:0", broken)
    await server.start()
    server.set_snapshot("router", Snapshot([policy("a")]))
    peer = await RawPeer.connect(server)
    peer.open()
    peer.ask("*")
    await peer.read(lambda: peer.closed)
    assert set(await fetch(server.address, node(), POLICY, 5.0)) == {"a"}
    await peer.close()
    await server.close()


async def test_closing_tells_clients_to_come_back() -> None:
    server = AdsServer("127.0.0.1:0", group_of)
    await server.start()
    peer = await RawPeer.connect(server)
    peer.open()
    peer.ask("*")
    await until(lambda: len(server.clients()) == 1)
    closing: Awaitable[None] = asyncio.create_task(server.close())
    await peer.read(lambda: peer.saw(h2.events.ConnectionTerminated))
    await peer.close()
    await closing
    assert peer.headers[1]["grpc-status"] == "14"
    assert server.clients() == []
