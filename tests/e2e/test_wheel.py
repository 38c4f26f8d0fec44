"""The wheel, in an environment of its own: everything a process needs at run time is in it, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a clean copy, so that what lies about in the checkout plays no part."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", out, source], check=True)
    (path,) = out.glob("modalmesh-*.whl")
    return path


def test_what_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "xds/pb/envoy/service/discovery/v3/discovery_pb2.py",
        "xds/pb/router/policy_pb2.py",
        "router/encoder/starter/vision_model.onnx",
        "router/encoder/starter/encoder.json",
        "controlplane/compile/listeners.py",
        "bpf/programs/sock_lb.bpf.o",
        "bpf/programs/sock_lb.bpf.c",
        "bpf/programs/layout.h",
        "modalmesh/py.typed",
    ):
        assert needed in names
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops <= {"modalmesh", "controlplane", "router", "xds", "bpf"}


def test_it_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = tmp_path / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies are those of the tests; the wheel's own packages come first.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "venv" / "bin" / "python"

    def run(*arguments: str) -> str:
        command = [str(python), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    for package in ("modalmesh", "xds", "router", "controlplane", "bpf"):
        assert run("-c", f"import {package}; print({package}.__file__)").startswith(str(site))
    assert run("-m", "modalmesh.cli", "--version").startswith("modalmesh ")
    quickstart = str(ROOT / "deploy" / "examples" / "quickstart")
    assert "is valid" in run("-m", "modalmesh.cli", "validate", quickstart)
    assert '"node"' in run("-m", "modalmesh.cli", "envoy", "bootstrap")
    program = "from router.encoder.model import DualEncoder as D; e = D.load(None, threads=1, max_pixels=10**6)\n"
    assert run("-c", program + "print(e.encode_texts(['a cat']).shape)") == "(1, 512)\n"
