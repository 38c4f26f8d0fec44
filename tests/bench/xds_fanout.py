"""Fan-out of xDS: how soon the last of K clients has one changed endpoint, and what that costs.

    python -m tests.bench.xds_fanout [--quick] [--json FILE]

500 services with 8 endpoints each; K = 50, 200, 1000 clients, delta and state of the world. Runs of our server and of
the floor (``grpc.aio``, pre-serialised shared bytes, no protocol logic) alternate. Ours sends zstd, as it does to
Envoy; the floor can't. The clock starts at the snapshot store's ``set()`` (the floor: before it queues). Server,
clients and this program share the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zstandard
from rich.console import Console
from rich.table import Table

from tests.bench.xds_world import World, cluster, endpoint_set
from xds.frames import encode
from xds.pushes import Form, Response
from xds.types import CLUSTER, ENDPOINT

PAUSE: Final = 0.13
"""Seconds between two changes: longer than the time of quiet after which a change goes at once."""


class Process:
    """A process that takes and answers lines of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.bench.{module}", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Figures:
    """Of one server, form and K; lists hold what each run adds."""

    latencies: list[float] = field(default_factory=list)
    initial: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)
    burst_messages: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    rss_per_client: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def summary(self) -> dict[str, float]:
        return {
            "change_min_ms": 1e3 * min(self.latencies),
            "change_p50_ms": 1e3 * statistics.median(self.latencies),
            "change_p99_ms": 1e3 * self.percentile(0.99),
            "initial_sync_s": min(self.initial),
            "burst20_ms": 1e3 * statistics.median(self.burst),
            "burst20_messages_per_client": statistics.median(self.burst_messages),
            "cpu_us_per_message_and_ack": 1e6 * statistics.median(self.cpu),
            "bytes_per_client_and_change": statistics.median(self.bytes),
            "rss_kib_per_client": statistics.median(self.rss_per_client),
        }


@contextmanager
def running(
    kind: str, form: str, clients: int, services: int = 500, quiet: float = 0.1, *, plain: bool = False
) -> Iterator[tuple[Process, Process]]:
    common = ("--form", form, "--services", str(services))
    server = Process("xds_server", kind, *common, "--quiet", str(quiet))
    try:
        port = server.answer()["port"]
        zstd = ("--zstd",) if kind == "ours" and not plain else ()
        load = Process("xds_load", str(port), *common, "--clients", str(clients), *zstd)
        try:
            yield server, load
        finally:
            load.end()
    finally:
        server.end()


def measure(kind: str, form: str, clients: int, changes: int, into: Figures, *, plain: bool) -> None:
    """Run one server with its clients once."""
    with running(kind, form, clients, plain=plain) as (server, load):
        empty = server.ask(do="stats")["rss_kib"]
        into.initial.append(load.ask(do="connect")["seconds"])
        time.sleep(1.0)  # the last ACKs
        full = server.ask(do="stats")
        into.rss_per_client.append((full["rss_kib"] - empty) / clients)
        warm_up = 5
        before, traffic = full, load.ask(do="stats")
        for mark in range(1, warm_up + changes + 1):
            if mark == warm_up + 1:
                before, traffic = server.ask(do="stats"), load.ask(do="stats")
            began = server.ask(do="change", mark=mark)["began"]
            last = load.ask(do="wait", mark=mark)["last"]
            if mark > warm_up:
                into.latencies.append(last - began)
            time.sleep(max(0.0, began + PAUSE - time.monotonic()))
        after, later = server.ask(do="stats"), load.ask(do="stats")
        messages = later["messages"] - traffic["messages"]
        into.cpu.append((after["cpu"] - before["cpu"]) / messages)
        into.bytes.append((later["bytes"] - traffic["bytes"]) / clients / changes)
        traffic, mark = later, warm_up + changes + 1
        began = server.ask(do="burst", mark=mark, count=20, pause=0.005)["began"]
        into.burst.append(load.ask(do="wait", mark=mark + 19)["last"] - began)
        into.burst_messages.append((load.ask(do="stats")["messages"] - traffic["messages"]) / clients)


def work_per_change(services: int, changes: int) -> float:
    """Return seconds of server CPU for one change and 200 delta clients."""
    with running("ours", "delta", 200, services) as (server, load):
        load.ask(do="connect")
        time.sleep(1.0)
        before = server.ask(do="stats")["cpu"]
        for mark in range(1, changes + 1):
            server.ask(do="change", mark=mark)
            load.ask(do="wait", mark=mark)
            time.sleep(PAUSE)
        return float(server.ask(do="stats")["cpu"] - before) / changes


