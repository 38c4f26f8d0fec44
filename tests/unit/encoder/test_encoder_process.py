"""Server, client and the embedding child, over real sockets and processes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from modalmesh.base import metrics
from modalmesh.base.settings import Encoder
from router.encoder import service
from router.encoder.client import EncoderClient
from router.encoder.embed import embed_texts
from router.encoder.errors import (
    EncoderFilesError,
    EncoderModelError,
    EncoderUnavailableError,
    ItemError,
)
from router.encoder.files import find
from router.encoder.model import DualEncoder
from router.encoder.server import EncoderServer
from router.encoder.work import CallerGone, Full, Worker
from router.sockets import reserved
from xds.pb.router.encoder import encoder_pb2

TinyClip = Callable[..., Path]
PATIENCE = 20.0


class Held:
    """An encoder that waits for a test's leave before each text, and remembers what it was asked."""

    name = "held"
    note = ""
    dimension = 2
    fingerprint = "0123456789abcdef"
    max_tokens = 9

    def __init__(self) -> None:
        self.leave = threading.Semaphore(0)
        self.texts: list[str] = []

    def encode_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += texts
        assert self.leave.acquire(timeout=PATIENCE)
        if texts[0] == "break":
            raise RuntimeError("the model broke")
        return np.array([[1, 0]] * len(texts), np.float32)

    def encode_images(self, pictures: Sequence[bytes]) -> NDArray[np.float32]:
        return np.array([[0, 1]] * len(pictures), np.float32)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  what is waited for happens in other threads and processes
            await asyncio.sleep(0.005)


def counted(modality: str, outcome: str) -> float:
    return (
        metrics.REGISTRY.get_sample_value("modalmesh_encoder_items_total", {"modality": modality, "outcome": outcome})
        or 0.0
    )


@contextlib.asynccontextmanager
async def serving(encoder: Any, path: Path, queue: int = 8) -> AsyncIterator[tuple[EncoderServer, EncoderClient]]:
    with reserved(path):
        server = EncoderServer(encoder, socket=path, queue=queue)
        await server.start()
        client = EncoderClient(path)
        try:
            yield server, client
        finally:
            await client.close()
            if isinstance(encoder, Held):
                encoder.leave.release(1000)
            await server.close()


async def test_texts_and_pictures_come_back_in_order(
    starter: DualEncoder, short_dir: Path, photographs: dict[str, bytes]
) -> None:
    async with serving(starter, short_dir / "e.sock") as (_, client):
        encoded = await client.encode(
            ["photographs of animals", photographs["cat"], "photographs of cars and trucks"], PATIENCE
        )
        described = await client.describe(PATIENCE)

    assert encoded.fingerprint == described.fingerprint == find(None).fingerprint
    assert (described.name, described.dimension, described.max_tokens) == ("modalmesh-starter", 512, 256)
    assert encoded.vectors.shape == (3, 512)
    animals, cat, vehicles = encoded.vectors
    assert cat @ animals > cat @ vehicles + 0.2
    assert animals.tobytes() == starter.encode_texts(["photographs of animals"])[0].tobytes()
    assert cat.tobytes() == starter.encode_images([photographs["cat"]])[0].tobytes()


async def test_an_item_that_cannot_be_encoded_is_named(starter: DualEncoder, short_dir: Path, cat: bytes) -> None:
    before = counted("image", "invalid")
    async with serving(starter, short_dir / "e.sock") as (_, client):
        with pytest.raises(ItemError, match=r"item 1: the picture can't be decoded") as raised:
            await client.encode(["a cat", cat[:4000], ""], PATIENCE)
        assert raised.value.item == 1
        with pytest.raises(ItemError, match="item 2: the text is empty"):
            await client.encode(["a cat", cat, " "], PATIENCE)
        with pytest.raises(ItemError, match="0 items"):
            await client.encode([], PATIENCE)
        with pytest.raises(ItemError, match="257 items"):
            await client.encode(["a"] * 257, PATIENCE)
        with pytest.raises(ItemError, match="not valid Unicode") as raised:
            await client.encode(["a", "\ud800"], PATIENCE)
        assert raised.value.item == 1
        assert (await client.encode(["still there"], PATIENCE)).vectors.shape == (1, 512)
    assert counted("image", "invalid") == before + 1


