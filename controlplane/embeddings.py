"""Descriptions → vectors, computed once per text and encoder, kept in memory and on disk.

Why on disk: a restart must give the same bytes (equal bytes cause no push), fast, and without loading a model. A file
is named after the encoder's fingerprint and the text's digest and holds a digest of itself, so a torn or foreign file
is computed again instead of believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from controlplane.compile.policy import Vectors
from modalmesh.base.errors import EncoderError
from modalmesh.base.logging import get_logger
from router.encoder.embed import Embeddings
from router.encoder.errors import ItemError

__all__ = ["Embed", "Embedder", "TextError"]

_log = get_logger()

Embed = Callable[[Sequence[str]], Embeddings]
"""Texts → a vector of unit length for each, and the encoder's fingerprint; slow; raises EncoderError."""

_DIGEST_BYTES = 16

# float32 keeps seven digits; a vector that is farther from unit length was not made by an encoder.
_LENGTH_TOLERANCE = 1e-3


class TextError(EncoderError):
    """A text can't be encoded; the others could."""

    code = "MM1208"

    def __init__(self, text: str, error: ItemError) -> None:
        super().__init__(error.what, hint=error.hint)
        self.text = text


class Embedder:
    """Keeps vectors of one encoder. Not thread-safe; called from one worker thread at a time.

    Args:
        directory: Where vectors are kept; made when needed. A disk that can't be written costs time, nothing else.
        fingerprint: Says which encoder there is, without loading it; raises EncoderError.
        embed: Asks the encoder.
    """

    def __init__(self, directory: Path, *, fingerprint: Callable[[], str], embed: Embed) -> None:
        self._directory = directory
        self._read_fingerprint = fingerprint
        self._embed = embed
        self._fingerprint = ""
        self._known: dict[str, tuple[float, ...]] = {}

    def vectors(self, texts: Iterable[str]) -> Vectors:
        """Return the vectors of texts, asking the encoder only for those never seen.

        Only the vectors of these texts are kept in memory.

        Raises:
            TextError: A text can't be encoded.
            EncoderError: The encoder has no files, or does not answer.
        """
        wanted = sorted(set(texts))
        self._fingerprint = self._fingerprint or self._read_fingerprint()
        known = {text: vector for text in wanted if (vector := self._known.get(text) or self._load(text))}
        missing = [text for text in wanted if text not in known]
        if missing:
            made = self._made(missing)
            if made.fingerprint != self._fingerprint:
                # The encoder was replaced meanwhile, and vectors of two encoders can't be compared.
                self._fingerprint, known, missing = made.fingerprint, {}, wanted
                made = self._made(wanted)
            if made.fingerprint != self._fingerprint:
                raise EncoderError(
                    "the encoder's files change while it is used", hint="try again when they are in place"
                )
            for text, values in zip(missing, made.vectors, strict=True):
                known[text] = tuple(values)
                self._store(text, values)
        self._known = known
        return Vectors(self._fingerprint, len(next(iter(known.values()), ())), known)

    def _made(self, texts: Sequence[str]) -> Embeddings:
        try:
            return self._embed(texts)
        except ItemError as error:
            raise TextError(texts[error.item], error) from error

    def _path(self, text: str) -> Path:
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return self._directory / self._fingerprint / f"{digest}.f32"

    def _load(self, text: str) -> tuple[float, ...] | None:
        path = self._path(text)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("kept vector can't be read; computing it again", file=str(path), reason=error.strerror)
            return None
        vector = _decoded(data)
        if vector is None:
            _log.warning("kept vector is damaged; computing it again", file=str(path))
        return vector

    def _store(self, text: str, vector: Sequence[float]) -> None:
        path = self._path(text)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_encoded(vector))
                Path(temporary).replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
        except OSError as error:
            _log.warning("vector can't be kept; it will be computed again", file=str(path), reason=error.strerror)


def _encoded(vector: Sequence[float]) -> bytes:
    """Digest of the rest, then float32, little endian."""
    values = struct.pack(f"<{len(vector)}f", *vector)
    return hashlib.blake2b(values, digest_size=_DIGEST_BYTES).digest() + values


def _decoded(data: bytes) -> tuple[float, ...] | None:
    digest, values = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not values or len(values) % 4 or hashlib.blake2b(values, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    vector = struct.unpack(f"<{len(values) // 4}f", values)
    length = math.sqrt(math.fsum(value * value for value in vector))
    return vector if abs(length - 1) < _LENGTH_TOLERANCE else None
