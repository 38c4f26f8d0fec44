"""Joined sockets behave as TCP sockets do, in one namespace and across two."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from bpf import layout, links, loader
from bpf.layout import Counter, JoinEvent, MeshConfig, ServiceKey, u32
from bpf.loader import Object
from tests.kernel.lab import Child, Lab, Tell
from tests.kernel.services import family_of

pytestmark = pytest.mark.kernel

PORT = 9000
MIB = 1 << 20


@dataclass
class World:
    """Where a client and a server run, and the programs that join them."""

    lab: Lab
    client_netns: str
    server_netns: str
    address: str
    cgroup: Path
    sock_join: Object

    def serve(self, function: Any, *args: Any) -> Child:
        child = self.lab.start(function, self.address, *args, netns=self.server_netns, cgroup=self.cgroup)
        assert child.hear() == "listening"
        return child

    def ask(self, function: Any, *args: Any) -> Child:
        return self.lab.start(function, self.address, *args, netns=self.client_netns, cgroup=self.cgroup)

    @property
    def events(self) -> dict[JoinEvent, Counter]:
        found = self.sock_join.maps["join_stats"].totals(Counter)
        return {JoinEvent(layout.unpack_u32(key)): value for key, value in found.items()}

    def messages(self, event: JoinEvent) -> int:
        return self.events[event].packets


def attach_sock_join(lab: Lab, cgroup: Path) -> Object:
    loaded: Object = lab.closing(loader.load("sock_join"))
    links.attach_sk_msg(loaded.programs["sock_join_message"], loaded.maps["join_sockets"])
    lab.closing(links.attach_cgroup(loaded.programs["sock_join_established"], cgroup))
    return loaded


def allow(loaded: Object, address: str, port: int = PORT) -> None:
    loaded.maps["join_endpoints"].set(ServiceKey(ip_address(address), port, socket.IPPROTO_TCP).pack(), u32(1))


PLACES = ("one namespace", "two namespaces", "two namespaces, IPv6")


@pytest.fixture(params=PLACES)
def world(lab: Lab, request: pytest.FixtureRequest) -> Iterator[World]:
    cgroup = lab.cgroup()
    if request.param == "one namespace":
        client = server = lab.namespace("join")
        address = "127.0.0.1"
    else:
        client, server = lab.namespace("client"), lab.namespace("server")
        lab.veth(client, "c0", server, "s0")
        for netns, device, last in ((client, "c0", 1), (server, "s0", 2)):
            lab.address(netns, device, f"10.1.0.{last}/24")
            lab.address(netns, device, f"fd01::{last}/64")
        address = "fd01::2" if request.param.endswith("IPv6") else "10.1.0.2"
    sock_join = attach_sock_join(lab, cgroup)
    allow(sock_join, address)
    yield World(lab, client, server, address, cgroup, sock_join)
    lab.stop_children()
    for _ in range(100):
        if not list(sock_join.maps["join_sockets"].keys()):
            return
        time.sleep(0.02)
    pytest.fail("sockets are left in the map")


# ---- ends of connections, in children


def listening(tell: Tell, address: str, port: int = PORT) -> socket.socket:
    made = socket.socket(family_of(address))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen(512)
    made.settimeout(30)
    tell("listening")
    return made


def accept(listener: socket.socket) -> socket.socket:
    connection = listener.accept()[0]
    connection.settimeout(30)
    return connection


def connected(address: str, port: int = PORT) -> socket.socket:
    return socket.create_connection((address, port), timeout=30)


def read_all(connection: socket.socket) -> tuple[int, str]:
    digest, count = hashlib.blake2b(), 0
    while data := connection.recv(1 << 18):
        digest.update(data)
        count += len(data)
    return count, digest.hexdigest()


def echo(tell: Tell, address: str) -> None:
    listener = listening(tell, address)
    while True:
        with accept(listener) as connection:
            while data := connection.recv(65536):
                connection.sendall(data)


def play(tell: Tell, address: str, rounds: int) -> None:
    with connected(address) as client:
        for number in range(rounds):
            sent = bytes([number & 255]) * (1 + number * 7 % 3000)
            client.sendall(sent)
            got = b""
            while len(got) < len(sent):
                got += client.recv(65536)
            assert got == sent


def digest_all(tell: Tell, address: str, asleep: float = 0) -> None:
    """Answer with what came, after the other end has closed its direction."""
    with accept(listening(tell, address)) as connection:
        time.sleep(asleep)
        count, digest = read_all(connection)
        connection.sendall(f"{count} {digest}".encode())


def pour(tell: Tell, address: str, size: int) -> None:
    """Writes of very different sizes, then half a close, then the answer."""
    block, digest, count = os.urandom(MIB), hashlib.blake2b(), 0
    sizes = (1, 77, 4096, 65536, MIB)
    with connected(address) as client:
        number = 0
        while count < size:
            part = block[: sizes[number % len(sizes)]]
            client.sendall(part)
            digest.update(part)
            count += len(part)
            number += 1
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while data := client.recv(4096):
            answer += data
    assert answer.decode() == f"{count} {digest.hexdigest()}"


def pour_file(tell: Tell, address: str, file: str) -> None:
    content = Path(file).read_bytes()
    with connected(address) as client, Path(file).open("rb") as source:
        client.sendfile(source)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096).decode() == f"{len(content)} {hashlib.blake2b(content).hexdigest()}"


def answer_late(tell: Tell, address: str) -> None:
    with accept(listening(tell, address)) as connection:
        assert read_all(connection)[0] == 3
        time.sleep(0.1)
        for _ in range(50):
            connection.sendall(b"k" * 10_000)


def ask_and_close_half(tell: Tell, address: str) -> int:
    with connected(address) as client:
        client.sendall(b"ask")
        client.shutdown(socket.SHUT_WR)
        return read_all(client)[0]


SMALL = [struct.pack("=I", number) for number in range(40)]


def take_small_writes(tell: Tell, address: str, connections: int) -> int:
    listener = listening(tell, address)
    right = 0
    for number in range(connections):
        with accept(listener) as connection:
            if number % 3 == 0:
                time.sleep(0.001)
            got = b""
            while data := connection.recv(65536):
                got += data
            right += got == b"".join(SMALL)
    return right


def write_small_at_once(tell: Tell, address: str, connections: int) -> None:
    for _ in range(connections):
        with connected(address) as client:
            for part in SMALL:
                client.send(part)


def never_read(tell: Tell, address: str) -> None:
    with accept(listening(tell, address)):
        time.sleep(60)


def write_until_blocked(tell: Tell, address: str, most: int) -> int:
    """How many bytes went in before one second passed without any."""
    block, count = b"z" * 65536, 0
    with connected(address) as client:
        client.settimeout(1)
        with contextlib.suppress(TimeoutError):
            while count < most:
                count += client.send(block)
    return count


def read_ten_and_wait(tell: Tell, address: str) -> None:
    with accept(listening(tell, address)) as connection:
        connection.recv(10)
        tell("read")
        time.sleep(60)


def survive(tell: Tell, address: str) -> list[str]:
    """What a client sees when the other end is killed: the end, then an error."""
    with connected(address) as client:
        client.sendall(b"0123456789")
        seen = []
        try:
            seen.append(f"read {client.recv(10)!r}")
        except ConnectionResetError:
            seen.append("reset")
        for _ in range(100):
            try:
                client.send(b"x")
            except (BrokenPipeError, ConnectionResetError) as error:
                seen.append(errno.errorcode[error.errno or 0])
                break
            time.sleep(0.02)
        return seen


def look_closely(tell: Tell, address: str) -> list[Any]:
    with accept(listening(tell, address)) as connection:
        poll, epoll = select.poll(), select.epoll()
        poll.register(connection, select.POLLIN)
        epoll.register(connection, select.EPOLLIN | select.EPOLLET)
        seen: list[Any] = [bool(poll.poll(5000)), bool(epoll.poll(5))]
        time.sleep(0.1)
        seen += [connection.recv(4, socket.MSG_PEEK).decode(), connection.recv(100).decode()]
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            seen.append(connection.recv(1).decode())
        connection.setblocking(True)
        connection.sendall(b"done")
        return seen


def send_ten(tell: Tell, address: str) -> str:
    with connected(address) as client:
        client.sendall(b"0123456789")
        return client.recv(10).decode()


# ---- tests


def test_five_hundred_rounds_of_every_size(world: World) -> None:
    world.serve(echo)
    world.ask(play, 500).result()
    assert world.messages(JoinEvent.ADDED) == 2
    assert world.messages(JoinEvent.REDIRECTED) >= 990
    assert world.messages(JoinEvent.MISMATCH) == 0


def test_bulk_arrives_whole_and_half_a_close_keeps_the_other_half(world: World) -> None:
    size = 256 * MIB if world.address == "10.1.0.2" else 32 * MIB
    server = world.serve(digest_all)
    world.ask(pour, size).result()
    server.result()
    assert world.events[JoinEvent.REDIRECTED].bytes + world.events[JoinEvent.PLAIN].bytes > 0


def test_an_answer_after_the_question_s_end(world: World) -> None:
    world.serve(answer_late)
    assert world.ask(ask_and_close_half).result() == 500_000


def test_small_writes_right_after_connecting_keep_their_order(world: World) -> None:
    server = world.serve(take_small_writes, 200)
    world.ask(write_small_at_once, 200).result()
    assert server.result() == 200
    assert world.messages(JoinEvent.REDIRECTED) > 0


def test_a_reader_that_never_reads_stops_the_writer(world: World) -> None:
    world.serve(never_read)
    sent = world.ask(write_until_blocked, 200 * MIB).result()
    assert MIB // 4 < sent < 24 * MIB
    assert world.messages(JoinEvent.HIGHWATER) == 1


def test_the_mark_is_configurable(world: World) -> None:
    world.sock_join.maps["mesh_config"].set(u32(0), MeshConfig(join_highwater=65536).pack())
    world.serve(never_read)
    world.ask(write_until_blocked, 200 * MIB).result()
    assert world.events[JoinEvent.REDIRECTED].bytes < MIB
    assert world.messages(JoinEvent.HIGHWATER) == 1


def test_a_reader_that_sleeps_gets_everything_in_order(world: World) -> None:
    """The writer crosses over from handing over to TCP in the middle of the stream."""
    server = world.serve(digest_all, 1.0)
    world.ask(pour, 32 * MIB).result()
    server.result()
    assert world.messages(JoinEvent.HIGHWATER) == 1
    assert world.events[JoinEvent.REDIRECTED].bytes > 0
    assert world.events[JoinEvent.PLAIN].bytes > 0


def test_a_killed_server_is_noticed(world: World) -> None:
    server = world.serve(read_ten_and_wait)
    client = world.ask(survive)
    assert server.hear() == "read"
    server.kill(signal.SIGKILL)
    seen = client.result()
    assert seen[0] in ("read b''", "reset")
    assert seen[1] in ("EPIPE", "ECONNRESET")


def test_sendfile(world: World, tmp_path: Path) -> None:
    file = tmp_path / "content"
    file.write_bytes(os.urandom(3 * MIB + 17))
    server = world.serve(digest_all)
    world.ask(pour_file, str(file)).result()
    server.result()


def test_polling_and_peeking(world: World) -> None:
    server = world.serve(look_closely)
    assert world.ask(send_ten).result() == "done"
    assert server.result() == [True, True, "0123", "0123456789"]


def test_what_has_not_opted_in_is_not_joined(world: World) -> None:
    world.sock_join.maps["join_endpoints"].clear()
    world.serve(echo)
    world.ask(play, 20).result()
    assert all(counter.packets == 0 for counter in world.events.values())


def test_a_client_outside_the_cgroup_is_served_by_tcp(world: World) -> None:
    world.serve(echo)
    world.lab.start(play, world.address, 20, netns=world.client_netns).result()
    assert all(counter.packets == 0 for counter in world.events.values())


def test_a_server_outside_the_cgroup_is_reached_by_tcp(world: World) -> None:
    server = world.lab.start(echo, world.address, netns=world.server_netns)
    assert server.hear() == "listening"
    world.ask(play, 20).result()
    assert world.messages(JoinEvent.ADDED) == 1
    assert world.messages(JoinEvent.REDIRECTED) == 0
    assert world.messages(JoinEvent.NO_PEER) == 1
    assert world.messages(JoinEvent.PLAIN) == 19


def test_a_full_map_leaves_connections_to_tcp(lab: Lab) -> None:
    netns, cgroup = lab.namespace("full"), lab.cgroup()
    loaded: Object = lab.closing(loader.load("sock_join", max_entries={"join_sockets": 1}))
    links.attach_sk_msg(loaded.programs["sock_join_message"], loaded.maps["join_sockets"])
    lab.closing(links.attach_cgroup(loaded.programs["sock_join_established"], cgroup))
    allow(loaded, "127.0.0.1")
    world = World(lab, netns, netns, "127.0.0.1", cgroup, loaded)
    world.serve(echo)
    world.ask(play, 50).result()
    assert world.messages(JoinEvent.ADDED) == 1
    assert world.messages(JoinEvent.ADD_FAILED) >= 1
    assert world.messages(JoinEvent.REDIRECTED) == 0


def say_name(tell: Tell, address: str, name: str) -> None:
    with accept(listening(tell, address)) as connection:
        while question := connection.recv(100):
            connection.sendall(name.encode() + question)


def ask_name(tell: Tell, address: str, mine: int) -> list[str]:
    """From a fixed port, so that both namespaces have the same connection; answer when told to by the clock."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind((address, mine))
        client.settimeout(10)
        client.connect((address, PORT))
        tell("connected")
        answers = []
        for number in range(20):
            client.sendall(str(number).encode())
            answers.append(client.recv(100).decode())
            time.sleep(0.02)
        return answers


