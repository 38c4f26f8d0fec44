"""The command: help that reads well and comes fast, errors in one line with an exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from modalmesh.cli import COMMANDS


def modalmesh(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "modalmesh.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def failed(result: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    assert result.returncode == code, result
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    for text in says:
        assert text in result.stderr


def test_help_names_every_command_and_imports_none() -> None:
    result = modalmesh("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in COMMANDS)
    program = "import sys, modalmesh.cli as c; sys.argv[1:] = ['--help']\ntry: c.main()\nexcept SystemExit: pass\n"
    program += "print([m for m in ('numpy', 'grpc', 'envoy_data_plane', 'pydantic', 'yaml') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    result = modalmesh(name, "--help")
    assert result.returncode == 0, result.stderr
    assert name in result.stdout


def test_the_version() -> None:
    assert modalmesh("--version").stdout.startswith("modalmesh 0.")


def test_an_unknown_command_or_option() -> None:
    assert modalmesh("fly").returncode == 2
    assert modalmesh("status", "--fly").returncode == 2


def test_a_wrong_setting() -> None:
    failed(modalmesh("status", MODALMESH_XDS__LISTEN="nowhere"), 2, "xds.listen")
    failed(modalmesh("--config", "/nonexistent.yaml", "status"), 2, "/nonexistent.yaml")


def test_no_control_plane(short_dir: Path) -> None:
    failed(modalmesh("status", MODALMESH_RUNTIME_DIR=str(short_dir)), 1, "control plane", "modalmesh up")


def test_debug_shows_the_traceback(short_dir: Path) -> None:
    result = modalmesh("--debug", "status", MODALMESH_RUNTIME_DIR=str(short_dir))
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_a_taken_port(short_dir: Path, root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for command in ("up", "run"):
            result = modalmesh(
                command, cwd=root, MODALMESH_RUNTIME_DIR=str(short_dir), MODALMESH_GATEWAY__LISTEN=address
            )
            assert result.returncode == 1
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            assert address in line
            assert "MODALMESH_GATEWAY__LISTEN" in line


def test_a_missing_envoy(short_dir: Path) -> None:
    failed(
        modalmesh("envoy", "start", MODALMESH_RUNTIME_DIR=str(short_dir), MODALMESH_ENVOY__BINARY="/nonexistent/envoy"),
        1,
        "/nonexistent/envoy",
    )


def test_a_missing_triton_environment(short_dir: Path, root: Path) -> None:
    result = modalmesh(
        "run", cwd=root, MODALMESH_RUNTIME_DIR=str(short_dir), MODALMESH_TRITON__VENV="/nonexistent/venv"
    )
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "/nonexistent/venv" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_runtime_directory_that_can_not_be_made(root: Path) -> None:
    failed(
        modalmesh("up", cwd=root, MODALMESH_RUNTIME_DIR="/proc/nowhere"), 1, "/proc/nowhere", "MODALMESH_RUNTIME_DIR"
    )


def test_bad_documents_stop_the_start(tmp_path: Path, short_dir: Path, root: Path) -> None:
    (tmp_path / "a.yaml").write_text("services:\n  - name: a\n    endpoints:\n      - {host: h, port: eighty}\n")
    where = {"MODALMESH_RUNTIME_DIR": str(short_dir), "MODALMESH_CONTROLPLANE__DOCUMENTS": str(tmp_path)}
    failed(modalmesh("up", cwd=root, **where), 1, "a.yaml:4", "modalmesh validate")


def test_two_addresses_that_are_one(short_dir: Path, root: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    where = {"MODALMESH_GATEWAY__LISTEN": address, "MODALMESH_XDS__LISTEN": address}
    failed(modalmesh("up", cwd=root, MODALMESH_RUNTIME_DIR=str(short_dir), **where), 1, "MODALMESH_XDS__LISTEN")


def test_an_older_process_on_a_socket(short_dir: Path, root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as older:
        older.bind(str(short_dir / "encoder.sock"))
        older.listen()
        failed(modalmesh("up", cwd=root, MODALMESH_RUNTIME_DIR=str(short_dir)), 1, "older process", "encoder.sock")


def test_a_runtime_directory_that_others_may_write_to(short_dir: Path, root: Path) -> None:
    short_dir.chmod(0o777)
    for command in (("up",), ("controlplane",), ("run",)):
        failed(modalmesh(*command, cwd=root, MODALMESH_RUNTIME_DIR=str(short_dir)), 1, "others may write")


def test_output_that_is_closed_or_can_not_show_a_character(root: Path, tmp_path: Path) -> None:
    quickstart = root / "deploy/examples/quickstart"
    command = f"{sys.executable} -m modalmesh.cli validate {quickstart}"
    closed = subprocess.run(["/bin/sh", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")
    ascii_only = modalmesh("validate", str(quickstart), PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0, ascii_only.stderr


def test_bad_documents(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("services:\n  - name: a\n    endpoints:\n      - {host: h, port: eighty}\n")
    result = modalmesh("validate", str(tmp_path))
    assert result.returncode == 1
    assert "a.yaml:4" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_an_encoder_directory_with_a_file_missing(tmp_path: Path, short_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    failed(
        modalmesh("encoder", MODALMESH_RUNTIME_DIR=str(short_dir), MODALMESH_ENCODER__PATH=str(tmp_path)),
        1,
        "text_model.onnx",
    )


def test_explain_needs_one_content(tmp_path: Path) -> None:
    assert modalmesh("explain").returncode == 2
    assert modalmesh("explain", "--text", "a", "--image", "b").returncode == 2
    failed(modalmesh("explain", "--image", str(tmp_path / "none.jpg")), 2, "none.jpg")
