"""In which order Envoys and routers get what belongs together.

A policy names clusters. A router that has it before its Envoy has them, or an Envoy that loses a cluster while its
router still chooses it, answers requests with 503. So, when policies change («make before break», over two groups):

1. Envoys get the new configuration, and keep the clusters that it lacks;
2. when they have acknowledged clusters and endpoints (Envoy does so once they are warm), routers get the new policies;
3. when those have acknowledged them, Envoys lose the clusters that nothing names any more.

Each wait has a limit: one client that is stuck must not keep the others from their configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final, Protocol

from controlplane.compile import Compiled
from controlplane.compile.policy import POLICY
from modalmesh.base.logging import get_logger
from xds.pb.xds import status_pb2
from xds.snapshot import Snapshot
from xds.types import CLUSTER, ENDPOINT

__all__ = ["ENVOY", "ROUTER", "Rollout", "keeping_clusters"]

_log = get_logger()

ENVOY: Final = "envoy"
ROUTER: Final = "router"

WAIT_LIMIT: Final = 5.0
"""Seconds; a cluster is warm after its first health check, which takes a second at most."""

_FIRST_LOOK: Final = 0.005
_LONGEST_PAUSE: Final = 0.2


class Server(Protocol):
    """The part of ``xds.server.AdsServer`` that is used here."""

    def set_snapshot(self, group: str, snapshot: Snapshot) -> None:
        """Make this what the group shall hold."""

    def clients(self) -> Sequence[status_pb2.Client]:
        """Return the state of every client."""
        ...


def keeping_clusters(new: Snapshot, old: Snapshot) -> Snapshot:
    """Return the new snapshot with the clusters, and their endpoints, that only the old one has."""
    kept = [
        resource
        for url in (CLUSTER, ENDPOINT)
        for name, resource in old.of_type(url).items()
        # A service that came by EDS and is a cluster with its endpoints now needs no EDS any more.
        if name not in new.of_type(CLUSTER)
    ]
    return Snapshot([*(item for url in new.type_urls for item in new.of_type(url).values()), *kept])


class Rollout:
    """Gives a server what was compiled, in order; a newer one takes over from where an older one has got to.

    All methods are called on the server's event loop.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._holds = {ENVOY: Snapshot(), ROUTER: Snapshot()}
        self._task: asyncio.Task[None] | None = None

    async def begin(self, compiled: Compiled) -> None:
        """Start to roll out; returns before it is finished if clients have to be waited for."""
        await self.close()
        if compiled.router == self._holds[ROUTER]:
            self._set(ENVOY, compiled.envoy)
            self._set(ROUTER, compiled.router)
            return
        self._task = asyncio.create_task(self._roll_out(compiled), name="rollout")
        await asyncio.sleep(0)  # its first step is taken now

    async def finished(self) -> None:
        """Wait until what was begun is rolled out."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Stop where it is."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def _set(self, group: str, snapshot: Snapshot) -> None:
        self._server.set_snapshot(group, snapshot)
        self._holds[group] = snapshot

    async def _roll_out(self, compiled: Compiled) -> None:
        bridge = keeping_clusters(compiled.envoy, self._holds[ENVOY])
        self._set(ENVOY, bridge)
        await self._acknowledged(ENVOY, (CLUSTER, ENDPOINT))
        self._set(ROUTER, compiled.router)
        if bridge != compiled.envoy:
            await self._acknowledged(ROUTER, (POLICY,))
            self._set(ENVOY, compiled.envoy)

    async def _acknowledged(self, group: str, type_urls: Sequence[str]) -> None:
        """Wait until the clients of a group have answered on the types, or the limit has passed.

        While every one of them refuses what it got, there is nothing to go on with: the wait has no end but one that
        accepts, or a newer update.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_LIMIT
        pause = _FIRST_LOOK
        said = False
        while states := self._states(group, type_urls):
            stuck = sum(status_pb2.STALE in found for found in states)
            if all(status_pb2.NACKED in found for found in states):
                if not said:
                    _log.error("every client refuses what it got; the next step waits", group=group)
                said = True
            elif not stuck:
                return
            elif loop.time() >= deadline:
                _log.warning("clients do not acknowledge; going on without them", group=group, clients=stuck)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _states(self, group: str, type_urls: Sequence[str]) -> list[set[status_pb2.State]]:
        return [
            {item.state for item in client.types if item.type_url in type_urls}
            for client in self._server.clients()
            if client.group == group
        ]
