"""What the agent does when something is in its way: others' programs, refusals, a control plane that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from prometheus_client import CollectorRegistry, generate_latest

from bpf import build, foreign, links, loader, policy_file
from bpf.agent import NodeAgent
from bpf.datapath import HookState
from bpf.ground import own
from bpf.install import CAPABILITIES
from bpf.layout import ServiceKey, u32
from bpf.links import XdpMode
from bpf.node_errors import AgentRunningError, BrokenPinsError
from bpf.policy import TYPE_URL
from modalmesh.base import logging
from modalmesh.base import settings as configuration
from tests.kernel.agents import GPU, Node, environment, make_node, stream, until
from tests.kernel.lab import Lab, command, ifindex, inside, mac
from tests.kernel.test_agent_services import BACKENDS, VIP, ask, echo, policy, service
from xds.pb.bpf import policy_pb2
from xds.server import AdsServer
from xds.snapshot import Resource, Snapshot

pytestmark = pytest.mark.kernel

BAD_PROGRAM = """
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
char LICENSE[] SEC("license") = "Dual BSD/GPL";
SEC("cgroup/connect4")
int sock_lb_connect4(struct bpf_sock_addr *context)
{
    return *(volatile int *)((long)context->user_ip4); /* a number is no address */
}
"""


@pytest.fixture
def node(lab: Lab) -> Node:
    made = make_node(lab)
    for address in BACKENDS:
        lab.address(made.netns, "lo", f"{address}/32")
    return made


@contextlib.contextmanager
def running(node: Node, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any] | None = None) -> Iterator[NodeAgent]:
    """An agent in this process, for what needs no process of its own."""
    for name, value in environment(node, {}).items():
        if name.startswith("MODALMESH_"):
            monkeypatch.setenv(name, value)
    node.write_policy(values if values is not None else {})
    settings = configuration.load()
    logging.configure(settings.log, "node")
    node.pins.mkdir(exist_ok=True)
    with inside(node.netns), contextlib.closing(NodeAgent(settings, lambda: None)) as agent:
        agent.start(0.0, {"file": policy_file.read(node.policy_file)})
        yield agent


# ---- others


def gpu_state(agent: NodeAgent) -> HookState:
    return agent.datapath.states["gpu", "nic"]


def test_somebody_elses_xdp_program_stays_and_ours_waits(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.plug(0)
    theirs = node.lab.closing(loader.load("xdp_gpu_bypass"))
    with inside(node.netns):
        link = links.attach_xdp(theirs.programs["xdp_gpu_bypass"], socket.if_nametoindex("nic"), XdpMode.NATIVE)
    with running(node, monkeypatch, node.function_policy(0)) as agent:
        assert gpu_state(agent) is HookState.TAKEN
        assert links.attached_xdp(ifindex(node.netns, "nic")) == theirs.programs["xdp_gpu_bypass"].id
        link.close()
        agent.look_after(1.0, thoroughly=True)
        assert gpu_state(agent) is HookState.ATTACHED
        assert links.attached_xdp(ifindex(node.netns, "nic")) not in (0, theirs.programs["xdp_gpu_bypass"].id)


def test_somebody_elses_programs_on_the_cgroup_are_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs = node.lab.closing(loader.load("sock_lb"))
    node.lab.closing(links.attach_cgroup(theirs.programs["sock_lb_connect4"], node.cgroup))
    with running(node, monkeypatch, policy(service())) as agent:
        for _ in range(2):
            agent.look_after(1.0, thoroughly=False)
        found = foreign.on_cgroup(node.cgroup, agent.datapath.program_ids())
    assert [(program.hook, program.id) for program in found] == [("connect4", theirs.programs["sock_lb_connect4"].id)]
    assert found[0].name == "sock_lb_connect"  # as the kernel cuts it
    assert capfd.readouterr().err.count("another program is on a hook of ours") == 1


def test_what_somebody_else_changed_is_put_right(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(node, monkeypatch, policy(service(), service(1))) as agent:
        kept = node.map("services")
        agent.datapath.maps["services"].delete_many(list(kept)[:1])
        agent.datapath.maps["tier_marks"].set(u32(7), u32(3))
        agent.datapath.maps["backend_stats"].set(u32(77), bytes(16))
        agent.look_after(1.0, thoroughly=True)
        assert node.services() == {*map(ServiceKey.unpack, kept)}
        assert node.map("tier_marks") == {}
        assert node.map("backend_stats") == {}
        assert len(node.map("backend_slots")) == 2


# ---- refusals


def test_a_refused_program_costs_its_hook_and_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real program, real verifier: the log is whole, and nothing is tried again."""
    bad = node.lab.folder / "sock_lb.bpf.o"
    source = node.lab.folder / "bad.bpf.c"
    source.write_text(BAD_PROGRAM)
    subprocess.run(build.command(source, bad), check=True, timeout=60)
    packaged = build.packaged_object
    loads = []

    def counted(name: str) -> Path:
        loads.append(name)
        return bad if name == "sock_lb" else packaged(name)

    monkeypatch.setattr(build, "packaged_object", counted)
    with running(node, monkeypatch, policy(service())) as agent:
        for now in range(3):
            agent.look_after(float(now), thoroughly=True)
        assert agent.datapath.states["services", ""] is HookState.REFUSED
        assert agent.datapath.states["signals", ""] is HookState.ATTACHED
        assert "invalid mem access" in agent.datapath.refused["services"]
        assert loads.count("sock_lb") == 1
        # A range is only ours to cut off while its addresses are translated.
        assert "blackhole" not in command("ip", "-n", node.netns, "route")
    said = capfd.readouterr().err
    assert said.count("program refused") == 1
    assert "invalid mem access" in said


