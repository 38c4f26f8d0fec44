"""Objects, maps and links: loaded, pinned, found again, taken over, refused."""

from __future__ import annotations

import socket
import subprocess
import time
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from bpf import build, layout, links, loader
from bpf.errors import BpfError, HookTakenError, LayoutError, MapFullError, ObjectError, VerifierError
from bpf.layout import BackendStats, DevmapValue, GpuFlowKey, GpuSlot, MeshConfig, ServiceKey, SlotKey, u32
from bpf.links import Link, XdpMode
from bpf.maps import Map
from tests.kernel.lab import Lab, Tell, command, inside

pytestmark = pytest.mark.kernel


def flow(number: int) -> bytes:
    return GpuFlowKey(IPv4Address(number), 1, 6).pack()


# ---- objects


def test_pinned_maps_are_found_again_with_their_content(lab: Lab) -> None:
    pins = lab.pins()
    with loader.load("xdp_gpu_bypass", pins=pins) as first:
        first.maps["gpu_flow_rules"].set(flow(1), u32(3))
        number = first.maps["gpu_flow_rules"].id
    with loader.load("xdp_gpu_bypass", pins=pins) as second:
        assert second.maps["gpu_flow_rules"].get(flow(1)) == u32(3)
        assert second.maps["gpu_flow_rules"].id == number
    pinned = Map.open(loader.maps_directory(pins) / "gpu_flow_rules")
    assert (pinned.id, pinned.name) == (number, "gpu_flow_rules")
    pinned.close()


def test_objects_share_a_map_by_its_name(lab: Lab) -> None:
    pins = lab.pins()
    with loader.load("sock_lb", pins=pins) as one, loader.load("tcp_signals", pins=pins) as other:
        assert one.maps["socket_origin"].id == other.maps["socket_origin"].id
        assert one.maps["mesh_config"].id == other.maps["mesh_config"].id


def test_maps_carry_their_layout_s_version(lab: Lab) -> None:
    pins = lab.pins()
    assert loader.pinned_layout_version(pins) is None
    with loader.load("tcp_signals", pins=pins) as loaded:
        assert MeshConfig.unpack(loaded.maps["mesh_config"].get(u32(0)) or b"") == MeshConfig()
    assert loader.pinned_layout_version(pins) == layout.LAYOUT_VERSION


def test_maps_of_another_layout_are_refused_and_stay(lab: Lab) -> None:
    pins = lab.pins()
    with loader.load("xdp_gpu_bypass", pins=pins) as loaded:
        loaded.maps["mesh_config"].set(u32(0), MeshConfig(layout_version=99).pack())
        loaded.maps["gpu_flow_rules"].set(flow(1), u32(3))
    with pytest.raises(LayoutError, match=r"layout 99.*need 1"):
        loader.load("xdp_gpu_bypass", pins=pins)
    pinned = Map.open(loader.maps_directory(pins) / "gpu_flow_rules")
    assert pinned.get(flow(1)) == u32(3)
    pinned.close()


def test_a_pinned_map_of_another_size_is_refused(lab: Lab) -> None:
    pins = lab.pins()
    loader.load("xdp_gpu_bypass", pins=pins, max_entries={"gpu_flow_rules": 7}).close()
    with pytest.raises(LayoutError, match="gpu_flow_rules"):
        loader.load("xdp_gpu_bypass", pins=pins)


def test_only_some_programs(lab: Lab) -> None:
    with loader.load("sock_lb", programs=["sock_lb_connect4"]) as loaded:
        assert list(loaded.programs) == ["sock_lb_connect4"]


BAD = """
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
char LICENSE[] SEC("license") = "Dual BSD/GPL";
SEC("xdp") int reads_too_far(struct xdp_md *context)
{
	return *((char *)(long)context->data + 100);
}
"""


def test_a_refusal_brings_the_verifier_s_whole_log(short_dir: Path) -> None:
    source, target = short_dir / "bad.bpf.c", short_dir / "bad.bpf.o"
    source.write_text(BAD)
    subprocess.run(build.command(source, target), check=True, timeout=60)
    with pytest.raises(VerifierError) as caught:
        loader.load_file(target)
    assert "invalid access to packet" in caught.value.log
    assert "processed" in caught.value.log
    assert "reads_too_far" in str(caught.value)


def test_an_object_that_is_missing_is_built_on_the_node(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "packaged_object", lambda name: short_dir / "nowhere" / name)
    with loader.load("tcp_signals", build_dir=short_dir / "built") as loaded:
        assert "tcp_signals" in loaded.programs
    assert [path.name for path in (short_dir / "built").iterdir()] == ["tcp_signals.bpf.o"]


