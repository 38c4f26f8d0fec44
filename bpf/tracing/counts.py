"""What the kernel dropped while one looks: packets on their way to a GPU slot, and packets anywhere, by reason.

A program can't see what happens to a packet after it said «redirect»: the target's queue may be full, its link down,
its driver without a receiver. Two raw tracepoints can.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bpf import btf
from bpf.errors import TraceError
from bpf.layout import DevmapValue, unpack_u32
from bpf.loader import maps_directory
from bpf.maps import Map
from bpf.tracing.bcc_backend import loaded

__all__ = ["Drop", "RedirectError", "count_drops", "count_redirect_errors"]

_REDIRECTS: Final = """
#include <linux/types.h>

struct failure { u32 ifindex; u32 slot; u32 error; u32 where; };
BPF_HASH(failures, struct failure, u64, 4096);

/* net_device *from, bpf_prog *, void *target, int error, map type, map id, index */
RAW_TRACEPOINT_PROBE(xdp_redirect_err)
{
    struct failure failure = { .slot = ctx->args[6], .error = -(int)ctx->args[3] };
    if ((u32)ctx->args[5] != OUR_MAP)
        return 0;
    bpf_probe_read_kernel(&failure.ifindex, 4, (void *)(ctx->args[0] + IFINDEX));
    failures.atomic_increment(failure);
    return 0;
}

/* net_device *from, net_device *to, int sent, int drops, int error */
RAW_TRACEPOINT_PROBE(xdp_devmap_xmit)
{
    struct failure failure = { .error = -(int)ctx->args[4], .where = 1 };
    int drops = ctx->args[3];
    if (drops <= 0)
        return 0;
    bpf_probe_read_kernel(&failure.ifindex, 4, (void *)(ctx->args[1] + IFINDEX));
    failures.atomic_increment(failure, drops);
    return 0;
}
"""

_DROPS: Final = """
#include <linux/types.h>

struct place { u32 ifindex; u32 reason; };
BPF_HASH(drops, struct place, u64, 4096);

/* sk_buff *, void *location, enum skb_drop_reason */
RAW_TRACEPOINT_PROBE(kfree_skb)
{
    struct place place = { .reason = ctx->args[2] };
    u64 device = 0;
    bpf_probe_read_kernel(&device, 8, (void *)(ctx->args[0] + DEVICE));
    if (device)
        bpf_probe_read_kernel(&place.ifindex, 4, (void *)(device + IFINDEX));
    drops.atomic_increment(place);
    return 0;
}
"""

# skb_drop_reason: the high half names a subsystem, whose reasons aren't in the enumeration.
_SUBSYSTEM_SHIFT: Final = 16


@dataclass(frozen=True, slots=True)
class RedirectError:
    """Packets that a program redirected and the kernel then dropped."""

    slot: int | None
    """None: not known any more when the target's queue was emptied, and no slot has that interface."""
    ifindex: int
    """Of the target (``transmit``) or of where they came in (``redirect``)."""
    stage: str
    error: str
    packets: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Packets that the kernel's stack dropped."""

    ifindex: int
    reason: str
    packets: int


def _defines(**values: int) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def count_redirect_errors(pins: Path, seconds: float) -> list[RedirectError]:
    """Count redirected packets that never left.

    Args:
        pins: Where ``gpu_if_map`` is pinned.
        seconds: How long to count.

    Raises:
        TraceError: The map isn't pinned, or ``bcc`` can't do it here.
    """
    path = maps_directory(pins) / "gpu_if_map"
    if not path.exists():
        raise TraceError(f"{path} isn't there", hint="is the node agent running (modalmesh node)?")
    devices = Map.open(path)
    try:
        defines = _defines(OUR_MAP=devices.id, IFINDEX=btf.of_kernel().structure("net_device").offsets["ifindex"])
        counted = _count(defines + _REDIRECTS, b"failures", seconds)
        slots = {DevmapValue.unpack(value).ifindex: unpack_u32(key) for key, value in devices.items()}
    finally:
        devices.close()
    return [
        RedirectError(
            slot=slots.get(key.ifindex) if key.where else key.slot,
            ifindex=key.ifindex,
            stage="transmit" if key.where else "redirect",
            error=f"{errno.errorcode.get(key.error, key.error)} ({os.strerror(key.error)})",
            packets=packets,
        )
        for key, packets in counted
    ]


def count_drops(seconds: float) -> list[Drop]:
    """Count what the kernel's stack drops, by interface and reason.

    Raises:
        TraceError: ``bcc`` can't do it here.
    """
    types = btf.of_kernel()
    try:
        names = {number: name for name, number in types.enumeration("skb_drop_reason").items()}
    except KeyError as error:
        raise TraceError("this kernel gives no reason for drops", hint="Linux 5.17 does") from error
    defines = _defines(
        DEVICE=types.structure("sk_buff").offsets["dev"], IFINDEX=types.structure("net_device").offsets["ifindex"]
    )
    return [
        Drop(key.ifindex, _reason(key.reason, names), packets)
        for key, packets in _count(defines + _DROPS, b"drops", seconds)
    ]


def _reason(number: int, names: dict[int, str]) -> str:
    if number >> _SUBSYSTEM_SHIFT:
        return f"subsystem {number >> _SUBSYSTEM_SHIFT}, reason {number & 0xFFFF}"
    return names.get(number, str(number)).removeprefix("SKB_DROP_REASON_").removeprefix("SKB_").lower()


def _count(program: str, table: bytes, seconds: float) -> list[tuple[Any, int]]:
    with loaded(program) as running:
        time.sleep(seconds)
        found = [(key, int(value.value)) for key, value in running[table].items()]
    return sorted(found, key=lambda item: -item[1])
