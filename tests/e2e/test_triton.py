"""The demonstration's Triton server, for real: answers, refusals, stopping, and what a kill leaves."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import skimage
import tritonclient.grpc as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from modalmesh.launcher import triton as launcher

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-triton"
STARTER = ROOT / "router" / "encoder" / "starter"
MODELS = ("animal-classifier", "vehicle-classifier", "food-classifier", "sentence-embedder")
CONTROL_KEY = "known-to-the-test"
CONTROL = {"triton-grpc-protocol-modalmesh-control": CONTROL_KEY}

pytestmark = pytest.mark.e2e


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def processes(session: int) -> list[int]:
    """Who is left of a server's session, zombies aside."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, owner = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(owner) == session and state != "Z":
            left.append(int(stat.parent.name))
    return left


def shared_memory(server: Any) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{server.shared_memory_prefix}*"))


def until(condition: Any, seconds: float = 15) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "not in time"
        time.sleep(0.02)
    return time.monotonic() - start


class Running:
    def __init__(self, directory: Path, **options: Any) -> None:
        deploy = ROOT / "deploy" / "triton"
        installation = launcher.prepare(VENV, directory, repository=deploy / "repository", modules=deploy / "models")
        self.port = free_port()
        self.server = launcher.command(
            installation,
            grpc_port=self.port,
            variables={"MODALMESH_STARTER": str(STARTER)},
            control_key=CONTROL_KEY,
            **options,
        )
        self.process = subprocess.Popen(self.server.argv, env=self.server.env, start_new_session=True)
        self.client = triton.InferenceServerClient(f"127.0.0.1:{self.port}")
        self.seconds = until(self.ready, 60)

    def ready(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        try:
            return bool(self.client.is_server_ready())
        except InferenceServerException:
            return False

    def ask(self, model: str, name: str, *rows: bytes) -> Any:
        tensor = triton.InferInput(name, [len(rows), 1], "BYTES")
        tensor.set_data_from_numpy(np.array(rows, dtype=np.object_).reshape(-1, 1))
        return self.client.infer(model, [tensor])

    def close(self) -> None:
        self.client.close()
        if processes(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        launcher.remove_shared_memory(self.server)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    it = Running(tmp_path_factory.mktemp("triton"))
    yield it
    it.close()


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Running]:
    it = Running(tmp_path, load=["animal-classifier", "sentence-embedder"])
    yield it
    it.close()


def encoded(pixels: Any, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(("picture", "label"), [("chelsea", "cat"), ("coffee", "espresso"), ("rocket", "missile")])
@pytest.mark.parametrize("model", ["animal-classifier", "vehicle-classifier", "food-classifier"])
def test_picture(running: Running, model: str, picture: str, label: str, kind: str) -> None:
    answer = running.ask(model, "IMAGE", encoded(getattr(skimage.data, picture)(), kind))
    labels, scores = answer.as_numpy("LABEL"), answer.as_numpy("SCORE")
    assert labels.shape == scores.shape == (1, 5)
    assert any(label in text.decode() for text in labels[0]), labels
    assert list(scores[0]) == sorted(scores[0], reverse=True)
    assert 0 < scores.sum() <= 1.0001


def test_pictures_together_answer_as_alone(running: Running) -> None:
    pictures = [encoded(getattr(skimage.data, name)()) for name in ("chelsea", "coffee", "rocket")]
    together = running.ask("animal-classifier", "IMAGE", *pictures)
    for row, picture in enumerate(pictures):
        alone = running.ask("animal-classifier", "IMAGE", picture)
        assert list(together.as_numpy("LABEL")[row]) == list(alone.as_numpy("LABEL")[0])
        np.testing.assert_allclose(together.as_numpy("SCORE")[row], alone.as_numpy("SCORE")[0], atol=1e-5)


def test_same_top_labels_as_the_whole_picture_resized(running: Running) -> None:
    """Against the plain way: decode in full, resize all of it, then crop."""
    import json

    import onnxruntime

    network = onnxruntime.InferenceSession(STARTER / "vision_model.onnx")
    labels = json.loads((STARTER / "labels.json").read_text())
    for name in ("chelsea", "coffee", "rocket", "astronaut"):
        image = Image.fromarray(getattr(skimage.data, name)())
        ratio = 256 / min(image.size)
        image = image.resize((round(image.width * ratio), round(image.height * ratio)), Image.Resampling.BICUBIC)
        left, top = (image.width - 224) // 2, (image.height - 224) // 2
        crop = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32)
        pixels = ((crop - 127) / 128).transpose(2, 0, 1)[None].astype(np.float32)
        (expected,) = network.run(["class_probs"], {"pixel_values": pixels})
        answer = running.ask("animal-classifier", "IMAGE", encoded(getattr(skimage.data, name)(), "PNG"))
        assert answer.as_numpy("LABEL")[0, 0].decode() == labels[expected[0].argmax()]
        assert abs(answer.as_numpy("SCORE")[0, 0] - expected.max()) < 0.05


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "I;16", "CMYK"])
def test_any_kind_of_pixel(running: Running, mode: str) -> None:
    out = io.BytesIO()
    cat = Image.fromarray(skimage.data.chelsea())
    cat = cat.convert("I").convert("I;16") if mode == "I;16" else cat.convert(mode)
    cat.save(out, "JPEG" if mode == "CMYK" else "PNG")
    assert running.ask("animal-classifier", "IMAGE", out.getvalue()).as_numpy("LABEL").shape == (1, 5)


