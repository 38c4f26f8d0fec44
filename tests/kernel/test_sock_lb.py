"""Real clients and servers over service addresses, in a namespace of the test's own."""

from __future__ import annotations

import contextlib
import ctypes
import math
import socket
import time
from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from bpf.layout import BackendStats, Endpoint, MeshConfig, ServiceKey, ServiceStats, u32
from bpf.loader import Object
from tests.kernel.lab import Lab, Tell, command
from tests.kernel.services import attach_sock_lb, family_of, serve_names, set_service, totals

pytestmark = pytest.mark.kernel

TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
BACKENDS4 = ("10.50.0.1", "10.50.0.2", "10.50.0.3")
BACKENDS6 = ("fd50::1", "fd50::2", "fd50::3")
VIP4, VIP6, PORT = "10.96.0.10", "fd96::10", 80
BACKEND_PORT = 9100
WEIGHTS = (70, 20, 10)


def endpoint(address: str, number: int) -> Endpoint:
    return Endpoint(ip_address(address), BACKEND_PORT, number)


@dataclass
class World:
    """A namespace with backends, service addresses that lead nowhere by themselves, and the translation."""

    lab: Lab
    netns: str
    cgroup: Path
    sock_lb: Object

    def ask(self, function: Any, *args: Any, inside: bool = True) -> Any:
        """What a client sees."""
        child = self.lab.start(function, *args, netns=self.netns, cgroup=self.cgroup if inside else None)
        return child.result()


@pytest.fixture
def world(lab: Lab) -> World:
    netns, cgroup = lab.namespace("lb"), lab.cgroup()
    for address in BACKENDS4:
        lab.address(netns, "lo", f"{address}/32")
    for address in BACKENDS6:
        lab.address(netns, "lo", f"{address}/128")
    command("ip", "-n", netns, "route", "add", "blackhole", "10.96.0.0/16")
    command("ip", "-n", netns, "-6", "route", "add", "blackhole", "fd96::/64")
    server = lab.start(serve_names, [(address, BACKEND_PORT) for address in BACKENDS4 + BACKENDS6], netns=netns)
    sock_lb = attach_sock_lb(lab, cgroup)
    for number, (vip, backends) in enumerate(((VIP4, BACKENDS4), (VIP6, BACKENDS6)), start=1):
        weighted = [(endpoint(address, 10 * number + index), WEIGHTS[index]) for index, address in enumerate(backends)]
        set_service(sock_lb, ServiceKey(ip_address(vip), PORT, TCP), number, weighted)
        set_service(sock_lb, ServiceKey(ip_address(vip), PORT, UDP), number + 2, weighted)
    server.hear()
    return World(lab, netns, cgroup, sock_lb)


def chi_square_p(observed: list[int], weights: tuple[int, ...]) -> float:
    """Pearson's test for three classes: two degrees of freedom, whose tail is exp(-x/2)."""
    total = sum(observed)
    expected = [total * weight / sum(weights) for weight in weights]
    return math.exp(-sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True)) / 2)


# ---- what clients do, in children


def connect_often(tell: Tell, address: str, count: int) -> dict[str, Any]:
    names: Counter[str] = Counter()
    peers: Counter[str] = Counter()
    for _ in range(count):
        with socket.socket(family_of(address), socket.SOCK_STREAM) as client:
            client.settimeout(10)
            client.connect((address, PORT))
            peers[client.getpeername()[0]] += 1
            names[client.recv(100).decode()] += 1
    return {"names": names, "peers": peers}


def send_often(tell: Tell, address: str, count: int) -> dict[str, Any]:
    """Unconnected datagram sockets, one datagram each."""
    names: Counter[str] = Counter()
    senders: Counter[str] = Counter()
    for _ in range(count):
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as client:
            client.settimeout(10)
            client.sendto(b"?", (address, PORT))
            data, sender = client.recvfrom(100)
            names[data.decode()] += 1
            senders[f"{sender[0]} {sender[1]}"] += 1
    return {"names": names, "senders": senders}


