"""The whole mesh as a newcomer starts it: every process real, requests from an ordinary client.

One mesh serves the module; tests stand in the order in which they disturb it more and more, and each leaves it well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as kserve
from tritonclient.utils import InferenceServerException

from modalmesh.base.settings import Settings
from modalmesh.launcher import envoy_admin
from modalmesh.launcher.requests import Outcome, Request, read_requests, send_all

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "deploy" / "examples" / "quickstart"
REQUESTS = ROOT / "deploy" / "examples" / "quickstart.requests.yaml"
MODALMESH = (sys.executable, "-m", "modalmesh.cli")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def eventually(condition: Callable[[], Any], within: float = 15.0) -> float:
    """Wait until a condition holds; return the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, "did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began


class RunningMesh:
    """`modalmesh up`, its documents, and what can be asked of it."""

    def __init__(self, folder: Path) -> None:
        gateway, xds, triton = free_ports(3)
        self.documents = folder / "documents"
        shutil.copytree(QUICKSTART, self.documents)
        discovery = self.documents / "service-discovery.yaml"
        discovery.write_text(discovery.read_text().replace("port: 8001", f"port: {triton}"))
        self.triton = triton
        self.settings = Settings(
            runtime_dir=folder / "run",
            gateway={"listen": f"127.0.0.1:{gateway}"},
            xds={"listen": f"127.0.0.1:{xds}"},
            triton={"listen": f"127.0.0.1:{triton}"},
            controlplane={"documents": self.documents},
        )
        self.env = {
            **os.environ,
            "MODALMESH_RUNTIME_DIR": str(self.settings.runtime_dir),
            "MODALMESH_GATEWAY__LISTEN": self.settings.gateway.listen,
            "MODALMESH_XDS__LISTEN": self.settings.xds.listen,
            "MODALMESH_TRITON__LISTEN": self.settings.triton.listen,
            "MODALMESH_CONTROLPLANE__DOCUMENTS": str(self.documents),
        }
        self.log_path = folder / "up.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*MODALMESH, "up"], cwd=ROOT, env=self.env, stderr=log, stdout=log, start_new_session=True
            )
        eventually(lambda: self.process.poll() is not None or "up: requests to" in self.log, 90)
        assert self.process.poll() is None, self.log

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MODALMESH, *arguments], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )

    def status(self) -> dict[str, Any]:
        """What `modalmesh status` says, by node."""
        result = self.command("status", "-o", "json")
        assert result.returncode == 0, result.stderr
        return {client["node_id"]: client for client in json.loads(result.stdout)["clients"]}

    def stats(self, pattern: str) -> dict[str, int]:
        text = envoy_admin.get(self.settings.envoy_admin_socket, f"/stats?filter={pattern}")
        pairs = (line.rsplit(": ", 1) for line in text.splitlines() if ": " in line)
        return {name: int(value) for name, value in pairs if value.isdecimal()}

    def dump(self) -> Any:
        return json.loads(envoy_admin.get(self.settings.envoy_admin_socket, "/config_dump?include_eds"))

    def send(self, **content: str) -> Outcome:
        (outcome,) = send_all([Request(**content)], self.settings)
        return outcome

    def pid_of(self, command: str) -> int:
        """The process id of one of our own commands."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                environment = (path.parent / "environ").read_bytes()
                if (
                    f"MODALMESH_RUNTIME_DIR={self.settings.runtime_dir}".encode() in environment
                    and b"modalmesh.cli" in words
                    and command.encode() in words
                ):
                    return int(path.parent.name)
        raise AssertionError(f"no process runs {command}")

    def processes(self) -> list[str]:
        """Whatever was started for this mesh and still lives (Triton's environment is its own: told by its path)."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                environment = (path / "environ").read_bytes().decode("utf-8", "replace")
                if str(self.settings.runtime_dir) in environment + line and int(path.name) != os.getpid():
                    found.append(line)
        return found


@pytest.fixture(scope="module")
def mesh() -> Iterator[RunningMesh]:
    # A short path: unix sockets.
    with tempfile.TemporaryDirectory(prefix="mm-", dir="/tmp") as folder:
        running = RunningMesh(Path(folder))
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGINT)
                running.process.wait(60)


def test_every_request_of_the_quickstart_goes_where_it_should(mesh: RunningMesh) -> None:
    result = mesh.command("run", "-o", "json")
    assert result.returncode == 0, result.stdout + result.stderr
    outcomes = json.loads(result.stdout)
    assert len(outcomes) == len(read_requests(REQUESTS))
    assert all(outcome["right"] for outcome in outcomes)
    cat = next(outcome for outcome in outcomes if "chelsea" in outcome["request"].get("picture", ""))
    assert "cat" in cat["answer"]
    assert cat["routed"]["runner_up"]
    assert cat["routed"]["router_ms"] > 0
    assert cat["routed"]["backend_ms"] > 0