@pytest.mark.parametrize("size", [(1, 1), (1, 60_000), (3000, 2), (224, 224), (5000, 5000)])
def test_any_shape(running: Running, size: tuple[int, int]) -> None:
    out = io.BytesIO()
    Image.new("RGB", size, "red").save(out, "PNG")
    assert running.ask("animal-classifier", "IMAGE", out.getvalue()).as_numpy("LABEL").shape == (1, 5)


def bomb() -> bytes:
    out = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a picture"),
        (b"hello", "not a picture"),
        (b"%PDF-1.4", "not a picture"),
        (encoded(skimage.data.coffee())[:9000], "not a readable picture"),
        (encoded(skimage.data.coffee(), "PNG")[:9000], "not a readable picture"),
        (bomb(), "pixels"),
    ],
)
def test_bad_picture_is_refused(running: Running, data: bytes, why: str) -> None:
    with pytest.raises(InferenceServerException, match=why) as caught:
        running.ask("animal-classifier", "IMAGE", data)
    assert "INVALID_ARGUMENT" in str(caught.value.status())


def test_bad_picture_leaves_its_neighbours_alone(running: Running) -> None:
    import concurrent.futures

    good, bad = encoded(skimage.data.chelsea()), b"nonsense"
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = [
            pool.submit(running.ask, "animal-classifier", "IMAGE", bad if i % 3 == 0 else good) for i in range(48)
        ]
        for i, future in enumerate(futures):
            if i % 3 == 0:
                assert "not a picture" in str(future.exception())
            else:
                assert any(b"cat" in label for label in future.result().as_numpy("LABEL")[0])
    statistics = running.client.get_inference_statistics("animal-classifier").model_stats[0]
    assert max(batch.batch_size for batch in statistics.batch_stats) > 1


