"""A control plane and an Envoy before backends of ours, over sockets of one short directory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modalmesh.base.errors import XdsError
from modalmesh.launcher import envoy_admin
from tests.e2e.echo import Answer, Backend, Client
from xds.pb.xds import status_pb2
from xds.status import fetch_status
from xds.types import CLUSTER, LISTENER, ROUTE

LIMIT = 60.0


def eventually(what: str, condition: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    """A port of loopback that nobody uses just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Plane:
    """The processes, and what a test asks of them."""

    def __init__(self, directory: Path, backends: Sequence[str]) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.documents = directory / "docs"
        self.documents.mkdir()
        self.gateway = free_port()
        self.backends = {name: Backend(name) for name in backends}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def write(self, name: str, text: str) -> None:
        """Replace a document; ``{port:NAME}`` stands for the port of a backend."""
        for backend in self.backends.values():
            text = text.replace(f"{{port:{backend.name}}}", str(backend.port))
        text = text.replace("{port:gateway}", str(self.gateway))
        temporary = self.documents / "new"
        temporary.write_text(text)
        temporary.replace(self.documents / name)

    def start(self) -> None:
        for name, command in (("controlplane", ("controlplane",)), ("envoy", ("envoy", "start"))):
            environment = {
                **{key: value for key, value in os.environ.items() if not key.startswith("MODALMESH_")},
                "MODALMESH_RUNTIME_DIR": str(self.run),
                "MODALMESH_XDS__LISTEN": f"unix:{self.directory}/xds.sock",
                "MODALMESH_GATEWAY__LISTEN": f"127.0.0.1:{self.gateway}",
                "MODALMESH_CONTROLPLANE__DOCUMENTS": str(self.documents),
                "MODALMESH_LOG__FORMAT": "json",
            }
            with (self.directory / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "modalmesh.cli", *command], env=environment, stdout=log, stderr=log
                )
        eventually(f"every type acknowledged\n{self.problems()}", self.synced)

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT)
        for backend in self.backends.values():
            backend.close()

    def problems(self) -> list[str]:
        """What the control plane has refused so far."""
        text = (self.directory / "controlplane.log").read_text()
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [line["what"] for line in lines if line["event"] in ("problem", "warning")]

    def synced(self) -> bool:
        try:
            clients = fetch_status(self.run / "controlplane.sock", 5)
        except XdsError:
            return False
        states = {item.type_url: item.state for client in clients for item in client.types}
        return all(states.get(url) == status_pb2.SYNCED for url in (CLUSTER, LISTENER, ROUTE))

    def admin(self, path: str) -> str:
        return envoy_admin.get(self.run / "envoy-admin.sock", path, timeout=10)

    def stat(self, name: str) -> int:
        pattern = re.escape(name)
        found = re.search(rf"^{pattern}: (\d+)$", self.admin(f"/stats?filter=^{pattern}$"), re.MULTILINE)
        assert found, name
        return int(found[1])

    def get(self, authority: str, path: str = "/", method: str = "GET", **headers: str) -> Answer:
        with Client(self.gateway) as client:
            return client.request(authority, path, method, **headers)

    def many(self, count: int, authority: str, path: str = "/", at_once: int = 100, **headers: str) -> list[Answer]:
        found: list[Answer] = []
        with Client(self.gateway) as client:
            while len(found) < count:
                found += client.requests([(authority, path, "GET", headers)] * min(at_once, count - len(found)))
        return found
