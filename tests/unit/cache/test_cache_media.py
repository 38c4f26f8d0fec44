"""dHash against imagehash's, MFCC means against librosa's; strangers' files against the decoders."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from router.cache.errors import FingerprintError
from router.cache.media import dhash, mel_filterbank, mfcc_means, read_wav
from tests.data.cache.samples import RATE, chirp, pictures, sounds
from tests.unit.cache.conftest import VECTORS

MEANS = json.loads((VECTORS / "mfcc.json").read_text())["means"]
HASHES = json.loads((VECTORS / "dhash.json").read_text())["dhash"]
MEL = json.loads((VECTORS / "mel.json").read_text())["nonzero"]


def png(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


@pytest.mark.parametrize("name", sorted(HASHES))
def test_dhash_is_imagehashs(name: str) -> None:
    assert f"{dhash(png(pictures()[name])):016x}" == HASHES[name]


@pytest.mark.parametrize("name", ["astronaut", "chelsea", "coffee", "rocket"])
def test_a_scaled_jpeg_decode_changes_at_most_a_bit(name: str) -> None:
    from skimage import data

    large = Image.fromarray(getattr(data, name)()).resize((1920, 1080), Image.Resampling.BICUBIC)
    encoded = png(large, "JPEG", quality=92)
    with Image.open(io.BytesIO(encoded)) as decoded:
        whole = dhash(png(decoded.convert("RGB")))
    assert (whole ^ dhash(encoded)).bit_count() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"])
def test_every_kind_of_picture_is_taken(mode: str) -> None:
    grey = pictures()["rings"]
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    image = deep if mode == "I;16" else grey.convert(mode)
    data = png(image, "JPEG" if mode == "CMYK" else "PNG")
    distance = (dhash(data) ^ dhash(png(grey))).bit_count()
    assert distance <= (16 if mode in {"1", "P"} else 1)


def test_damaged_and_hostile_pictures_are_refused() -> None:
    whole = png(pictures()["rings"])
    for data in (b"", b"GIF89a", whole[: len(whole) // 2], b"\xff\xd8\xff" + bytes(50)):
        with pytest.raises(FingerprintError):
            dhash(data)
    with pytest.raises(FingerprintError, match="320 × 240 pixels"):
        dhash(whole, max_pixels=1000)


@pytest.mark.parametrize("name", sorted(MEANS))
def test_mfcc_means_are_librosas(name: str) -> None:
    found = np.array(mfcc_means(sounds()[name]))
    double, single = (np.array(MEANS[name][kind]) for kind in ("float64", "float32"))
    np.testing.assert_allclose(found, double, rtol=1e-5, atol=1e-9)
    # librosa's default is single precision, whose own error exceeds that where a mean is near nothing.
    assert np.abs(found - single).max() <= 1e-5 * np.abs(single).max()


def test_the_filterbank_is_slaneys() -> None:
    filters = mel_filterbank()
    assert filters.shape == (128, 1025)
    for row, values in MEL.items():
        np.testing.assert_allclose(filters[int(row)][np.nonzero(filters[int(row)])], values, rtol=1e-9)


def wav(samples: NDArray[np.float64], *, rate: int, kind: str) -> bytes:
    from scipy.io import wavfile

    scaled: dict[str, NDArray[np.generic]] = {
        "int16": (samples * 32767).astype(np.int16),
        "int32": (samples * (2**31 - 1)).astype(np.int32),
        "uint8": (samples * 127 + 128).astype(np.uint8),
        "float32": samples.astype(np.float32),
    }
    target = io.BytesIO()
    wavfile.write(target, rate, scaled[kind])
    return target.getvalue()


@pytest.mark.parametrize("kind", ["int16", "int32", "uint8", "float32"])
def test_wav_files(kind: str) -> None:
    samples = chirp(RATE)
    found = read_wav(wav(samples, rate=RATE, kind=kind))
    np.testing.assert_allclose(found, samples, atol=0.02)


def test_other_rates_and_channels() -> None:
    time = np.arange(48_000) / 48_000
    tone = np.sin(2 * np.pi * 440 * time) / 2
    found = read_wav(wav(np.stack([tone, tone], -1), rate=48_000, kind="float32"))
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) / 2
    assert len(found) == 16_000
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=0.01)


def test_damaged_and_hostile_sounds_are_refused() -> None:
    whole = wav(chirp(RATE), rate=RATE, kind="int16")
    huge = bytearray(whole)
    struct.pack_into("<I", huge, 24, 10_000_000)  # samples a second
    for data in (b"", b"RIFF", whole[:30], bytes(huge), b"ID3" + bytes(100)):
        with pytest.raises(FingerprintError):
            read_wav(data)
    with pytest.raises(FingerprintError, match=r"at most 0\.5 s"):
        read_wav(whole, max_seconds=0.5)
    with pytest.raises(FingerprintError):
        mfcc_means(np.array([]))
    with pytest.raises(FingerprintError):
        mfcc_means(np.array([1.0, np.nan]))
