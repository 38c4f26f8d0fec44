"""The real agent keeps service addresses, joined sockets and routes as the policy says, also while it is not there."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from bpf.layout import Counter as Packets
from bpf.layout import JoinEvent, MeshConfig, Service, ServiceStats, u32
from tests.kernel.agents import Node, make_node, until
from tests.kernel.lab import Lab, Tell, command

pytestmark = pytest.mark.kernel

VIP, VIP_PORT = "198.18.0.10", 80
BACKENDS = ("10.51.0.1", "10.51.0.2")
BACKEND_PORT = 9100
OWNED = "198.18.0.0/16"


@pytest.fixture
def node(lab: Lab) -> Node:
    made = make_node(lab)
    for address in BACKENDS:
        lab.address(made.netns, "lo", f"{address}/32")
    return made


def service(number: int = 0, **fields: Any) -> dict[str, Any]:
    backend = {"address": BACKENDS[0], "port": BACKEND_PORT, "weight": 1, "node": "node-1"}
    return {
        "name": f"service-{number}",
        "address": VIP,
        "port": VIP_PORT + number,
        "transport": "TCP",
        "backends": [backend],
    } | fields


def policy(*services: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"services": list(services), "ownedRanges": [OWNED]} | fields


def routes(node: Node) -> list[str]:
    return [line.strip() for line in command("ip", "-n", node.netns, "route").splitlines() if "blackhole" in line]


# ---- children


def echo(tell: Tell, addresses: tuple[str, ...]) -> None:
    """Every connection gets back what it sends."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)

    def accept(listener: socket.socket) -> None:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    for address in addresses:
        listener = socket.create_server((address, BACKEND_PORT), backlog=512)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    tell("ready")
    time.sleep(100)


def ask_until_told(tell: Tell, seconds: float) -> dict[str, Any]:
    """One connection kept open, and a new one for each round; all of them are asked."""
    kept = socket.create_connection((VIP, VIP_PORT), timeout=5)
    end, rounds, errors = time.monotonic() + seconds, 0, []
    tell("connected")
    while time.monotonic() < end:
        message = b"%08d" % rounds
        try:
            with socket.create_connection((VIP, VIP_PORT), timeout=5) as fresh:
                for connection in (kept, fresh):
                    connection.sendall(message)
                    assert connection.recv(8, socket.MSG_WAITALL) == message
        except OSError as error:
            errors.append(str(error))
        rounds += 1
    return {"rounds": rounds, "errors": errors, "peer": kept.getpeername()[0]}


def connect(tell: Tell, address: str, port: int) -> str:
    """The name of the error, or what the peer is called."""
    try:
        with socket.create_connection((address, port), timeout=3) as connection:
            connection.sendall(b"hello")
            assert connection.recv(5, socket.MSG_WAITALL) == b"hello"
            return str(connection.getpeername()[0])
    except OSError as error:
        return type(error).__name__


def ask(node: Node, port: int = VIP_PORT, address: str = VIP, *, served: bool = True) -> str:
    child = node.lab.start(connect, address, port, netns=node.netns, cgroup=node.cgroup if served else None)
    return str(child.result())


@pytest.fixture
def backends(node: Node) -> Any:
    child = node.lab.start(echo, BACKENDS, netns=node.netns, cgroup=node.cgroup)
    child.hear()
    return child


# ---- tests


@pytest.mark.usefixtures("backends")
def test_a_service_address_is_translated_and_its_range_leads_nowhere_else(node: Node) -> None:
    node.write_policy(policy(service()))
    node.start().ready()
    assert ask(node) == VIP
    assert routes(node) == [f"blackhole {OWNED} proto 77"]
    assert ask(node, served=False) == "OSError"  # EINVAL by the blackhole: nothing leaves the node
    assert ask(node, port=VIP_PORT + 1) == "OSError"
    number = next(Service.unpack(value).id for value in node.map("services").values())
    assert node.total("service_stats", number, ServiceStats).connections == 1


@pytest.mark.usefixtures("backends")
def test_killed_and_restarted_with_open_connections(node: Node) -> None:
    node.write_policy(policy(service()))
    first = node.start().ready()
    services, rows = node.map("services"), node.map("backend_slots")
    client = node.lab.start(ask_until_told, 6.0, netns=node.netns, cgroup=node.cgroup)
    client.hear()
    first.kill()
    time.sleep(0.5)
    second = node.start().ready()
    seen = client.result()
    assert second.said("layout") == []
    assert seen["errors"] == []
    assert seen["rounds"] > 100
    assert seen["peer"] == VIP
    assert (node.map("services"), node.map("backend_slots")) == (services, rows)


@pytest.mark.usefixtures("backends")
def test_a_change_of_backends_under_fire(node: Node) -> None:
    node.write_policy(policy(service()))
    node.start().ready()
    client = node.lab.start(ask_until_told, 3.0, netns=node.netns, cgroup=node.cgroup)
    client.hear()
    for number in range(2):
        time.sleep(0.2)
        before = node.map("services")

        def changed(before: dict[bytes, bytes] = before) -> bool:
            return node.map("services") != before

        backend = {"address": BACKENDS[1 - number], "port": BACKEND_PORT, "weight": 1}
        node.write_policy(policy(service(backends=[backend])))
        until(changed, "the change")
    assert client.result()["errors"] == []
    assert len(node.map("backend_slots")) == 1


