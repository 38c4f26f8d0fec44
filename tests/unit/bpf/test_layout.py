"""layout.py and layout.h say the same, byte for byte."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest

from bpf import btf, build, layout
from bpf.btf import Struct
from bpf.layout import (
    BackendSlot,
    BackendStats,
    Counter,
    DevmapValue,
    Endpoint,
    GpuFlowKey,
    GpuQpKey,
    GpuSlot,
    GpuSlotStats,
    JoinKey,
    MeshConfig,
    Service,
    ServiceKey,
    ServiceStats,
    SlotKey,
    TcpStats,
    UdpReverseKey,
)

V4, V6 = IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")
ENDPOINT = Endpoint(V4, 80, 3)

STRUCTURES: dict[str, Any] = {
    "mesh_config": MeshConfig(1, 2, 3, 4),
    "counter": Counter(1, 2),
    "gpu_qp_key": GpuQpKey(V6, 5),
    "gpu_flow_key": GpuFlowKey(V4, 6, 17),
    "gpu_slot": GpuSlot(b"abcdef", b"ghijkl", 9),
    "gpu_slot_stats": GpuSlotStats(1, 2, 3, 4),
    "service_key": ServiceKey(V6, 443, 6),
    "service": Service(1, 2, 3, 4),
    "slot_key": SlotKey(1, 2, 3),
    "endpoint": ENDPOINT,
    "backend_slot": BackendSlot(ENDPOINT, Endpoint(V6, 81, 4), 7),
    "udp_reverse_key": UdpReverseKey(2**40, V4, 53),
    "service_stats": ServiceStats(1, 2, 3, 4),
    "backend_stats": BackendStats(1, 2),
    "join_key": JoinKey(V4, V6, 1, 2, 2**33),
    "tcp_stats": TcpStats(1, 2, 3, 4, 5, 6, 7, 8),
    "bpf_devmap_val": DevmapValue(1, 0),
}


@pytest.fixture(scope="module")
def in_c() -> dict[str, Struct]:
    build.build_package()
    found = {}
    for name in ("xdp_gpu_bypass", "sock_lb", "sock_join", "tcp_signals"):
        types = btf.of_object(build.packaged_object(name).read_bytes())
        for structure in STRUCTURES:
            with contextlib.suppress(KeyError):
                found[structure] = types.structure(structure)
    return found


@pytest.mark.parametrize("name", STRUCTURES)
def test_sizes_and_round_trip(in_c: dict[str, Struct], name: str) -> None:
    value = STRUCTURES[name]
    packed = value.pack()
    assert len(packed) == in_c[name].size
    assert type(value).unpack(packed) == value


@pytest.mark.parametrize("name", STRUCTURES)
def test_offsets(in_c: dict[str, Struct], name: str) -> None:
    """Changing one member changes bytes at that member's offset in C, and no byte before it or of the next one."""
    value = STRUCTURES[name]
    size, members = in_c[name].size, in_c[name].offsets
    starts = [at for member, at in members.items() if not member.startswith(("zero", "bpf_prog"))]
    starts = sorted(starts)
    if name == "gpu_slot_stats":
        starts = [0, 8, 16, 24]  # two counters
    packed = value.pack()
    fields = [field.name for field in dataclasses.fields(value) if (name, field.name) != ("bpf_devmap_val", "program")]
    assert len(fields) == len(starts)
    ends = [*sorted(members.values())[1:], size] if name != "gpu_slot_stats" else [8, 16, 24, 32]
    for field, start in zip(fields, starts, strict=True):
        end = min(end for end in ends if end > start)
        changed = dataclasses.replace(value, **{field: _other(getattr(value, field))}).pack()
        places = {index for index in range(size) if changed[index] != packed[index]}
        assert places, field
        assert places <= set(range(start, end)), field


def _other(value: Any) -> Any:
    if isinstance(value, int):
        return value ^ 1
    if isinstance(value, bytes):
        return value[:-1] + b"?"
    if isinstance(value, Endpoint):
        return Endpoint(value.address, value.port ^ 1, value.id)
    return IPv6Address(int(IPv6Address(layout.pack_address(value))) ^ 1)


def test_members_stand_in_the_same_order_by_the_same_names(in_c: dict[str, Struct]) -> None:
    for name, value in STRUCTURES.items():
        if name in ("gpu_slot_stats", "bpf_devmap_val"):
            continue  # flattened; the kernel's own
        c_names = [member for member in in_c[name].offsets if not member.startswith("zero")]
        assert [field.name for field in dataclasses.fields(value)] == c_names


def test_enumerations() -> None:
    header = (build.SOURCES / "layout.h").read_text(encoding="utf-8")
    for prefix, kind, count in (("GPU_PASS", layout.GpuPassReason, "REASONS"), ("JOIN", layout.JoinEvent, "EVENTS")):
        found = {name: int(value) for name, value in re.findall(rf"\t{prefix}_(\w+) = (\d+)", header)}
        assert found.pop(count) == len(kind)
        assert found == {member.name: member.value for member in kind}


def test_constants() -> None:
    header = (build.SOURCES / "layout.h").read_text(encoding="utf-8")
    found = {name: int(value) for name, value in re.findall(r"#define MM_(\w+) (\d+)", header)}
    assert found == {name: getattr(layout, name) for name in found}
    assert len(found) == 10


def test_addresses() -> None:
    assert layout.pack_address(V4) == bytes(10) + b"\xff\xff" + V4.packed
    assert layout.unpack_address(layout.pack_address(V4)) == V4
    assert layout.unpack_address(layout.pack_address(V6)) == V6
    assert layout.pack_address(layout.ANY) == bytes(16)


def test_ports_travel_in_network_order() -> None:
    assert ServiceKey(V4, 0x1234, 6).pack()[16:20] == b"\x12\x34\x06\x00"
    assert ENDPOINT.pack()[16:] == b"\x00\x50\x00\x00" + struct.pack("=I", 3)