def test_a_full_map_takes_what_fits_and_says_so_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    marks = [{"mark": number, "tier": 1} for number in range(1, 301)]
    with running(node, monkeypatch, policy(service(), tierMarks=marks)) as agent:
        agent.look_after(1.0, thoroughly=True)
        assert len(node.map("tier_marks")) == 256
        assert len(node.services()) == 1
        agent.take_policies({"file": _body(policy(service(), tierMarks=marks[:10]))}, (), 2.0)
        assert len(node.map("tier_marks")) == 10
    said = capfd.readouterr().err
    assert said.count("not everything is in force") == 1
    assert said.count("everything is in force again") == 1


def _body(values: dict[str, Any]) -> bytes:
    return json_format.ParseDict(values, policy_pb2.NodePolicy()).SerializeToString()


def test_a_second_agent_and_a_place_that_holds_no_pins(node: Node) -> None:
    first = own(node.pins)
    with pytest.raises(AgentRunningError):
        own(node.pins)
    os.close(first)
    os.close(own(node.pins))
    with pytest.raises(BrokenPinsError, match="no bpf file system"):
        own(node.lab.folder / "plain")
    with pytest.raises(BrokenPinsError, match="can't be made"):
        own(node.lab.folder / "a" / "b")


# ---- what people see


def test_metrics_from_the_maps(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.plug(0)
    values = policy(service(tier=2)) | node.function_policy(0)
    values["functions"][0]["mac"] = mac(node.gpu, "gpu0").hex(":")
    server = node.lab.start(echo, BACKENDS, netns=node.netns, cgroup=node.cgroup)
    server.hear()
    with running(node, monkeypatch, values) as agent:
        assert ask(node) == VIP
        node.lab.start(stream, GPU[0], 0.1, netns=node.client).result()
        registry = CollectorRegistry()
        registry.register(agent.collector)
        text = generate_latest(registry).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['modalmesh_service_connections_total{result="connected",service="service-0"}']) == 1
    assert float(lines['modalmesh_gpu_packets_total{function="0000:3b:00.2",way="redirected"}']) > 10
    assert float(lines['modalmesh_tcp_active_total{tier="2"}']) == 1
    assert float(lines['modalmesh_tcp_rtt_seconds_count{tier="2"}']) > 0
    assert "modalmesh_tcp_time_wait" in lines