async def test_an_item_of_neither_kind_is_named(short_dir: Path) -> None:
    async with serving(Held(), short_dir / "e.sock"), grpc.aio.insecure_channel(f"unix:{short_dir}/e.sock") as channel:
        call = channel.unary_unary(
            f"/{service.SERVICE}/{service.ENCODE}", request_serializer=encoder_pb2.EncodeRequest.SerializeToString
        )
        with pytest.raises(grpc.aio.AioRpcError, match="item 0: has neither text nor image"):
            await call(encoder_pb2.EncodeRequest(items=[encoder_pb2.Item()]), timeout=PATIENCE)


async def test_a_message_of_32_mib_passes_and_a_larger_one_does_not(short_dir: Path) -> None:
    async with serving(Held(), short_dir / "e.sock") as (_, client):
        assert (await client.encode([bytes(32 * 1024 * 1024 - 100)], PATIENCE)).vectors.tolist() == [[0, 1]]
        with pytest.raises(ItemError, match="more than 33554432"):
            await client.encode([bytes(32 * 1024 * 1024)], PATIENCE)
        # A client with other limits is stopped by the server.
        async with grpc.aio.insecure_channel(
            f"unix:{short_dir}/e.sock", options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            call = channel.unary_unary(f"/{service.SERVICE}/{service.ENCODE}")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(bytes(33 * 1024 * 1024), timeout=PATIENCE)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_full_line_refuses_and_recovers(short_dir: Path) -> None:
    encoder = Held()
    before = counted("text", "refused")
    async with serving(encoder, short_dir / "e.sock", queue=2) as (server, client):
        first = asyncio.create_task(client.encode(["in work"], PATIENCE))
        await until(lambda: encoder.texts == ["in work"])
        waiting = [asyncio.create_task(client.encode([f"waits {number}"], PATIENCE)) for number in range(2)]
        await until(lambda: server.waiting == 2)

        with pytest.raises(EncoderUnavailableError, match="RESOURCE_EXHAUSTED"):
            await client.encode(["one too many", "two too many"], PATIENCE)
        assert counted("text", "refused") == before + 2

        encoder.leave.release(4)
        for task in [first, *waiting]:
            assert (await task).vectors.tolist() == [[1, 0]]
        assert (await client.encode(["again"], PATIENCE)).vectors.tolist() == [[1, 0]]
    assert "one too many" not in encoder.texts


async def test_work_past_its_deadline_is_not_done(short_dir: Path) -> None:
    encoder = Held()
    before = counted("text", "skipped")
    async with serving(encoder, short_dir / "e.sock") as (server, client):
        first = asyncio.create_task(client.encode(["in work"], PATIENCE))
        await until(lambda: encoder.texts == ["in work"])

        with pytest.raises(EncoderUnavailableError, match=r"in 0\.05 s"):
            await client.encode(["too late"], 0.05)
        await until(lambda: server.waiting == 0)

        encoder.leave.release(2)
        await first
        await client.encode(["afterwards"], PATIENCE)
        assert encoder.texts == ["in work", "afterwards"]
        await until(lambda: counted("text", "skipped") == before + 1)


async def test_a_request_given_up_in_the_middle_ends_there(short_dir: Path) -> None:
    encoder = Held()
    async with serving(encoder, short_dir / "e.sock") as (_, client):
        task = asyncio.create_task(client.encode([str(number) for number in range(200)], PATIENCE))
        await until(lambda: encoder.texts == ["0"])
        before = counted("text", "skipped")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The server hears of it a moment later: meanwhile it may do some items, but not all.
        async with asyncio.timeout(PATIENCE):
            while counted("text", "skipped") == before and len(encoder.texts) < 200:
                encoder.leave.release()
                await asyncio.sleep(0.01)
        assert counted("text", "skipped") == before + 200 - len(encoder.texts)
        assert len(encoder.texts) < 200


async def test_the_work_of_a_killed_client_is_not_done(short_dir: Path) -> None:
    encoder = Held()
    path = short_dir / "e.sock"
    async with serving(encoder, path) as (server, client):
        first = asyncio.create_task(client.encode(["in work"], PATIENCE))
        await until(lambda: encoder.texts == ["in work"])
        code = (
            "import asyncio, pathlib, sys; from router.encoder.client import EncoderClient;"
            "asyncio.run(EncoderClient(pathlib.Path(sys.argv[1])).encode(['of the dead'], 60))"
        )
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(path))
        try:
            await until(lambda: server.waiting == 1)
        finally:
            child.kill()
            await child.wait()
        await until(lambda: server.waiting == 0)

        encoder.leave.release(2)
        await first
        await client.encode(["of the living"], PATIENCE)
    assert encoder.texts == ["in work", "of the living"]


