"""One server of the fan-out benchmark, as a process: ours, or the floor.

The floor is ``grpc.aio`` without any protocol logic: bytes serialised once and shared, sent to every stream; requests
are not parsed: the first two on a stream bring clusters and endpoints.

Commands come as lines of JSON on standard input; each is answered with one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog
import uvloop

from tests.bench.xds_world import World, cluster, endpoint_set
from xds.frames import encode
from xds.grpc_wire import DELTA_PATH, SOTW_PATH
from xds.limits import Limits
from xds.pushes import Form, Response
from xds.server import AdsServer
from xds.snapshot import Resource
from xds.store import SnapshotStore
from xds.types import CLUSTER, ENDPOINT


class Ours:
    """The server of this project."""

    def __init__(self, world: World, quiet: float) -> None:
        self.world = world
        limits = Limits(keepalive_idle=300.0)
        self.server = AdsServer("127.0.0.1:0", lambda _: "g", limits=limits, store=SnapshotStore(quiet=quiet))

    async def start(self) -> int:
        await self.server.start()
        self.server.set_snapshot("g", self.world.snapshot)
        return int(self.server.address.rpartition(":")[2])

    def change(self, mark: int) -> float:
        self.world.change(mark)
        began = time.monotonic()
        self.server.set_snapshot("g", self.world.snapshot)
        return began

    def churn(self, number: int) -> None:
        """A service comes or goes, and endpoints of another change."""
        extra = 90_000 + number % 50
        if number % 2:
            snapshot = self.world.snapshot.updated([cluster(extra), endpoint_set(extra)])
        else:
            old = cluster(90_000 + (number - 1) % 50).name
            snapshot = self.world.snapshot.updated((), [(CLUSTER, old), (ENDPOINT, old)])
        self.world.snapshot = snapshot.updated([endpoint_set(1 + number % 100, 1 + number % 60_000)])
        self.server.set_snapshot("g", self.world.snapshot)


class Floor:
    """grpc.aio, no protocol logic."""

    def __init__(self, world: World, form: Form) -> None:
        self.world = world
        self.form = form
        self.number = 1
        self.queues: dict[asyncio.Queue[bytes], None] = {}
        self.initial = {
            url: self._bytes(url, tuple(world.snapshot.of_type(url).values())) for url in (CLUSTER, ENDPOINT)
        }

    def _bytes(self, type_url: str, resources: tuple[Resource, ...]) -> bytes:
        self.number += 1
        return encode(Response(self.form, type_url, self.number, f"{self.number:016x}", resources))

    async def start(self) -> int:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = (DELTA_PATH if self.form is Form.DELTA else SOTW_PATH).strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.server = server
        return int(port)

    async def _serve(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.queues[queue] = None
        reader = asyncio.create_task(self._read(requests, queue))
        try:
            while True:
                await context.write(await queue.get())
        finally:
            reader.cancel()
            self.queues.pop(queue, None)

    async def _read(self, requests: AsyncIterator[bytes], queue: asyncio.Queue[bytes]) -> None:
        first = [CLUSTER, ENDPOINT]
        async for _ in requests:
            if first:
                queue.put_nowait(self.initial[first.pop(0)])

    def change(self, mark: int) -> float:
        data = self._bytes(ENDPOINT, (self.world.change(mark),))
        began = time.monotonic()
        for queue in self.queues:
            queue.put_nowait(data)
        return began


def rss_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise RuntimeError("no VmRSS")


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def obey(server: Ours | Floor, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "change":
        return {"began": server.change(command["mark"])}
    if command["do"] == "burst":
        began = server.change(command["mark"])
        for mark in range(command["mark"] + 1, command["mark"] + command["count"]):
            await asyncio.sleep(command["pause"])
            server.change(mark)
        return {"began": began}
    if command["do"] == "churn":
        assert isinstance(server, Ours)
        for number in range(command["rounds"]):
            server.churn(number)
            await asyncio.sleep(0)
        return {"rss_kib": rss_kib()}
    return {"rss_kib": rss_kib(), "cpu": cpu()}


async def main(arguments: argparse.Namespace) -> None:
    world = World(arguments.services)
    form = Form(arguments.form)
    server: Ours | Floor = Ours(world, arguments.quiet) if arguments.kind == "ours" else Floor(world, form)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"port": await server.start()}), flush=True)
    while line := await reader.readline():
        print(json.dumps(await obey(server, json.loads(line))), flush=True)
    if isinstance(server, Floor):
        await server.server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ours", "floor"])
    parser.add_argument("--form", choices=["delta", "sotw"], default="delta")
    parser.add_argument("--services", type=int, default=500)
    parser.add_argument("--quiet", type=float, default=0.1)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    uvloop.run(main(parser.parse_args()))
