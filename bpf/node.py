"""The node agent's process: the loop around ``NodeAgent``, and the end of everything (``clean_up``).

A signal ends the process and leaves what it set up in place; only ``clean_up`` takes it away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Final

from bpf import datapath, policy_file, selftest
from bpf.agent import NodeAgent
from bpf.ground import cgroup_of, own
from bpf.node_errors import NetlinkError, NodePolicyError
from bpf.policy import TYPE_URL
from bpf.routes import sync_blackholes
from bpf.service_manager import notify, touch
from modalmesh.base import metrics
from modalmesh.base.errors import ModalMeshError
from modalmesh.base.logging import get_logger
from modalmesh.base.settings import Settings
from xds.client import AdsClient, Update
from xds.pb.envoy.config.core.v3 import base_pb2

__all__ = ["clean_up", "identity", "serve", "stop_on_signals"]

_log = get_logger()

_LOOK_AFTER: Final = 10.0
"""Seconds between two looks at what failed."""
_THOROUGHLY: Final = 6
"""Every so many looks, all maps are compared."""
_LOOK_AT_FILE: Final = 1.0
_HEARTBEAT: Final = 5.0


def identity(settings: Settings) -> base_pb2.Node:
    """Return the xDS node of this agent; its role selects what it is sent."""
    result = base_pb2.Node(id=settings.node.node_id, user_agent_name="modalmesh-node")
    result.metadata.update({"role": "node"})
    return result


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run the agent until ``stop`` is set; what it set up stays.

    Raises:
        MachineError: The kernel, the pins or the metrics port can't be had.
        NodePolicyError: The policy file can't be used, and nothing was in force yet.
    """
    loop = asyncio.get_running_loop()
    lock = own(settings.bpf.pins)
    try:
        metrics.serve(settings.metrics.node)
        join_wanted = asyncio.Event()
        agent = NodeAgent(settings, join_wanted.set)
        with contextlib.closing(agent), _collected(agent):
            file = settings.node.policy
            agent.start(loop.time(), {str(file): policy_file.read(file)} if file else None)
            notify("READY=1")
            _log.info("node agent runs", node=settings.node.node_id, pins=str(settings.bpf.pins))
            loop.add_reader(agent.monitor.fileno(), _on_links, agent, loop.time)
            try:
                await _until(
                    stop,
                    _follow(agent, settings),
                    _test_joining(agent, settings, join_wanted),
                    _look_after(agent),
                    _beat(settings.node_alive),
                )
            finally:
                loop.remove_reader(agent.monitor.fileno())
                notify("STOPPING=1")
    finally:
        os.close(lock)


async def _until(stop: asyncio.Event, *jobs: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.ensure_future(job) for job in jobs]
    stopped = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait({*tasks, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a job only ends by an error: better restarted than half alive
    finally:
        for task in (*tasks, stopped):
            task.cancel()
        await asyncio.gather(*tasks, stopped, return_exceptions=True)


@contextlib.contextmanager
def _collected(agent: NodeAgent) -> Iterator[None]:
    metrics.REGISTRY.register(agent.collector)
    try:
        yield
    finally:
        metrics.REGISTRY.unregister(agent.collector)


def _on_links(agent: NodeAgent, clock: Callable[[], float]) -> None:
    try:
        news = agent.monitor.read()
    except NetlinkError as error:
        _log.error("events about interfaces are lost; all are asked for again soon", why=str(error))
        return
    if news:
        agent.links_changed(clock())


async def _follow(agent: NodeAgent, settings: Settings) -> None:
    """Take policies from where they come."""
    clock = asyncio.get_running_loop().time
    if settings.node.policy is not None:
        await _follow_file(agent, settings.node.policy, clock)
        return

    def take(update: Update) -> None:
        agent.take_policies(update.changed, update.removed, clock())

    await AdsClient(settings.xds.listen, identity(settings), {TYPE_URL: take}).run()


async def _follow_file(agent: NodeAgent, path: Path, clock: Callable[[], float]) -> None:
    seen = _stamp(path)
    while True:
        await asyncio.sleep(_LOOK_AT_FILE)
        stamp = _stamp(path)
        if stamp == seen:
            continue
        seen = stamp
        # Refusals are logged and counted where they happen; the file is read again when it changes.
        with contextlib.suppress(NodePolicyError):
            agent.take_policies(_read(path), (), clock())


def _read(path: Path) -> dict[str, bytes]:
    try:
        return {str(path): policy_file.read(path)}
    except NodePolicyError as error:
        _log.warning("policy file refused; the last good policy stays in force", why=str(error))
        raise


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def _test_joining(agent: NodeAgent, settings: Settings, wanted: asyncio.Event) -> None:
    """In a thread: it takes a second, and interfaces go down meanwhile as always."""
    await wanted.wait()
    cgroup = cgroup_of(settings)
    failure: ModalMeshError | None = None
    try:
        if cgroup is not None:
            report = await asyncio.to_thread(selftest.check_join, cgroup)
            _log.info("joined sockets behave", stopped_after_bytes=report.stopped_after)
    except ModalMeshError as error:
        failure = error
    agent.joining_tested(failure, asyncio.get_running_loop().time())
    await asyncio.Event().wait()  # a job that ends ends the process


async def _look_after(agent: NodeAgent) -> None:
    clock = asyncio.get_running_loop().time
    number = 0
    while True:
        await asyncio.sleep(_LOOK_AFTER)
        number += 1
        agent.look_after(clock(), thoroughly=number % _THOROUGHLY == 0)


async def _beat(alive: Path) -> None:
    while True:
        touch(alive)
        notify("WATCHDOG=1")
        await asyncio.sleep(_HEARTBEAT)


def clean_up(settings: Settings) -> None:
    """Detach and remove everything that agents have left: routes, programs, maps, files.

    Raises:
        AgentRunningError: One is still running.
        MachineError: The kernel refuses.
    """
    # Routes first: an address that is still translated needs none, one that isn't must not be cut off.
    pins = settings.bpf.pins
    lock = own(pins)
    try:
        sync_blackholes(frozenset())
        datapath.remove(pins)
    finally:
        os.close(lock)
    for path in (settings.node_policies, settings.node_alive):
        path.unlink(missing_ok=True)
    _log.info("nothing of the node agent is left", pins=str(pins))


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set ``stop`` at SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
