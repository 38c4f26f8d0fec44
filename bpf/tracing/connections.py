"""How long TCP connections from this node take to be established, one by one, with their tier from the pinned map."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final

from bpf import btf, layout
from bpf.layout import Address
from bpf.loader import maps_directory
from bpf.tracing.bcc_backend import loaded

__all__ = ["Connection", "watch"]

# The tier map has the layout of programs/layout.h: struct service_key → u32.
_PROGRAM: Final = """
#include <uapi/linux/in.h>
#include <linux/types.h>

struct key { u32 address[4]; u16 port; u8 protocol; u8 zero; };
struct start { u64 at; u32 pid; char command[16]; };
struct event {
    u64 nanoseconds;
    u32 source[4], destination[4];
    u32 pid, tier, established;
    u16 source_port, destination_port;
    char command[16];
};

BPF_HASH(starts, u64, struct start, 16384);
BPF_PERF_OUTPUT(events);
TIER_MAP

static void read_address(u32 *to, u64 socket, u16 family, int offset4, int offset6)
{
    if (family == 10) {
        bpf_probe_read_kernel(to, 16, (void *)(socket + offset6));
        return;
    }
    to[0] = to[1] = 0;
    to[2] = 0xffff0000;
    bpf_probe_read_kernel(&to[3], 4, (void *)(socket + offset4));
}

RAW_TRACEPOINT_PROBE(inet_sock_set_state)
{
    u64 socket = ctx->args[0];
    int old = ctx->args[1], new = ctx->args[2];

    if (new == SYN_SENT) {
        struct start start = { .at = bpf_ktime_get_ns(), .pid = bpf_get_current_pid_tgid() >> 32 };
        bpf_get_current_comm(start.command, sizeof(start.command));
        starts.update(&socket, &start);
        return 0;
    }
    if (old != SYN_SENT)
        return 0;
    struct start *start = starts.lookup(&socket);
    if (!start)
        return 0;
    struct event event = { .nanoseconds = bpf_ktime_get_ns() - start->at, .pid = start->pid };
    u16 family = 0;
    __builtin_memcpy(event.command, start->command, sizeof(event.command));
    event.established = new == ESTABLISHED;
    bpf_probe_read_kernel(&family, 2, (void *)(socket + FAMILY));
    read_address(event.source, socket, family, SOURCE4, SOURCE6);
    read_address(event.destination, socket, family, DESTINATION4, DESTINATION6);
    bpf_probe_read_kernel(&event.source_port, 2, (void *)(socket + SOURCE_PORT));
    bpf_probe_read_kernel(&event.destination_port, 2, (void *)(socket + DESTINATION_PORT));
    TIER_LOOKUP
    events.perf_submit(ctx, &event, sizeof(event));
    starts.delete(&socket);
    return 0;
}
"""

_LOOKUP: Final = """
    struct key key = { .port = event.destination_port, .protocol = IPPROTO_TCP };
    __builtin_memcpy(key.address, event.destination, 16);
    u32 *tier = tier_addresses.lookup(&key);
    if (tier)
        event.tier = *tier;
"""

# enum in net/tcp_states.h
_STATES: Final = {"ESTABLISHED": 1, "SYN_SENT": 2}

_MEMBERS: Final = {
    "FAMILY": "skc_family",
    "SOURCE4": "skc_rcv_saddr",
    "SOURCE6": "skc_v6_rcv_saddr",
    "SOURCE_PORT": "skc_num",
    "DESTINATION4": "skc_daddr",
    "DESTINATION6": "skc_v6_daddr",
    "DESTINATION_PORT": "skc_dport",
}


@dataclass(frozen=True, slots=True)
class Connection:
    """One attempt to connect."""

    command: str
    pid: int
    source: Address
    source_port: int
    destination: Address
    destination_port: int
    microseconds: float
    established: bool
    """False: refused or given up."""
    tier: int


def watch(pins: Path, seconds: float) -> Iterator[Connection]:
    """Yield connections as they are established or fail.

    Args:
        pins: Where the node agent's maps are pinned; without them tiers are 0.
        seconds: How long.

    Raises:
        TraceError: ``bcc`` can't do it here.
    """
    with loaded(_program(maps_directory(pins) / "tier_addresses")) as program:
        found: list[Connection] = []

        def take(_cpu: int, data: Any, _size: int) -> None:
            found.append(_connection(program[b"events"].event(data)))

        program[b"events"].open_perf_buffer(take, page_cnt=64)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            program.perf_buffer_poll(timeout=int(min(left, 0.2) * 1000) + 1)
            yield from found
            found.clear()


def _program(tier_map: Path) -> str:
    offsets = btf.of_kernel().structure("sock_common").offsets
    defines = {name: offsets[member] for name, member in _MEMBERS.items()} | _STATES
    text = _PROGRAM
    if tier_map.exists():
        pinned = f'BPF_TABLE_PINNED("hash", struct key, u32, tier_addresses, {layout.SERVICES}, "{tier_map}");'
        text = text.replace("TIER_MAP", pinned).replace("TIER_LOOKUP", _LOOKUP)
    else:
        text = text.replace("TIER_MAP", "").replace("TIER_LOOKUP", "")
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + text


def _connection(event: Any) -> Connection:
    return Connection(
        command=event.command.decode(errors="replace"),
        pid=event.pid,
        source=_address(event.source),
        source_port=event.source_port,
        destination=_address(event.destination),
        destination_port=socket.ntohs(event.destination_port),
        microseconds=event.nanoseconds / 1000,
        established=bool(event.established),
        tier=event.tier,
    )


def _address(words: Any) -> IPv4Address | IPv6Address:
    return layout.unpack_address(ip_address(bytes(words)).packed)
