"""The control plane before a real Envoy, router and embedding child, over sockets of one short directory.

Backends are gRPC servers that say which one they are; models are called by name, so nothing here depends on what an
encoder finds similar.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from controlplane.compile.policy import POLICY
from modalmesh.base.errors import XdsError
from modalmesh.launcher import envoy_admin
from xds.pb.xds import status_pb2
from xds.status import fetch_status
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

pytestmark = pytest.mark.e2e

LIMIT = 60.0
SERVICE = "inference.GRPCInferenceService"
LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def backend(name: str) -> tuple[Any, int]:
    """A KServe server that answers with its name, the model it was asked for, and the length of what it was sent."""

    def infer(request: Any, context: Any) -> Any:
        seen = dict(context.invocation_metadata())
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version=name, id=request.id)
        response.parameters["cluster header"].string_param = seen.get("x-modalmesh-cluster", "")
        response.parameters["bytes"].int64_param = sum(len(item) for item in request.raw_input_contents)
        return response

    def unary(function: Callable[[Any, Any], Any], kind: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            function, request_deserializer=kind.FromString, response_serializer=lambda reply: reply.SerializeToString()
        )

    def live(request: Any, context: Any) -> Any:
        del request, context
        return service_pb2.ServerLiveResponse(live=True)

    # grpc.health.v1.HealthCheckResponse{status: SERVING}
    health = grpc.unary_unary_rpc_method_handler(lambda request, context: b"\x08\x01")
    server = grpc.server(ThreadPoolExecutor(4), options=LARGE)
    methods = {
        "ModelInfer": unary(infer, service_pb2.ModelInferRequest),
        "ServerLive": unary(live, service_pb2.ServerLiveRequest),
    }
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, methods),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": health}),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def eventually(what: str, condition: Callable[[], Any]) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + LIMIT
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
        time.sleep(0.02)


class Stack:
    """The processes, and what a test asks of them."""

    def __init__(self, directory: Path, ports: dict[str, int]) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.documents = directory / "docs"
        self.documents.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.first: dict[tuple[str, str], str] = {}
        (self.documents / "routes.yaml").write_text(ROUTES)
        self.write_services(ports)

    def write_services(self, ports: dict[str, int], extra: str = "") -> None:
        services = "".join(
            f"- name: {name}\n  endpoints:\n  - {{host: 127.0.0.1, port: {port}, tags: [protocol=grpc]}}\n"
            for name, port in ports.items()
        )
        temporary = self.documents / "new"
        temporary.write_text(f"services:\n{services}{extra}")
        temporary.replace(self.documents / "service-discovery.yaml")

    def start(self, name: str, *command: str) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MODALMESH_")}
        environment = {
            **clean,
            "MODALMESH_RUNTIME_DIR": str(self.run),
            "MODALMESH_XDS__LISTEN": f"unix:{self.directory}/xds.sock",
            "MODALMESH_GATEWAY__LISTEN": f"unix:{self.gateway}",
            "MODALMESH_CONTROLPLANE__DOCUMENTS": str(self.documents),
            "MODALMESH_LOG__FORMAT": "json",
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "modalmesh.cli", *command], env=environment, stdout=log, stderr=log
            )

    def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(LIMIT)

    @property
    def gateway(self) -> Path:
        return self.directory / "gateway.sock"

    def log(self, name: str) -> list[dict[str, Any]]:
        text = (self.directory / f"{name}.log").read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def types(self) -> dict[tuple[str, str], status_pb2.Type]:
        """Group and type → what its client has."""
        try:
            clients = fetch_status(self.run / "controlplane.sock", 5)
        except XdsError:
            return {}
        return {(client.group, item.type_url): item for client in clients for item in client.types}

    def acknowledged(self) -> dict[tuple[str, str], str]:
        return {key: item.acked_version for key, item in self.types().items()}

    def as_first(self) -> bool:
        """Whether clients hold what the documents at the start say: equal documents give equal versions."""
        return self.synced() and self.acknowledged() == self.first

    def synced(self) -> bool:
        wanted = [("envoy", url) for url in (CLUSTER, ENDPOINT, LISTENER, ROUTE)] + [("router", POLICY)]
        types = self.types()
        return all(key in types and types[key].state == status_pb2.SYNCED for key in wanted)

    def admin(self, path: str) -> str:
        return envoy_admin.get(self.run / "envoy-admin.sock", path, timeout=10)

    def stat(self, name: str) -> int:
        found = re.search(
            rf"^{re.escape(name)}: (\d+)$", self.admin(f"/stats?filter=^{re.escape(name)}$"), re.MULTILINE
        )
        assert found, name
        return int(found[1])

    def hosts(self, service: str) -> list[str]:
        """Addresses that Envoy holds for a service."""
        return sorted(set(re.findall(rf"^{service}::(127[^:]*:\d+)::health", self.admin("/clusters"), re.MULTILINE)))

    def call(self, method: str, request: Any, reply: Any, metadata: dict[str, str] | None = None) -> Any:
        with grpc.insecure_channel(f"unix:{self.gateway}", options=LARGE) as channel:
            stub = channel.unary_unary(
                f"/{SERVICE}/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=reply.FromString,
            )
            return stub(request, timeout=LIMIT, metadata=tuple((metadata or {}).items()))

    def infer(self, model: str, size: int = 10, metadata: dict[str, str] | None = None, id_: str = "") -> Any:
        request = service_pb2.ModelInferRequest(model_name=model, id=id_, raw_input_contents=[bytes(size)])
        request.inputs.add(name="in", datatype="UINT8", shape=[size])
        return self.call("ModelInfer", request, service_pb2.ModelInferResponse, metadata)

    def logged(self, id_: str) -> dict[str, Any]:
        """The access log's line of the request with a KServe id."""

        def find() -> dict[str, Any] | None:
            lines = [json.loads(line) for line in (self.run / "access.log").read_text().splitlines()]
            return next((line for line in lines if (line["decision"] or {}).get("request_id") == id_), None)

        found = eventually(f"an access log line with id {id_}", find)
        assert isinstance(found, dict)
        return found


