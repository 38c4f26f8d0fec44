"""A node for the real agent: namespaces, a fake sysfs that calls veth ends GPU functions, and the agent's process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bpf import loader
from bpf.layout import DevmapValue, ServiceKey, u32, unpack_u32
from bpf.maps import Map
from tests.conftest import ROOT
from tests.kernel.lab import Lab, Tell, command

PCIE = ("0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4")
GPU = ("10.50.0.1", "10.50.0.2", "10.50.0.3")
PORT = 7000
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h


def until(condition: Callable[[], Any], what: str, seconds: float = 15) -> Any:
    """The first true value of ``condition``."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


class FakeSysfs:
    """A card with one physical function whose virtual functions are veth ends."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "bus" / "pci" / "devices"
        self.net = root / "class" / "net"
        self.net.mkdir(parents=True)
        physical = self.devices / "0000:3b:00.0"
        (physical / "net").mkdir(parents=True)
        for number, pcie in enumerate(PCIE):
            (self.devices / pcie).mkdir()
            (self.devices / pcie / "physfn").symlink_to(physical)
            (physical / f"virtfn{number}").symlink_to(self.devices / pcie)
        self.physical = physical
        self.interface("nic", switch="0a1b", port="p0")
        (physical / "net" / "nic").mkdir()

    def interface(self, name: str, *, switch: str, port: str) -> None:
        (self.net / name).mkdir()
        (self.net / name / "phys_switch_id").write_text(f"{switch}\n")
        (self.net / name / "phys_port_name").write_text(f"{port}\n")

    def representor(self, name: str, number: int) -> None:
        self.interface(name, switch="0a1b", port=f"pf0vf{number}")

    def remove(self, name: str) -> None:
        shutil.rmtree(self.net / name)


@dataclass
class Node:
    """client c0 ─ nic node rep0..2 ─ gpu0..2 gpu; processes that the agent serves are in ``cgroup``."""

    lab: Lab
    client: str
    netns: str
    gpu: str
    pins: Path
    cgroup: Path
    sysfs: FakeSysfs
    runtime: Path
    policy_file: Path
    environment: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)

    def plug(self, number: int) -> None:
        """A function appears, as a hot-plugged one does: made, up, in sysfs."""
        self.sysfs.representor(f"rep{number}", number)
        self.lab.veth(self.netns, f"rep{number}", self.gpu, f"gpu{number}")
        command("ip", "netns", "exec", self.gpu, "ethtool", "-K", f"gpu{number}", "gro", "on")
        for name in ("all", f"gpu{number}"):
            command("ip", "netns", "exec", self.gpu, "sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=0")

    def unplug(self, number: int) -> None:
        command("ip", "-n", self.netns, "link", "del", f"rep{number}")
        self.sysfs.remove(f"rep{number}")

    def function_policy(self, *numbers: int) -> dict[str, Any]:
        """Rules that send UDP for each function's address there."""
        return {
            "functions": [{"pcie": PCIE[number], "mac": f"02:00:00:00:00:0{number}"} for number in numbers],
            "flows": [
                {"address": GPU[number], "port": PORT, "protocol": 17, "function": PCIE[number]} for number in numbers
            ],
        }

    def write_policy(self, policy: dict[str, Any]) -> None:
        """In one step, as an editor that doesn't leave half a file does."""
        partial = self.policy_file.with_suffix(".new")
        partial.write_text(yaml.safe_dump(policy))
        partial.replace(self.policy_file)

    def start(self, *, control_plane: Path | None = None) -> Agent:
        """The agent; its policy comes from the file unless there is a control plane."""
        if control_plane:
            agent = Agent(self, (), {"XDS__LISTEN": f"unix:{control_plane}"})
        else:
            agent = Agent(self, ("--policy", str(self.policy_file)), {})
        self.lab.closing(agent)
        return agent

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command to its end."""
        return subprocess.run(
            _command(self, arguments),
            env=environment(self, {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )

    # ---- what the kernel has

    def map(self, name: str) -> dict[bytes, bytes]:
        opened = Map.open(loader.maps_directory(self.pins) / name)
        try:
            return dict(opened.items())
        finally:
            opened.close()

    def interfaces(self) -> set[int]:
        """Indices in the device map."""
        return {DevmapValue.unpack(value).ifindex for value in self.map("gpu_if_map").values()}

    def rules(self) -> dict[bytes, int]:
        return {key: unpack_u32(value) for key, value in self.map("gpu_flow_rules").items()}

    def services(self) -> set[ServiceKey]:
        return {ServiceKey.unpack(key) for key in self.map("services")}

    def total(self, name: str, number: int, kind: Any) -> Any:
        opened = Map.open(loader.maps_directory(self.pins) / name)
        try:
            return opened.total(u32(number), kind) or kind()
        finally:
            opened.close()


def make_node(lab: Lab) -> Node:
    client, netns, gpu = (lab.namespace(name) for name in ("client", "node", "gpu"))
    for each in (client, netns, gpu):  # neighbour discovery would be counted
        command("ip", "netns", "exec", each, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
    lab.veth(client, "c0", netns, "nic")
    lab.address(client, "c0", "10.1.1.2/24")
    lab.address(netns, "nic", "10.1.1.1/24")
    command("ip", "-n", client, "route", "add", "default", "via", "10.1.1.1")
    for address in GPU:  # on the plain way packets arrive here, on the bypass at the function
        lab.address(netns, "lo", f"{address}/32")
        lab.address(gpu, "lo", f"{address}/32")
    # What comes from a wire has its checksum.
    command("ip", "netns", "exec", client, "ethtool", "-K", "c0", "tx", "off")
    folder = lab.folder
    node = Node(
        lab,
        client,
        netns,
        gpu,
        pins=lab.pins() / "mm",
        cgroup=lab.cgroup(),
        sysfs=FakeSysfs(folder / "sys"),
        runtime=folder / "run",
        policy_file=folder / "policy.yaml",
    )
    node.write_policy({})
    return node


def _command(node: Node, arguments: tuple[str, ...]) -> list[str]:
    enter = ["nsenter", f"--net=/run/netns/{node.netns}", *node.wrapper]
    return [*enter, sys.executable, "-m", "modalmesh.cli", "node", *arguments]


def environment(node: Node, more: dict[str, str]) -> dict[str, str]:
    """What the command is started with."""
    settings = {
        "RUNTIME_DIR": str(node.runtime),
        "BPF__PINS": str(node.pins),
        "BPF__CGROUP": str(node.cgroup),
        "NODE__SYSFS": str(node.sysfs.root),
        "NODE__NODE_ID": "node-1",
        "LOG__FORMAT": "json",
    } | node.environment
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MODALMESH_")}
    return kept | {f"MODALMESH_{name}": value for name, value in (settings | more).items()}


class Agent:
    """The agent's process."""

    def __init__(self, node: Node, arguments: tuple[str, ...], more: dict[str, str]) -> None:
        self._log = node.lab.folder / f"agent-{time.monotonic_ns()}.log"
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                _command(node, arguments),
                env=environment(node, more),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged; what is no JSON, as ``text``."""
        found: list[dict[str, Any]] = []
        for line in self._log.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append({"event": line})
        return found

    def said(self, text: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if text in line["event"]]

    def hear(self, text: str, seconds: float = 20) -> dict[str, Any]:
        """The first line with ``text``."""

        def look() -> list[dict[str, Any]]:
            found = self.said(text)
            assert found or self.process.poll() is None, f"the agent has ended: {self.lines()}"
            return found

        first: dict[str, Any] = until(look, f"{text!r} in {self._log.read_text()}", seconds)[0]
        return first

    def ready(self) -> Agent:
        self.hear("node agent runs")
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(20)

    def stop(self) -> None:
        self.kill(signal.SIGTERM)
        assert self.process.returncode == 0, self.lines()

    def close(self) -> None:
        self.kill()


# ---- traffic, in children


def stream(tell: Tell, address: str, seconds: float, pause: float = 0.0005) -> int:
    """Numbered datagrams; returns how many."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            sender.sendto(struct.pack("!I", number), (address, PORT))
            number += 1
            time.sleep(pause)
        return number


def collect(tell: Tell, idle: float) -> list[list[int]]:
    """The numbers that arrive, as ranges, until nothing comes for a while."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        receiver.bind(("0.0.0.0", PORT))  # noqa: S104 - in a namespace of the test's own
        tell("ready")
        receiver.settimeout(30)
        seen: list[int] = []
        try:
            while True:
                seen += struct.unpack("!I", receiver.recv(100))
                receiver.settimeout(idle)
        except TimeoutError:
            return _ranges(seen)


def _ranges(numbers: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def expand(ranges: list[list[int]]) -> list[int]:
    return [number for first, last in ranges for number in range(first, last + 1)]