def send_connected(tell: Tell, address: str) -> list[Any]:
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        client.connect((address, PORT))
        client.send(b"?")
        data, sender = client.recvfrom(100)
        return [data.decode(), sender[0], client.getpeername()[0]]


def send_thrice(tell: Tell, address: str) -> list[str]:
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        names = []
        for _ in range(3):
            client.sendto(b"?", (address, PORT))
            names.append(client.recv(100).decode())
        return names


def send_to_all(tell: Tell) -> list[list[Any]]:
    """One socket, several services and a plain address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        seen = []
        for address, port in ((VIP4, PORT), (VIP4, PORT + 1), (BACKENDS4[2], BACKEND_PORT)):
            client.sendto(b"?", (address, port))
            data, sender = client.recvfrom(100)
            seen.append([data.decode(), *sender])
        return seen


def reconnect_past_us(tell: Tell) -> list[str]:
    """A datagram socket that is connected to a service, then to one of its backends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((VIP4, PORT))
        first = client.getpeername()[0]
        client.connect((BACKENDS4[0], BACKEND_PORT))
        return [first, client.getpeername()[0]]


def reconnect_to_the_same_backend(tell: Tell, backend: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((VIP4, PORT))
        first = client.getpeername()[0]
        client.connect((backend, BACKEND_PORT))
        return [first, client.getpeername()[0]]


def disconnect_and_receive(tell: Tell, other: str) -> str:
    """Who seems to answer a socket that was connected to a service once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        client.connect((VIP4, PORT))
        # Python can't: connect() to AF_UNSPEC dissolves the association (connect(2)).
        assert ctypes.CDLL(None).connect(client.fileno(), bytes(16), 16) == 0
        client.sendto(b"?", (other, BACKEND_PORT))
        return str(client.recvfrom(100)[1][0])


def connect_mapped(tell: Tell) -> list[str]:
    """An IPv6 socket that speaks IPv4."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as client:
        client.settimeout(10)
        client.connect((f"::ffff:{VIP4}", PORT))
        return [client.getpeername()[0], client.recv(100).decode()]


def send_mapped(tell: Tell) -> list[str]:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        client.sendto(b"?", (f"::ffff:{VIP4}", PORT))
        data, sender = client.recvfrom(100)
        return [sender[0], data.decode()]


def connect_without_waiting(tell: Tell) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.connect((VIP4, PORT))
        time.sleep(0.1)
        return str(client.getpeername()[0])


def failure(tell: Tell, address: str, port: int, kind: int, mark: int = 0) -> str:
    """The name of the error that a connect() or sendto() ends in; empty: none."""
    with socket.socket(family_of(address), kind) as client:
        client.settimeout(5)
        if mark:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        try:
            if kind == socket.SOCK_STREAM:
                client.connect((address, port))
            else:
                client.sendto(b"?", (address, port))
        except OSError as error:
            return type(error).__name__ + str(error.errno)
    return ""


def connect_until_told(tell: Tell, address: str, seconds: float) -> dict[str, int]:
    until = time.monotonic() + seconds
    seen: Counter[str] = Counter()
    while time.monotonic() < until:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as client:
            client.settimeout(5)
            try:
                client.connect((address, PORT))
                seen[client.recv(100).decode()] += 1
            except OSError as error:
                seen[f"error {error}"] += 1
    return seen


# ---- tests


@pytest.mark.parametrize(("vip", "backends", "number"), [(VIP4, BACKENDS4, 1), (VIP6, BACKENDS6, 2)])
def test_connections_are_shared_by_weight(world: World, vip: str, backends: tuple[str, ...], number: int) -> None:
    seen = world.ask(connect_often, vip, 2000)
    assert set(seen["peers"]) == {vip}
    counts = [seen["names"][address] for address in backends]
    assert sum(counts) == 2000
    assert chi_square_p(counts, WEIGHTS) >= 1e-6
    assert totals(world.sock_lb, "service_stats", ServiceStats) == {number: ServiceStats(connections=2000)}
    shares = totals(world.sock_lb, "backend_stats", BackendStats)
    assert [shares[10 * number + index].connections for index in range(3)] == counts


@pytest.mark.parametrize(("vip", "backends", "number"), [(VIP4, BACKENDS4, 3), (VIP6, BACKENDS6, 4)])
def test_datagrams_are_shared_by_weight_and_answers_come_from_the_service(
    world: World, vip: str, backends: tuple[str, ...], number: int
) -> None:
    seen = world.ask(send_often, vip, 2000)
    assert seen["senders"] == {f"{vip} {PORT}": 2000}
    assert chi_square_p([seen["names"][address] for address in backends], WEIGHTS) >= 1e-6
    assert totals(world.sock_lb, "service_stats", ServiceStats) == {number: ServiceStats(datagrams=2000)}


@pytest.mark.parametrize(("vip", "backends"), [(VIP4, BACKENDS4), (VIP6, BACKENDS6)])
def test_a_connected_datagram_socket_knows_only_the_service(world: World, vip: str, backends: tuple[str, ...]) -> None:
    name, sender, peer = world.ask(send_connected, vip)
    assert name in backends
    assert (sender, peer) == (vip, vip)


def test_a_datagram_socket_keeps_its_backend(world: World) -> None:
    for _ in range(10):
        assert len(set(world.ask(send_thrice, VIP4))) == 1


def test_one_datagram_socket_can_talk_to_services_and_others(world: World) -> None:
    second = ServiceKey(ip_address(VIP4), PORT + 1, UDP)
    set_service(world.sock_lb, second, 9, [(endpoint(BACKENDS4[1], 90), 1)])
    seen = world.ask(send_to_all)
    assert seen[0][0] in BACKENDS4
    assert seen[0][1:] == [VIP4, PORT]
    assert seen[1] == [BACKENDS4[1], VIP4, PORT + 1]
    assert seen[2] == [BACKENDS4[2], BACKENDS4[2], BACKEND_PORT] or seen[0][0] == BACKENDS4[2]


def test_a_socket_reconnected_past_the_service_shows_its_real_peer(world: World) -> None:
    assert world.ask(reconnect_past_us) == [VIP4, BACKENDS4[0]]


def test_a_socket_reconnected_to_its_own_backend_shows_its_real_peer(world: World) -> None:
    service = ServiceKey(ip_address(VIP4), PORT, UDP)
    set_service(world.sock_lb, service, 3, [(endpoint(BACKENDS4[0], 1), 1)], generation=2)
    assert world.ask(reconnect_to_the_same_backend, BACKENDS4[0]) == [VIP4, BACKENDS4[0]]


def test_a_socket_that_was_disconnected_sees_real_senders(world: World) -> None:
    service = ServiceKey(ip_address(VIP4), PORT, UDP)
    set_service(world.sock_lb, service, 3, [(endpoint(BACKENDS4[0], 1), 1)], generation=2)
    assert world.ask(disconnect_and_receive, BACKENDS4[1]) == BACKENDS4[1]


def test_an_ipv6_socket_that_speaks_ipv4(world: World) -> None:
    peer, name = world.ask(connect_mapped)
    assert (peer, name in BACKENDS4) == (f"::ffff:{VIP4}", True)
    sender, name = world.ask(send_mapped)
    assert (sender, name in BACKENDS4) == (f"::ffff:{VIP4}", True)


def test_connecting_without_waiting(world: World) -> None:
    assert world.ask(connect_without_waiting) == VIP4


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_what_is_no_service_is_left_alone(world: World, kind: int) -> None:
    assert world.ask(failure, BACKENDS4[0], BACKEND_PORT, kind) == ""
    assert world.ask(failure, VIP4, PORT + 9, kind) == "OSError22"  # the blackhole's EINVAL
    assert totals(world.sock_lb, "service_stats", ServiceStats) == {}


def test_processes_elsewhere_are_left_alone(world: World) -> None:
    assert world.ask(failure, VIP4, PORT, socket.SOCK_STREAM, inside=False) == "OSError22"
    assert world.ask(failure, VIP4, PORT, socket.SOCK_STREAM) == ""


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_without_a_backend_the_plain_way_is_taken_and_counted(world: World, kind: int) -> None:
    protocol = TCP if kind == socket.SOCK_STREAM else UDP
    set_service(world.sock_lb, ServiceKey(ip_address(BACKENDS4[0]), BACKEND_PORT, protocol), 7, [])
    assert world.ask(failure, BACKENDS4[0], BACKEND_PORT, kind) == ""
    assert totals(world.sock_lb, "service_stats", ServiceStats) == {7: ServiceStats(no_backend=1)}


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_an_ipv4_socket_is_not_sent_to_an_ipv6_backend(world: World, kind: int) -> None:
    protocol = TCP if kind == socket.SOCK_STREAM else UDP
    key = ServiceKey(ip_address(VIP4), PORT, protocol)
    set_service(world.sock_lb, key, 7, [(endpoint(BACKENDS6[0], 1), 1)], generation=2)
    assert world.ask(failure, VIP4, PORT, kind) == "OSError22"
    assert totals(world.sock_lb, "service_stats", ServiceStats) == {7: ServiceStats(wrong_family=1)}


def test_an_ipv6_connection_may_go_to_an_ipv4_backend_but_a_datagram_may_not(world: World) -> None:
    for number, protocol in ((7, TCP), (8, UDP)):
        key = ServiceKey(ip_address(VIP6), PORT, protocol)
        set_service(world.sock_lb, key, number, [(endpoint(BACKENDS4[1], 1), 1)], generation=2)
    assert world.ask(connect_often, VIP6, 1) == {"names": {BACKENDS4[1]: 1}, "peers": {VIP6: 1}}
    assert world.ask(failure, VIP6, PORT, socket.SOCK_DGRAM) != ""
    assert totals(world.sock_lb, "service_stats", ServiceStats)[8] == ServiceStats(wrong_family=1)


def test_the_node_proxy_s_own_connections_are_not_translated(world: World) -> None:
    world.sock_lb.maps["mesh_config"].set(u32(0), MeshConfig(proxy_mark=0x100, proxy_mask=0xF00).pack())
    assert world.ask(failure, VIP4, PORT, socket.SOCK_STREAM, 0x102) == "OSError22"
    assert world.ask(failure, VIP4, PORT, socket.SOCK_STREAM, 0x202) == ""
    assert world.ask(failure, VIP4, PORT, socket.SOCK_STREAM) == ""


def test_tables_exchanged_under_fire_lose_no_connection(world: World) -> None:
    key = ServiceKey(ip_address(VIP4), PORT, TCP)
    client = world.lab.start(connect_until_told, VIP4, 2.0, netns=world.netns, cgroup=world.cgroup)
    generation, until = 1, time.monotonic() + 2.0
    while time.monotonic() < until:
        generation += 1
        serving = BACKENDS4[: 1 + generation % 3]
        weighted = [(endpoint(address, 10 + index), 1) for index, address in enumerate(serving)]
        set_service(world.sock_lb, key, 1, weighted, generation=generation)
        time.sleep(0.0005)
    seen = client.result()
    assert set(seen) <= set(BACKENDS4)
    assert sum(seen.values()) > 100
    assert generation > 100
    assert totals(world.sock_lb, "service_stats", ServiceStats)[1].no_backend == 0
    assert len(world.sock_lb.maps["backend_slots"].items()) == 3 * 3 + 1 + generation % 3
