"""Real packets past the stack: a client, a node with a NIC, and a GPU function that a veth pair stands in for."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

import pytest

from bpf import layout, links, loader
from bpf.layout import Counter, DevmapValue, GpuFlowKey, GpuPassReason, GpuQpKey, GpuSlot, GpuSlotStats, u32
from bpf.links import Link, XdpMode
from bpf.loader import Object
from tests.kernel.lab import Lab, Tell, command, ifindex, inside, mac, received

pytestmark = pytest.mark.kernel

_SO_RCVBUFFORCE = 33  # asm-generic/socket.h

SLOT = 5
QP = 0x11
GPU = "10.50.0.1"
ROCE = 4791


@dataclass
class World:
    """client c0 ─ nic node vf0 ─ gpu0 function."""

    lab: Lab
    client: str
    node: str
    function: str
    program: Object
    link: Link | None = None

    def set_slot(self) -> None:
        """As the node agent does when a function appears."""
        target = GpuSlot(mac(self.function, "gpu0"), mac(self.node, "vf0"), ifindex(self.node, "vf0"))
        self.program.maps["gpu_slots"].set(u32(SLOT), target.pack())
        with inside(self.node):
            self.program.maps["gpu_if_map"].set(u32(SLOT), DevmapValue(target.ifindex).pack())

    @property
    def slot(self) -> GpuSlotStats:
        return self.program.maps["gpu_slot_stats"].total(u32(SLOT), GpuSlotStats) or GpuSlotStats()

    def passed(self, reason: GpuPassReason) -> int:
        found = self.program.maps["gpu_pass_stats"].total(u32(reason), Counter)
        return found.packets if found else 0

    def plug(self) -> None:
        self.lab.veth(self.node, "vf0", self.function, "gpu0")
        self.lab.address(self.function, "gpu0", f"{GPU}/32")
        # A veth end takes redirected frames only if its peer polls for them.
        command("ip", "netns", "exec", self.function, "ethtool", "-K", "gpu0", "gro", "on")
        # The client's address isn't reachable from the function: that is no reason to drop what comes from there.
        for name in ("all", "gpu0"):
            command("ip", "netns", "exec", self.function, "sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=0")

    def send(self, *args: Any) -> Any:
        return self.lab.start(send_datagrams, *args, netns=self.client).result()


@pytest.fixture(params=list(XdpMode), ids=lambda mode: mode.name.lower())
def world(lab: Lab, request: pytest.FixtureRequest) -> World:
    client, node, function = (lab.namespace(name) for name in ("client", "node", "function"))
    for netns in (client, node, function):  # its neighbour discovery would be counted
        command("ip", "netns", "exec", netns, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
    lab.veth(client, "c0", node, "nic")
    lab.address(client, "c0", "10.1.1.2/24")
    lab.address(node, "nic", "10.1.1.1/24")
    command("ip", "-n", client, "route", "add", "default", "via", "10.1.1.1")
    # What comes from a wire has its checksum.
    command("ip", "netns", "exec", client, "ethtool", "-K", "c0", "tx", "off")
    program: Object = lab.closing(loader.load("xdp_gpu_bypass"))
    made = World(lab, client, node, function, program)
    made.plug()
    made.set_slot()
    program.maps["gpu_qp_rules"].set(GpuQpKey(IPv4Address(GPU), QP).pack(), u32(SLOT))
    program.maps["gpu_flow_rules"].set(GpuFlowKey(IPv4Address(GPU), 7000, socket.IPPROTO_UDP).pack(), u32(SLOT))
    with inside(node):
        nic = socket.if_nametoindex("nic")
        made.link = lab.closing(links.attach_xdp(program.programs["xdp_gpu_bypass"], nic, request.param))
    return made


def send_datagrams(tell: Tell, port: int, queue_pair: int, count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        base = struct.pack("!BBHI", 4, 0, 0xFFFF, queue_pair)
        for number in range(count):
            sender.sendto(base + struct.pack("!I", number) + b"x" * 64, (GPU, port))


def collect(tell: Tell, port: int, seconds: float) -> dict[str, int]:
    """Which numbers arrive at the function, and how often one arrives twice."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        receiver.bind(("0.0.0.0", port))  # noqa: S104 - in a namespace of the test's own
        receiver.settimeout(seconds)
        tell("ready")
        seen: set[int] = set()
        twice = 0
        try:
            while True:
                (number,) = struct.unpack_from("!I", receiver.recv(2000), 8)
                twice += number in seen
                seen.add(number)
        except TimeoutError:
            return {"different": len(seen), "twice": twice}


def test_ten_thousand_packets_go_past_the_stack_and_none_is_lost_or_stray(world: World) -> None:
    collector = world.lab.start(collect, ROCE, 1.0, netns=world.function)
    collector.hear()
    forwarded = _forwarded(world)
    world.send(ROCE, QP, 10_000)
    assert collector.result() == {"different": 10_000, "twice": 0}
    assert world.slot.redirected_packets == 10_000
    assert world.slot.no_interface_packets == 0
    assert _forwarded(world) == forwarded
    assert world.passed(GpuPassReason.NO_RULE) == 0


