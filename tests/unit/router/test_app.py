"""Policies over a real ADS stream, and encoders that come and go on a real socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from modalmesh.base.settings import Settings
from router.app import Subscription, node, watch_encoder
from router.encoder.client import EncoderClient
from router.encoder.server import EncoderServer
from router.policy import TYPE_URL
from router.store import PolicyStore
from xds.pb.router import policy_pb2
from xds.pb.xds import status_pb2
from xds.server import AdsServer
from xds.snapshot import Resource, Snapshot

Build = Callable[..., policy_pb2.SemanticPolicy]
FINGERPRINT = "00112233aabbccdd"


@dataclass
class Axes:
    """Makes the first axis of everything."""

    fingerprint: str
    name: str = "axes"
    note: str = ""
    dimension: int = 4
    max_tokens: int = 0

    def encode_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.eye(4, dtype=np.float32)[[0] * len(texts)]

    def encode_images(self, pictures: Sequence[bytes]) -> NDArray[np.float32]:
        return np.eye(4, dtype=np.float32)[[0] * len(pictures)]


class Node:
    """A control plane, a router's subscription and the encoder that the test starts."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "encoder.sock"
        self.control_plane = AdsServer(f"unix:{folder}/xds.sock", lambda who: str(who.metadata["role"]))
        self.store = PolicyStore()
        self.settings = Settings(runtime_dir=folder)
        self.subscription = Subscription(self.store, f"unix:{folder}/xds.sock", node(self.settings))

    def publish(self, **policies: policy_pb2.SemanticPolicy) -> None:
        resources = [Resource.of(TYPE_URL, name, policy) for name, policy in policies.items()]
        self.control_plane.set_snapshot("router", Snapshot(resources))

    async def start_encoder(self, fingerprint: str) -> EncoderServer:
        server = EncoderServer(Axes(fingerprint), socket=self.socket, queue=4)
        await server.start()
        return server

    def names(self) -> list[str]:
        return [policy.name for policy in self.store.current.policies]

    def states(self) -> list[tuple[str, str]]:
        return [
            (status_pb2.State.Name(kind.state), kind.last_error)
            for client in self.control_plane.clients()
            for kind in client.types
        ]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def mesh() -> AsyncIterator[Node]:
    with tempfile.TemporaryDirectory(prefix="mm") as folder:
        mesh = Node(Path(folder))
        await mesh.control_plane.start()
        client = EncoderClient(mesh.socket)
        tasks = [
            asyncio.create_task(mesh.subscription.run()),
            asyncio.create_task(
                watch_encoder(client, mesh.store, mesh.subscription, ask_again=0.02, ask_again_soon=0.02)
            ),
        ]
        yield mesh
        for task in tasks:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        await mesh.control_plane.close()


def test_a_router_says_that_it_is_one() -> None:
    identity = node(Settings())
    assert identity.id == "router-1"
    assert identity.metadata["role"] == "router"


async def test_policies_follow_the_control_plane(mesh: Node, policy_message: Build) -> None:
    mesh.publish(one=policy_message(hosts=["one.com"]), two=policy_message(hosts=["two.com"]))
    await until(lambda: mesh.names() == ["one", "two"])
    mesh.publish(two=policy_message(hosts=["two.com"]))
    await until(lambda: mesh.names() == ["two"])
    await until(lambda: mesh.states() == [("SYNCED", "")])


async def test_a_bad_policy_is_refused_with_its_reason(mesh: Node, policy_message: Build) -> None:
    mesh.publish(one=policy_message(hosts=["one.com"]))
    await until(lambda: mesh.names() == ["one"])
    mesh.publish(one=policy_message(services=[]), two=policy_message(hosts=["two.com"]))
    await until(lambda: [state for state, _ in mesh.states()] == ["NACKED"])
    assert "policy 'one': no services" in mesh.states()[0][1]
    assert mesh.store.current.hosts == ("one.com",)


async def test_a_policy_of_another_encoder_is_refused_until_that_one_runs(mesh: Node, policy_message: Build) -> None:
    encoder = await mesh.start_encoder("ffffffffffffffff")
    await until(lambda: mesh.store.encoder == ("ffffffffffffffff", 4))
    mesh.publish(one=policy_message())
    await until(lambda: [state for state, _ in mesh.states()] == ["NACKED"])
    assert "was computed with encoder 00112233aabbccdd, but ffffffffffffffff runs here" in mesh.states()[0][1]
    await encoder.close()
    encoder = await mesh.start_encoder(FINGERPRINT)
    await until(lambda: mesh.names() == ["one"])
    await until(lambda: mesh.states() == [("SYNCED", "")])
    await encoder.close()


async def test_before_the_encoder_is_there_policies_are_accepted(mesh: Node, policy_message: Build) -> None:
    mesh.publish(one=policy_message())
    await until(lambda: mesh.names() == ["one"])
    encoder = await mesh.start_encoder("ffffffffffffffff")
    await until(lambda: mesh.store.encoder is not None)
    assert mesh.names() == ["one"]
    await encoder.close()
