from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controlplane.cli import app
from controlplane.errors import UnreadableError
from controlplane.runtime import RuntimeDirectoryError

BROKEN = "services:\n- name: a\n  endpoints:\n  - {host: h, port: 0}\n  - {host: h, port: 1, extra: 2}\n"


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    for name in [name for name in os.environ if name.startswith("MODALMESH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MODALMESH_RUNTIME_DIR", str(tmp_path / "run"))
    return CliRunner()


def test_validate_shows_what_would_be_served(runner: CliRunner, quickstart: Path) -> None:
    result = runner.invoke(app, ["validate", str(quickstart)])
    assert result.exit_code == 0, result.output
    for expected in ("general-text", "grpc", "127.0.0.1:8001", "inference.kserve", "text (default)", "is valid"):
        assert expected in result.output


def test_validate_as_json(runner: CliRunner, quickstart: Path) -> None:
    result = runner.invoke(app, ["validate", str(quickstart), "-o", "json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["valid"], found["problems"]) == (0, True, [])
    assert (found["hosts"], found["semantic_routes"], len(found["services"])) == (["*"], ["quickstart"], 9)


def test_validate_prints_every_problem_and_fails(runner: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(BROKEN)
    result = runner.invoke(app, ["validate", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout == ""
    first, second, summary = result.stderr.splitlines()
    assert first.startswith(f"{file}:4: ")
    assert second.startswith(f"{file}:5: ")
    assert summary == f"2 problems in {tmp_path}"


def test_validate_prints_problems_as_json(runner: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(BROKEN)
    result = runner.invoke(app, ["validate", str(tmp_path), "-o", "json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["valid"]) == (1, False)
    assert [(problem["file"], problem["line"], problem["code"]) for problem in found["problems"]] == [
        (str(file), 4, "MM1203"),
        (str(file), 5, "MM1203"),
    ]


def test_what_stands_in_documents_is_no_markup(runner: CliRunner, tmp_path: Path, quickstart: Path) -> None:
    for file in quickstart.iterdir():
        text = file.read_text().replace("Legal advice", "my [bold]general[/nonsense]")
        (tmp_path / file.name).write_text(text)
    result = runner.invoke(app, ["validate", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "[bold]general[/nonsense]" in result.output


def test_validate_of_no_directory(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["validate", str(tmp_path / "no")])
    assert isinstance(result.exception, UnreadableError)


def test_bootstrap_is_printed(runner: CliRunner) -> None:
    result = runner.invoke(app, ["envoy", "bootstrap"])
    assert json.loads(result.stdout)["node"]["metadata"] == {"role": "envoy"}


def test_start_becomes_envoy(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODALMESH_ENVOY__CONCURRENCY", "3")
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append([str(path), *arguments]))
    result = runner.invoke(app, ["envoy", "start"])
    assert result.exit_code == 0, result.output
    ((path, name, *arguments),) = started
    assert path == name
    options = dict(itertools.pairwise(arguments))
    assert options["--concurrency"] == "3"
    assert json.loads(Path(options["--config-path"]).read_text())["node"]["id"] == "envoy-1"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_runtime_directory_that_cannot_be_made(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    result = runner.invoke(app, ["envoy", "start"])
    assert isinstance(result.exception, RuntimeDirectoryError)


def modalmesh(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MODALMESH_")}
    return subprocess.run(
        [sys.executable, "-m", "modalmesh.cli", *arguments],
        env={**clean, "MODALMESH_RUNTIME_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_assembled_command_has_the_group(tmp_path: Path) -> None:
    result = modalmesh(tmp_path, "envoy", "bootstrap")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["node"]["id"] == "envoy-1"


def test_documents_that_are_not_there_stop_the_control_plane_with_one_line(tmp_path: Path) -> None:
    result = modalmesh(tmp_path, "controlplane", "--documents", str(tmp_path / "no"))
    assert result.returncode == 1
    assert result.stderr == (
        f"error: {tmp_path / 'no'}: not a directory; name one with MODALMESH_CONTROLPLANE__DOCUMENTS [MM1201]\n"
    )


def test_a_taken_port_stops_the_control_plane_with_one_line(tmp_path: Path, quickstart: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        result = modalmesh(tmp_path, "controlplane", "--documents", str(quickstart), MODALMESH_XDS__LISTEN=listen)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert listen in line
