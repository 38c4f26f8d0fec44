"""What the node agent costs: memory, start, a whole policy, one backend, an interface that goes down.

    python -m tests.bench.node_agent [--quick] [--json FILE]

The agent runs in this process for times (wall clock and processor) and as the real command for memory and for what a
packet notices: the time from «link down» until the slot is empty. Needs root; everything happens in namespaces of its
own.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import operator
import os
import platform
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bpf.agent import NodeAgent
from modalmesh.base import logging
from modalmesh.base import settings as configuration
from tests.kernel.agents import Node, environment, make_node
from tests.kernel.lab import Lab, command, inside
from xds.pb.bpf import policy_pb2

_SIOCSIFFLAGS: Final = 0x8914  # linux/sockios.h

SERVICES: Final = 100
BACKENDS: Final = 100

TARGETS: Final[dict[str, tuple[str, float]]] = {
    "apply_10000_backends_s": ("<=", 0.5),
    "one_backend_p50_ms": ("<=", 5.0),
    "rss_mib": ("<=", 80.0),
}
_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {"<=": operator.le}


def fragment(number: int, *, heavy: int = -1) -> bytes:
    """One service as a resource of its own; the backend ``heavy`` has another weight."""
    message = policy_pb2.NodePolicy()
    service = message.services.add(
        name=f"s{number}", address=f"198.18.{number // 250}.{number % 250 + 1}", port=80, transport=policy_pb2.TCP
    )
    for index in range(BACKENDS):
        weight = 2 if index == heavy else 1
        service.backends.add(address=f"10.{number // 250}.{number % 250}.{index + 1}", port=9000, weight=weight)
    return message.SerializeToString()


def timed(action: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds by the wall clock and of the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3


@contextlib.contextmanager
def agent_here(node: Node) -> Iterator[NodeAgent]:
    os.environ |= {name: value for name, value in environment(node, {}).items() if name.startswith("MODALMESH_")}
    settings = configuration.load()
    logging.configure(settings.log.model_copy(update={"level": "warning"}), "node")
    node.pins.mkdir()
    with inside(node.netns), contextlib.closing(NodeAgent(settings, lambda: None)) as agent:
        yield agent


def measure_policies(node: Node, rounds: int) -> dict[str, float]:
    with agent_here(node) as agent:
        start = timed(lambda: agent.start(0.0))
        everything = {f"s{number}": fragment(number) for number in range(SERVICES)}
        whole = timed(lambda: agent.take_policies(everything, (), 1.0))
        single = []
        for index in range(rounds):
            number = index % SERVICES
            changed = {f"s{number}": fragment(number, heavy=index % BACKENDS)}
            single.append(timed(lambda changed=changed: agent.take_policies(changed, (), 2.0)))  # type: ignore[misc]
    walls, processors = (sorted(column) for column in zip(*single, strict=True))
    return {
        "start_ms": start[0],
        "start_processor_ms": start[1],
        "apply_10000_backends_s": whole[0] / 1e3,
        "apply_10000_backends_processor_s": whole[1] / 1e3,
        "one_backend_min_ms": walls[0],
        "one_backend_p50_ms": statistics.median(walls),
        "one_backend_p99_ms": walls[int(0.99 * len(walls))],
        "one_backend_processor_p50_ms": statistics.median(processors),
    }


def measure_process(node: Node, rounds: int) -> dict[str, float]:
    node.plug(0)
    node.write_policy(node.function_policy(0) | {"services": _some_services()})
    started = time.perf_counter()
    agent = node.start().ready()
    ready = time.perf_counter() - started
    down = []
    for _ in range(rounds):
        with inside(node.netns):
            begun = time.perf_counter()
            take_down("rep0")
        while node.interfaces():
            pass
        down.append((time.perf_counter() - begun) * 1e3)
        command("ip", "-n", node.netns, "link", "set", "rep0", "up")
        while not node.interfaces():
            time.sleep(0.005)
    status = Path(f"/proc/{agent.process.pid}/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    agent.stop()
    return {
        "process_ready_s": ready,
        "rss_mib": int(fields["VmRSS"].split()[0]) / 1024,
        "rss_peak_mib": int(fields["VmHWM"].split()[0]) / 1024,
        "link_down_min_ms": min(down),
        "link_down_p50_ms": statistics.median(down),
        "link_down_max_ms": max(down),
    }


def take_down(device: str) -> None:
    """Without a process, whose start and end would be part of what is measured."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SIOCSIFFLAGS, struct.pack("16sh22x", device.encode(), 0))


def _some_services() -> list[dict[str, Any]]:
    backends = [{"address": f"10.0.0.{number + 1}", "port": 9000, "weight": 1} for number in range(BACKENDS)]
    return [
        {"name": f"s{number}", "address": "198.18.0.1", "port": 1 + number, "transport": "TCP", "backends": backends}
        for number in range(SERVICES // 4)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, figures and targets there")
    arguments = parser.parse_args()
    rounds = 40 if arguments.quick else 300
    figures: dict[str, float] = {}
    for part in (measure_policies, measure_process):
        with tempfile.TemporaryDirectory(prefix="mm-", dir="/tmp") as folder, Lab(Path(folder)) as lab:
            figures |= part(make_node(lab), rounds)
    load = os.getloadavg()[0]
    targets = {
        name: {"op": op, "value": value, "met": _OPERATORS[op](figures[name], value)}
        for name, (op, value) in TARGETS.items()
    }
    table = Table(title=f"Node agent (load {load:.1f}, {os.cpu_count()} processors)", title_justify="left")
    for column in ("figure", "measured", "target"):
        table.add_column(column)
    for name, value in figures.items():
        goal = targets.get(name)
        verdict = f"{goal['op']} {goal['value']:g} {'met' if goal['met'] else 'missed'}" if goal else ""
        table.add_row(name, f"{value:.3f}", verdict)
    Console().print(table)
    if arguments.json:
        machine = {"kernel": platform.release(), "processors": os.cpu_count(), "load": load}
        arguments.json.write_text(json.dumps({"machine": machine, "figures": figures, "targets": targets}, indent=2))


if __name__ == "__main__":
    main()