def churn(rounds: int) -> float:
    """Return RSS after rounds of churn over RSS after a tenth of them."""
    with running("ours", "delta", 20, quiet=0.0) as (server, load):
        load.ask(do="connect")
        early = server.ask(do="churn", rounds=rounds // 10)["rss_kib"]
        return float(server.ask(do="churn", rounds=rounds)["rss_kib"]) / float(early)


def encoding() -> dict[str, float]:
    """Return what it takes to build, serialise and compress."""
    began = time.perf_counter()
    made = [*(cluster(number) for number in range(1000)), *(endpoint_set(number) for number in range(1000))]
    built = time.perf_counter() - began
    world = World(1000)
    began = time.perf_counter()
    world.change(1)
    changed = time.perf_counter() - began
    del made
    full = [
        encode(Response(Form.DELTA, url, 1, "v", tuple(world.snapshot.of_type(url).values())))
        for url in (CLUSTER, ENDPOINT)
    ]
    compressor = zstandard.ZstdCompressor(level=3)
    zstd_cpu, zstd_size = _best(lambda: sum(len(compressor.compress(message)) for message in full))
    gzip_cpu, gzip_size = _best(lambda: sum(len(gzip.compress(message, 6)) for message in full))
    raw = sum(map(len, full))
    return {
        "encode_1000_s": built,
        "encode_change_ms": 1e3 * changed,
        "full_snapshot_reduction": 1 - zstd_size / raw,
        "full_snapshot_reduction_gzip6": 1 - gzip_size / raw,
        "zstd_cpu_over_gzip6": zstd_cpu / gzip_cpu,
    }


def _best(action: Any) -> tuple[float, int]:
    times = []
    for _ in range(5):
        began = time.process_time()
        result = action()
        times.append(time.process_time() - began)
    return min(times), result


def targets(figures: Mapping[str, Mapping[str, float]], single: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Compare with what is aimed at."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, op: str, limit: float, value: float | None) -> None:
        if value is not None:
            compare = operator.le if op == "<=" else operator.ge
            found[name] = {"op": op, "value": limit, "measured": value, "met": bool(compare(value, limit))}

    def ratio(form: str, key: str) -> float | None:
        ours, floor = figures.get(f"ours {form} 1000"), figures.get(f"floor {form} 1000")
        return ours[key] / floor[key] if ours and floor else None

    floor = figures.get("floor delta 1000")
    add("floor_delta_1000_p50_ms (else the run is invalid)", "<=", 150, floor["change_p50_ms"] if floor else None)
    add("delta_1000_p50_over_floor", "<=", 0.7, ratio("delta", "change_p50_ms"))
    add("delta_1000_p99_over_floor", "<=", 0.7, ratio("delta", "change_p99_ms"))
    add("delta_1000_cpu_over_floor", "<=", 0.5, ratio("delta", "cpu_us_per_message_and_ack"))
    add("sotw_1000_p50_over_floor", "<=", 0.7, ratio("sotw", "change_p50_ms"))
    ours = figures.get("ours delta 1000")
    add("rss_kib_per_client", "<=", 150, ours["rss_kib_per_client"] if ours else None)
    add("churn_rss_ratio", "<=", 1.1, single.get("churn_rss_ratio"))
    add("work_5000_over_500", "<=", 1.3, single.get("work_5000_over_500"))
    add("encode_1000_s", "<=", 0.4, single.get("encode_1000_s"))
    add("encode_change_ms", "<=", 5, single.get("encode_change_ms"))
    add("full_snapshot_reduction", ">=", 0.85, single.get("full_snapshot_reduction"))
    add("zstd_cpu_over_gzip6", "<=", 0.2, single.get("zstd_cpu_over_gzip6"))
    return found


def show(figures: Mapping[str, Mapping[str, float]], single: Mapping[str, float], wanted: Mapping[str, Any]) -> None:
    console = Console(width=160)
    columns = list(next(iter(figures.values()))) if figures else []
    table = Table("server form K", *(column.replace("_", " ") for column in columns), box=None)
    for name, row in figures.items():
        table.add_row(name, *(f"{row[column]:.4g}" for column in columns))
    console.print(table)
    for name, value in single.items():
        console.print(f"{name}: {value:.4g}")
    for name, target in wanted.items():
        verdict = "met" if target["met"] else "MISSED"
        console.print(f"{verdict:6} {name} {target['op']} {target['value']}: {target['measured']:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="delta with 1000 clients only, few changes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--clients", type=int, nargs="*", default=[50, 200, 1000])
    parser.add_argument("--forms", nargs="*", default=["delta", "sotw"])
    parser.add_argument("--changes", type=int, default=100, help="per run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each server")
    parser.add_argument("--fan-out-only", action="store_true")
    parser.add_argument("--plain", action="store_true", help="ours without compression, as the floor")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.clients, arguments.forms, arguments.changes, arguments.rounds = [1000], ["delta"], 40, 1
    load_before = os.getloadavg()
    collected: defaultdict[str, Figures] = defaultdict(Figures)
    for form in arguments.forms:
        for clients in arguments.clients:
            for _ in range(arguments.rounds):
                for kind in ("ours", "floor"):
                    name = f"{kind} {form} {clients}"
                    measure(kind, form, clients, arguments.changes, collected[name], plain=arguments.plain)
    single = encoding()
    if not arguments.quick and not arguments.fan_out_only:
        single["work_5000_over_500"] = work_per_change(5000, 60) / work_per_change(500, 60)
        single["churn_rss_ratio"] = churn(10_000)
    figures = {name: found.summary() for name, found in collected.items()}
    wanted = targets(figures, single)
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }
    print(f"load before {load_before}, after {machine['load_after']}")
    show(figures, single, wanted)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine, "figures": {**figures, "single": single}, "targets": wanted}, indent=2)
        )


if __name__ == "__main__":
    main()
