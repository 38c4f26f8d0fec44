"""The order of a change over Envoys and routers; a server that only records, clients that answer when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import structlog

from controlplane import rollout as module
from controlplane.compile import Compiled
from controlplane.compile.policy import POLICY
from controlplane.rollout import ENVOY, ROUTER, Rollout, keeping_clusters
from xds.pb.xds import status_pb2
from xds.snapshot import Resource, Snapshot
from xds.types import CLUSTER, ENDPOINT, LISTENER

Step = tuple[str, tuple[str, ...]]


def resource(url: str, name: str, content: str = "") -> Resource:
    return Resource(url, name, content.encode(), f"{url}{name}{content}")


def envoys(*services: str, content: str = "") -> Snapshot:
    return Snapshot(
        [
            resource(LISTENER, "gateway"),
            *(resource(url, name, content) for url in (CLUSTER, ENDPOINT) for name in services),
        ]
    )


def compiled(*services: str, policy: str, content: str = "") -> Compiled:
    return Compiled(envoys(*services, content=content), Snapshot([resource(POLICY, "p", policy)]))


class Server:
    """Records what is set; its clients have the states that a test gives them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.states: dict[str, list[status_pb2.State]] = {}

    def set_snapshot(self, group: str, snapshot: Snapshot) -> None:
        names = (
            sorted(snapshot.of_type(CLUSTER))
            if group == ENVOY
            else [r.body.decode() for r in snapshot.of_type(POLICY).values()]
        )
        self.steps.append((group, tuple(names)))

    def clients(self) -> Sequence[status_pb2.Client]:
        return [
            status_pb2.Client(
                group=group,
                types=[
                    status_pb2.Type(type_url=CLUSTER if group == ENVOY else POLICY, state=state),
                    status_pb2.Type(type_url=LISTENER, state=status_pb2.STALE),
                ],
            )
            for group, states in self.states.items()
            for state in states
        ]

    def take(self) -> list[Step]:
        taken, self.steps = self.steps, []
        return taken


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def rollout(server: Server) -> AsyncIterator[Rollout]:
    """One that has rolled out services a and b."""
    found = Rollout(server)
    await found.begin(compiled("a", "b", policy="1"))
    await found.finished()
    assert server.take() == [(ENVOY, ("a", "b")), (ROUTER, ("1",))]
    yield found
    await found.close()


async def settle() -> None:
    await asyncio.sleep(0.3)


async def test_policies_wait_for_clusters_and_clusters_go_after_policies(server: Server, rollout: Rollout) -> None:
    server.states = {ENVOY: [status_pb2.SYNCED, status_pb2.STALE], ROUTER: [status_pb2.STALE]}
    await rollout.begin(compiled("b", "c", policy="2"))
    await settle()
    assert server.take() == [(ENVOY, ("a", "b", "c"))]
    server.states[ENVOY] = [status_pb2.SYNCED, status_pb2.SYNCED]
    await settle()
    assert server.take() == [(ROUTER, ("2",))]
    server.states[ROUTER] = [status_pb2.SYNCED]
    await rollout.finished()
    assert server.take() == [(ENVOY, ("b", "c"))]


async def test_without_a_change_of_policies_nothing_waits(server: Server, rollout: Rollout) -> None:
    server.states = {ENVOY: [status_pb2.STALE], ROUTER: [status_pb2.STALE]}
    await rollout.begin(compiled("b", policy="1"))
    assert server.take() == [(ENVOY, ("b",)), (ROUTER, ("1",))]


async def test_a_newer_update_takes_over(server: Server, rollout: Rollout) -> None:
    server.states = {ENVOY: [status_pb2.STALE]}
    await rollout.begin(compiled("c", policy="2"))
    await rollout.begin(compiled("d", policy="3"))
    await settle()
    # Routers may still choose a and b.
    assert server.take() == [(ENVOY, ("a", "b", "c")), (ENVOY, ("a", "b", "c", "d"))]
    server.states[ENVOY] = [status_pb2.SYNCED]
    await rollout.finished()
    assert server.take() == [(ROUTER, ("3",)), (ENVOY, ("d",))]


async def test_going_back_before_policies_were_sent_ends_at_once(server: Server, rollout: Rollout) -> None:
    server.states = {ENVOY: [status_pb2.STALE]}
    await rollout.begin(compiled("c", policy="2"))
    await rollout.begin(compiled("a", "b", policy="1"))
    await rollout.finished()
    assert server.take() == [(ENVOY, ("a", "b", "c")), (ENVOY, ("a", "b")), (ROUTER, ("1",))]


async def test_a_client_that_is_stuck_does_not_keep_the_others(
    server: Server, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_LIMIT", 0.05)
    server.states = {ENVOY: [status_pb2.STALE, status_pb2.SYNCED]}
    with structlog.testing.capture_logs() as logs:
        await rollout.begin(compiled("a", "b", policy="2"))
        await rollout.finished()
    assert server.take() == [(ENVOY, ("a", "b")), (ROUTER, ("2",))]
    assert logs[0]["clients"] == 1


async def test_while_every_envoy_refuses_routers_keep_their_policies(
    server: Server, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_LIMIT", 0.05)
    server.states = {ENVOY: [status_pb2.NACKED]}
    with structlog.testing.capture_logs() as logs:
        await rollout.begin(compiled("a", "b", policy="2"))
        await settle()
    assert server.take() == [(ENVOY, ("a", "b"))]
    assert len(logs) == 1
    server.states[ENVOY].append(status_pb2.SYNCED)
    await rollout.finished()
    assert server.take() == [(ROUTER, ("2",))]


def test_only_clusters_and_endpoints_are_kept() -> None:
    old = Snapshot([*(resource(url, "a") for url in (CLUSTER, ENDPOINT)), resource(LISTENER, "old")])
    new = envoys("b")
    kept = keeping_clusters(new, old)
    assert {url: sorted(kept.of_type(url)) for url in kept.type_urls} == {
        CLUSTER: ["a", "b"],
        ENDPOINT: ["a", "b"],
        LISTENER: ["gateway"],
    }
    assert keeping_clusters(new, new) == new


def test_endpoints_of_a_cluster_that_now_holds_them_are_not_kept() -> None:
    new = Snapshot([resource(CLUSTER, "a", "with names")])
    assert keeping_clusters(new, envoys("a")) == new
