"""Photographs that ship with packages, the starter loaded once, and a CLIP export small enough to be made here."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from router.encoder.model import DualEncoder

Field = tuple[int, "int | bytes | str | list[Field]"]


@pytest.fixture(scope="session")
def starter() -> DualEncoder:
    return DualEncoder.load()


def _file_of(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / name


@pytest.fixture(scope="session")
def cat() -> bytes:
    return _file_of("skimage", "data/chelsea.png").read_bytes()


@pytest.fixture(scope="session")
def photographs(cat: bytes) -> dict[str, bytes]:
    return {
        "cat": cat,
        "rocket": _file_of("skimage", "data/rocket.jpg").read_bytes(),
        "temple": _file_of("sklearn", "datasets/images/china.jpg").read_bytes(),
        "flower": _file_of("sklearn", "datasets/images/flower.jpg").read_bytes(),
    }


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Unix socket paths have at most 107 bytes; pytest's own directories are longer."""
    path = Path(tempfile.mkdtemp(prefix="mm-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def _wire(fields: list[Field]) -> bytes:
    """Encode a protobuf message: the few fields of onnx.proto needed here, without the package onnx."""

    def varint(number: int) -> bytes:
        out = bytearray()
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes([*out, number])

    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value))
        else:
            body = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else _wire(value)
            parts.append(varint(number << 3 | 2) + varint(len(body)) + body)
    return b"".join(parts)


_FLOAT, _INT32, _INT64 = 1, 6, 7


def _tensor(name: str, values: NDArray[np.float32], external: str | None = None) -> list[Field]:
    """TensorProto; with ``external`` its bytes are in that file."""
    fields: list[Field] = [*((1, size) for size in values.shape), (2, _FLOAT), (8, name)]
    if external:
        return [*fields, (13, [(1, "location"), (2, external)]), (14, 1)]
    return [*fields, (9, values.tobytes())]


def _value(name: str, kind: int, shape: list[str | int]) -> list[Field]:
    """ValueInfoProto."""
    dims: list[Field] = [(1, [(1, size) if isinstance(size, int) else (2, size)]) for size in shape]
    return [(1, name), (2, [(1, [(1, kind), (2, dims)])])]


def _node(operator: str, inputs: list[str], output: str, **ints: int | list[int]) -> list[Field]:
    """NodeProto; attributes are INT (2) or INTS (7)."""
    fields: list[Field] = [*((1, name) for name in inputs), (2, output), (4, operator)]
    for name, value in ints.items():
        attribute: list[Field] = (
            [(1, name), (3, value), (20, 2)]
            if isinstance(value, int)
            else [(1, name), *((8, number) for number in value), (20, 7)]
        )
        fields.append((5, attribute))
    return fields


def _model(
    nodes: list[list[Field]], weights: list[list[Field]], inputs: list[list[Field]], output: list[Field]
) -> bytes:
    """ModelProto with operators of opset 17."""
    graph: list[Field] = [
        *((1, node) for node in nodes),
        (2, "tiny"),
        *((5, weight) for weight in weights),
        *((11, value) for value in inputs),
        (12, output),
    ]
    return _wire([(1, 8), (7, graph), (8, [(1, ""), (2, 17)])])


WORDS = ["<pad>", "<unk>", "<|startoftext|>", "<|endoftext|>", "a", "photo", "of", "cat", "dog", "red", "car"]

TinyClip = Callable[..., Path]


@pytest.fixture
def tiny_clip(tmp_path: Path) -> TinyClip:
    """Make a CLIP export in Hugging Face's layout with random weights: real ONNX files with CLIP's names and shapes."""

    def make(
        name: str = "tiny-clip",
        *,
        dimension: int = 6,
        image_dimension: int | None = None,
        ids: int = _INT64,
        length: str | int = "sequence",
        batch: str | int = "batch",
        text_output: str = "text_embeds",
        folder: str = "",
        external: str | None = None,
    ) -> Path:
        directory = tmp_path / name
        models = directory / folder
        models.mkdir(parents=True)
        random = np.random.default_rng(7)
        table = random.normal(size=(len(WORDS), dimension)).astype(np.float32)
        # Mean over the tokens that the mask leaves: (mask @ table[ids]) keeps the order out of it, as a test wants.
        (models / "text_model.onnx").write_bytes(
            _model(
                [
                    _node("Gather", ["table", "input_ids"], "tokens", axis=0),
                    _node("Cast", ["attention_mask"], "mask", to=_FLOAT),
                    _node("Unsqueeze", ["mask", "one"], "row"),
                    _node("MatMul", ["row", "tokens"], "sum"),
                    _node("Squeeze", ["sum", "one"], text_output),
                ],
                [_tensor("table", table, external), [(1, 1), (2, _INT64), (8, "one"), (9, struct.pack("<q", 1))]],
                [_value(name, ids, [batch, length]) for name in ("input_ids", "attention_mask")],
                _value(text_output, _FLOAT, [batch, dimension]),
            )
        )
        if external:
            (models / external).write_bytes(table.tobytes())
        matrix = random.normal(size=(3 * 8 * 8, image_dimension or dimension)).astype(np.float32)
        (models / "vision_model.onnx").write_bytes(
            _model(
                [
                    _node("Flatten", ["pixel_values"], "flat", axis=1),
                    _node("MatMul", ["flat", "matrix"], "image_embeds"),
                ],
                [_tensor("matrix", matrix)],
                [_value("pixel_values", _FLOAT, ["batch", 3, 8, 8])],
                _value("image_embeds", _FLOAT, ["batch", image_dimension or dimension]),
            )
        )
        (directory / "tokenizer.json").write_text(_tokenizer())
        config = {
            "feature_extractor_type": "CLIPFeatureExtractor",
            "size": 8,
            "crop_size": 8,
            "resample": 3,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(config))
        return directory

    return make


def _tokenizer() -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>", special_tokens=[(WORDS[2], 2), (WORDS[3], 3)]
    )
    # As some exports have it; the encoder must set it aside.
    tokenizer.enable_padding(length=20, pad_id=0, pad_token="<pad>")
    return str(tokenizer.to_str())