ROUTES = """
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: inference}
spec:
  hosts: ["*"]
  http:
    - match: [{uri: {prefix: /inference.GRPCInferenceService/}}]
      route: [{destination: {host: one}}]
---
apiVersion: modalmesh.io/v1alpha1
kind: SemanticRoute
metadata: {name: choice}
spec:
  services:
    - {service: one, model: model-one, modalities: [text], description: questions about animals}
    - {service: two, model: model-two, modalities: [text], description: questions about money}
"""


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    servers = {name: backend(name) for name in ("one", "two", "three")}
    yield {name: port for name, (_, port) in servers.items()}
    for server, _ in servers.values():
        server.stop(0).wait(5)


@pytest.fixture(scope="module")
def stack(ports: dict[str, int]) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="mm-") as directory:
        found = Stack(Path(directory), {name: ports[name] for name in ("one", "two")})
        try:
            found.start("controlplane", "controlplane")
            found.start("envoy", "envoy", "start")
            found.start("router", "router")
            eventually("every type acknowledged", found.synced)
            eventually("backends well", lambda: healthy(found))
            found.first = found.acknowledged()
            yield found
        finally:
            for name in list(found.processes):
                found.stop(name, signal.SIGKILL)


@pytest.fixture
def restored(stack: Stack, ports: dict[str, int]) -> Iterator[Stack]:
    """The stack, everything as it was when the test is over: versions are made from content, so they tell."""
    yield stack
    stack.write_services({name: ports[name] for name in ("one", "two")})
    eventually("everything as before", stack.as_first)


def healthy(stack: Stack) -> bool:
    text = stack.admin("/clusters")
    return all(re.search(rf"^{name}::127.*::health_flags::healthy$", text, re.MULTILINE) for name in ("one", "two"))


def test_every_type_is_acknowledged_over_zstd(stack: Stack) -> None:
    clients = fetch_status(stack.run / "controlplane.sock", 5)
    assert {(client.group, client.encoding) for client in clients if client.group == "envoy"} == {("envoy", "zstd")}
    resources = {key: item.resources for key, item in stack.types().items()}
    assert resources == {
        ("envoy", CLUSTER): 3,
        ("envoy", ENDPOINT): 2,
        ("envoy", LISTENER): 1,
        ("envoy", ROUTE): 1,
        ("router", POLICY): 1,
    }


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(item)


