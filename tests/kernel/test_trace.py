"""Tracing tools, driven by Debian's bcc, next to a running data path."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import time
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Any

import pytest

from bpf import loader
from bpf.errors import TraceError
from bpf.layout import DevmapValue, GpuFlowKey, GpuSlot, ServiceKey, u32
from bpf.tracing import bcc_backend
from bpf.tracing.connections import watch
from bpf.tracing.counts import count_drops, count_redirect_errors
from tests.kernel.lab import Lab, Tell, command, ifindex, inside, mac
from tests.kernel.packets import UDP, ip4, udp

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _bcc() -> None:
    if importlib.util.find_spec("bcc") is None:
        pytest.fail("Debian's python3-bpfcc is not there: scripts/install-system-packages.sh")


def connect_when_told(tell: Tell, address: str, port: int) -> None:
    with socket.socket() as listener:
        listener.bind((address, port))
        listener.listen()
        for _ in range(30):  # bcc compiles meanwhile; some come early and are not seen
            with socket.create_connection((address, port), timeout=5):
                time.sleep(0.1)


def test_connections_are_timed_and_carry_their_tier(lab: Lab) -> None:
    netns, pins = lab.namespace("traced"), lab.pins()
    lab.address(netns, "lo", "10.50.0.1/32")
    with loader.load("tcp_signals", pins=pins) as signals:
        key = ServiceKey(ip_address("10.50.0.1"), 9100, socket.IPPROTO_TCP).pack()
        signals.maps["tier_addresses"].set(key, u32(3))
    lab.start(connect_when_told, "10.50.0.1", 9100, netns=netns)
    for seen in watch(pins, 5):
        if str(seen.destination) == "10.50.0.1":
            break
    else:
        pytest.fail("no connection was seen")
    assert (seen.destination_port, seen.established, seen.tier) == (9100, True, 3)
    assert 0 < seen.microseconds < 1e6


def fail_when_told(tell: Tell) -> None:
    for _ in range(30):
        with socket.socket(socket.AF_INET6) as client:
            client.connect_ex(("::1", 9))
        time.sleep(0.1)


def test_refused_connections_are_seen_too(lab: Lab) -> None:
    lab.start(fail_when_told, netns=lab.namespace("traced"))
    found = [seen for seen in watch(Path("/nonexistent"), 2.5) if str(seen.destination) == "::1"]
    assert found
    assert not any(seen.established for seen in found)


def test_packets_redirected_to_a_link_that_is_down(lab: Lab) -> None:
    node, function, pins = lab.namespace("node"), lab.namespace("function"), lab.pins()
    lab.veth(node, "vf0", function, "gpu0")
    command("ip", "netns", "exec", function, "ethtool", "-K", "gpu0", "gro", "on")  # else it takes no frames at all
    loaded = lab.closing(loader.load("xdp_gpu_bypass", pins=pins))
    program, target = loaded.programs["xdp_gpu_bypass"], ifindex(node, "vf0")
    loaded.maps["gpu_flow_rules"].set(GpuFlowKey(IPv4Address("10.50.0.1"), 7000, UDP).pack(), u32(5))
    loaded.maps["gpu_slots"].set(u32(5), GpuSlot(mac(function, "gpu0"), mac(node, "vf0")).pack())

    def inject(tell: Tell) -> None:
        for _ in range(30):
            program.inject(ip4("10.50.0.1", UDP, udp(7000)), ifindex=target, count=10)
            time.sleep(0.1)

    with inside(node):
        loaded.maps["gpu_if_map"].set(u32(5), DevmapValue(target).pack())
        command("ip", "link", "set", "vf0", "down")
    lab.start(inject, netns=node)
    found = count_redirect_errors(pins, 1.0)
    assert [(each.slot, each.stage, each.error.split(" ")[0]) for each in found] == [(5, "redirect", "ENETDOWN")]
    assert found[0].packets >= 10


def send_nowhere(tell: Tell) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(300):
            sender.sendto(b"?", ("127.0.0.1", 9))
            time.sleep(0.01)


def test_drops_have_reasons(lab: Lab) -> None:
    lab.start(send_nowhere, netns=lab.namespace("traced"))
    found = {each.reason: each.packets for each in count_drops(1.0)}
    assert found.get("no_socket", 0) >= 10


def test_without_bcc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(TraceError, match="python3-bpfcc"), bcc_backend.loaded("int x;"):
        pass


def test_pypi_s_bcc_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    with pytest.raises(TraceError, match="another program"), bcc_backend.loaded("int x;"):
        pass


def test_redirects_need_a_data_path() -> None:
    with pytest.raises(TraceError, match="gpu_if_map"):
        count_redirect_errors(Path("/nonexistent"), 0.1)
