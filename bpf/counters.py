"""What the programs have counted, read from the pinned maps: plain values that a person or a script can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bpf import loader
from bpf.errors import BpfError, LayoutError
from bpf.layout import (
    LAYOUT_VERSION,
    RTT_BUCKETS,
    TIERS,
    BackendStats,
    Counter,
    GpuPassReason,
    GpuSlotStats,
    JoinEvent,
    Service,
    ServiceKey,
    ServiceStats,
    TcpStats,
    unpack_u32,
    unpack_u64,
)
from bpf.maps import Map

__all__ = ["quantile", "read_counters"]

_PROTOCOLS: Final = {6: "tcp", 17: "udp"}


def read_counters(pins: Path) -> dict[str, Any]:
    """Return everything that was counted; a part whose maps aren't pinned is left out.

    Raises:
        BpfError: Nothing is pinned, or this process may not read it.
        LayoutError: The maps are another version's.
    """
    version = loader.pinned_layout_version(pins)
    if version is None:
        raise BpfError(f"no maps are pinned below {pins}", hint="is the node agent running (modalmesh node)?")
    if version not in (0, LAYOUT_VERSION):
        raise LayoutError(f"the maps below {pins} have layout {version}, this version reads {LAYOUT_VERSION}")
    parts = {
        "gpu": _gpu,
        "services": _services,
        "join": _join,
        "tcp": _tcp,
    }
    found = {}
    for name, read in parts.items():
        opened = _Opened(loader.maps_directory(pins))
        try:
            found[name] = read(opened)
        except FileNotFoundError:
            continue
        finally:
            opened.close()
    return found


class _Opened:
    """Pinned maps by name, closed together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: list[Map] = []

    def __getitem__(self, name: str) -> Map:
        path = self._folder / name
        if not path.exists():
            raise FileNotFoundError(path)
        opened = Map.open(path)
        self._maps.append(opened)
        return opened

    def close(self) -> None:
        for opened in self._maps:
            opened.close()


def _counted(counter: Counter) -> dict[str, int]:
    return {"packets": counter.packets, "bytes": counter.bytes}


def _gpu(maps: _Opened) -> dict[str, Any]:
    passed = {unpack_u32(key): value for key, value in maps["gpu_pass_stats"].totals(Counter).items()}
    slots = {unpack_u32(key): value for key, value in maps["gpu_slot_stats"].totals(GpuSlotStats).items()}
    return {
        "passed": {reason.name.lower(): _counted(passed[reason]) for reason in GpuPassReason},
        "slots": [
            {
                "slot": number,
                "redirected": {"packets": stats.redirected_packets, "bytes": stats.redirected_bytes},
                "no_interface": {"packets": stats.no_interface_packets, "bytes": stats.no_interface_bytes},
            }
            for number, stats in sorted(slots.items())
            if stats != GpuSlotStats()
        ],
    }


def _services(maps: _Opened) -> dict[str, Any]:
    addresses: dict[int, list[str]] = {}
    for key, value in maps["services"].items():
        asked = ServiceKey.unpack(key)
        host = f"[{asked.address}]" if asked.address.version == 6 else str(asked.address)
        protocol = _PROTOCOLS.get(asked.protocol, str(asked.protocol))
        addresses.setdefault(Service.unpack(value).id, []).append(f"{protocol}://{host}:{asked.port}")
    services = maps["service_stats"].totals(ServiceStats)
    backends = maps["backend_stats"].totals(BackendStats)
    return {
        "services": [
            {
                "id": unpack_u32(key),
                "addresses": sorted(addresses.get(unpack_u32(key), [])),
                "connections": stats.connections,
                "datagrams": stats.datagrams,
                "no_backend": stats.no_backend,
                "wrong_family": stats.wrong_family,
            }
            for key, stats in sorted(services.items(), key=lambda item: unpack_u32(item[0]))
        ],
        "backends": [
            {"id": unpack_u32(key), "connections": stats.connections, "datagrams": stats.datagrams}
            for key, stats in sorted(backends.items(), key=lambda item: unpack_u32(item[0]))
        ],
    }


def _join(maps: _Opened) -> dict[str, Any]:
    events = {unpack_u32(key): value for key, value in maps["join_stats"].totals(Counter).items()}
    return {
        event.name.lower(): {"messages": events[event].packets, "bytes": events[event].bytes} for event in JoinEvent
    }


def _tcp(maps: _Opened) -> dict[str, Any]:
    stats = {unpack_u32(key): value for key, value in maps["tcp_stats"].totals(TcpStats).items()}
    histogram = [0] * (TIERS * RTT_BUCKETS)
    for key, cpus in maps["rtt_histogram"].items_per_cpu():
        histogram[unpack_u32(key)] = sum(unpack_u64(value) for value in cpus)
    tiers = []
    for tier in range(TIERS):
        found = stats[tier]
        if found == TcpStats():
            continue
        buckets = histogram[tier * RTT_BUCKETS : (tier + 1) * RTT_BUCKETS]
        tiers.append(
            {
                "tier": tier,
                "active": found.active,
                "passive": found.passive,
                "closed": found.closed,
                "retransmissions": found.retransmissions,
                "bytes_sent": found.bytes_sent,
                "bytes_received": found.bytes_received,
                "rtt_us": {
                    "samples": found.rtt_samples,
                    "mean": round(found.rtt_sum_us / found.rtt_samples, 1) if found.rtt_samples else None,
                    "p50_below": quantile(buckets, 0.5),
                    "p99_below": quantile(buckets, 0.99),
                    "buckets": buckets,
                },
            }
        )
    return {"tiers": tiers}


def quantile(buckets: list[int], share: float) -> int | None:
    """Return the upper bound, in µs, of the bucket that holds the quantile; None without samples.

    Args:
        buckets: Bucket i counts [2^i, 2^(i+1)) µs.
        share: Between 0 and 1.
    """
    due, seen = share * sum(buckets), 0
    for bucket, count in enumerate(buckets):
        seen += count
        if count and seen >= due:
            return int(2 ** (bucket + 1))
    return None
