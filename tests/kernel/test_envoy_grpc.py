"""A real gRPC client reaches a real gRPC service by a service address, through a real Envoy, over joined sockets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from bpf import layout, links, loader
from bpf.layout import Counter, Endpoint, JoinEvent, MeshConfig, ServiceKey, ServiceStats, u32
from controlplane.envoy_binary import find_envoy
from tests.kernel.envoy_config import envoy_config, h2_listener
from tests.kernel.grpc_ends import SIZES
from tests.kernel.lab import Lab, command, enter, inside
from tests.kernel.services import attach_sock_lb, set_service, totals

pytestmark = [pytest.mark.kernel, pytest.mark.e2e]

VIP, PROXY, BACKEND = "10.96.0.10", "10.50.0.9", "10.50.0.1"
VIP_PORT, PROXY_PORT, BACKEND_PORT = 443, 15000, 9100


def test_grpc_by_a_service_address_through_envoy_over_joined_sockets(lab: Lab, root: Path) -> None:
    netns, cgroup = lab.namespace("mesh"), lab.cgroup()
    for address in (PROXY, BACKEND):
        lab.address(netns, "lo", f"{address}/32")
    command("ip", "-n", netns, "route", "add", "blackhole", "10.96.0.0/16")
    sock_join = lab.closing(loader.load("sock_join"))
    links.attach_sk_msg(sock_join.programs["sock_join_message"], sock_join.maps["join_sockets"])
    lab.closing(links.attach_cgroup(sock_join.programs["sock_join_established"], cgroup))
    for address, port in ((PROXY, PROXY_PORT), (BACKEND, BACKEND_PORT)):
        key = ServiceKey(IPv4Address(address), port, socket.IPPROTO_TCP)
        sock_join.maps["join_endpoints"].set(key.pack(), u32(1))
    sock_join.maps["mesh_config"].set(u32(0), MeshConfig().pack())
    sock_lb = attach_sock_lb(lab, cgroup)
    service = ServiceKey(IPv4Address(VIP), VIP_PORT, socket.IPPROTO_TCP)
    set_service(sock_lb, service, 1, [(Endpoint(IPv4Address(PROXY), PROXY_PORT, 1), 1)])

    module = [sys.executable, "-m", "tests.kernel.grpc_ends"]
    server = lab.spawn([*module, "serve", f"{BACKEND}:{BACKEND_PORT}"], netns=netns, cgroup=cgroup)
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    config = lab.folder / "envoy.json"
    listeners = [h2_listener(PROXY, PROXY_PORT, "h2")]
    config.write_text(json.dumps(envoy_config(listeners, {"h2": (BACKEND, BACKEND_PORT)})), encoding="utf-8")
    envoy = [str(find_envoy(None)), "--concurrency", "1", "-l", "error", "--disable-hot-restart", "-c", str(config)]
    lab.spawn(envoy, netns=netns, cgroup=cgroup)
    _wait_for(netns)

    asked = subprocess.run(
        enter([*module, "ask", f"{VIP}:{VIP_PORT}"], netns=netns, cgroup=cgroup),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=root,
        check=False,
    )
    assert asked.stdout.strip() == "all right", asked.stderr[-2000:]
    assert totals(sock_lb, "service_stats", ServiceStats)[1].connections >= 1
    found = sock_join.maps["join_stats"].totals(Counter)
    events = {JoinEvent(layout.unpack_u32(key)): value for key, value in found.items()}
    assert events[JoinEvent.ADDED].packets >= 4
    assert events[JoinEvent.MISMATCH].packets == 0
    # Requests and answers, between client and Envoy and again between Envoy and service.
    assert events[JoinEvent.REDIRECTED].bytes + events[JoinEvent.PLAIN].bytes > 4 * 3 * sum(SIZES)
    assert events[JoinEvent.REDIRECTED].bytes > 3 * sum(SIZES)


def _wait_for(netns: str) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with inside(netns), socket.socket() as probe:
            if probe.connect_ex((PROXY, PROXY_PORT)) == 0:
                return
        time.sleep(0.1)
    pytest.fail("Envoy does not listen")
