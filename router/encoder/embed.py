"""Vectors for a handful of texts, made by a child process that ends.

Why a child: the control plane needs a model for a second when a description changes, not the 200 MB that would stay
for good, and not a running encoder process on its node. The parent's half imports no model runtime.

The child (``python -m router.encoder.embed``) reads one JSON object from standard input and writes one to standard
output: ``{"fingerprint", "dimension", "vectors": base64 of float32, little endian}`` or ``{"error": …}``.
"""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalmesh.base.errors import EncoderError, ModalMeshError
from modalmesh.base.settings import Encoder
from router.encoder.errors import (
    EncoderFilesError,
    EncoderModelError,
    EncoderUnavailableError,
    ItemError,
)

__all__ = ["Embeddings", "embed_texts"]

_ERRORS: dict[str, type[EncoderError]] = {
    error.code: error for error in (EncoderError, EncoderFilesError, EncoderModelError, EncoderUnavailableError)
}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of texts, in their order."""

    fingerprint: str
    """Of the encoder that made them."""
    dimension: int
    vectors: list[list[float]]
    """Each of unit length and ``dimension`` values, exactly those of float32."""


def embed_texts(texts: Sequence[str], *, settings: Encoder, timeout: float) -> Embeddings:
    """Return the vectors of texts; blocks for about a second, so call it in a thread.

    Args:
        texts: Any number, also none.
        settings: Which encoder, and how many threads it may use.
        timeout: Seconds after which the child is killed.

    Raises:
        ItemError: A text can't be encoded; ``item`` says which.
        EncoderFilesError, EncoderModelError: The encoder can't be loaded.
        EncoderUnavailableError: The child took too long, or died.
    """
    request = json.dumps(
        {"path": str(settings.path) if settings.path else None, "threads": settings.threads, "texts": list(texts)}
    )
    try:
        child = subprocess.run(
            [sys.executable, "-m", "router.encoder.embed"],
            input=request.encode(),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EncoderUnavailableError(
            f"embedding {len(texts)} texts took more than {timeout:g} s", hint="give it more time or more threads"
        ) from error
    except OSError as error:
        raise EncoderUnavailableError(f"{sys.executable} can't be started: {error.strerror}") from error
    return _read_reply(child.stdout, child.returncode, child.stderr, len(texts))


def _read_reply(output: bytes, status: int, errors: bytes, count: int) -> Embeddings:
    try:
        reply: Any = json.loads(output)
        if "error" in reply:
            raise _carried_over(reply["error"])
        dimension = int(reply["dimension"])
        values = base64.b64decode(reply["vectors"], validate=True)
        numbers = struct.unpack(f"<{count * dimension}f", values)
        vectors = [list(numbers[start : start + dimension]) for start in range(0, count * dimension, dimension)]
        return Embeddings(str(reply["fingerprint"]), dimension, vectors)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        said = errors.decode("utf-8", "replace").strip().splitlines()
        reason = f": {said[-1]}" if said else ""
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise EncoderUnavailableError(f"the embedding process {ended} and gave no vectors{reason}") from error


def _carried_over(error: dict[str, Any]) -> EncoderError:
    what, hint = str(error["what"]), str(error["hint"])
    if error["code"] == ItemError.code:
        return ItemError(what, item=int(error["item"]), hint=hint)
    return _ERRORS.get(str(error["code"]), EncoderError)(what, hint=hint)


def _answer(request: dict[str, Any]) -> dict[str, object]:
    """Be the child: load, encode, return the reply."""
    from router.encoder.model import DualEncoder

    try:
        encoder = DualEncoder.load(Path(request["path"]) if request["path"] else None, threads=request["threads"])
        vectors = encoder.encode_texts(request["texts"])
    except ModalMeshError as error:
        return {
            "error": {
                "code": error.code,
                "what": error.what,
                "hint": error.hint,
                "item": error.item if isinstance(error, ItemError) else 0,
            }
        }
    return {
        "fingerprint": encoder.fingerprint,
        "dimension": encoder.dimension,
        "vectors": base64.b64encode(vectors.astype("<f4").tobytes()).decode(),
    }


def _main() -> None:
    reply = _answer(json.load(sys.stdin.buffer))
    json.dump(reply, sys.stdout)
    sys.exit(1 if "error" in reply else 0)


if __name__ == "__main__":
    _main()
