"""Do the programs do here what they were built for? Asked before joined sockets are switched on, and by a person.

Why at load and not only in the project's tests: whether a writer is stopped when nobody reads depends on how the
running kernel accounts for bytes that were handed over. Where it doesn't, a slow reader could fill the node's memory,
and joined sockets stay off.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from socket import IPPROTO_TCP, IPPROTO_UDP
from struct import pack
from typing import Final

from bpf import layout, links, loader
from bpf.errors import SelftestError
from bpf.join_ends import BOUND, ROUNDS
from bpf.layout import Counter, DevmapValue, GpuFlowKey, GpuSlot, JoinEvent, ServiceKey, u32

__all__ = ["JoinReport", "check_bypass", "check_join"]

_TIMEOUT_S: Final = 20.0
_XDP_PASS: Final = 2
_XDP_REDIRECT: Final = 4
_LOOPBACK: Final = 1
"""An interface that is always there. Nothing is sent in a test run."""


@dataclass(frozen=True, slots=True)
class JoinReport:
    """What joined sockets did."""

    joined: int
    """Sockets."""
    redirected: int
    """Messages handed over past TCP."""
    stopped_after: int
    """Bytes after which a writer was stopped whose reader didn't read."""


def check_join(cgroup: Path) -> JoinReport:
    """Join a few connections on loopback, in a cgroup of their own, with programs that nobody else sees.

    Args:
        cgroup: A cgroup (version 2) below which one may be made.

    Raises:
        SelftestError: Bytes were lost, or a writer was not stopped, or nothing was joined.
        BpfError: The programs can't be loaded or attached.
    """
    inner = cgroup / f"modalmesh-selftest-{os.getpid()}"
    try:
        inner.mkdir()
    except OSError as error:
        raise SelftestError(f"no cgroup can be made below {cgroup}: {error.strerror}") from error
    try:
        return _check_join_in(inner)
    finally:
        _remove(inner)


def _check_join_in(cgroup: Path) -> JoinReport:
    with loader.load("sock_join") as loaded:
        links.attach_sk_msg(loaded.programs["sock_join_message"], loaded.maps["join_sockets"])
        with links.attach_cgroup(loaded.programs["sock_join_established"], cgroup):
            child = subprocess.Popen(
                [sys.executable, "-m", "bpf.join_ends", str(cgroup)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent.parent,
            )
            try:
                seen = _converse(child, loaded.maps["join_endpoints"].set)
            finally:
                child.kill()
                child.communicate()
        events = {JoinEvent(layout.unpack_u32(key)): value for key, value in _events(loaded).items()}
    report = JoinReport(
        joined=events[JoinEvent.ADDED].packets,
        redirected=events[JoinEvent.REDIRECTED].packets,
        stopped_after=int(seen["stopped_after"]),
    )
    _judge(seen, report)
    return report


def _events(loaded: loader.Object) -> dict[bytes, Counter]:
    return loaded.maps["join_stats"].totals(Counter)


def _converse(child: subprocess.Popen[str], allow: Callable[[bytes, bytes], None]) -> dict[str, int]:
    """Let the child's port be joined, then hear what it saw."""
    port = child.stdout.readline().strip() if child.stdout else ""
    if not port:
        raise SelftestError(f"the ends of the test connections did not start: {_last_words(child)}")
    allow(ServiceKey(IPv4Address("127.0.0.1"), int(port), IPPROTO_TCP).pack(), u32(1))
    try:
        output, errors = child.communicate("\n", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise SelftestError(f"the test connections did not end in {_TIMEOUT_S:.0f} s") from error
    if child.returncode:
        raise SelftestError(f"the test connections broke: {errors.strip().splitlines()[-1:] or 'no message'}")
    seen: dict[str, int] = json.loads(output)
    return seen


def _last_words(child: subprocess.Popen[str]) -> str:
    _, errors = child.communicate(timeout=_TIMEOUT_S)
    return (errors.strip().splitlines() or ["no message"])[-1]


def _judge(seen: dict[str, int], report: JoinReport) -> None:
    if not seen["rounds"] or not seen["half_close"]:
        raise SelftestError("joined sockets lost or mixed up bytes", hint="the kernel's sock maps are not usable")
    if report.stopped_after > BOUND:
        raise SelftestError(
            f"a writer got rid of {report.stopped_after >> 20} MiB while nobody read",
            hint="this kernel does not account for handed over bytes",
        )
    if report.redirected < ROUNDS:
        raise SelftestError(f"only {report.redirected} messages of {2 * ROUNDS} were handed over")


def _remove(cgroup: Path) -> None:
    for _ in range(100):  # a process that has just died is still in its cgroup for a moment
        with contextlib.suppress(OSError):
            cgroup.rmdir()
            return
        time.sleep(0.01)


def check_bypass() -> int:
    """Run ``xdp_gpu_bypass`` on a packet with a rule and on one without; return the nanoseconds that the first took.

    Raises:
        SelftestError: One of them did not go where it should.
        BpfError: The program can't be loaded.
    """
    gpu = IPv4Address("198.51.100.1")
    with loader.load("xdp_gpu_bypass") as loaded:
        loaded.maps["gpu_flow_rules"].set(GpuFlowKey(gpu, 7000, IPPROTO_UDP).pack(), u32(0))
        loaded.maps["gpu_slots"].set(u32(0), GpuSlot(b"\x02gpu01", b"\x02nic01").pack())
        loaded.maps["gpu_if_map"].set(u32(0), DevmapValue(_LOOPBACK).pack())
        program = loaded.programs["xdp_gpu_bypass"]
        found = program.test_run(_udp(gpu, 7000), repeat=100_000)
        other = program.test_run(_udp(gpu, 7001))
    if (found.verdict, found.packet[:12]) != (_XDP_REDIRECT, b"\x02gpu01\x02nic01"):
        raise SelftestError(f"a packet with a rule was not redirected: verdict {found.verdict}")
    if other.verdict != _XDP_PASS:
        raise SelftestError(f"a packet without a rule was not passed: verdict {other.verdict}")
    return found.nanoseconds


def _udp(destination: IPv4Address, port: int) -> bytes:
    ethernet = b"\x02\0\0\0\0\x02\x02\0\0\0\0\x01\x08\x00"
    source = IPv4Address("192.0.2.1").packed
    network = pack("!BBHHHBBH", 0x45, 0, 36, 0, 0, 64, IPPROTO_UDP, 0) + source + destination.packed
    return ethernet + network + pack("!HHHH", 49152, port, 16, 0) + bytes(8)
