"""The modality fingerprint of a request: 16 bytes that are equal on every machine and run.

It serves the filters, penetration control and affinity. It is **not** what an answer is served under: pictures that
look alike and texts that differ in case share one; ``key.py`` has the exact key.

The hashed line, in ASCII::

    t:TEXT|i:IMAGE,IMAGE|a:MEANS;MEANS          and |v:FRAMES;FRAMES  only where there is video

TEXT is xxh3-128 of the normalised text's UTF-8, IMAGE a dHash, both in hex; MEANS are 13 numbers joined by commas;
FRAMES the dHashes of one video's key frames, joined by commas. A part that is absent is empty.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_hexdigest

__all__ = ["FINGERPRINT_BYTES", "TextPolicy", "fingerprint", "fingerprint_line", "fnv1a_128", "normalise_text"]

FINGERPRINT_BYTES = 16

# The FNV-1a reference (draft-eastlake-fnv), 128 bits.
_OFFSET = 0x6C62272E07BB014262B821756295C58D
_PRIME = 0x0000000001000000000000000000013B
_MASK = (1 << 128) - 1
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TextPolicy:
    """Which differences between texts do not count. All are on by default; a route may switch each off."""

    nfkc: bool = True
    """Compatibility forms are one: full-width letters, ligatures, composed and decomposed accents."""
    casefold: bool = True
    collapse_spaces: bool = True
    """Runs of white space are one space; none at the ends."""


_DEFAULT_POLICY = TextPolicy()


def normalise_text(text: str, policy: TextPolicy = _DEFAULT_POLICY) -> str:
    """Return the text without the differences that do not count; applying it twice changes nothing.

    Code points that were assigned after the oldest Unicode version among the machines may be normalised on some of
    them only (Python 3.11: Unicode 14).
    """
    plain = text.isascii()  # ASCII is its own NFKC
    if policy.nfkc and not plain:
        text = unicodedata.normalize("NFKC", text)
    if policy.casefold:
        text = text.casefold()
        if policy.nfkc and not plain:
            # Folding can undo composition, and composing can yield what folds again (Unicode 3.13, NFKC_Casefold).
            text = unicodedata.normalize("NFKC", text).casefold()
            text = unicodedata.normalize("NFKC", text)
    return " ".join(text.split()) if policy.collapse_spaces else text


def fnv1a_128(data: bytes) -> int:
    """Return the 128-bit FNV-1a hash: 0.2 µs a byte, so for short lines only."""
    state = _OFFSET
    for byte in data:
        state = (state ^ byte) * _PRIME & _MASK
    return state


def _number(value: float) -> str:
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


def fingerprint_line(
    text: str | None = None,
    *,
    images: Sequence[int] = (),
    audio: Sequence[Sequence[float]] = (),
    video: Sequence[Sequence[int]] = (),
    policy: TextPolicy = _DEFAULT_POLICY,
) -> str:
    """Return the line that ``fingerprint`` hashes.

    Args:
        text: All text of the request; None and a text that normalises to nothing are the same.
        images: 64-bit dHashes, in the request's order.
        audio: For each clip its 13 MFCC means.
        video: For each video the dHashes of its key frames.
        policy: How the text is normalised.
    """
    normal = normalise_text(text, policy) if text else ""
    digest = xxh3_128_hexdigest(normal.encode("utf-8", "surrogatepass")) if normal else ""
    line = f"t:{digest}|i:{','.join(f'{image & _MASK64:016x}' for image in images)}|a:"
    if audio:
        line += ";".join(",".join(map(_number, means)) for means in audio)
    if video:
        line += "|v:" + ";".join(",".join(f"{frame & _MASK64:016x}" for frame in frames) for frames in video)
    return line


def fingerprint(
    text: str | None = None,
    *,
    images: Sequence[int] = (),
    audio: Sequence[Sequence[float]] = (),
    video: Sequence[Sequence[int]] = (),
    policy: TextPolicy = _DEFAULT_POLICY,
) -> bytes:
    """Return the 16 bytes, big-endian; arguments as for ``fingerprint_line``."""
    line = fingerprint_line(text, images=images, audio=audio, video=video, policy=policy)
    return fnv1a_128(line.encode("ascii")).to_bytes(FINGERPRINT_BYTES, "big")
