"""The clients of the fan-out benchmark, as one process: as light as clients can be, so that they measure the server.

Why not grpc.aio: 200 of its clients are themselves the bottleneck. Here all clients get the same bytes, so a message is
decompressed and parsed once, and its ACK is made once; a client costs a look-up and a write. What Envoy does on the
wire is done: wide windows, SETTINGS and PING answered, every response acknowledged.

Commands come as lines of JSON on standard input; each is answered with one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

import hpack
import uvloop
import zstandard

from tests.bench.xds_world import mark_of, service_name
from xds.grpc_wire import DELTA_PATH, SOTW_PATH, prefixed
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.types import CLUSTER, ENDPOINT

WINDOW = 1 << 24
CREDIT = 1 << 22


@dataclass(slots=True)
class Known:
    """A message as it was parsed once."""

    type_url: str
    ack: bytes
    mark: int


@dataclass(slots=True)
class Load:
    """What all clients share."""

    delta: bool
    zstd: bool
    names: list[str]
    clients: int
    parsed: dict[bytes, Known | None] = field(default_factory=dict)
    synced: int = 0
    messages: int = 0
    received: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def parse(self, message: bytes) -> Known:
        """Parse a message and make its ACK."""
        if self.delta:
            delta = discovery_pb2.DeltaDiscoveryResponse.FromString(message)
            ack = discovery_pb2.DeltaDiscoveryRequest(
                type_url=delta.type_url, response_nonce=delta.nonce
            ).SerializeToString()
            bodies = [item.resource.value for item in delta.resources]
            type_url = delta.type_url
        else:
            sotw = discovery_pb2.DiscoveryResponse.FromString(message)
            ack = discovery_pb2.DiscoveryRequest(
                version_info=sotw.version_info,
                type_url=sotw.type_url,
                resource_names=self.names if sotw.type_url == ENDPOINT else (),
                response_nonce=sotw.nonce,
            ).SerializeToString()
            bodies = [item.value for item in sotw.resources]
            type_url = sotw.type_url
        mark = mark_of(bodies[0]) if type_url == ENDPOINT and len(bodies) == 1 else 0
        return Known(type_url, data_frame(prefixed(ack)), mark)

    def first(self) -> bytes:
        """Return what a client sends first."""
        node = base_pb2.Node(id="bench", cluster="bench", user_agent_name="envoy")
        path = DELTA_PATH if self.delta else SOTW_PATH
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "bench"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *([("accept-encoding", "zstd")] if self.zstd else []),
        ]
        requests: list[Any]
        if self.delta:
            requests = [
                discovery_pb2.DeltaDiscoveryRequest(node=node, type_url=CLUSTER),
                discovery_pb2.DeltaDiscoveryRequest(type_url=ENDPOINT, resource_names_subscribe=self.names),
            ]
        else:
            requests = [
                discovery_pb2.DiscoveryRequest(node=node, type_url=CLUSTER),
                discovery_pb2.DiscoveryRequest(type_url=ENDPOINT, resource_names=self.names),
            ]
        return b"".join(
            (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                frame(0x4, 0, 0, b"\0\x04" + WINDOW.to_bytes(4, "big")),
                frame(0x8, 0, 0, WINDOW.to_bytes(4, "big")),
                frame(0x1, 0x4, 1, hpack.Encoder().encode(headers)),
                *(data_frame(prefixed(request.SerializeToString())) for request in requests),
            )
        )


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def data_frame(payload: bytes) -> bytes:
    pieces = [payload[start : start + 16_384] for start in range(0, len(payload), 16_384)]
    return b"".join(frame(0x0, 0, 1, piece) for piece in pieces)


class Client(asyncio.Protocol):
    """One client."""

    def __init__(self, load: Load, first: bytes) -> None:
        self.load = load
        self.first = first
        self.buffer = b""
        self.body = b""
        self.seen = 0
        self.credit = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.first)

    def data_received(self, data: bytes) -> None:
        if self.buffer:
            data = self.buffer + data
        position = 0
        while len(data) - position >= 9:
            stop = position + 9 + int.from_bytes(data[position : position + 3], "big")
            if stop > len(data):
                break
            kind, flags = data[position + 3], data[position + 4]
            if kind == 0x0:
                self.on_data(data[position + 9 : stop], stop - position - 9)
            elif kind == 0x4 and not flags:
                self.transport.write(frame(0x4, 1, 0, b""))
            elif kind == 0x6 and not flags:
                self.transport.write(frame(0x6, 1, 0, data[position + 9 : stop]))
            elif kind in (0x3, 0x7):
                raise SystemExit(f"the server ended a stream: {data[position:stop]!r}")
            position = stop
        self.buffer = data[position:]

    def on_data(self, payload: bytes, length: int) -> None:
        load = self.load
        load.received += length
        self.credit += length
        if self.credit >= CREDIT:
            count = self.credit.to_bytes(4, "big")
            self.transport.write(frame(0x8, 0, 0, count) + frame(0x8, 0, 1, count))
            self.credit = 0
        self.body = self.body + payload if self.body else payload
        if load.zstd:
            self.compressed()
        else:
            self.plain()

    def compressed(self) -> None:
        load = self.load
        if self.body not in load.parsed:
            message = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(self.body)
            whole = len(message) >= 5 and len(message) == 5 + int.from_bytes(message[1:5], "big")
            load.parsed[self.body] = load.parse(message[5:]) if whole else None
        known = load.parsed[self.body]
        if known is not None:
            self.body = b""
            self.take(known)

    def plain(self) -> None:
        load = self.load
        while len(self.body) >= 5:
            end = 5 + int.from_bytes(self.body[1:5], "big")
            if len(self.body) < end:
                return
            message, self.body = self.body[5:end], self.body[end:]
            known = load.parsed.get(message)
            if known is None:
                known = load.parsed[message] = load.parse(message)
            self.take(known)

    def take(self, known: Known) -> None:
        load = self.load
        # After all that has come was read: the clients of a real fleet do not wait for each other.
        asyncio.get_running_loop().call_soon(self.transport.write, known.ack)
        load.messages += 1
        self.seen += 1
        if self.seen == 2:
            load.synced += 1
            if load.synced == load.clients:
                load.done[0] = time.monotonic()
                load.changed.set()
        if known.mark:
            count = load.counts[known.mark] = load.counts.get(known.mark, 0) + 1
            if count == load.clients:
                load.done[known.mark] = time.monotonic()
                load.changed.set()


async def wait_for(load: Load, mark: int, limit: float) -> float:
    async with asyncio.timeout(limit):
        while mark not in load.done:
            load.changed.clear()
            await load.changed.wait()
    if mark:
        load.parsed.clear()
    return load.done[mark]


async def obey(load: Load, command: dict[str, Any], port: int) -> dict[str, Any]:
    if command["do"] == "connect":
        began = time.monotonic()
        first = load.first()
        loop = asyncio.get_running_loop()
        for _ in range(load.clients):
            await loop.create_connection(lambda: Client(load, first), "127.0.0.1", port)
        return {"seconds": await wait_for(load, 0, 120.0) - began}
    if command["do"] == "wait":
        return {"last": await wait_for(load, command["mark"], 60.0)}
    return {"messages": load.messages, "bytes": load.received}


async def main(arguments: argparse.Namespace) -> None:
    names = [service_name(number) for number in range(arguments.services)]
    load = Load(arguments.form == "delta", arguments.zstd, names, arguments.clients)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await obey(load, json.loads(line), arguments.port)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--form", choices=["delta", "sotw"], default="delta")
    parser.add_argument("--services", type=int, default=500)
    parser.add_argument("--zstd", action="store_true")
    uvloop.run(main(parser.parse_args()))
