from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from controlplane.embeddings import Embedder, TextError
from modalmesh.base.errors import EncoderError
from router.encoder.embed import Embeddings
from router.encoder.errors import ItemError


class Encoder:
    """Vectors that differ by text and by encoder, and a record of what was asked."""

    def __init__(self, fingerprint: str = "aa", dimension: int = 3) -> None:
        self.fingerprint = fingerprint
        self.dimension = dimension
        self.asked: list[list[str]] = []

    def vector(self, text: str) -> list[float]:
        values = [float(len(text) + place + len(self.fingerprint)) for place in range(self.dimension)]
        length = math.sqrt(sum(value * value for value in values))
        # As float32, as the real one gives them.
        return list(
            struct.unpack(f"<{self.dimension}f", struct.pack(f"<{self.dimension}f", *(v / length for v in values)))
        )

    def embed(self, texts: Sequence[str]) -> Embeddings:
        self.asked.append(list(texts))
        return Embeddings(self.fingerprint, self.dimension, [self.vector(text) for text in texts])

    def embedder(self, directory: Path) -> Embedder:
        return Embedder(directory, fingerprint=lambda: self.fingerprint, embed=self.embed)


def test_each_text_is_encoded_once(tmp_path: Path) -> None:
    encoder = Encoder()
    embedder = encoder.embedder(tmp_path)
    found = embedder.vectors(["b", "a", "b"])
    assert (found.fingerprint, found.dimension) == ("aa", 3)
    assert {text: list(vector) for text, vector in found.by_text.items()} == {t: encoder.vector(t) for t in "ab"}
    embedder.vectors(["a", "c"])
    assert encoder.asked == [["a", "b"], ["c"]]


def test_a_restart_finds_the_same_values_without_an_encoder(tmp_path: Path) -> None:
    encoder = Encoder()
    before = encoder.embedder(tmp_path).vectors(["a", "b"])
    after = encoder.embedder(tmp_path).vectors(["a", "b"])
    assert after == before
    assert len(encoder.asked) == 1


def test_another_encoder_has_vectors_of_its_own(tmp_path: Path) -> None:
    Encoder("aa").embedder(tmp_path).vectors(["a"])
    other = Encoder("bbbb")
    found = other.embedder(tmp_path).vectors(["a"])
    assert other.asked == [["a"]]
    assert list(found.by_text["a"]) == other.vector("a")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:-4],
        lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
        lambda data: bytes(16) + data[16:],
        lambda data: data + b"\x00\x00\x00\x00",
    ],
)
def test_a_damaged_file_is_not_believed(tmp_path: Path, damage: object) -> None:
    encoder = Encoder()
    good = encoder.embedder(tmp_path).vectors(["a"])
    (file,) = (tmp_path / "aa").iterdir()
    content = file.read_bytes()
    assert callable(damage)
    file.write_bytes(damage(content))
    assert encoder.embedder(tmp_path).vectors(["a"]) == good
    assert len(encoder.asked) == 2
    assert file.read_bytes() == content


def test_a_disk_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    encoder = Encoder()
    embedder = encoder.embedder(tmp_path / "file")
    assert embedder.vectors(["a"]) == embedder.vectors(["a"])
    assert encoder.asked == [["a"]]


def test_nothing_is_left_beside_the_vectors(tmp_path: Path) -> None:
    Encoder().embedder(tmp_path).vectors(["a", "b"])
    assert [path.suffix for path in (tmp_path / "aa").iterdir()] == [".f32", ".f32"]


def test_an_encoder_replaced_meanwhile_encodes_everything_again(tmp_path: Path) -> None:
    encoder = Encoder("aa")
    embedder = encoder.embedder(tmp_path)
    embedder.vectors(["a"])
    encoder.fingerprint = "bbbb"
    found = embedder.vectors(["a", "b"])
    assert found.fingerprint == "bbbb"
    assert {text: list(vector) for text, vector in found.by_text.items()} == {t: encoder.vector(t) for t in "ab"}
    assert encoder.asked == [["a"], ["b"], ["a", "b"]]


def test_an_encoder_that_never_stays_the_same_is_an_error(tmp_path: Path) -> None:
    encoder = Encoder()

    def embed(texts: Sequence[str]) -> Embeddings:
        encoder.fingerprint += "x"
        return encoder.embed(texts)

    with pytest.raises(EncoderError, match="change while it is used"):
        Embedder(tmp_path, fingerprint=lambda: "aa", embed=embed).vectors(["a"])


def test_a_text_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    def embed(texts: Sequence[str]) -> Embeddings:
        raise ItemError("has no letters", item=1)

    with pytest.raises(TextError) as caught:
        Embedder(tmp_path, fingerprint=lambda: "aa", embed=embed).vectors(["a", "b"])
    assert (caught.value.text, caught.value.what) == ("b", "has no letters")
