from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xds.cli import app
from xds.errors import ListenError, UnreachableError
from xds.pb.xds import status_pb2
from xds.status import StatusServer, fetch_status
from xds.types import CLUSTER, LISTENER

CLIENTS = [
    status_pb2.Client(
        node_id="envoy-1\x1b[31m[bold]",
        group="envoy",
        encoding="zstd",
        types=[
            status_pb2.Type(
                type_url=CLUSTER,
                resources=2,
                sent_version="1" * 16,
                acked_version="1" * 16,
                current_version="1" * 16,
                state=status_pb2.SYNCED,
            ),
            status_pb2.Type(
                type_url=LISTENER, sent_version="2" * 16, state=status_pb2.NACKED, last_error="no such filter [foo]\n"
            ),
        ],
    ),
    status_pb2.Client(node_id="router-1", group="router", types=[status_pb2.Type(type_url="t/a.b.Policy", state=4)]),  # type: ignore[arg-type]
]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mm", dir="/tmp"))
    monkeypatch.setenv("MODALMESH_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def control_plane(folder: Path) -> Iterator[list[status_pb2.Client]]:
    """Serve the list from a thread of its own, as another process would."""
    clients = list(CLIENTS)
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        server = StatusServer(folder / "controlplane.sock", lambda: clients)
        await server.start()
        ready.set()
        await asyncio.to_thread(stop.wait)
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield clients
    stop.set()
    thread.join(10)


def test_fetch_returns_what_is_served(folder: Path, control_plane: list[status_pb2.Client]) -> None:
    assert fetch_status(folder / "controlplane.sock", 5.0) == control_plane


def test_a_control_plane_that_is_not_running(folder: Path) -> None:
    with pytest.raises(UnreachableError, match=r"the control plane is not running .*MM1406") as caught:
        fetch_status(folder / "controlplane.sock", 5.0)
    assert caught.value.exit_code == 1


async def test_a_folder_that_does_not_exist_is_no_place_to_listen(folder: Path) -> None:
    with pytest.raises(ListenError):
        await StatusServer(folder / "missing" / "controlplane.sock", list).start()


@pytest.mark.usefixtures("control_plane")
def test_the_table_has_a_row_per_type_and_no_control_characters() -> None:
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0
    header, *rows = [line.split() for line in result.stdout.splitlines()]
    assert header[:3] == ["node", "group", "type"]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("envoy-1\N{REPLACEMENT CHARACTER}[31m[bold]", "envoy", "CDS"),
        ("envoy-1\N{REPLACEMENT CHARACTER}[31m[bold]", "envoy", "LDS"),
        ("router-1", "router", "Policy"),
    ]
    assert rows[0][3:7] == ["2", "1" * 16, "1" * 16, "synced"]
    assert rows[1][3:7] == ["0", "2" * 16, "-", "nacked"]
    assert " ".join(rows[1][7:]) == "no such filter [foo]\N{REPLACEMENT CHARACTER}"
    assert rows[2][6] == "not-sent"


@pytest.mark.usefixtures("control_plane")
def test_json_holds_everything() -> None:
    result = CliRunner().invoke(app, ["status", "-o", "json"])
    assert result.exit_code == 0
    clients = json.loads(result.stdout)["clients"]
    assert [client["node_id"] for client in clients] == [client.node_id for client in CLIENTS]
    assert clients[0]["types"][0]["state"] == "SYNCED"
    assert clients[0]["types"][0]["last_error"] == ""


def test_nobody_is_connected(control_plane: list[status_pb2.Client]) -> None:
    control_plane.clear()
    result = CliRunner().invoke(app, ["status"])
    assert result.stdout == "No client is connected.\n"
    assert json.loads(CliRunner().invoke(app, ["status", "-o", "json"]).stdout) == {"clients": [], "faults": []}