async def test_a_model_that_breaks_fails_one_request(short_dir: Path) -> None:
    encoder = Held()
    encoder.leave.release(2)
    async with serving(encoder, short_dir / "e.sock") as (_, client):
        with pytest.raises(EncoderUnavailableError, match=r"the model broke \(INTERNAL\)"):
            await client.encode(["break"], PATIENCE)
        assert (await client.encode(["works"], PATIENCE)).vectors.tolist() == [[1, 0]]


async def test_without_a_server_the_client_says_so_and_finds_it_later(short_dir: Path) -> None:
    path = short_dir / "e.sock"
    client = EncoderClient(path)
    with pytest.raises(EncoderUnavailableError, match="no encoder process answers on") as raised:
        await client.encode(["a"], PATIENCE)
    assert str(path) in raised.value.what

    encoder = Held()
    encoder.leave.release(1)
    async with serving(encoder, path), asyncio.timeout(PATIENCE):
        while True:
            try:
                encoded = await client.encode(["a"], PATIENCE)
                break
            except EncoderUnavailableError:  # gRPC waits a moment between attempts
                await asyncio.sleep(0.02)
        assert encoded.vectors.tolist() == [[1, 0]]
    await client.close()


async def test_an_answer_that_makes_no_sense_is_an_error(short_dir: Path) -> None:
    class Lies(Held):
        dimension = 3

        def encode_images(self, pictures: Sequence[bytes]) -> NDArray[np.float32]:
            return np.array([[np.nan, 0, 0]] * len(pictures), np.float32)

    async with serving(Lies(), short_dir / "e.sock") as (_, client):
        with pytest.raises(EncoderModelError, match="not finite"):
            await client.encode([b"x"], PATIENCE)


async def test_the_line_is_bounded_in_bytes_too() -> None:
    worker: Worker[int] = Worker(limit=10, max_bytes=100, thread_name="test")
    hold = threading.Event()
    working = threading.Event()

    def block(_gone: Callable[[], bool]) -> int:
        working.set()
        assert hold.wait(PATIENCE)
        return 1

    first = asyncio.create_task(worker.do(block, size=90, deadline=None))
    await until(working.is_set)
    second = asyncio.create_task(worker.do(lambda _: 2, size=60, deadline=None))
    await until(lambda: worker.waiting == 1)
    with pytest.raises(Full):
        await worker.do(lambda _: 3, size=41, deadline=None)
    second.cancel()  # leaving the line makes room
    await until(lambda: worker.waiting == 0)
    third = asyncio.create_task(worker.do(lambda _: 3, size=100, deadline=None))
    late = asyncio.create_task(worker.do(lambda _: 4, size=0, deadline=asyncio.get_running_loop().time() - 1))
    await until(lambda: worker.waiting == 2)
    hold.set()
    assert (await first, await third) == (1, 3)
    with pytest.raises(CallerGone):
        await late
    await worker.close()


