"""The commands below «modalmesh bpf», on this kernel."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bpf import build, layout, links, loader, probe, selftest
from bpf.cli import app
from bpf.errors import PermissionDeniedError, SelftestError
from bpf.layout import Endpoint, MeshConfig, ServiceKey, u32
from tests.kernel.lab import Lab
from tests.kernel.services import HOOKS, serve_names, set_service

pytestmark = pytest.mark.kernel

VIP = "10.96.0.10"


def run(pins: Path, *arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bpf", *arguments, "-o", "json"], env={"MODALMESH_BPF__PINS": str(pins)})
    assert result.exit_code == code, result.output
    return json.loads(result.output)


def connect(tell: Any, address: str, count: int) -> None:
    for _ in range(count):
        with socket.create_connection((address, 80), timeout=10) as client:
            client.recv(100)


@pytest.fixture
def pins(lab: Lab) -> Path:
    """A data path that has seen five connections to a service."""
    folder, netns, cgroup = lab.pins(), lab.namespace("commands"), lab.cgroup()
    lab.address(netns, "lo", "10.50.0.1/32")
    server = lab.start(serve_names, [("10.50.0.1", 9100)], netns=netns)
    server.hear()
    (folder / "links").mkdir()
    for name in ("sock_lb", "tcp_signals"):
        loaded = lab.closing(loader.load(name, pins=folder))
        functions = [f"sock_lb_{hook}" for hook in HOOKS] if name == "sock_lb" else [name]
        for function in functions:
            program = loaded.programs[function]
            link = lab.closing(links.attach_cgroup(program, cgroup))
            link.pin(folder / "links" / function)
        if name == "sock_lb":
            key = ServiceKey(IPv4Address(VIP), 80, socket.IPPROTO_TCP)
            set_service(loaded, key, 5, [(Endpoint(IPv4Address("10.50.0.1"), 9100, 7), 1)], tier=2)
    lab.start(connect, VIP, 5, netns=netns, cgroup=cgroup).result()
    return folder


def test_counters(pins: Path) -> None:
    found = run(pins, "counters")
    assert set(found) == {"services", "tcp"}
    assert found["services"]["services"] == [
        {
            "id": 5,
            "addresses": [f"tcp://{VIP}:80"],
            "connections": 5,
            "datagrams": 0,
            "no_backend": 0,
            "wrong_family": 0,
        }
    ]
    assert found["services"]["backends"] == [{"id": 7, "connections": 5, "datagrams": 0}]
    (tier,) = found["tcp"]["tiers"]
    assert (tier["tier"], tier["active"], tier["closed"]) == (2, 5, 5)
    assert sum(tier["rtt_us"]["buckets"]) == tier["rtt_us"]["samples"]


def test_status(pins: Path) -> None:
    found = run(pins, "status")
    assert found["layout_version"] == layout.LAYOUT_VERSION
    maps = {each["name"]: each for each in found["maps"]}
    assert (maps["services"]["entries"], maps["services"]["max_entries"]) == (1, layout.SERVICES)
    assert {link["pin"] for link in found["links"]} == {f"sock_lb_{hook}" for hook in HOOKS} | {"tcp_signals"}
    assert all(link["alive"] and link["kind"] == "cgroup" for link in found["links"])


def test_tables_show_the_same(pins: Path) -> None:
    for command, expected in (("status", "sock_lb_connect4"), ("counters", f"tcp://{VIP}:80")):
        result = CliRunner().invoke(app, ["bpf", command], env={"MODALMESH_BPF__PINS": str(pins)})
        assert result.exit_code == 0
        assert expected in result.output


def test_nothing_pinned(lab: Lab) -> None:
    folder = lab.pins()
    assert run(folder, "status")["maps"] == []
    result = CliRunner().invoke(app, ["bpf", "counters"], env={"MODALMESH_BPF__PINS": str(folder)})
    assert result.exit_code != 0
    assert "no maps are pinned" in str(result.exception)


def test_counters_of_another_layout_are_not_misread(pins: Path) -> None:
    with loader.load("tcp_signals", pins=pins) as loaded:
        loaded.maps["mesh_config"].set(u32(0), MeshConfig(layout_version=99).pack())
    result = CliRunner().invoke(app, ["bpf", "counters"], env={"MODALMESH_BPF__PINS": str(pins)})
    assert "layout 99" in str(result.exception)


def test_probe_finds_the_programs_and_gives_reasons(lab: Lab) -> None:
    found = {feature["name"]: feature["missing"] for feature in run(lab.pins(), "probe")}
    assert all(found[f"program {name}"] == "" for name in build.NAMES)
    assert found["bpf file system"] == ""
    assert found["capabilities"] == ""


def test_probe_without_permission_says_so_line_by_line() -> None:
    """The same as nobody."""
    script = (
        "import json, os; os.setgid(65534); os.setuid(65534)\n"
        "from pathlib import Path\n"
        "from bpf.probe import probe\n"
        "print(json.dumps({f.name: f.missing for f in probe(Path('/sys/fs/bpf/modalmesh'), None)}))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(shown.stdout)
    assert "CAP_BPF" in found["capabilities"]
    assert "not permitted" in found["program sock_lb"]


def test_probe_of_a_missing_place() -> None:
    found = {feature.name: feature.missing for feature in probe.probe(Path("/nonexistent/pins"), Path("/nonexistent"))}
    assert "no bpf file system" in found["bpf file system"]
    assert found["cgroup version 2"] != ""


def test_the_selftest_passes_and_leaves_nothing(lab: Lab) -> None:
    cgroup = lab.cgroup()
    report = selftest.check_join(cgroup)
    assert report.joined == 6
    assert report.redirected >= 100
    assert 0 < report.stopped_after <= 32 << 20
    assert [path for path in cgroup.iterdir() if path.is_dir()] == []
    assert selftest.check_bypass() > 0


def test_the_selftest_fails_where_a_writer_is_never_stopped(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    """A kernel that doesn't account for handed over bytes looks to the guard like a queue that stays empty."""
    broken = short_dir / "programs"
    broken.mkdir()
    for path in build.SOURCES.iterdir():
        if path.suffix in (".c", ".h"):
            text = path.read_text(encoding="utf-8")
            (broken / path.name).write_text(
                text.replace("(__u32)queued > highwater()", "(__u32)queued / 1024 > highwater()"), encoding="utf-8"
            )
    monkeypatch.setattr(build, "SOURCES", broken)
    build.build("sock_join", broken / "sock_join.bpf.o")
    with pytest.raises(SelftestError, match="while nobody read"):
        selftest.check_join(lab.cgroup())


def test_the_selftest_needs_a_cgroup() -> None:
    with pytest.raises(SelftestError, match="no cgroup can be made"):
        selftest.check_join(Path("/proc"))


def test_permission_is_an_error_of_its_own() -> None:
    script = (
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "from bpf import loader, errors\n"
        "try: loader.load('sock_lb')\n"
        "except errors.PermissionDeniedError as error: print(error.code)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == PermissionDeniedError.code
