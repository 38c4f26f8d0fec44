"""Last good wins, shown with the real pipeline, a server that isn't listening, and no encoder."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import structlog

from controlplane.compile import Vectors
from controlplane.rollout import ENVOY, ROUTER
from controlplane.server import Publisher, group_of
from modalmesh.base.errors import EncoderError
from modalmesh.base.settings import Controlplane, Settings
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.server import AdsServer
from xds.snapshot import Snapshot
from xds.types import CLUSTER


class Encoder:
    failed = False

    def vectors(self, texts: Iterable[str]) -> Vectors:
        if self.failed:
            raise EncoderError("no files")
        return Vectors("00112233aabbccdd", 2, {text: [1.0, 0.0] for text in texts})


class Bench:
    """A publisher and what it gave to its server."""

    def __init__(self, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.documents = documents
        self.encoder = Encoder()
        self.pushed: list[tuple[str, Snapshot]] = []
        monkeypatch.setattr("controlplane.server.embedder_of", lambda _: self.encoder)
        server = AdsServer("127.0.0.1:0", group_of)
        monkeypatch.setattr(server, "set_snapshot", lambda group, snapshot: self.pushed.append((group, snapshot)))
        settings = Settings(controlplane=Controlplane(documents=documents))
        self.publisher = Publisher(settings, server)

    async def update(self) -> tuple[list[str], float | None]:
        """Return the groups that got something, and when to try again."""
        self.pushed.clear()
        retry = await self.publisher.update()
        return [group for group, _ in self.pushed], retry

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.documents / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def bench(tmp_path: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(Path(shutil.copytree(quickstart, tmp_path / "documents")), monkeypatch)


BOTH = [ENVOY, ROUTER]


async def test_clusters_are_set_before_the_policies_that_name_them(bench: Bench) -> None:
    assert await bench.update() == (BOTH, None)
    assert "general-text" in bench.pushed[0][1].of_type(CLUSTER)


async def test_an_update_without_a_change_sets_nothing(bench: Bench) -> None:
    await bench.update()
    bench.edit("virtual-service.yaml", "# Which", "# A comment. Which")
    assert await bench.update() == ([], None)


async def test_a_broken_edit_changes_nothing_and_is_said_line_by_line_once(bench: Bench) -> None:
    await bench.update()
    bench.edit("virtual-service.yaml", "host: general-text", "host: general-tex")
    bench.edit("service-discovery.yaml", "name: food-vision", "nam: food-vision")
    with structlog.testing.capture_logs() as logs:
        assert await bench.update() == ([], None)
        assert await bench.update() == ([], None)
    lines = [str(entry["what"]) for entry in logs if entry["event"] == "problem"]
    assert len(lines) == 2  # the missing name and the unknown field; the rest may be a consequence
    assert all("service-discovery.yaml:10: " in line and "MM1203" in line for line in lines)
    bench.edit("service-discovery.yaml", "nam: food-vision", "name: food-vision")
    with structlog.testing.capture_logs() as logs:
        assert await bench.update() == ([], None)
    assert "did you mean 'general-text'?" in str(logs)
    bench.edit("virtual-service.yaml", "host: general-tex", "host: food-vision")
    assert await bench.update() == (BOTH, None)


async def test_an_empty_source_publishes_nothing_at_a_cold_start(bench: Bench) -> None:
    for file in bench.documents.iterdir():
        file.unlink()
    with structlog.testing.capture_logs() as logs:
        assert await bench.update() == ([], None)
    assert "nothing is served yet" in str(logs)


async def test_documents_that_vanish_change_nothing(bench: Bench) -> None:
    await bench.update()
    shutil.rmtree(bench.documents)
    assert await bench.update() == ([], None)


async def test_at_a_cold_start_a_failed_encoder_costs_the_policies_only_and_is_tried_again(bench: Bench) -> None:
    bench.encoder.failed = True
    groups, first = await bench.update()
    assert groups == BOTH
    assert bench.pushed[1][1].type_urls == ()
    groups, second = await bench.update()
    assert groups == []
    assert first is not None
    assert second is not None
    assert 0 < first < second
    bench.edit("service-discovery.yaml", "port: 8001", "port: 8002")
    assert (await bench.update())[0] == BOTH
    bench.encoder.failed = False
    assert await bench.update() == (BOTH, None)
    assert bench.pushed[1][1].type_urls != ()


async def test_once_policies_are_served_a_failed_encoder_refuses_the_update(bench: Bench) -> None:
    await bench.update()
    bench.encoder.failed = True
    bench.edit("semantic-route.yaml", "Recipes and cooking advice", "Recipes")
    groups, retry = await bench.update()
    assert groups == []
    assert retry is not None
    bench.encoder.failed = False
    assert await bench.update() == (BOTH, None)


async def test_a_mistake_in_the_control_plane_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.update()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("controlplane.server.prepare", broken)
    with structlog.testing.capture_logs() as logs:
        assert await bench.update() == ([], None)
    assert "what is being served stays" in str(logs)


@pytest.mark.parametrize(("role", "group"), [("router", ROUTER), ("envoy", ENVOY), ("", ENVOY), ("other", ENVOY)])
def test_groups_go_by_role(role: str, group: str) -> None:
    node = base_pb2.Node(id="n")
    if role:
        node.metadata["role"] = role
    before = node.SerializeToString()
    assert group_of(node) == group
    assert node.SerializeToString() == before


def test_event_loops_are_not_blocked_by_an_update(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the documents are read, the loop answers (the encoder may take a minute)."""
    started, release = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def slow(*_: object, **__: object) -> object:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
            raise ZeroDivisionError

        monkeypatch.setattr("controlplane.server.prepare", slow)
        update = asyncio.create_task(bench.publisher.update())
        await asyncio.wait_for(started.wait(), 20)
        release.set()
        await asyncio.wait_for(update, 20)

    asyncio.run(run())
