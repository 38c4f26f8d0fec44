"""The paths that datapath.py measures: namespaces, programs on their hooks, Envoys.

    client ── router ── server      three cables side by side, by path:
       plain and sock_join, classify (tc on both of the router's ends), XDP redirect (native, both ends)

Envoys stand next to the client and next to the server, and speak over the plain cable.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from bpf import layout, links, loader
from bpf.layout import DevmapValue, GpuFlowKey, GpuSlot, ServiceKey, u32
from bpf.links import XdpMode
from bpf.loader import Object
from tests.kernel.envoy_config import envoy_config, h2_listener, tcp_listener
from tests.kernel.lab import Lab, command, enter, ifindex, inside, mac

PLAIN, CLASSIFY, XDP = 1, 2, 3
TCP_PORT, H2_PORT, JOIN_PORT = 7001, 7002, 9000
ONE_ENVOY, TCP_PAIR, H2_PAIR = 15001, 15002, 15003
_SERVER_TCP, _SERVER_H2 = 16002, 16003
OTHER_RULES: Final = 3000
"""Rules that don't match, so that a lookup has something to pass over."""


def server_address(path: int) -> str:
    return f"10.{path}.2.2"


class Network:
    """Everything that the ping-pong needs, in a lab that removes it."""

    def __init__(self, lab: Lab, pingpong: Path, envoy: Path | None) -> None:
        self.lab = lab
        self.client, self.router, self.server = (lab.namespace(name) for name in ("client", "router", "server"))
        self._pingpong = pingpong
        command("ip", "netns", "exec", self.router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for path in (PLAIN, CLASSIFY, XDP):
            self._cable(path)
        self.cgroup = lab.cgroup()
        self.objects: dict[str, Object] = {}
        self._classify()
        self._redirect()
        self._join()
        ends = (f"tcp:{TCP_PORT}", f"h2:{H2_PORT}", f"tcp:{JOIN_PORT}")
        server = lab.spawn([str(pingpong), "serve", *ends], netns=self.server, cgroup=self.cgroup)
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        if envoy:
            self._envoys(envoy)

    def _cable(self, path: int) -> None:
        for netns, end, side in ((self.client, "c", 1), (self.server, "s", 2)):
            self.lab.veth(netns, f"{end}{path}", self.router, f"r{end}{path}")
            self.lab.address(netns, f"{end}{path}", f"10.{path}.{side}.2/24")
            self.lab.address(self.router, f"r{end}{path}", f"10.{path}.{side}.1/24")
        for netns, here, there in ((self.client, 1, 2), (self.server, 2, 1)):
            command("ip", "-n", netns, "route", "add", f"10.{path}.{there}.0/24", "via", f"10.{path}.{here}.1")

    def _load(self, name: str) -> Object:
        loaded: Object = self.lab.closing(loader.load(name))
        self.objects[name] = loaded
        return loaded

    def _classify(self) -> None:
        loaded = self._load("tc_gpu_bypass")
        rules = ((GpuFlowKey(IPv4Address(0x0B00_0000 + n), 1, 6).pack(), u32(0)) for n in range(OTHER_RULES))
        loaded.maps["gpu_flow_rules"].set_many(rules)
        with inside(self.router):
            for end in "cs":
                index = socket.if_nametoindex(f"r{end}{CLASSIFY}")
                self.lab.closing(links.attach_tcx(loaded.programs["tc_gpu_bypass"], index))

    def _redirect(self) -> None:
        """Packets from either side go to the other: two functions, in a way."""
        loaded = self._load("xdp_gpu_bypass")
        for slot, (netns, end, side) in enumerate(((self.client, "c", 1), (self.server, "s", 2))):
            command("ip", "netns", "exec", netns, "ethtool", "-K", f"{end}{XDP}", "tx", "off", "gro", "on")
            device = f"r{end}{XDP}"
            target = GpuSlot(mac(netns, f"{end}{XDP}"), mac(self.router, device))
            loaded.maps["gpu_slots"].set(u32(slot), target.pack())
            key = GpuFlowKey(IPv4Address(f"10.{XDP}.{side}.2"), 0, socket.IPPROTO_TCP)
            loaded.maps["gpu_flow_rules"].set(key.pack(), u32(slot))
            with inside(self.router):
                loaded.maps["gpu_if_map"].set(u32(slot), DevmapValue(ifindex(self.router, device)).pack())
        with inside(self.router):
            for end in "cs":
                index = socket.if_nametoindex(f"r{end}{XDP}")
                self.lab.closing(links.attach_xdp(loaded.programs["xdp_gpu_bypass"], index, XdpMode.NATIVE))

    def _join(self) -> None:
        loaded = self._load("sock_join")
        links.attach_sk_msg(loaded.programs["sock_join_message"], loaded.maps["join_sockets"])
        self.lab.closing(links.attach_cgroup(loaded.programs["sock_join_established"], self.cgroup))
        key = ServiceKey(IPv4Address(server_address(PLAIN)), JOIN_PORT, socket.IPPROTO_TCP)
        loaded.maps["join_endpoints"].set(key.pack(), u32(1))

    def _envoys(self, envoy: Path) -> None:
        address = server_address(PLAIN)
        near = envoy_config(
            [
                tcp_listener("127.0.0.1", ONE_ENVOY, "one"),
                tcp_listener("127.0.0.1", TCP_PAIR, "pair"),
                h2_listener("127.0.0.1", H2_PAIR, "h2"),
            ],
            {"one": (address, TCP_PORT), "pair": (address, _SERVER_TCP), "h2": (address, _SERVER_H2)},
        )
        far = envoy_config(
            [tcp_listener(address, _SERVER_TCP, "tcp"), h2_listener(address, _SERVER_H2, "h2")],
            {"tcp": ("127.0.0.1", TCP_PORT), "h2": ("127.0.0.1", H2_PORT)},
        )
        for netns, name, config in ((self.client, "near", near), (self.server, "far", far)):
            file = self.lab.folder / f"{name}.json"
            file.write_text(json.dumps(config), encoding="utf-8")
            arguments = ["--concurrency", "1", "-l", "error", "--disable-hot-restart", "-c", str(file)]
            self.lab.spawn([str(envoy), *arguments], netns=netns)
        for port in (_SERVER_TCP, _SERVER_H2):
            self._wait_for(address, port)
        for port in (ONE_ENVOY, TCP_PAIR, H2_PAIR):
            self._wait_for("127.0.0.1", port)

    def _wait_for(self, host: str, port: int) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with inside(self.client), socket.socket() as probe:
                if probe.connect_ex((host, port)) == 0:
                    return
            time.sleep(0.1)
        raise SystemExit(f"Envoy does not listen on {host}:{port}")

    def ask(self, rounds: int, size: int, targets: Mapping[str, str]) -> bytes:
        """Run the ping-pong; returns the samples, path after path."""
        file = self.lab.folder / "samples"
        arguments = [str(self._pingpong), "ask", str(rounds), "500", str(size), str(file)]
        arguments += [f"{name}={target}" for name, target in targets.items()]
        done = subprocess.run(
            enter(arguments, netns=self.client, cgroup=self.cgroup),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the ping-pong broke: {done.stderr.strip()}")
        return file.read_bytes()

    def events(self, name: str, kind: Any) -> dict[int, Any]:
        found = {"sock_join": "join_stats", "tc_gpu_bypass": "gpu_pass_stats", "xdp_gpu_bypass": "gpu_slot_stats"}[name]
        totals = self.objects[name].maps[found].totals(kind)
        return {layout.unpack_u32(key): value for key, value in totals.items()}


def compile_pingpong(target: Path) -> Path:
    source = Path(__file__).with_name("pingpong.c")
    subprocess.run(
        [os.environ.get("CC", "clang"), "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(target), str(source)],
        check=True,
        timeout=60,
    )
    return target
