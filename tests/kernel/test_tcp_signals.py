"""What tcp_signals counts, by tier."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from bpf import layout, links, loader
from bpf.layout import Counter, Endpoint, JoinEvent, ServiceKey, TcpStats, u32
from bpf.loader import Object
from tests.kernel.lab import Lab, Tell, command
from tests.kernel.services import HOOKS, set_service

pytestmark = pytest.mark.kernel

PORT, GOLD, SILVER = 9000, 1, 2
SERVER, VIP = "10.50.0.1", "10.96.0.10"


@dataclass
class World:
    lab: Lab
    netns: str
    cgroup: Path
    signals: Object
    pins: Path

    def tier(self, number: int) -> TcpStats:
        return self.signals.maps["tcp_stats"].total(u32(number), TcpStats) or TcpStats()

    def talk(self, *args: Any, **kwargs: Any) -> None:
        self.lab.start(ask_for, *args, netns=self.netns, cgroup=self.cgroup, **kwargs).result()


@pytest.fixture
def world(lab: Lab) -> World:
    netns, cgroup, pins = lab.namespace("signals"), lab.cgroup(), lab.pins()
    lab.address(netns, "lo", f"{SERVER}/32")
    signals: Object = lab.closing(loader.load("tcp_signals", pins=pins))
    lab.closing(links.attach_cgroup(signals.programs["tcp_signals"], cgroup))
    server = lab.start(answer, netns=netns)  # outside the cgroup: only clients are counted
    server.hear()
    return World(lab, netns, cgroup, signals, pins)


def answer(tell: Tell) -> None:
    """Send back twice what comes."""
    with socket.socket() as listener:
        listener.bind((SERVER, PORT))
        listener.listen(64)
        tell("ready")
        while True:
            with listener.accept()[0] as connection:
                while data := connection.recv(65536):
                    connection.sendall(data * 2)


def ask_for(tell: Tell, address: str, rounds: int, size: int, mark: int = 0) -> None:
    with socket.socket() as client:
        if mark:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        client.settimeout(20)
        client.connect((address, PORT))
        for _ in range(rounds):
            client.sendall(bytes(size))
            missing = 2 * size
            while missing:
                missing -= len(client.recv(missing))


def test_connections_and_bytes_without_a_tier(world: World) -> None:
    world.talk(SERVER, 100, 1000)
    stats = world.tier(0)
    assert (stats.active, stats.passive, stats.closed) == (1, 0, 1)
    assert 100_000 <= stats.bytes_sent <= 100_002  # SYN and FIN are acknowledged like bytes
    assert 200_000 <= stats.bytes_received <= 200_001
    assert world.tier(GOLD) == TcpStats()


def test_round_trips_fill_the_histogram(world: World) -> None:
    world.talk(SERVER, 200, 10)
    stats = world.tier(0)
    assert stats.rtt_samples >= 150
    counts = {
        layout.unpack_u32(key): sum(map(layout.unpack_u64, cpus))
        for key, cpus in world.signals.maps["rtt_histogram"].items_per_cpu()
    }
    assert sum(counts.values()) == stats.rtt_samples
    mean = stats.rtt_sum_us / stats.rtt_samples
    low = sum(count * 2**bucket for bucket, count in counts.items() if bucket) / stats.rtt_samples
    assert low <= mean <= 2 * low + 1
    assert sum(count for bucket, count in counts.items() if bucket < 20) == stats.rtt_samples


def test_a_tier_by_the_remote_address(world: World) -> None:
    world.signals.maps["tier_addresses"].set(ServiceKey(ip_address(SERVER), PORT, socket.IPPROTO_TCP).pack(), u32(GOLD))
    world.talk(SERVER, 10, 100)
    assert world.tier(GOLD).active == 1
    assert world.tier(0) == TcpStats()


def test_a_tier_by_the_mark(world: World) -> None:
    world.signals.maps["tier_marks"].set(u32(0x51), u32(SILVER))
    world.talk(SERVER, 10, 100, 0x51)
    world.talk(SERVER, 10, 100, 0x52)
    assert (world.tier(SILVER).active, world.tier(0).active) == (1, 1)


def test_a_tier_by_the_service_address_that_was_asked_for(world: World) -> None:
    """Two objects, one map: what sock_lb notes at the socket, tcp_signals reads."""
    sock_lb: Object = world.lab.closing(loader.load("sock_lb", pins=world.pins))
    for hook in HOOKS:
        world.lab.closing(links.attach_cgroup(sock_lb.programs[f"sock_lb_{hook}"], world.cgroup))
    backend = Endpoint(ip_address(SERVER), PORT, 1)
    set_service(sock_lb, ServiceKey(ip_address(VIP), PORT, socket.IPPROTO_TCP), 1, [(backend, 1)], tier=GOLD)
    world.talk(VIP, 10, 100)
    world.talk(SERVER, 10, 100)
    assert (world.tier(GOLD).active, world.tier(0).active) == (1, 1)


def test_a_tier_that_can_t_be_counts_as_none(world: World) -> None:
    world.signals.maps["tier_marks"].set(u32(0x51), u32(layout.TIERS))
    world.talk(SERVER, 10, 100, 0x51)
    assert world.tier(0).active == 1


def test_the_accepting_end_is_counted_as_passive(world: World) -> None:
    def serve_once(tell: Tell) -> None:
        with socket.socket() as listener:
            listener.bind((SERVER, PORT + 1))
            listener.listen()
            tell("ready")
            with listener.accept()[0] as connection:
                connection.sendall(connection.recv(10))

    def once(tell: Tell) -> None:
        with socket.create_connection((SERVER, PORT + 1), timeout=10) as client:
            client.sendall(b"x")
            client.recv(10)

    server = world.lab.start(serve_once, netns=world.netns, cgroup=world.cgroup)
    server.hear()
    world.lab.start(once, netns=world.netns).result()
    server.result()
    assert (world.tier(0).active, world.tier(0).passive) == (0, 1)


def test_retransmissions(world: World) -> None:
    """The far end of the cable is unplugged while something is sent."""
    near, far = world.lab.namespace("near"), world.lab.namespace("far")
    world.lab.veth(near, "c0", far, "s0")
    world.lab.address(near, "c0", "10.1.0.1/24")
    world.lab.address(far, "s0", "10.1.0.2/24")

    def drain(tell: Tell) -> str:
        with socket.socket() as listener:
            listener.bind(("10.1.0.2", PORT))
            listener.listen()
            tell("ready")
            with listener.accept()[0] as connection:
                return connection.recv(4, socket.MSG_WAITALL).decode()

    def send(tell: Tell) -> None:
        with socket.create_connection(("10.1.0.2", PORT), timeout=10) as sender:
            tell("connected")
            time.sleep(0.3)
            sender.sendall(b"lost")
            sender.shutdown(socket.SHUT_WR)
            sender.recv(1)  # until the other end has closed

    receiver = world.lab.start(drain, netns=far)
    receiver.hear()
    sender = world.lab.start(send, netns=near, cgroup=world.cgroup)
    sender.hear()
    # Only the far end: the near one must go on trying.
    command("ip", "netns", "exec", far, "sysctl", "-qw", "net.ipv4.conf.s0.rp_filter=1")
    command("ip", "-n", far, "route", "add", "blackhole", "10.1.0.1/32")
    time.sleep(1)
    command("ip", "-n", far, "route", "del", "blackhole", "10.1.0.1/32")
    assert receiver.result() == "lost"
    sender.result()
    assert world.tier(0).retransmissions >= 1


def test_a_joined_connection_s_bytes_are_counted_at_their_sender(world: World) -> None:
    sock_join: Object = world.lab.closing(loader.load("sock_join", pins=world.pins))
    links.attach_sk_msg(sock_join.programs["sock_join_message"], sock_join.maps["join_sockets"])
    world.lab.closing(links.attach_cgroup(sock_join.programs["sock_join_established"], world.cgroup))
    key = ServiceKey(ip_address(SERVER), PORT + 2, socket.IPPROTO_TCP).pack()
    sock_join.maps["join_endpoints"].set(key, u32(1))
    world.signals.maps["tier_addresses"].set(key, u32(GOLD))

    def serve(tell: Tell) -> None:
        with socket.socket() as listener:
            listener.bind((SERVER, PORT + 2))
            listener.listen()
            tell("ready")
            with listener.accept()[0] as connection:
                for _ in range(100):
                    connection.sendall(connection.recv(1000, socket.MSG_WAITALL) * 2)

    def ask(tell: Tell) -> None:
        with socket.create_connection((SERVER, PORT + 2), timeout=10) as client:
            for _ in range(100):
                client.sendall(bytes(1000))
                client.recv(2000, socket.MSG_WAITALL)

    server = world.lab.start(serve, netns=world.netns, cgroup=world.cgroup)
    server.hear()
    world.lab.start(ask, netns=world.netns, cgroup=world.cgroup).result()
    server.result()
    redirected = sock_join.maps["join_stats"].total(u32(JoinEvent.REDIRECTED), Counter)
    assert redirected == Counter(200, 300_000)
    assert 300_000 <= world.tier(GOLD).bytes_sent <= 300_004
    assert (world.tier(GOLD).active, world.tier(GOLD).passive) == (1, 1)
