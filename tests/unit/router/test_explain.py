"""The command against a real control plane, with an encoder process or without."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog

from modalmesh import cli
from router.encoder.model import DualEncoder
from router.encoder.server import EncoderServer
from router.policy import TYPE_URL
from xds.pb.router import policy_pb2
from xds.server import AdsServer
from xds.snapshot import Resource, Snapshot
from xds.store import SnapshotStore

Explain = Callable[..., Awaitable[tuple[int, str, str]]]

DESCRIPTIONS = {
    "animals": "questions about animals: dogs, cats, birds and other wildlife",
    "finance": "banking and money: loans, interest rates, stock prices",
    "photos": "photographs of cats, dogs and other animals",
}


@pytest.fixture(scope="module")
def encoder() -> DualEncoder:
    return DualEncoder.load(None)


@pytest.fixture(scope="module")
def policy(encoder: DualEncoder) -> policy_pb2.SemanticPolicy:
    vectors = dict(zip(DESCRIPTIONS, encoder.encode_texts(list(DESCRIPTIONS.values())), strict=True))
    return policy_pb2.SemanticPolicy(
        name="quick",
        hosts=["*"],
        model="auto",
        encoder=policy_pb2.EncoderIdentity(fingerprint=encoder.fingerprint, dimension=encoder.dimension),
        thresholds=[
            policy_pb2.Threshold(modality=policy_pb2.TEXT, similarity=0.25),
            policy_pb2.Threshold(modality=policy_pb2.IMAGE, similarity=0.1),
        ],
        services=[
            policy_pb2.SemanticService(
                service_id=name,
                cluster=f"cluster-{name}",
                model=f"model-{name}",
                modalities=[policy_pb2.IMAGE if name == "photos" else policy_pb2.TEXT],
                description=DESCRIPTIONS[name],
                clip_text_emb=vectors[name],
            )
            for name in DESCRIPTIONS
        ],
        defaults=[policy_pb2.DefaultRoute(modality=policy_pb2.TEXT, service_id="finance")],
    )


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mm") as name:
        monkeypatch.setenv("MODALMESH_RUNTIME_DIR", name)
        monkeypatch.setenv("MODALMESH_XDS__LISTEN", f"unix:{name}/xds.sock")
        monkeypatch.setenv("COLUMNS", "200")
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # the servers of this process
        yield Path(name)
        structlog.reset_defaults()  # the command has bound the log to a stream that is captured


@pytest.fixture
async def control_plane(folder: Path, policy: policy_pb2.SemanticPolicy) -> AsyncIterator[AdsServer]:
    at_once = SnapshotStore(quiet=0.0)
    server = AdsServer(f"unix:{folder}/xds.sock", lambda node: str(node.metadata["role"]), store=at_once)
    await server.start()
    server.set_snapshot("router", Snapshot([Resource.of(TYPE_URL, "quick", policy)]))
    yield server
    await server.close()


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Explain:
    async def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["modalmesh", "explain", *arguments])

        def main() -> int:
            try:
                cli.main()
            except SystemExit as end:
                return int(end.code or 0)
            return 0

        status = await asyncio.to_thread(main)  # it runs an event loop of its own
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def picture(name: str) -> str:
    import skimage

    return str(Path(skimage.__file__).parent / "data" / name)


@pytest.mark.usefixtures("control_plane")
async def test_explains_with_the_encoder_loaded_here(explain: Explain) -> None:
    status, output, _ = await explain("--text", "do dogs and cats dream?")
    assert status == 0
    assert ["animals" in line for line in output.splitlines() if "→" in line] == [True]
    assert "reason     matched" in output
    assert "service    animals (cluster cluster-animals)" in output
    assert "model      model-animals" in output
    assert "threshold  0.250 for text" in output
    assert "This is the starter encoder" in output
    assert "reads English only" in output
    assert "loaded here" in output


@pytest.mark.usefixtures("control_plane")
async def test_asks_the_encoder_process_if_it_runs(explain: Explain, folder: Path, encoder: DualEncoder) -> None:
    server = EncoderServer(encoder, socket=folder / "encoder.sock", queue=4)
    await server.start()
    status, output, _ = await explain("--image", picture("chelsea.png"), "-o", "json", "--top-k", "1")
    await server.close()
    assert status == 0
    told = json.loads(output)
    assert (told["service"], told["reason"], told["modality"]) == ("photos", "matched", "image")
    assert told["encoder"]["loaded_here"] is False
    assert told["encoder"]["starter"] is True
    assert told["encoder"]["note"] == encoder.note
    assert [candidate["service"] for candidate in told["candidates"]] == ["photos"]


@pytest.mark.usefixtures("control_plane")
async def test_what_fits_nothing(explain: Explain) -> None:
    status, output, _ = await explain("--text", "zxqv 0000 ####", "-o", "json")
    told = json.loads(output)
    assert (status, told["reason"], told["service"]) == (0, "default", "finance")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "either a text or a picture"),
        (["--text", "a", "--image", "b.png"], 2, "either a text or a picture"),
        (["--text", " "], 2, "the text is empty"),
        (["--image", "/nowhere/a.png"], 2, "picture /nowhere/a.png can't be read: No such file or directory"),
        (["--image", "/dev/null"], 2, "picture /dev/null is empty"),
        (["--image", "/"], 2, "picture / can't be read: Is a directory"),
        (["--text", "dogs"], 1, "nobody answers at unix:"),
    ],
)
@pytest.mark.usefixtures("folder")
async def test_errors_are_one_line(explain: Explain, arguments: list[str], status: int, text: str) -> None:
    code, output, errors = await explain(*arguments)
    assert (code, output) == (status, "")
    assert errors.startswith("error: ")
    assert text in errors
    assert errors.count("\n") == 1


@pytest.mark.usefixtures("control_plane")
@pytest.mark.parametrize("with_process", [False, True])
async def test_a_picture_that_is_none_is_an_error(
    explain: Explain, tmp_path: Path, folder: Path, encoder: DualEncoder, with_process: bool
) -> None:
    server = EncoderServer(encoder, socket=folder / "encoder.sock", queue=4)
    if with_process:
        await server.start()
    broken = tmp_path / "a.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    code, output, errors = await explain("--image", str(broken))
    await server.close()
    assert (code, output) == (1, "")
    assert errors.splitlines()[-1].startswith("error: the picture ")
    assert "item 0" not in errors
    assert "[MM1503]" in errors


async def test_other_hosts_and_no_policies(
    explain: Explain, control_plane: AdsServer, policy: policy_pb2.SemanticPolicy
) -> None:
    only = policy_pb2.SemanticPolicy.FromString(policy.SerializeToString())
    only.hosts[:] = ["api.example.com"]
    control_plane.set_snapshot("router", Snapshot([Resource.of(TYPE_URL, "quick", only)]))
    code, _, errors = await explain("--text", "dogs")
    assert (code, "no policy covers '127.0.0.1:10000'" in errors, "api.example.com" in errors) == (1, True, True)
    code, output, _ = await explain("--text", "dogs and cats", "--authority", "api.example.com:443", "-o", "json")
    assert (code, json.loads(output)["service"]) == (0, "animals")


async def test_no_policies(explain: Explain, control_plane: AdsServer) -> None:
    control_plane.set_snapshot("router", Snapshot([]))
    code, _, errors = await explain("--text", "dogs")
    assert (code, "no SemanticRoute" in errors) == (1, True)


async def test_a_policy_of_another_encoder(
    explain: Explain, control_plane: AdsServer, policy: policy_pb2.SemanticPolicy
) -> None:
    other = policy_pb2.SemanticPolicy.FromString(policy.SerializeToString())
    other.encoder.fingerprint = "f" * 16
    control_plane.set_snapshot("router", Snapshot([Resource.of(TYPE_URL, "quick", other)]))
    code, _, errors = await explain("--text", "dogs")
    assert (code, "was computed with encoder ffffffffffffffff" in errors) == (1, True)