def test_an_object_that_can_t_be_read_is_built_on_the_node(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = short_dir / "tcp_signals.bpf.o"
    damaged.write_bytes(build.packaged_object("tcp_signals").read_bytes()[:1000])
    monkeypatch.setattr(build, "packaged_object", lambda name: damaged)
    with loader.load("tcp_signals", build_dir=short_dir / "built") as loaded:
        assert "tcp_signals" in loaded.programs


def test_without_clang_the_error_says_so(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "packaged_object", lambda name: short_dir / "nowhere" / name)
    monkeypatch.setenv("CLANG", "/nonexistent/clang")
    with pytest.raises(ObjectError, match="clang is not installed"):
        loader.load("tcp_signals", build_dir=short_dir / "built")


# ---- maps


def test_a_full_map_says_so_and_keeps_what_it_has(lab: Lab) -> None:
    with loader.load("xdp_gpu_bypass", max_entries={"gpu_flow_rules": 3}) as loaded:
        rules = loaded.maps["gpu_flow_rules"]
        with pytest.raises(MapFullError, match="gpu_flow_rules"):
            rules.set_many((flow(number), u32(number)) for number in range(10))
        assert len(rules.items()) == 3
        with pytest.raises(MapFullError):
            rules.set(flow(99), u32(1))


def test_ten_thousand_entries_at_once() -> None:
    with loader.load("xdp_gpu_bypass") as loaded:
        rules = loaded.maps["gpu_flow_rules"]
        wanted = {flow(number): u32(number % 256) for number in range(10_000)}
        rules.set_many(wanted.items())
        assert dict(rules.items()) == wanted
        assert set(rules.keys()) == set(wanted)
        rules.delete_many(flow(number) for number in range(0, 20_000, 2))  # half of them, and some that aren't there
        assert dict(rules.items()) == {flow(number): u32(number % 256) for number in range(1, 10_000, 2)}
        rules.clear()
        assert rules.items() == []


def test_one_entry() -> None:
    with loader.load("sock_lb") as loaded:
        services = loaded.maps["services"]
        key = ServiceKey(IPv4Address("10.0.0.1"), 80, 6).pack()
        assert services.get(key) is None
        assert not services.delete(key)
        assert services.add(key, bytes(16))
        assert not services.add(key, b"\1" * 16)
        assert services.get(key) == bytes(16)
        assert services.delete(key)


def test_a_key_or_value_of_the_wrong_size_never_reaches_the_kernel() -> None:
    with loader.load("sock_lb") as loaded:
        slots = loaded.maps["backend_slots"]
        with pytest.raises(ValueError, match="key has 4 bytes, not 12"):
            slots.get(b"1234")
        with pytest.raises(ValueError, match="value has 1 bytes, not 52"):
            slots.set(SlotKey(1, 2, 3).pack(), b"1")
        with pytest.raises(ValueError, match="value has 1 bytes"):
            slots.set_many([(SlotKey(1, 2, 3).pack(), b"1")])


def test_per_cpu_values_add_up() -> None:
    with loader.load("sock_lb") as loaded:
        stats = loaded.maps["backend_stats"]
        stats.set_many((u32(number), BackendStats(number, 1).pack()) for number in range(1, 101))
        values = stats.get_per_cpu(u32(7))
        assert values
        assert {BackendStats.unpack(value) for value in values} == {BackendStats(7, 1)}
        assert stats.total(u32(7), BackendStats) == BackendStats(7 * len(values), len(values))
        assert stats.totals(BackendStats)[u32(100)] == BackendStats(100 * len(values), len(values))
        assert stats.total(u32(999), BackendStats) is None


def test_a_map_without_batches() -> None:
    with loader.load("xdp_gpu_bypass") as loaded:
        devices = loaded.maps["gpu_if_map"]
        devices.set_many((u32(number), DevmapValue(1).pack()) for number in range(5))
        assert {layout.unpack_u32(key) for key, _ in devices.items()} == set(range(5))
        devices.delete_many([u32(1), u32(9)])
        assert {layout.unpack_u32(key) for key in devices.keys()} == {0, 2, 3, 4}  # noqa: SIM118 - not a dict
        devices.clear()
        assert devices.items() == []


def test_clearing_an_array_writes_zeros() -> None:
    with loader.load("xdp_gpu_bypass") as loaded:
        slots = loaded.maps["gpu_slots"]
        slots.set(u32(9), GpuSlot(b"abcdef", b"ghijkl", 1).pack())
        slots.clear()
        assert {value for _, value in slots.items()} == {bytes(16)}


# ---- links


@pytest.fixture
def node(lab: Lab) -> str:
    netns = lab.namespace("node")
    other = lab.namespace("wire")
    lab.veth(netns, "nic", other, "wire")
    return netns


def attach_and_leave(tell: Tell, pins: str) -> int:
    """An agent that dies: what it pinned stays."""
    loaded = loader.load("xdp_gpu_bypass", pins=Path(pins))
    program = loaded.programs["xdp_gpu_bypass"]
    nic = socket.if_nametoindex("nic")
    path = Path(pins) / "xdp"
    links.ensure_pinned(path, program, lambda: links.attach_xdp(program, nic, XdpMode.GENERIC))
    loaded.maps["gpu_flow_rules"].set(flow(1), u32(3))
    return program.id


def detached(nic: int) -> bool:
    """The kernel frees a link that nobody holds a moment later."""
    for _ in range(200):
        if links.attached_xdp(nic) == 0:
            return True
        time.sleep(0.01)
    return False


def test_a_dead_agent_s_link_and_maps_are_taken_over(lab: Lab, node: str) -> None:
    pins = lab.pins()
    old = lab.start(attach_and_leave, str(pins), netns=node).result()
    with inside(node):
        nic = socket.if_nametoindex("nic")
        assert links.attached_xdp(nic) == old
        with loader.load("xdp_gpu_bypass", pins=pins) as loaded:
            program = loaded.programs["xdp_gpu_bypass"]
            before = Link.open(pins / "xdp")
            link = links.ensure_pinned(pins / "xdp", program, lambda: pytest.fail("nothing new may be attached"))
            assert link.facts.id == before.facts.id
            assert links.attached_xdp(nic) == program.id != old
            assert loaded.maps["gpu_flow_rules"].get(flow(1)) == u32(3)
            before.close()
            link.close()
        assert links.attached_xdp(nic) != 0
        (pins / "xdp").unlink()
        assert detached(nic)


def test_a_link_whose_interface_is_gone_is_replaced(lab: Lab, node: str) -> None:
    pins = lab.pins()
    lab.start(attach_and_leave, str(pins), netns=node).result()
    command("ip", "-n", node, "link", "del", "nic")
    lab.veth(node, "nic", lab.namespace("other"), "wire")
    with inside(node), loader.load("xdp_gpu_bypass", pins=pins) as loaded:
        program, nic = loaded.programs["xdp_gpu_bypass"], socket.if_nametoindex("nic")
        link = links.ensure_pinned(pins / "xdp", program, lambda: links.attach_xdp(program, nic, XdpMode.GENERIC))
        assert link.facts.target == nic
        assert links.attached_xdp(nic) == program.id
        link.close()


def test_somebody_else_s_program_is_reported_and_stays(lab: Lab, node: str) -> None:
    with inside(node), loader.load("xdp_gpu_bypass") as theirs, loader.load("xdp_gpu_bypass") as ours:
        nic = socket.if_nametoindex("nic")
        with links.attach_xdp(theirs.programs["xdp_gpu_bypass"], nic, XdpMode.NATIVE):
            with pytest.raises(HookTakenError, match="xdp_gpu_bypass"):
                links.attach_xdp(ours.programs["xdp_gpu_bypass"], nic, XdpMode.NATIVE)
            assert links.attached_xdp(nic) == theirs.programs["xdp_gpu_bypass"].id
        assert detached(nic)


def test_an_interface_that_does_not_exist(node: str) -> None:
    with inside(node), loader.load("xdp_gpu_bypass") as loaded:
        with pytest.raises(BpfError, match="interface 9999"):
            links.attach_xdp(loaded.programs["xdp_gpu_bypass"], 9999, XdpMode.GENERIC)
        assert links.attached_xdp(9999) == 0


def test_two_programs_share_a_cgroup(lab: Lab) -> None:
    cgroup = lab.cgroup()
    with loader.load("sock_lb", programs=["sock_lb_connect4"]) as one, loader.load("sock_lb") as other:
        first = links.attach_cgroup(one.programs["sock_lb_connect4"], cgroup)
        second = links.attach_cgroup(other.programs["sock_lb_connect4"], cgroup)
        assert first.facts.target
        assert first.facts.id != second.facts.id
        first.close()
        second.close()