async def test_closing_cancels_what_waits() -> None:
    worker: Worker[int] = Worker(limit=10, max_bytes=100, thread_name="test")
    hold = threading.Event()
    working = threading.Event()

    def block(_gone: Callable[[], bool]) -> int:
        working.set()
        return int(hold.wait(PATIENCE))

    tasks = [asyncio.create_task(worker.do(block, size=1, deadline=None)) for _ in range(2)]
    await until(working.is_set)
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    hold.set()
    await closing
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def process(short_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start encoder processes that are gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> subprocess.Popen[str]:
        code = (
            "from modalmesh.base.settings import load; from modalmesh.base.errors import ModalMeshError;"
            "from router.encoder.server import run\n"
            "try: run(load())\n"
            "except ModalMeshError as error: raise SystemExit(str(error))"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "MODALMESH_RUNTIME_DIR": str(short_dir / "run"),
                "MODALMESH_LOG__FORMAT": "json",
                **environment,
            },
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def lines_until(child: subprocess.Popen[str], event: str) -> list[dict[str, Any]]:
    assert child.stderr is not None
    lines = []
    for line in child.stderr:
        lines.append(json.loads(line))
        if lines[-1]["event"] == event:
            return lines
    raise AssertionError(f"ended without «{event}»: {lines}")


def test_the_process_serves_alone_and_stops_when_told(
    process: Callable[..., subprocess.Popen[str]], short_dir: Path
) -> None:
    path = short_dir / "run" / "encoder.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:  # what a killed predecessor leaves
        stale.bind(str(path))

    child = process()
    lines = lines_until(child, "encoder serves")

    loaded = next(line for line in lines if line["event"] == "encoder loaded")
    assert (loaded["name"], loaded["dimension"], loaded["fingerprint"]) == (
        "modalmesh-starter", 512, find(None).fingerprint
    )  # fmt: skip
    assert any("starter" in line["event"] for line in lines)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0

    second = process()
    _, errors = second.communicate(timeout=PATIENCE)
    assert second.returncode == 1
    assert errors.startswith("another process serves")

    async def ask() -> tuple[int, ...]:
        client = EncoderClient(path)
        encoded = await client.encode(["a cat"], PATIENCE)
        await client.close()
        return tuple(encoded.vectors.shape)

    assert asyncio.run(ask()) == (1, 512)  # the second one did not take the socket away
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert not path.exists()


def test_a_wrong_directory_ends_the_process_with_one_line(
    process: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = process(MODALMESH_ENCODER__PATH=str(tmp_path))
    _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1
    assert errors.count("\n") == 1
    assert f"{tmp_path} has no tokenizer.json" in errors
    assert "[MM1501]" in errors


def test_the_child_gives_the_vectors_of_the_encoder(starter: DualEncoder) -> None:
    texts = ["photographs of animals", "cooking recipes: soups & «cakes»"]

    embeddings = embed_texts(texts, settings=Encoder(), timeout=PATIENCE)

    assert (embeddings.fingerprint, embeddings.dimension) == (starter.fingerprint, 512)
    assert np.array(embeddings.vectors, np.float32).tobytes() == starter.encode_texts(texts).tobytes()


def test_the_child_takes_an_export_and_no_texts(tiny_clip: TinyClip) -> None:
    directory = tiny_clip()
    embeddings = embed_texts([], settings=Encoder(path=directory), timeout=PATIENCE)
    assert (embeddings.fingerprint, embeddings.dimension, embeddings.vectors) == (
        find(directory).fingerprint, 6, []
    )  # fmt: skip


def test_the_childs_errors_are_carried_over(tiny_clip: TinyClip, tmp_path: Path) -> None:
    with pytest.raises(ItemError, match="the text is empty") as raised:
        embed_texts(["a cat", "a dog", " "], settings=Encoder(path=tiny_clip()), timeout=PATIENCE)
    assert raised.value.item == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(EncoderFilesError, match=r"has no tokenizer\.json; add the file"):
        embed_texts(["a"], settings=Encoder(path=empty), timeout=PATIENCE)
    with pytest.raises(EncoderModelError, match="image 5"):
        embed_texts(["a"], settings=Encoder(path=tiny_clip("other", image_dimension=5)), timeout=PATIENCE)


def test_a_child_that_takes_too_long_is_killed() -> None:
    with pytest.raises(EncoderUnavailableError, match=r"took more than 0\.01 s"):
        embed_texts(["a cat"], settings=Encoder(), timeout=0.01)


def test_a_child_that_dies_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho one >&2\necho 'last words' >&2\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(EncoderUnavailableError, match="ended by signal 9 and gave no vectors: last words"):
        embed_texts(["a cat"], settings=Encoder(), timeout=PATIENCE)


def test_a_reply_cut_short_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reply = {"fingerprint": "f", "dimension": 3, "vectors": base64.b64encode(bytes(8)).decode()}
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(reply)}\nEND\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(EncoderUnavailableError, match="gave no vectors"):
        embed_texts(["a cat"], settings=Encoder(), timeout=PATIENCE)
