"""What the node agent counts itself, and what the maps count, for Prometheus.

Maps are read when somebody scrapes. Labels are the policy's names and enumerations, so their number is bounded by the
maps' sizes; backends, of which there may be tens of thousands, are left to ``modalmesh bpf counters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bpf.errors import BpfError
from bpf.layout import (
    RTT_BUCKETS,
    TIERS,
    GpuPassReason,
    GpuSlotStats,
    JoinEvent,
    ServiceStats,
    TcpStats,
    u32,
    unpack_u32,
    unpack_u64,
)
from bpf.layout import Counter as Packets
from bpf.maps import Map
from modalmesh.base.metrics import REGISTRY

__all__ = [
    "FOREIGN",
    "FUNCTIONS_WITHOUT_INTERFACE",
    "HOOKS",
    "MAP_FULL",
    "POLICY_UPDATES",
    "REFUSED_PROGRAMS",
    "UNAPPLIED",
    "MapCollector",
    "Names",
    "time_wait",
]

POLICY_UPDATES: Final = Counter(
    "modalmesh_node_policy_updates", "Updates of the node's policy, by result.", ["result"], registry=REGISTRY
)
HOOKS: Final = Gauge(
    "modalmesh_node_hook", "1 for the state that a hook is in.", ["hook", "interface", "state"], registry=REGISTRY
)
REFUSED_PROGRAMS: Final = Counter(
    "modalmesh_node_refused_programs", "Programs that the kernel refused.", ["hook"], registry=REGISTRY
)
MAP_FULL: Final = Counter("modalmesh_node_map_full", "Changes that found no room in a map.", ["map"], registry=REGISTRY)
UNAPPLIED: Final = Gauge(
    "modalmesh_node_unapplied", "Parts of the policy that are not in force; they take the plain way.", registry=REGISTRY
)
FUNCTIONS_WITHOUT_INTERFACE: Final = Gauge(
    "modalmesh_node_functions_without_interface",
    "GPU functions whose packets take the plain way: no interface faces them, or it is down.",
    registry=REGISTRY,
)
FOREIGN: Final = Gauge(
    "modalmesh_node_foreign_programs", "Others' programs on hooks that we use.", ["owner"], registry=REGISTRY
)


@dataclass(frozen=True, slots=True)
class Names:
    """What the numbers in the maps stand for, at one time."""

    functions: Mapping[int, str] = field(default_factory=dict)
    """Slot → PCIe address."""
    services: Mapping[int, str] = field(default_factory=dict)
    """Id → name."""


def time_wait(sockstat: str) -> int:
    """Return the sockets in TIME_WAIT; programs never see that state.

    Args:
        sockstat: Content of ``/proc/net/sockstat``.
    """
    for line in sockstat.splitlines():
        words = line.split()
        if words[:1] == ["TCP:"] and "tw" in words[:-1]:
            return int(words[words.index("tw") + 1])
    return 0


class MapCollector(Collector):
    """Reads the maps at a scrape. Its owner registers it."""

    def __init__(self) -> None:
        self._maps: Mapping[str, Map] = {}
        self._names: Callable[[], Names] = Names

    def show(self, maps: Mapping[str, Map], names: Callable[[], Names]) -> None:
        """Say what to read from now on; called from another thread than ``collect``, which calls ``names``."""
        self._maps, self._names = dict(maps), names

    def describe(self) -> list[Metric]:
        """Nothing: names are known only once maps are."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read everything that is there."""
        maps, names = self._maps, self._names()
        for name, part in (
            ("gpu_slot_stats", self._slots),
            ("gpu_pass_stats", self._passes),
            ("service_stats", self._services),
            ("join_stats", self._joined),
            ("tcp_stats", self._tcp),
            ("rtt_histogram", self._rtt),
        ):
            if name not in maps:
                continue
            try:
                found = list(part(maps[name], names))
            except (BpfError, OSError):
                continue  # the agent is being stopped
            yield from found
        yield _gauge_of_time_wait()

    @staticmethod
    def _slots(counters: Map, names: Names) -> Iterator[Metric]:
        packets = CounterMetricFamily(
            "modalmesh_gpu_packets", "Packets for GPU functions, by way.", labels=("function", "way")
        )
        size = CounterMetricFamily(
            "modalmesh_gpu_bytes", "Bytes for GPU functions, by way.", labels=("function", "way")
        )
        for slot, function in names.functions.items():
            stats = counters.total(u32(slot), GpuSlotStats)
            if stats is None:
                continue
            packets.add_metric((function, "redirected"), stats.redirected_packets)
            packets.add_metric((function, "plain"), stats.no_interface_packets)
            size.add_metric((function, "redirected"), stats.redirected_bytes)
            size.add_metric((function, "plain"), stats.no_interface_bytes)
        yield packets
        yield size

    @staticmethod
    def _passes(counters: Map, _names: Names) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "modalmesh_gpu_passed_packets", "Packets that the bypass left alone, by reason.", labels=("reason",)
        )
        for reason in GpuPassReason:
            stats = counters.total(u32(reason), Packets)
            family.add_metric((reason.name.lower(),), stats.packets if stats else 0)
        yield family

    @staticmethod
    def _services(counters: Map, names: Names) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "modalmesh_service_connections",
            "connect() and sendmsg() to service addresses.",
            labels=("service", "result"),
        )
        for key, stats in counters.totals(ServiceStats).items():
            service = names.services.get(unpack_u32(key))
            if service is not None:
                family.add_metric((service, "connected"), stats.connections)
                family.add_metric((service, "datagram"), stats.datagrams)
                family.add_metric((service, "no_backend"), stats.no_backend)
                family.add_metric((service, "wrong_family"), stats.wrong_family)
        yield family

    @staticmethod
    def _joined(counters: Map, _names: Names) -> Iterator[Metric]:
        events = CounterMetricFamily("modalmesh_join_events", "What became of joined sockets.", labels=("event",))
        size = CounterMetricFamily("modalmesh_join_bytes", "Bytes of joined sockets, by event.", labels=("event",))
        for event in JoinEvent:
            stats = counters.total(u32(event), Packets) or Packets()
            events.add_metric((event.name.lower(),), stats.packets)
            size.add_metric((event.name.lower(),), stats.bytes)
        yield events
        yield size

    @staticmethod
    def _tcp(counters: Map, _names: Names) -> Iterator[Metric]:
        families = {
            name: CounterMetricFamily(f"modalmesh_tcp_{name}", text, labels=("tier",))
            for name, text in (
                ("active", "Connections opened."),
                ("passive", "Connections accepted."),
                ("closed", "Connections closed."),
                ("retransmissions", "Segments sent again."),
                ("bytes_sent", "Bytes sent and acknowledged, or handed to a joined peer."),
                ("bytes_received", "Bytes received by TCP."),
            )
        }
        for tier in range(TIERS):
            stats = counters.total(u32(tier), TcpStats) or TcpStats()
            for name, family in families.items():
                family.add_metric((str(tier),), getattr(stats, name))
        yield from families.values()

    def _rtt(self, counters: Map, _names: Names) -> Iterator[Metric]:
        """Buckets double from 1 µs on; the sums stand in ``tcp_stats``."""
        family = HistogramMetricFamily("modalmesh_tcp_rtt_seconds", "Smoothed round-trip times.", labels=("tier",))
        found = {unpack_u32(key): sum(map(unpack_u64, values)) for key, values in counters.items_per_cpu()}
        for tier in range(TIERS):
            counts = [found.get(tier * RTT_BUCKETS + bucket, 0) for bucket in range(RTT_BUCKETS)]
            if not any(counts):
                continue
            stats = self._maps["tcp_stats"].total(u32(tier), TcpStats) if "tcp_stats" in self._maps else None
            buckets: list[tuple[str, float]] = []
            total = 0
            for bucket, count in enumerate(counts):
                total += count
                last = bucket == RTT_BUCKETS - 1
                buckets.append(("+Inf" if last else str(2 ** (bucket + 1) / 1e6), total))
            family.add_metric((str(tier),), buckets=buckets, sum_value=stats.rtt_sum_us / 1e6 if stats else 0.0)
        yield family


def _gauge_of_time_wait() -> Metric:
    gauge = GaugeMetricFamily("modalmesh_tcp_time_wait", "Sockets in TIME_WAIT, in this network namespace.")
    try:
        gauge.add_metric((), time_wait(Path("/proc/net/sockstat").read_text(encoding="ascii")))
    except OSError:
        gauge.add_metric((), 0)
    return gauge