@pytest.mark.parametrize("address", ["127.0.0.1", "10.7.0.1"])
def test_equal_connections_in_two_namespaces_never_meet(lab: Lab, address: str) -> None:
    """Loopback, and an address that both have: the same four numbers, two connections."""
    cgroup = lab.cgroup()
    loaded = attach_sock_join(lab, cgroup)
    allow(loaded, address)
    clients = []
    for name in ("a", "b"):
        netns = lab.namespace(name)
        if address != "127.0.0.1":
            lab.address(netns, "lo", f"{address}/32")
        server = lab.start(say_name, address, name, netns=netns, cgroup=cgroup)
        assert server.hear() == "listening"
        client = lab.start(ask_name, address, 50_000, netns=netns, cgroup=cgroup)
        assert client.hear() == "connected"
        clients.append(client)
    for name, client in zip(("a", "b"), clients, strict=True):
        assert client.result() == [f"{name}{number}" for number in range(20)]
    events = {
        JoinEvent(layout.unpack_u32(key)): value for key, value in loaded.maps["join_stats"].totals(Counter).items()
    }
    both_joined = address == "127.0.0.1"
    assert events[JoinEvent.ADDED].packets == (4 if both_joined else 2)
    assert events[JoinEvent.MISMATCH].packets == (0 if both_joined else 1)