def test_with_exactly_the_capabilities_of_the_unit(node: Node) -> None:
    node.plug(0)
    values = policy(service(joinsSockets=True)) | node.function_policy(0)
    node.write_policy(values)
    server = node.lab.start(echo, BACKENDS, netns=node.netns, cgroup=node.cgroup)
    server.hear()
    wanted = ",".join("+" + name.removeprefix("CAP_").lower() for name in CAPABILITIES)
    node.wrapper = ["setpriv", f"--bounding-set=-all,{wanted}", "--inh-caps=-all", "--no-new-privs"]
    agent = node.start()
    agent.hear("joined sockets behave")
    until((node.pins / "links" / "sock_join_established").exists, "the hook")
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    bits = {"CAP_NET_ADMIN": 12, "CAP_PERFMON": 38, "CAP_BPF": 39}
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    assert int(effective, 16) == sum(1 << bits[name] for name in CAPABILITIES)
    assert ask(node) == VIP
    assert node.interfaces() == {ifindex(node.netns, "rep0")}
    assert not agent.said("not attached")
    assert "blackhole" in command("ip", "-n", node.netns, "route")


# ---- the control plane


@contextlib.asynccontextmanager
async def control_plane(path: Path, policies: dict[str, dict[str, Any]]) -> AsyncIterator[AdsServer]:
    roles: list[str] = []

    def group_of(node: Any) -> str:
        roles.append(node.metadata.fields["role"].string_value)
        return roles[-1]

    server = AdsServer(f"unix:{path}", group_of)
    server.set_snapshot("node", snapshot(policies))
    await server.start()
    try:
        yield server
    finally:
        await server.close()
    assert set(roles) == {"node"}


def snapshot(policies: dict[str, dict[str, Any]]) -> Snapshot:
    return Snapshot(
        Resource.of(TYPE_URL, name, json_format.ParseDict(values, policy_pb2.NodePolicy()))
        for name, values in policies.items()
    )


async def eventually(condition: Callable[[], Any], what: str, seconds: float = 15) -> None:
    """On the loop, which serves meanwhile."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


def nack_of(server: AdsServer) -> str:
    return next((kind.last_error for client in server.clients() for kind in client.types if kind.last_error), "")


async def test_policies_of_a_control_plane_that_goes_away(node: Node) -> None:
    """Refused ones are answered with a reason; without it everything goes on, also after a restart."""
    address = node.lab.folder / "xds.sock"
    node.plug(0)
    for_all = {"services": [service()]}
    for_us = node.function_policy(0) | {"node": "node-1"}
    for_others = node.function_policy(1) | {"node": "node-2"}
    async with control_plane(address, {"a": for_all, "b": for_us, "c": for_others}) as server:
        first = node.start(control_plane=address)
        await eventually(lambda: first.said("policy in force"), "the policies")
        assert len(node.interfaces()) == 1
        assert len(node.services()) == 1
        assert len(node.rules()) == 1
        server.set_snapshot("node", snapshot({"a": {"services": [service(), service()]}, "b": for_us}))
        await eventually(lambda: nack_of(server), "the refusal")
        assert "occurs twice" in nack_of(server)
        assert "MM1720" in nack_of(server)
        assert len(node.services()) == 1
        server.set_snapshot("node", snapshot({"a": {"services": [service(), service(1)]}, "b": for_us}))
        await eventually(lambda: len(node.services()) == 2, "the better one")
    await eventually(lambda: first.said("no xds stream"), "the loss")
    assert len(node.services()) == 2
    first.kill()
    second = node.start(control_plane=address)
    second.hear("policies of the predecessor are in force")
    second.ready()
    command("ip", "-n", node.netns, "link", "set", "rep0", "down")
    until(lambda: node.interfaces() == set(), "the slot to be emptied without a control plane")
    async with control_plane(address, {"b": for_us}):
        await eventually(lambda: not node.services(), "what was removed meanwhile")
    assert len(node.rules()) == 1