def test_envoy_holds_http2_everywhere(stack: Stack) -> None:
    dump = json.loads(stack.admin("/config_dump"))
    managers = [item for item in walk(dump) if item.get("@type", "").endswith(".HttpConnectionManager")]
    clusters = [item for item in walk(dump) if item.get("@type", "").endswith(".cluster.v3.Cluster")]
    assert len(managers) >= 2  # the gateway and the decompressing listener
    assert {item["name"] for item in clusters} == {
        "one",
        "two",
        "modalmesh-router",
        "modalmesh-xds",
        "modalmesh-controlplane",
    }
    assert {item["codec_type"] for item in managers} == {"HTTP2"}
    for cluster in clusters:
        (options,) = cluster["typed_extension_protocol_options"].values()
        assert list(options["explicit_http_config"]) == ["http2_protocol_options"], cluster["name"]
    checks = [check for cluster in clusters for check in cluster.get("health_checks", [])]
    assert [list(check["grpc_health_check"]) for check in checks] == [[], []]


def test_http1_gets_no_answer(stack: Stack) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(stack.gateway))
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        received = b""
        try:
            while chunk := client.recv(4096):
                received += chunk
        except ConnectionResetError:
            pass
    assert received == b""


def test_the_router_chooses_the_service_of_a_named_model(stack: Stack) -> None:
    assert stack.infer("model-one").model_version == "one"
    reply = stack.infer("model-two", id_="named-two")
    assert (reply.model_version, reply.model_name) == ("two", "model-two")
    # The backend has no use for the router's header.
    assert reply.parameters["cluster header"].string_param == ""
    line = stack.logged("named-two")
    assert (line["decision"]["service"], line["decision"]["reason"]) == ("two", "named")
    assert (line["upstream_cluster"], line["route"], line["grpc_status"]) == ("two", "inference.0.chosen", "OK")
    assert (line["method"], line["path"], line["response_code"]) == ("POST", f"/{SERVICE}/ModelInfer", 200)
    assert line["request_id"]
    assert 0 <= line["router_us"] < LIMIT * 1e6
    assert 0 < line["backend_us"] < LIMIT * 1e6
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])


def test_a_large_picture_passes_and_a_larger_one_is_refused(stack: Stack) -> None:
    reply = stack.infer("model-two", size=12 << 20)
    assert (reply.model_version, reply.parameters["bytes"].int64_param) == ("two", 12 << 20)
    with pytest.raises(grpc.RpcError) as caught:
        stack.infer("model-two", size=17 << 20)
    assert "Payload Too Large" in str(caught.value)


def test_a_forged_choice_has_no_effect(stack: Stack) -> None:
    assert stack.infer("unknown", metadata={"x-modalmesh-cluster": "two"}).model_version == "one"
    assert stack.infer("model-one", metadata={"x-modalmesh-cluster": "modalmesh-controlplane"}).model_version == "one"


def test_only_inference_is_shown_to_the_router(stack: Stack) -> None:
    streams = "http.gateway.ext_proc.streams_started"
    before = stack.stat(streams)
    assert stack.call("ServerLive", service_pb2.ServerLiveRequest(), service_pb2.ServerLiveResponse).live
    with pytest.raises(grpc.RpcError), grpc.insecure_channel(f"unix:{stack.gateway}") as channel:
        channel.unary_unary("/no.Such/Method")(b"", timeout=LIMIT)
    assert stack.stat(streams) == before
    stack.infer("model-one")
    assert stack.stat(streams) == before + 1


def test_without_a_router_requests_go_where_the_plain_routes_send_them(stack: Stack) -> None:
    stack.stop("router", signal.SIGKILL)
    try:
        assert stack.infer("model-two").model_version == "one"
        # Also what a client asked for itself.
        assert stack.infer("model-two", metadata={"x-modalmesh-cluster": "two"}).model_version == "one"
    finally:
        stack.start("router", "router")
        eventually("the router back", stack.synced)
    assert eventually("the router asked", lambda: stack.infer("model-two").model_version == "two")