def test_sentences(running: Running) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Stocks fell sharply on Monday."]
    vectors = running.ask("sentence-embedder", "TEXT", *(text.encode() for text in texts)).as_numpy("EMBEDDING")
    assert vectors.shape == (3, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.5
    assert vectors[0] @ vectors[2] < 0.2
    alone = running.ask("sentence-embedder", "TEXT", texts[1].encode()).as_numpy("EMBEDDING")
    np.testing.assert_array_equal(vectors[1], alone[0])


def test_long_text(running: Running) -> None:
    assert running.ask("sentence-embedder", "TEXT", b"word " * 10_000).as_numpy("EMBEDDING").shape == (1, 384)


@pytest.mark.parametrize(
    ("data", "why"), [(b"caf\xe9", "UTF-8"), (b"", "empty"), (b" \n", "empty"), (b"x" * 70_000, "at most")]
)
def test_bad_text_is_refused(running: Running, data: bytes, why: str) -> None:
    with pytest.raises(InferenceServerException, match=why):
        running.ask("sentence-embedder", "TEXT", data)


def test_only_grpc_on_loopback_is_served(running: Running) -> None:
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    own = [line.split()[3] for line in listening.splitlines() if f"pid={running.process.pid}," in line]
    assert own == [f"[::ffff:127.0.0.1]:{running.port}"]


def test_unload_and_load(brief: Running) -> None:
    brief.client.unload_model("animal-classifier", headers=CONTROL)
    until(lambda: not brief.client.is_model_ready("animal-classifier"))
    brief.client.load_model("vehicle-classifier", headers=CONTROL)
    assert brief.client.is_model_ready("vehicle-classifier")


def test_health_protocol(running: Running) -> None:
    """grpc.health.v1, Check only, and of the server only: the service's name is not looked at."""
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for request in (b"", b"\n\x0bnonexistent"):
            assert check(request, timeout=5) == b"\x08\x01"  # SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=5))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_stop_leaves_nothing(brief: Running, how: signal.Signals) -> None:
    assert len(processes(brief.process.pid)) == 3
    assert len(shared_memory(brief.server)) == 2
    brief.process.send_signal(how)
    brief.process.wait(10)
    assert processes(brief.process.pid) == []
    assert shared_memory(brief.server) == []


def test_killed_server(brief: Running) -> None:
    """Its models' processes notice, and clear up."""
    brief.process.kill()
    brief.process.wait(5)
    until(lambda: not processes(brief.process.pid), 5)
    assert shared_memory(brief.server) == []


def test_killed_all_at_once(brief: Running) -> None:
    """Nobody is left to clear up."""
    os.killpg(brief.process.pid, signal.SIGKILL)
    brief.process.wait(5)
    until(lambda: not processes(brief.process.pid))
    assert len(shared_memory(brief.server)) == 2
    assert len(launcher.remove_shared_memory(brief.server)) == 2
    assert shared_memory(brief.server) == []


def test_killed_stub(brief: Running) -> None:
    """One model's process dies: it stays «ready» and answers errors until it is unloaded and loaded."""
    victim = next(
        pid for pid in processes(brief.process.pid) if b"image_classifier" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(victim, signal.SIGKILL)
    picture = encoded(skimage.data.chelsea())
    for _ in range(3):
        with pytest.raises(InferenceServerException, match="not healthy") as caught:
            brief.ask("animal-classifier", "IMAGE", picture)
        assert "INTERNAL" in str(caught.value.status())
    brief.ask("sentence-embedder", "TEXT", b"still here")
    assert brief.client.is_model_ready("animal-classifier"), "Triton now sees it: simplify this, and say so"
    brief.client.unload_model("animal-classifier", headers=CONTROL)
    until(lambda: not brief.client.is_model_ready("animal-classifier"))
    brief.client.load_model("animal-classifier", headers=CONTROL)
    assert brief.ask("animal-classifier", "IMAGE", picture).as_numpy("LABEL").shape == (1, 5)


def test_says_what_is_missing(tmp_path: Path) -> None:
    where = {"repository": ROOT / "deploy/triton/repository", "modules": ROOT / "deploy/triton/models"}
    with pytest.raises(launcher.TritonUnavailableError, match="no Python environment"):
        launcher.prepare(tmp_path / "none", tmp_path / "d", **where)
    other = tmp_path / "numpy2"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", other], check=True)
    site = other / "lib" / "python3.11" / "site-packages"
    for path in (VENV / "lib" / "python3.11" / "site-packages").iterdir():
        if not path.name.startswith("numpy"):
            (site / path.name).symlink_to(path)
    (site / "numpy-2.4.6.dist-info").mkdir()
    (site / "numpy-2.4.6.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 2.4.6\n")
    with pytest.raises(launcher.TritonUnavailableError, match=r"has NumPy 2.4.6; the Python backend needs NumPy 1"):
        launcher.prepare(other, tmp_path / "d", **where)
    (site / "pytriton").unlink()
    with pytest.raises(launcher.TritonUnavailableError, match=r"lacks .*bin/tritonserver, .*stub; run `make install`"):
        launcher.prepare(other, tmp_path / "d", **where)
    empty = tmp_path / "empty"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", empty], check=True)
    with pytest.raises(launcher.TritonUnavailableError, match=r"no nvidia-pytriton; run `make install`"):
        launcher.prepare(empty, tmp_path / "d", **where)
    assert not (tmp_path / "d").exists()