@pytest.mark.usefixtures("backends")
def test_maps_of_another_layout_are_replaced_without_a_lost_connection(node: Node) -> None:
    node.write_policy(policy(service()))
    first = node.start().ready()
    client = node.lab.start(ask_until_told, 7.0, netns=node.netns, cgroup=node.cgroup)
    client.hear()
    first.kill()
    _set_layout(node, 99)
    agent = node.start().ready()
    assert agent.said("maps of another layout are replaced")
    seen = client.result()
    assert seen["errors"] == []
    assert MeshConfig.unpack(node.map("mesh_config")[u32(0)]).layout_version != 99
    assert len(node.services()) == 1
    assert sorted(path.name for path in node.pins.iterdir()) == ["links", "maps"]


def test_maps_of_another_layout_stay_when_no_policy_is_known(node: Node) -> None:
    """Without a policy new maps could only be empty."""
    node.write_policy(policy(service()))
    node.start().ready().stop()
    _set_layout(node, 99)
    (node.runtime / "state" / "node-policies.binpb").unlink(missing_ok=True)
    refused = node.run()
    assert refused.returncode == 1
    assert "have layout 99" in refused.stderr
    assert len(node.services()) == 1


def _set_layout(node: Node, version: int) -> None:
    from bpf import loader
    from bpf.maps import Map

    opened = Map.open(loader.maps_directory(node.pins) / "mesh_config")
    opened.set(u32(0), MeshConfig(version).pack())
    opened.close()


@pytest.mark.usefixtures("backends")
def test_sockets_are_joined_for_a_service_that_asks_for_it(node: Node) -> None:
    node.write_policy(policy(service(joinsSockets=True)))
    node.start().hear("joined sockets behave")
    until((node.pins / "links" / "sock_join_established").exists, "the hook")
    assert ask(node) == VIP
    assert node.total("join_stats", JoinEvent.REDIRECTED, Packets).packets >= 2


@pytest.mark.slow
@pytest.mark.usefixtures("backends")
def test_a_table_that_finds_no_room_costs_its_service_and_no_other(node: Node) -> None:
    """The second service has more backends than the map has room for; it takes the plain way, told once."""
    node.write_policy(policy(service()))
    agent = node.start().ready()
    many = [
        {"address": f"10.{64 + i // 65536}.{i // 256 % 256}.{i % 256}", "port": 1, "weight": 1} for i in range(65_536)
    ]
    node.write_policy(policy(service(), service(1, backends=many), service(2)))
    line = agent.hear("not everything is in force", 120)
    assert line["count"] == 1
    assert str(VIP_PORT + 1) in line["first"][0]
    assert "MM1704" in line["why"]
    until(lambda: len(node.services()) == 2, "the other services")
    assert ask(node, port=VIP_PORT + 1) == "OSError"
    assert ask(node) == ask(node, port=VIP_PORT + 2) == VIP
    node.write_policy(policy(service(), service(1), service(2)))
    agent.hear("everything is in force again")
    assert ask(node, port=VIP_PORT + 1) == VIP
    assert len(agent.said("not everything is in force")) == 1
    assert len(node.map("backend_slots")) == 3


@pytest.mark.usefixtures("backends")
def test_a_refused_policy_leaves_the_last_good_one(node: Node) -> None:
    node.write_policy(policy(service()))
    agent = node.start().ready()
    node.write_policy(policy(service(), service()))
    assert "occurs twice" in agent.hear("policy refused")["why"]
    node.policy_file.write_text("services: [")
    assert "policy.yaml:1" in agent.hear("policy file refused")["why"]
    assert ask(node) == VIP


def test_cleanup_leaves_nothing(node: Node) -> None:
    node.plug(0)
    node.write_policy(policy(service(joinsSockets=True)) | node.function_policy(0))
    before = _kernel(node)
    agent = node.start().ready()
    assert _kernel(node) != before
    running = node.run("--cleanup")
    assert running.returncode == 1
    assert "MM1722" in running.stderr
    agent.kill()
    done = node.run("--cleanup")
    assert done.returncode == 0, done.stderr
    assert _kernel(node) == before
    assert not node.pins.exists()
    assert [path for path in node.runtime.rglob("*") if path.is_file()] == []
    assert node.run("--cleanup").returncode == 0


def _kernel(node: Node) -> tuple[Any, ...]:
    """What of ours can be seen: routes, programs on the cgroup and the interface."""
    return (
        routes(node),
        command("bpftool", "cgroup", "show", str(node.cgroup)),
        "xdp" in command("ip", "-n", node.netns, "-d", "link", "show", "nic"),
    )


def test_somebody_elses_route_for_an_owned_range_stays(node: Node) -> None:
    command("ip", "-n", node.netns, "route", "add", "blackhole", OWNED)
    node.write_policy(policy(service()))
    agent = node.start().ready()
    assert agent.hear("somebody else has a route")["range"] == OWNED
    agent.kill()
    node.run("--cleanup")
    assert routes(node) == [f"blackhole {OWNED}"]
