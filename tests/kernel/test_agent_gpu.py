"""The real agent follows GPU functions while packets flow."""

from __future__ import annotations

import signal
import time

import pytest
import yaml

from bpf.layout import GpuSlotStats
from tests.kernel.agents import GPU, PCIE, Node, collect, expand, make_node, stream, until
from tests.kernel.lab import Lab, command, ifindex, mac

pytestmark = pytest.mark.kernel


@pytest.fixture
def node(lab: Lab) -> Node:
    return make_node(lab)


def _policy(node: Node, *numbers: int) -> None:
    """Rules for functions that are plugged in, with the addresses that they have."""
    policy = node.function_policy(*numbers)
    for entry, number in zip(policy["functions"], numbers, strict=True):
        entry["mac"] = mac(node.gpu, f"gpu{number}").hex(":")
    node.write_policy(policy)


def test_a_function_is_found_by_its_pcie_address_and_gets_its_packets(node: Node) -> None:
    node.plug(0)
    _policy(node, 0)
    node.start().ready()
    assert node.interfaces() == {ifindex(node.netns, "rep0")}
    at_function = node.lab.start(collect, 0.5, netns=node.gpu)
    at_function.hear()
    sent = node.lab.start(stream, GPU[0], 0.5, netns=node.client).result()
    assert expand(at_function.result()) == list(range(sent))


def test_hot_plug_while_traffic_flows_loses_nothing(node: Node) -> None:
    """Packets go the plain way, then past the stack, and each arrives once, at one of the two."""
    node.plug(0)
    _policy(node, 0)
    command("ip", "-n", node.netns, "link", "del", "rep0")
    node.sysfs.remove("rep0")
    agent = node.start().ready()
    assert node.interfaces() == set()
    plain = node.lab.start(collect, 1.0, netns=node.netns)
    plain.hear()
    at_function = node.lab.start(collect, 1.0, netns=node.gpu)
    at_function.hear()
    sender = node.lab.start(stream, GPU[0], 4.0, netns=node.client)
    time.sleep(0.5)
    node.sysfs.representor("rep0", 0)
    command("ip", "-n", node.netns, "link", "add", "rep0", "type", "veth", "peer", "name", "gpu0", "netns", node.gpu)
    # The function is ready to receive before its representor says that it is up, as hardware does it.
    address = yaml.safe_load(node.policy_file.read_text())["functions"][0]["mac"]
    command("ip", "-n", node.gpu, "link", "set", "gpu0", "address", address, "up")
    for name in ("all", "gpu0"):
        command("ip", "netns", "exec", node.gpu, "sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=0")
    command("ip", "netns", "exec", node.gpu, "ethtool", "-K", "gpu0", "gro", "on")
    command("ip", "-n", node.netns, "link", "set", "rep0", "up")
    agent.hear("function has an interface again")
    sent = sender.result()
    first, then = expand(plain.result()), expand(at_function.result())
    assert first
    assert then
    assert sorted(first + then) == list(range(sent))


def test_a_function_that_comes_back_with_another_index_is_followed(node: Node) -> None:
    node.plug(0)
    _policy(node, 0)
    node.start().ready()
    before = ifindex(node.netns, "rep0")
    slots = node.rules()
    node.unplug(0)
    until(lambda: node.interfaces() == set(), "the slot to be emptied")
    node.plug(0)
    after = until(node.interfaces, "the slot to be filled")
    assert after == {ifindex(node.netns, "rep0")} != {before}
    assert node.rules() == slots


def test_link_down_means_plain_way(node: Node) -> None:
    node.plug(0)
    _policy(node, 0)
    agent = node.start().ready()
    command("ip", "-n", node.netns, "link", "set", "rep0", "down")
    until(lambda: node.interfaces() == set(), "the slot to be emptied")
    assert agent.hear("function has no interface")["why"] == "rep0 is down"
    plain = node.lab.start(collect, 0.5, netns=node.netns)
    plain.hear()
    sent = node.lab.start(stream, GPU[0], 0.3, netns=node.client).result()
    assert expand(plain.result()) == list(range(sent))
    slot = next(iter(node.rules().values()))
    assert node.total("gpu_slot_stats", slot, GpuSlotStats).no_interface_packets == sent
    command("ip", "-n", node.netns, "link", "set", "rep0", "up")
    until(lambda: node.interfaces() == {ifindex(node.netns, "rep0")}, "the slot to be filled again")


def test_the_device_end_losing_its_carrier_means_plain_way(node: Node) -> None:
    node.plug(0)
    _policy(node, 0)
    node.start().ready()
    command("ip", "-n", node.gpu, "link", "set", "gpu0", "down")
    until(lambda: node.interfaces() == set(), "the slot to be emptied")


def test_killed_and_restarted_while_packets_are_in_flight(node: Node) -> None:
    node.plug(0)
    _policy(node, 0)
    first = node.start().ready()
    at_function = node.lab.start(collect, 1.0, netns=node.gpu)
    at_function.hear()
    sender = node.lab.start(stream, GPU[0], 6.0, netns=node.client)
    time.sleep(0.3)
    first.kill()
    time.sleep(0.3)
    second = node.start().ready()
    sent = sender.result()
    assert second.said("layout") == []
    assert expand(at_function.result()) == list(range(sent))


def test_a_hung_agent_holds_nothing_up(node: Node) -> None:
    node.plug(0)
    _policy(node, 0)
    agent = node.start().ready()
    agent.process.send_signal(signal.SIGSTOP)
    at_function = node.lab.start(collect, 0.5, netns=node.gpu)
    at_function.hear()
    sent = node.lab.start(stream, GPU[0], 0.3, netns=node.client).result()
    assert expand(at_function.result()) == list(range(sent))
    agent.process.send_signal(signal.SIGCONT)
    node.unplug(0)
    until(lambda: node.interfaces() == set(), "the slot to be emptied")


def test_what_changed_while_nobody_watched_is_put_right(node: Node) -> None:
    """The function came back as another interface, and the policy gave its rule to another function."""
    node.plug(0)
    node.plug(1)
    _policy(node, 0)
    node.start().ready().kill()
    node.unplug(0)
    node.plug(0)
    _policy(node, 0, 1)
    node.start().ready()
    assert node.interfaces() == {ifindex(node.netns, "rep0"), ifindex(node.netns, "rep1")}
    assert len(set(node.rules().values())) == 2


def test_a_representor_of_another_switch_is_not_taken(node: Node) -> None:
    node.sysfs.interface("rep0", switch="ffff", port="pf0vf0")
    node.lab.veth(node.netns, "rep0", node.gpu, "gpu0")
    _policy(node, 0)
    agent = node.start().ready()
    assert "0 representors for virtual function 0" in agent.hear("function has no interface")["why"]
    assert agent.said("function has no interface")[0]["function"] == PCIE[0]
    assert node.interfaces() == set()