def _forwarded(world: World) -> int:
    """IPv4 packets that the node's own stack has received or forwarded."""
    shown = command("ip", "netns", "exec", world.node, "cat", "/proc/net/snmp").splitlines()
    names, values = (line.split() for line in shown if line.startswith("Ip: "))
    return int(values[names.index("InReceives")])


def test_an_unknown_queue_pair_reaches_the_stack(world: World) -> None:
    before, at_function = _forwarded(world), received(world.function, "gpu0")
    world.send(ROCE, 0x99, 100)
    assert _forwarded(world) == before + 100
    assert received(world.function, "gpu0") == at_function
    assert world.passed(GpuPassReason.NO_RULE) == 100


def test_a_rule_by_port(world: World) -> None:
    collector = world.lab.start(collect, 7000, 0.5, netns=world.function)
    collector.hear()
    world.send(7000, 0, 500)
    assert collector.result() == {"different": 500, "twice": 0}


def test_without_a_slot_packets_reach_the_stack_and_are_counted(world: World) -> None:
    world.program.maps["gpu_if_map"].delete(u32(SLOT))
    before = _forwarded(world)
    world.send(ROCE, QP, 100)
    assert _forwarded(world) == before + 100
    assert world.slot == GpuSlotStats(no_interface_packets=100, no_interface_bytes=100 * (14 + 20 + 8 + 12 + 64))
    assert world.passed(GpuPassReason.NO_INTERFACE) == 100


def test_a_function_that_vanishes_leaves_no_stale_slot_and_is_served_again_when_it_returns(world: World) -> None:
    old = ifindex(world.node, "vf0")
    command("ip", "-n", world.node, "link", "del", "vf0")
    before = _forwarded(world)
    world.send(ROCE, QP, 100)
    assert _forwarded(world) == before + 100  # the kernel has emptied the slot itself
    world.plug()
    assert ifindex(world.node, "vf0") != old
    world.set_slot()
    collector = world.lab.start(collect, ROCE, 0.5, netns=world.function)
    collector.hear()
    world.send(ROCE, QP, 100)
    assert collector.result() == {"different": 100, "twice": 0}


def test_exchanging_the_program_loses_nothing(world: World) -> None:
    """The successor's program takes over the pinned link between two packets."""
    collector = world.lab.start(collect, ROCE, 1.0, netns=world.function)
    collector.hear()
    sender = world.lab.start(send_datagrams, ROCE, QP, 20_000, netns=world.client)
    assert world.link
    for _ in range(20):
        world.link.update(world.program.programs["xdp_gpu_bypass"])
        time.sleep(0.005)
    sender.result()
    assert collector.result() == {"different": 20_000, "twice": 0}


def test_tc_takes_local_pods_traffic_to_a_function(lab: Lab) -> None:
    """A pod's own packets carry unfinished checksums and large segments: TCP through tc, with both left on."""
    pod, node, function = (lab.namespace(name) for name in ("pod", "node", "function"))
    lab.veth(pod, "eth0", node, "pod0")
    lab.veth(node, "vf0", function, "gpu0")
    lab.address(pod, "eth0", "10.1.1.2/24")
    lab.address(node, "pod0", "10.1.1.1/24")
    lab.address(function, "gpu0", f"{GPU}/24")
    lab.address(node, "vf0", "10.50.0.254/24")
    command("ip", "-n", pod, "route", "add", "default", "via", "10.1.1.1")
    command("ip", "-n", function, "route", "add", "default", "via", "10.50.0.254")
    command("ip", "netns", "exec", node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    program = lab.closing(loader.load("tc_gpu_bypass"))
    slot = GpuSlot(mac(function, "gpu0"), mac(node, "vf0"), ifindex(node, "vf0"))
    program.maps["gpu_slots"].set(u32(SLOT), slot.pack())
    program.maps["gpu_flow_rules"].set(GpuFlowKey(IPv4Address(GPU), 7000, socket.IPPROTO_TCP).pack(), u32(SLOT))
    with inside(node):
        lab.closing(links.attach_tcx(program.programs["tc_gpu_bypass"], socket.if_nametoindex("pod0")))
    server = lab.start(count_bytes, netns=function)
    server.hear()
    lab.start(pour, 8 << 20, netns=pod).result()
    assert server.result() == 8 << 20
    stats = program.maps["gpu_slot_stats"].total(u32(SLOT), GpuSlotStats)
    assert stats.redirected_bytes > 8 << 20
    assert stats.redirected_packets < (8 << 20) / 1448  # large segments stayed whole
    passed = program.maps["gpu_pass_stats"].totals(Counter)
    assert all(value.packets == 0 for key, value in passed.items() if layout.unpack_u32(key) not in (0, 1))


def count_bytes(tell: Tell) -> int:
    with socket.socket() as listener:
        listener.bind((GPU, 7000))
        listener.listen()
        listener.settimeout(20)
        tell("ready")
        connection, _ = listener.accept()
        count = 0
        while data := connection.recv(1 << 18):
            count += len(data)
        return count


def pour(tell: Tell, size: int) -> None:
    with socket.create_connection((GPU, 7000), timeout=10) as client:
        client.sendall(bytes(size))