def test_a_request_that_should_go_elsewhere_fails_the_run(mesh: RunningMesh, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text('requests: [{text: "Which cut of beef is best for a stew?", expect: law-text}]')
    result = mesh.command("run", "--requests", str(wrong))
    assert result.returncode == 1
    assert "should have gone to law-text" in result.stdout
    assert "went to cooking-text" in result.stdout


def test_a_text_that_fits_no_route_takes_the_default_and_says_so(mesh: RunningMesh) -> None:
    outcome = mesh.send(text="How far away is the nearest star?", expect="general-text", because="default")
    assert outcome.right
    assert outcome.answered_by == "sentence-embedder"


def test_every_type_is_acknowledged_by_every_client(mesh: RunningMesh) -> None:
    clients = mesh.status()
    assert set(clients) == {"envoy-1", "router-1"}
    assert len(clients["envoy-1"]["types"]) == 4
    assert {entry["state"] for client in clients.values() for entry in client["types"]} == {"SYNCED"}
    assert {client["encoding"] for client in clients.values()} == {"zstd"}
    table = mesh.command("status")
    assert table.returncode == 0
    assert "envoy-1" in table.stdout


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def test_the_config_dump_shows_http2_everywhere(mesh: RunningMesh) -> None:
    nodes = list(walk(mesh.dump()))
    types = [node.get("@type", "").rsplit(".", 1)[-1] for node in nodes]
    managers = [node for node, kind in zip(nodes, types, strict=True) if kind == "HttpConnectionManager"]
    clusters = [node for node, kind in zip(nodes, types, strict=True) if kind == "Cluster"]
    assert len({manager["stat_prefix"] for manager in managers}) == 2
    assert all(manager["codec_type"] == "HTTP2" for manager in managers)
    assert len(clusters) >= 9 + 2
    for cluster in clusters:
        options = cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
        assert "http2_protocol_options" in options["explicit_http_config"], cluster["name"]
        for check in cluster.get("health_checks", []):
            assert "http_health_check" not in check, cluster["name"]


def test_http1_gets_no_answer(mesh: RunningMesh) -> None:
    host, port = mesh.settings.gateway.listen.split(":")
    for preface in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(preface)
            assert connection.recv(100) == b""


def test_what_changes_the_backend_can_not_be_called(mesh: RunningMesh) -> None:
    """Triton's own service has methods that load code; neither the gateway nor Triton's port lets them through."""
    code = b"import os\nclass TritonPythonModel:\n    def execute(self, requests): return []\n"
    config = json.dumps({"backend": "python", "input": [], "output": []})
    for address in (mesh.settings.gateway.listen, mesh.settings.triton.listen):
        client = kserve.InferenceServerClient(address)
        calls: list[Callable[[], Any]] = [
            lambda c=client: c.load_model("evil", config=config, files={"file:1/model.py": code}),  # type: ignore[misc]
            lambda c=client: c.unload_model("law-embedder"),  # type: ignore[misc]
            lambda c=client: c.update_log_settings({"log_verbose_level": 1}),  # type: ignore[misc]
            lambda c=client: c.register_system_shared_memory("a", "/a", 1),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(InferenceServerException):
                call()
        assert client.is_server_ready()
        assert client.is_model_ready("law-embedder")
        client.close()


def test_a_second_envoy_is_refused(mesh: RunningMesh) -> None:
    result = mesh.command("envoy", "start")
    assert result.returncode == 1
    assert "another Envoy runs in" in result.stderr
    assert envoy_admin.get(mesh.settings.envoy_admin_socket, "/ready") == "LIVE\n"


def test_explain_says_what_the_mesh_does(mesh: RunningMesh) -> None:
    result = mesh.command("explain", "--text", "Which cut of beef is best for a stew?", "-o", "json")
    assert result.returncode == 0, result.stderr
    explained = json.loads(result.stdout)
    routed = mesh.send(text="Which cut of beef is best for a stew?", expect="cooking-text").routed
    assert routed is not None
    assert explained["service"] == routed.service == "cooking-text"
    assert explained["similarity"] == pytest.approx(routed.similarity, abs=1e-4)


def test_an_edited_endpoint_reaches_envoy_without_a_restart(mesh: RunningMesh) -> None:
    discovery = mesh.documents / "service-discovery.yaml"
    before, pid = discovery.read_text(), mesh.pid_of("controlplane")
    (unused,) = free_ports(1)

    def endpoints() -> str:
        return envoy_admin.get(mesh.settings.envoy_admin_socket, "/clusters")

    discovery.write_text(before.replace(f"port: {mesh.triton}", f"port: {unused}", 1))
    seconds = eventually(lambda: f"animal-vision::127.0.0.1:{unused}::" in endpoints())
    print(f"an edited endpoint reached Envoy after {seconds * 1000:.0f} ms")
    discovery.write_text(before)
    eventually(lambda: f"animal-vision::127.0.0.1:{mesh.triton}::health_flags::healthy" in endpoints())
    assert mesh.pid_of("controlplane") == pid


def test_a_broken_edit_is_refused_with_its_place_and_changes_nothing(mesh: RunningMesh) -> None:
    discovery = mesh.documents / "service-discovery.yaml"
    before, dump = discovery.read_text(), mesh.dump()
    versions = {t["type_url"]: t["current_version"] for t in mesh.status()["envoy-1"]["types"]}
    lines = before.splitlines()
    number = next(i for i, line in enumerate(lines) if "port:" in line)
    lines[number] = re.sub(r"port: \d+", "port: eighty", lines[number])
    mark = len(mesh.log)
    discovery.write_text("\n".join(lines))
    eventually(lambda: f"service-discovery.yaml:{number + 1}" in mesh.log[mark:])
    assert versions == {t["type_url"]: t["current_version"] for t in mesh.status()["envoy-1"]["types"]}
    assert mesh.dump() == dump
    assert mesh.send(text="Can my landlord keep the deposit when I move out?", expect="law-text").right
    discovery.write_text(before)


def test_swapping_two_descriptions_swaps_their_destinations(mesh: RunningMesh) -> None:
    path = mesh.documents / "semantic-route.yaml"
    before = path.read_text()
    food, animals = (re.search(rf'"{word}[^"]*"', before) for word in ("Food and drinks", "Animals and pets"))
    assert food
    assert animals
    swapped = before.replace(food[0], "\0").replace(animals[0], food[0]).replace("\0", animals[0])

    def goes_to(picture: str) -> str:
        routed = mesh.send(picture=f"skimage/data/{picture}.png", expect="").routed
        return routed.service if routed else ""

    assert (goes_to("chelsea"), goes_to("coffee")) == ("animal-vision", "food-vision")
    path.write_text(swapped)
    eventually(lambda: goes_to("chelsea") == "food-vision")
    assert goes_to("coffee") == "animal-vision"
    path.write_text(before)
    eventually(lambda: goes_to("chelsea") == "animal-vision")


def test_without_the_control_plane_traffic_goes_on_and_nothing_is_sent_twice(mesh: RunningMesh) -> None:
    updates = "update_(success|attempt)|control_plane.connected_state"
    before, old = mesh.stats(updates), mesh.pid_of("controlplane")
    resources = {t["type_url"]: t["acked_version"] for t in mesh.status()["envoy-1"]["types"]}
    os.kill(old, signal.SIGKILL)
    assert mesh.send(text="Which cut of beef is best for a stew?", expect="cooking-text").right
    assert mesh.send(picture="skimage/data/chelsea.png", expect="animal-vision").right
    eventually(lambda: "controlplane ended with status -9: started again" in mesh.log)
    eventually(lambda: mesh.settings.admin_socket.exists() and mesh.command("status").returncode == 0)
    eventually(lambda: set(mesh.status()) >= {"envoy-1", "router-1"}, 30)
    eventually(lambda: mesh.stats("control_plane.connected_state")["control_plane.connected_state"] == 1)
    time.sleep(0.5)  # time for what must not come
    after = mesh.stats(updates)
    received = {name: value for name, value in before.items() if name.endswith("update_success")}
    assert received
    assert received == {name: after[name] for name in received}
    types = mesh.status()["envoy-1"]["types"]
    assert {t["state"] for t in types} == {"SYNCED"}
    assert {t["type_url"]: t["current_version"] for t in types} == resources


def test_without_the_router_requests_take_envoys_own_route_until_it_is_back(mesh: RunningMesh) -> None:
    old = mesh.pid_of("router")
    os.kill(old, signal.SIGKILL)
    # Fail open: the plain destination gets the request as it is, and knows no model "auto".
    outcome = mesh.send(text="Which cut of beef is best for a stew?", expect="cooking-text")
    if not outcome.right:
        assert "auto" in outcome.answer
    eventually(lambda: mesh.send(text="Which cut of beef is best for a stew?", expect="cooking-text").right, 30)


def test_a_second_mesh_in_the_same_place_is_refused(mesh: RunningMesh) -> None:
    result = mesh.command("up")
    assert result.returncode == 1
    assert result.stderr.startswith("error: a mesh runs in")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_leaves_no_process(mesh: RunningMesh) -> None:
    assert len(mesh.processes()) > 5
    mesh.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    mesh.process.send_signal(signal.SIGINT)  # an impatient second one cuts nothing short
    assert mesh.process.wait(60) == 0
    assert mesh.processes() == []
    assert "stopped: no process is left" in mesh.log
    assert "Traceback" not in mesh.log
