from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import watchfiles

from controlplane import watch
from controlplane.directory import signature

Noticed = Callable[[], Awaitable[None]]

LIMIT = 20.0


@asynccontextmanager
async def watched(directory: Path) -> AsyncIterator[asyncio.Queue[None]]:
    stop = asyncio.Event()
    queue: asyncio.Queue[None] = asyncio.Queue()

    async def follow() -> None:
        async for _ in watch.changes(directory, signature(directory), stop):
            queue.put_nowait(None)

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.3)  # until the kernel watches
    try:
        yield queue
    finally:
        stop.set()
        await asyncio.wait_for(task, LIMIT)


async def noticed(queue: asyncio.Queue[None]) -> None:
    await asyncio.wait_for(queue.get(), LIMIT)
    while not queue.empty():
        queue.get_nowait()


async def test_every_kind_of_change_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    async with watched(tmp_path) as queue:
        file.write_text("a: 1\n")
        await noticed(queue)
        file.write_text("a: 2\n")
        await noticed(queue)
        (tmp_path / "new").write_text("a: 3\n")
        (tmp_path / "new").replace(file)
        await noticed(queue)
        file.unlink()
        await noticed(queue)


async def test_what_is_no_document_is_not_noticed(tmp_path: Path) -> None:
    async with watched(tmp_path) as queue:
        (tmp_path / "a.yaml.swp").write_text("x")
        (tmp_path / "readme.md").write_text("x")
        await asyncio.sleep(1.5)
        assert queue.empty()


async def test_a_change_behind_a_link_is_noticed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "a.yaml").write_text("a: 1\n")
    (inside / "a.yaml").symlink_to(outside / "a.yaml")
    async with watched(inside) as queue:
        (outside / "a.yaml").write_text("a: 2\nb: 3\n")
        await noticed(queue)


async def test_a_config_map_that_is_switched_over_is_noticed(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "a.yaml").write_text(f"a: {number}\n")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    async with watched(tmp_path) as queue:
        (tmp_path / "..next").symlink_to("..2")
        (tmp_path / "..next").replace(tmp_path / "..data")
        await noticed(queue)


async def test_a_directory_that_vanishes_and_comes_back_is_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awatch = watchfiles.awatch
    watched_by_kernel: list[Path] = []

    def counted(directory: Path, **options: Any) -> Any:
        watched_by_kernel.append(directory)
        return awatch(directory, **options)

    monkeypatch.setattr("controlplane.watch.watchfiles.awatch", counted)
    directory = tmp_path / "documents"
    directory.mkdir()
    (directory / "a.yaml").write_text("a: 1\n")
    async with watched(directory) as queue:
        directory.rename(tmp_path / "away")
        await noticed(queue)
        directory.mkdir()
        (directory / "b.yaml").write_text("b: 1\n")
        await noticed(queue)
        (directory / "b.yaml").write_text("b: 2\n")
        await noticed(queue)
        assert watched_by_kernel == [directory, directory]


async def test_without_the_kernels_help_files_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more inotify watches")

    monkeypatch.setattr("controlplane.watch.watchfiles.awatch", refuse)
    async with watched(tmp_path) as queue:
        (tmp_path / "a.yaml").write_text("a: 1\n")
        await noticed(queue)
