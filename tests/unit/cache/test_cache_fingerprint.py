from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cache.fingerprint import TextPolicy, fingerprint, fingerprint_line, fnv1a_128, normalise_text
from tests.unit.cache.conftest import VECTORS

DOCUMENT = json.loads((VECTORS / "fingerprint.json").read_text(encoding="utf-8"))


def test_fnv1a_is_the_published_one() -> None:
    # The reference's offset basis is the hash of nothing; «a» and «foobar» as in its test suite.
    assert fnv1a_128(b"") == 0x6C62272E07BB014262B821756295C58D
    assert fnv1a_128(b"a") == 0xD228CB696F1A8CAF78912B704E4A8964
    assert fnv1a_128(b"foobar") == 0x343E1662793C64BF6F0D3597BA446F18
    assert fnv1a_128(b"hello") == 0xE3E1EFD54283D94F7081314B599D31B3


@pytest.mark.parametrize("vector", DOCUMENT["vectors"], ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, object]) -> None:
    images = [int(image, 16) for image in vector.get("images", [])]  # type: ignore[attr-defined]
    video = [[int(frame, 16) for frame in frames] for frames in vector.get("video", [])]  # type: ignore[attr-defined]
    arguments = {"images": images, "audio": vector.get("audio", []), "video": video}
    text = vector.get("text")
    assert fingerprint_line(text, **arguments) == vector["line"]  # type: ignore[arg-type]
    assert fingerprint(text, **arguments).hex() == vector["fingerprint"]  # type: ignore[arg-type]


def test_differences_that_do_not_count_and_those_that_do() -> None:
    same = fingerprint("A  photo of\ta CAFÉ ")
    assert fingerprint("a photo of a cafe\u0301") == same
    assert fingerprint("a photo of a ｃａｆｅ\u0301") == same
    assert fingerprint("no photo of a café") != same
    assert fingerprint("A  photo", policy=TextPolicy(collapse_spaces=False)) != fingerprint("A photo")
    assert fingerprint("A", policy=TextPolicy(casefold=False)) != fingerprint("a")
    assert fingerprint("ﬁ", policy=TextPolicy(nfkc=False, casefold=False)) != fingerprint("fi")


def test_parts_do_not_run_into_each_other() -> None:
    shapes = [
        fingerprint_line("x"),
        fingerprint_line(None, images=[1]),
        fingerprint_line(None, images=[1, 2]),
        fingerprint_line(None, images=[2, 1]),
        fingerprint_line(None, audio=[[1.0] * 13]),
        fingerprint_line(None, audio=[[1.0] * 13, [1.0] * 13]),
        fingerprint_line(None, video=[[1, 2]]),
        fingerprint_line(None, video=[[1], [2]]),
    ]
    assert len(set(shapes)) == len(shapes)
    assert fingerprint_line() == fingerprint_line("  ") == "t:|i:|a:"


def test_minus_nothing_is_nothing() -> None:
    assert fingerprint_line(audio=[[-0.0001, 0.0001, -0.0006]]).endswith("|a:0.000,0.000,-0.001")


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    for policy in (TextPolicy(), TextPolicy(casefold=False), TextPolicy(nfkc=False), TextPolicy(collapse_spaces=False)):
        once = normalise_text(text, policy)
        if policy.nfkc or not policy.casefold:
            assert normalise_text(once, policy) == once
    assert len(fingerprint(text)) == 16


def test_half_a_surrogate_pair_has_a_fingerprint() -> None:
    assert fingerprint("\ud800") != fingerprint("\ud801")
