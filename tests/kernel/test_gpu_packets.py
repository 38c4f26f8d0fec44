"""Packet in; verdict, packet and counters out."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest

from bpf import layout, loader
from bpf.layout import Counter, DevmapValue, GpuFlowKey, GpuPassReason, GpuQpKey, GpuSlot, GpuSlotStats, u32
from bpf.loader import Object
from tests.kernel.packets import (
    TCP,
    UDP,
    authentication,
    ethernet,
    extension,
    ip4,
    ip6,
    roce,
    tcp,
    udp,
    vlan,
)

pytestmark = pytest.mark.kernel

XDP_PASS, XDP_REDIRECT = 2, 4
LOOPBACK = 1
"""An interface that is always there; nothing is sent in a test run."""

GPU4, GPU6, ELSEWHERE4, ELSEWHERE6 = "198.51.100.7", "2001:db8:9::7", "203.0.113.1", "2001:db8:a::1"
QP_ANYWHERE, QP_AT_GPU4, PORT, WHOLE, PROTOCOL, EMPTY, IMPOSSIBLE, UNCHANGED = 1, 2, 3, 4, 5, 6, 300, 7
DESTINATION, SOURCE = b"\x02\xaa\0\0\0\x01", b"\x02\xbb\0\0\0\x01"


@pytest.fixture(scope="module")
def loaded() -> Iterator[Object]:
    with loader.load("xdp_gpu_bypass") as program:
        flows, maps = program.maps["gpu_flow_rules"], program.maps
        gpu4, gpu6 = IPv4Address(GPU4), IPv6Address(GPU6)
        maps["gpu_qp_rules"].set(GpuQpKey(layout.ANY, 0x11).pack(), u32(QP_ANYWHERE))
        maps["gpu_qp_rules"].set(GpuQpKey(gpu4, 0x12).pack(), u32(QP_AT_GPU4))
        flows.set(GpuFlowKey(gpu4, 7000, TCP).pack(), u32(PORT))
        flows.set(GpuFlowKey(gpu4, 7000, UDP).pack(), u32(PORT))
        flows.set(GpuFlowKey(gpu4, 0, UDP).pack(), u32(PROTOCOL))
        flows.set(GpuFlowKey(gpu6, 0, 0).pack(), u32(WHOLE))
        flows.set(GpuFlowKey(gpu4, 7001, TCP).pack(), u32(EMPTY))
        flows.set(GpuFlowKey(gpu4, 7002, TCP).pack(), u32(IMPOSSIBLE))
        flows.set(GpuFlowKey(gpu4, 7003, TCP).pack(), u32(UNCHANGED))
        for slot in (QP_ANYWHERE, QP_AT_GPU4, PORT, WHOLE, PROTOCOL):
            maps["gpu_slots"].set(u32(slot), GpuSlot(DESTINATION, SOURCE).pack())
        for slot in (QP_ANYWHERE, QP_AT_GPU4, PORT, WHOLE, PROTOCOL, UNCHANGED):
            maps["gpu_if_map"].set(u32(slot), DevmapValue(LOOPBACK).pack())
        yield program


def counters(program: Object) -> tuple[dict[int, Counter], dict[int, GpuSlotStats]]:
    passed = program.maps["gpu_pass_stats"].totals(Counter)
    slots = program.maps["gpu_slot_stats"].totals(GpuSlotStats)
    return (
        {layout.unpack_u32(key): value for key, value in passed.items()},
        {layout.unpack_u32(key): value for key, value in slots.items()},
    )


def changes(before: dict[int, Any], after: dict[int, Any]) -> dict[int, Any]:
    return {key: value for key, value in after.items() if value != before[key]}


HOP, ROUTING, FRAGMENT, ESP, AH, NOTHING, OPTIONS = 0, 43, 44, 50, 51, 59, 60

REDIRECTED = {
    "RoCEv2 of a known queue pair, to any address": (ip4(ELSEWHERE4, UDP, roce(0x11)), QP_ANYWHERE),
    "the same over IPv6": (ip6(ELSEWHERE6, UDP, roce(0x11)), QP_ANYWHERE),
    "a queue pair known at this address": (ip4(GPU4, UDP, roce(0x12)), QP_AT_GPU4),
    "the eight reserved bits above a queue pair don't count": (ip4(ELSEWHERE4, UDP, roce(0xFF00_0011)), QP_ANYWHERE),
    "RoCEv2 of an unknown queue pair, to an address with a rule for UDP": (ip4(GPU4, UDP, roce(0x99)), PROTOCOL),
    "TCP to a port with a rule": (ip4(GPU4, TCP, tcp(7000, b"hello")), PORT),
    "UDP to a port with a rule, which is more special than the protocol": (ip4(GPU4, UDP, udp(7000)), PORT),
    "UDP to another port": (ip4(GPU4, UDP, udp(7999)), PROTOCOL),
    "UDP from and to port 0": (ip4(GPU4, UDP, udp(0, source=0)), PROTOCOL),
    "IPv4 with options": (ip4(GPU4, TCP, tcp(7000), options=b"\x01" * 8), PORT),
    "IPv4 with the most options there can be": (ip4(GPU4, TCP, tcp(7000), options=b"\x01" * 40), PORT),
    "«don't fragment» is no fragment": (ip4(GPU4, TCP, tcp(7000), fragment=0x4000), PORT),
    "padding behind a short packet": (ip4(GPU4, UDP, udp(7000, b"")) + bytes(18), PORT),
    "one VLAN tag": (vlan(ip4(GPU4, TCP, tcp(7000)), 5), PORT),
    "two VLAN tags": (vlan(ip4(GPU4, TCP, tcp(7000)), 5, 6), PORT),
    "two VLAN tags, the outer of 802.1ad, IPv6": (vlan(ip6(GPU6, TCP, tcp(1)), 5, 6, kind=0x88A8), WHOLE),
    "any protocol to an address with a rule for it all (ICMPv6)": (ip6(GPU6, 58, b"\x80" + bytes(7)), WHOLE),
    "ESP, whose ports can't be seen, to such an address": (ip6(GPU6, ESP, bytes(32)), WHOLE),
    "no next header, to such an address": (ip6(GPU6, NOTHING, b""), WHOLE),
    "IPv6 with hop-by-hop options": (ip6(ELSEWHERE6, HOP, extension(UDP) + roce(0x11)), QP_ANYWHERE),
    "IPv6 with long destination options": (ip6(ELSEWHERE6, OPTIONS, extension(UDP, 2048) + roce(0x11)), QP_ANYWHERE),
    "IPv6 with an authentication header": (ip6(ELSEWHERE6, AH, authentication(UDP) + roce(0x11)), QP_ANYWHERE),
    "IPv6 with a routing header at its end": (ip6(ELSEWHERE6, ROUTING, extension(UDP) + roce(0x11)), QP_ANYWHERE),
    "IPv6 with five extension headers": (
        ip6(
            ELSEWHERE6,
            HOP,
            extension(OPTIONS)
            + extension(ROUTING)
            + extension(AH)
            + authentication(OPTIONS)
            + extension(UDP)
            + roce(0x11),
        ),
        QP_ANYWHERE,
    ),
}

R = GpuPassReason
PASSED = {
    "TCP to a port without a rule": (ip4(GPU4, TCP, tcp(22)), R.NO_RULE),
    "TCP to an address without a rule": (ip4(ELSEWHERE4, TCP, tcp(7000)), R.NO_RULE),
    "TCP to port 0": (ip4(GPU4, TCP, tcp(0)), R.NO_RULE),
    "RoCEv2 of an unknown queue pair": (ip4(ELSEWHERE4, UDP, roce(0x99)), R.NO_RULE),
    "RoCEv2 of a queue pair that is known at another address": (ip4(ELSEWHERE4, UDP, roce(0x12)), R.NO_RULE),
    "a queue pair's number in UDP to another port": (
        ip4(ELSEWHERE4, UDP, udp(4790, struct.pack("!BBHII", 4, 0, 0xFFFF, 0x11, 1) + bytes(8))),
        R.NO_RULE,
    ),
    "a queue pair's number in TCP to port 4791": (ip4(ELSEWHERE4, TCP, tcp(4791, roce(0x11)[8:])), R.NO_RULE),
    "from the GPU, not to it": (ip4(ELSEWHERE4, TCP, tcp(7000), source=GPU4), R.NO_RULE),
    "ARP": (ethernet(bytes(28), 0x0806), R.NOT_IP),
    "a frame with a length (802.3)": (ethernet(bytes(46), 46), R.NOT_IP),
    "three VLAN tags": (vlan(ip4(GPU4, TCP, tcp(7000)), 5, 6, 7), R.NOT_IP),
    "nothing behind the Ethernet header": (ethernet(b"", 0x0800), R.TRUNCATED),
    "a VLAN tag cut short": (vlan(ip4(GPU4, TCP, tcp(7000)), 5)[:16], R.TRUNCATED),
    "half an IPv4 header": (ip4(GPU4, TCP, b"")[:24], R.TRUNCATED),
    "less than IPv4's length": (ip4(GPU4, TCP, tcp(7000, bytes(100)))[:-1], R.TRUNCATED),
    "half a TCP header": (ip4(GPU4, TCP, tcp(7000)[:10]), R.TRUNCATED),
    "half a UDP header": (ip4(GPU4, UDP, udp(7000)[:6]), R.TRUNCATED),
    "a UDP header in the padding": (ip4(GPU4, UDP, udp(7000), length=24), R.TRUNCATED),
    "RoCEv2 without a queue pair": (ip4(ELSEWHERE4, UDP, udp(4791, b"1234567")), R.TRUNCATED),
    "RoCEv2 whose queue pair lies in the padding": (
        ip4(ELSEWHERE4, UDP, udp(4791, roce(0x11)[8:], length=12)),
        R.TRUNCATED,
    ),
    "half an IPv6 header": (ip6(GPU6, TCP, b"")[:30], R.TRUNCATED),
    "less than IPv6's length": (ip6(GPU6, TCP, tcp(1, bytes(100)))[:-1], R.TRUNCATED),
    "an IPv6 extension header cut short": (ip6(GPU6, HOP, b"\x11\x00"), R.TRUNCATED),
    "IPv4's version under IPv6's type": (ethernet(ip4(GPU4, TCP, tcp(7000))[14:] + bytes(40), 0x86DD), R.MALFORMED),
    "IPv6's version under IPv4's type": (ethernet(ip6(GPU6, TCP, tcp(1))[14:], 0x0800), R.MALFORMED),
    "an IPv4 header of 16 bytes": (ip4(GPU4, TCP, tcp(7000), header_words=4), R.MALFORMED),
    "an IPv4 length below its header's": (ip4(GPU4, TCP, tcp(7000), length=19), R.MALFORMED),
    "a UDP length below its header's": (ip4(GPU4, UDP, udp(7000, length=7)), R.MALFORMED),
    "a UDP length above IPv4's": (ip4(GPU4, UDP, udp(7000, length=100)), R.MALFORMED),
    "an IPv6 extension header beyond the payload": (ip6(GPU6, OPTIONS, extension(TCP, 64)[:32]), R.MALFORMED),
    "hop-by-hop options that come second": (
        ip6(GPU6, OPTIONS, extension(HOP) + extension(TCP) + tcp(1)),
        R.MALFORMED,
    ),
    "the first fragment": (ip4(GPU4, UDP, udp(7000), fragment=0x2000), R.FRAGMENT),
    "a later fragment, whose first bytes look like a port": (ip4(GPU4, UDP, udp(7000), fragment=0x0001), R.FRAGMENT),
    "an IPv6 fragment": (ip6(GPU6, FRAGMENT, extension(UDP) + udp(1)), R.FRAGMENT),
    "an IPv6 fragment behind options": (ip6(GPU6, HOP, extension(FRAGMENT) + extension(UDP) + udp(1)), R.FRAGMENT),
    "a routing header with stations to come": (
        ip6(GPU6, ROUTING, extension(TCP, 24, routing=(4, 1)) + tcp(1)),
        R.EXTENSIONS,
    ),
    "six IPv6 extension headers": (ip6(GPU6, OPTIONS, extension(OPTIONS) * 5 + extension(TCP) + tcp(1)), R.EXTENSIONS),
    "a rule whose slot can't exist": (ip4(GPU4, TCP, tcp(7002)), R.BAD_SLOT),
}


@pytest.mark.parametrize("sentence", REDIRECTED)
def test_goes_to_its_function(loaded: Object, sentence: str) -> None:
    packet, slot = REDIRECTED[sentence]
    passed, slots = counters(loaded)
    run = loaded.programs["xdp_gpu_bypass"].test_run(packet)
    assert run.verdict == XDP_REDIRECT
    assert run.packet == DESTINATION + SOURCE + packet[12:]
    passed_after, slots_after = counters(loaded)
    assert passed_after == passed
    assert changes(slots, slots_after) == {slot: slots[slot] + GpuSlotStats(1, len(packet))}


@pytest.mark.parametrize("sentence", PASSED)
def test_goes_the_plain_way(loaded: Object, sentence: str) -> None:
    packet, reason = PASSED[sentence]
    passed, slots = counters(loaded)
    run = loaded.programs["xdp_gpu_bypass"].test_run(packet)
    assert run.verdict == XDP_PASS
    assert run.packet == packet
    passed_after, slots_after = counters(loaded)
    assert slots_after == slots
    assert changes(passed, passed_after) == {reason: passed[reason] + Counter(1, len(packet))}


def test_a_slot_without_an_interface_passes_its_packets_and_counts_them(loaded: Object) -> None:
    packet = ip4(GPU4, TCP, tcp(7001))
    passed, slots = counters(loaded)
    run = loaded.programs["xdp_gpu_bypass"].test_run(packet)
    assert (run.verdict, run.packet) == (XDP_PASS, packet)
    passed_after, slots_after = counters(loaded)
    assert changes(passed, passed_after) == {R.NO_INTERFACE: passed[R.NO_INTERFACE] + Counter(1, len(packet))}
    assert changes(slots, slots_after) == {EMPTY: slots[EMPTY] + GpuSlotStats(0, 0, 1, len(packet))}


def test_a_slot_without_a_mac_leaves_the_frame_as_it_is(loaded: Object) -> None:
    packet = ip4(GPU4, TCP, tcp(7003))
    run = loaded.programs["xdp_gpu_bypass"].test_run(packet)
    assert (run.verdict, run.packet) == (XDP_REDIRECT, packet)


def test_random_and_mutated_packets_leave_the_maps_sane(loaded: Object) -> None:
    """Every packet is decided once, leaves with its length, and changes but in its MACs; no rule or slot changes."""
    dice = random.Random(4791)  # noqa: S311 - a test's packets are no secret
    seeds = [packet for packet, _ in REDIRECTED.values()] + [packet for packet, _ in PASSED.values()]
    watched = ("gpu_qp_rules", "gpu_flow_rules", "gpu_slots", "gpu_if_map", "mesh_config")
    content = {name: sorted(loaded.maps[name].items()) for name in watched}
    program = loaded.programs["xdp_gpu_bypass"]
    passed, slots = counters(loaded)
    verdicts = {XDP_PASS: 0, XDP_REDIRECT: 0}
    for _ in range(20_000):
        packet = _mutated(dice, seeds)
        run = program.test_run(packet)
        verdicts[run.verdict] += 1
        assert run.packet[12:] == packet[12:]
        assert run.packet[:12] in (packet[:12], DESTINATION + SOURCE)
        assert run.verdict == XDP_REDIRECT or run.packet == packet
    passed_after, slots_after = counters(loaded)
    counted = sum(value.packets - passed[key].packets for key, value in passed_after.items())
    assert counted == verdicts[XDP_PASS]
    counted = sum(value.redirected_packets - slots[key].redirected_packets for key, value in slots_after.items())
    assert counted == verdicts[XDP_REDIRECT] > 1000
    assert {name: sorted(loaded.maps[name].items()) for name in watched} == content


def _mutated(dice: random.Random, seeds: list[bytes]) -> bytes:
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(14, 200))
    packet = bytearray(dice.choice(seeds))
    for _ in range(dice.randrange(4)):
        position = dice.randrange(len(packet))
        packet[position] = dice.choice((0, 1, 0xFF, packet[position] ^ 1 << dice.randrange(8), dice.randrange(256)))
    if dice.random() < 0.3:
        packet = packet[: dice.randrange(14, len(packet) + 1)]
    return bytes(packet)