def test_an_edited_endpoint_reaches_envoy(restored: Stack, ports: dict[str, int]) -> None:
    clusters_before = restored.types()["envoy", CLUSTER]
    restored.write_services({"one": ports["one"], "two": ports["three"]})
    begun = time.monotonic()
    eventually("the new endpoint", lambda: restored.hosts("two") == [f"127.0.0.1:{ports['three']}"])
    print(f"edit to Envoy: {time.monotonic() - begun:.3f} s")
    assert eventually("the new backend", lambda: restored.infer("model-two").model_version == "three")
    # Nothing else was sent.
    assert restored.types()["envoy", CLUSTER].since == clusters_before.since


def test_endpoints_may_be_names(restored: Stack, ports: dict[str, int]) -> None:
    extra = (
        "- name: named\n  endpoints:\n"
        f"  - {{host: localhost, port: {ports['three']}}}\n"
        "  - {host: name.invalid, port: 1}\n"
        "- name: lost\n  endpoints: [{host: name.invalid, port: 1, tags: [protocol=grpc]}]\n"
    )
    restored.write_services({"one": ports["one"], "two": ports["two"]}, extra=extra)
    eventually("the resolved name", lambda: restored.hosts("named") == [f"127.0.0.1:{ports['three']}"])
    eventually("every type acknowledged", restored.synced)
    assert restored.types()["envoy", CLUSTER].resources == 5
    assert restored.types()["envoy", ENDPOINT].resources == 2


def test_a_service_comes_and_goes_without_a_request_lost(restored: Stack, ports: dict[str, int]) -> None:
    routes = restored.documents / "routes.yaml"
    before = routes.read_text()
    restored.write_services({"one": ports["one"], "two": ports["two"], "three": ports["three"]})
    routes.write_text(before + "    - {service: three, model: model-three, modalities: [text], description: sport}\n")
    try:
        # Whatever is answered in between comes from a backend: the router never chooses a cluster that is not there.
        assert eventually("the new service", lambda: restored.infer("model-three").model_version == "three")
        with_all = restored.acknowledged()
    finally:
        routes.write_text(before)
    restored.write_services({"one": ports["one"], "two": ports["two"]})
    eventually("its end", lambda: restored.infer("model-three").model_version == "one" and restored.as_first())
    assert with_all != restored.first


def test_a_broken_edit_is_refused_with_its_line_and_changes_nothing(restored: Stack, ports: dict[str, int]) -> None:
    said = len(restored.log("controlplane"))
    restored.write_services({"one": ports["one"], "two": ports["three"]}, extra="- name: broken\n  endpoint: []\n")

    def refused() -> list[str]:
        lines = restored.log("controlplane")[said:]
        return [line["what"] for line in lines if line["event"] == "problem"]

    problems = eventually("the refusal", refused)
    file = re.escape(str(restored.documents / "service-discovery.yaml"))
    assert any(re.match(rf"{file}:9: field services\[2\]\.endpoint is not supported", problem) for problem in problems)
    assert restored.hosts("two") == [f"127.0.0.1:{ports['two']}"]
    assert {key: item.sent_version for key, item in restored.types().items()} == restored.first
    assert restored.as_first()


def test_traffic_goes_on_without_control_plane_and_nothing_is_resent_when_it_is_back(stack: Stack) -> None:
    counters = ("cluster_manager.cds.update_success", "listener_manager.lds.update_success")
    before = [stack.stat(name) for name in counters]
    stack.stop("controlplane", signal.SIGKILL)
    try:
        assert stack.infer("model-two").model_version == "two"
    finally:
        stack.start("controlplane", "controlplane")
    eventually("every type acknowledged again", stack.as_first)
    assert [stack.stat(name) for name in counters] == before
    assert stack.infer("model-two").model_version == "two"


def test_it_stops_when_told_to(stack: Stack) -> None:
    assert stack.stop("controlplane") == 0
    assert not (stack.directory / "xds.sock").exists()
    assert stack.infer("model-two").model_version == "two"
    stack.start("controlplane", "controlplane")
    eventually("every type acknowledged again", stack.synced)
