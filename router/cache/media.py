"""What a picture looks like and a sound sounds like, in a few bytes: dHash and MFCC means.

Both decode what strangers sent: sizes are checked before anything is decoded, and whatever a decoder raises becomes a
``FingerprintError``.
"""

from __future__ import annotations

import io
import math
import warnings
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from router.cache.errors import FingerprintError
from router.encoder.preprocess import FORMATS

__all__ = ["SAMPLE_RATE", "dhash", "mel_filterbank", "mfcc_means", "read_wav"]

SAMPLE_RATE = 16_000
"""Samples a second that MFCC means are taken of."""

# dHash compares neighbours in a grid of 9 × 8. A JPEG is decoded at the smallest scale that still has 8 times as many
# pixels a side: 3.9 instead of 21.6 ms for 1080p, with 0 or 1 of 64 bits changed.
_GRID = (9, 8)
_DRAFT = (72, 64)

# The filter decides more bits than the decoder does (box and Lanczos differ by 11), so it is pinned.
_RESAMPLE = Image.Resampling.LANCZOS

# librosa 0.11's defaults for librosa.feature.mfcc.
_WINDOW = 2048
_HOP = 512
_MELS = 128
_COEFFICIENTS = 13
_AMIN = 1e-10
_TOP_DB = 80.0

# Frames that are transformed at once: keeps the working set near 4 MB however long the sound is.
_FRAMES_AT_ONCE = 256


def dhash(picture: bytes, *, max_pixels: int = 64_000_000) -> int:
    """Return the 64-bit difference hash: bit = a pixel is brighter than its left neighbour, row by row, high bit first.

    EXIF orientation is not applied, transparency is ignored, and of an animation the first frame counts.

    Args:
        picture: JPEG, PNG, WebP, GIF or BMP.
        max_pixels: Width times height, by the header, above which nothing is decoded.

    Raises:
        FingerprintError: It is no picture that can be taken.
    """
    try:
        with Image.open(io.BytesIO(picture), formats=FORMATS) as image:
            _check_size(*image.size, max_pixels)
            image.draft("L", _DRAFT)
            grid = np.asarray(_grey(image).resize(_GRID, _RESAMPLE))
    except FingerprintError:
        raise
    except Exception as error:  # decoders raise a dozen types on bytes made to hurt them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FingerprintError(
            f"the picture can't be decoded: {reason}", hint="it may be cut off or damaged"
        ) from error
    return int.from_bytes(np.packbits(grid[:, 1:] > grid[:, :-1]).tobytes(), "big")


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if not 0 < width * height <= max_pixels:
        raise FingerprintError(
            f"the picture has {width} × {height} pixels; from 1 to {max_pixels} are taken", hint="send another size"
        )


def _grey(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips 16 bits to white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow wants this step between, and warns without it
    return image.convert("L")


def read_wav(sound: bytes, *, max_seconds: float = 600.0) -> NDArray[np.float64]:
    """Return the samples of a WAV file (PCM or float), channels averaged, resampled to 16 kHz, in −1…1.

    Raises:
        FingerprintError: It is no WAV file, has no samples, or is too long.
    """
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # a stranger must not be able to write to our log
            rate, raw = wavfile.read(io.BytesIO(sound))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FingerprintError(f"the sound can't be decoded: {reason}", hint="send WAV, PCM or float") from error
    if raw.size == 0 or not 1000 <= rate <= 384_000 or len(raw) > max_seconds * rate:
        raise FingerprintError(f"the sound has {len(raw)} samples at {rate} Hz; at most {max_seconds:g} s are taken")
    if raw.dtype == np.uint8:
        samples = (raw.astype(np.float64) - 128) / 128
    elif raw.dtype.kind == "i":
        samples = raw.astype(np.float64) / -float(np.iinfo(raw.dtype).min)
    else:
        samples = raw.astype(np.float64)
    if samples.ndim > 1:
        samples = samples.mean(axis=1)
    if rate != SAMPLE_RATE:
        common = math.gcd(rate, SAMPLE_RATE)
        samples = resample_poly(samples, SAMPLE_RATE // common, rate // common)
    return np.asarray(samples, np.float64)


def _hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's mel scale (Auditory Toolbox, 1998): linear to 1 kHz, 200/3 Hz a mel; above, 27 mels are a factor 6.4."""
    linear = mel * (200 / 3)
    return np.where(mel < 15, linear, 1000 * np.exp((mel - 15) * (math.log(6.4) / 27)))


def _mel(hz: float) -> float:
    return hz * 3 / 200 if hz < 1000 else 15 + math.log(hz / 1000) * 27 / math.log(6.4)


@cache
def mel_filterbank(rate: int = SAMPLE_RATE, window: int = _WINDOW, bands: int = _MELS) -> NDArray[np.float64]:
    """Return Slaney's triangular filters, each of area 1: [bands, window / 2 + 1].

    Band edges lie equally spaced in mels from 0 Hz to half the rate; a triangle rises from one edge to the next and
    falls to the one after, and is scaled by 2 / its width in Hz.
    """
    edges = _hz(np.linspace(0.0, _mel(rate / 2), bands + 2))
    frequencies = np.linspace(0.0, rate / 2, window // 2 + 1)
    widths = np.diff(edges)
    distance = edges[:, None] - frequencies[None, :]
    rising = -distance[:-2] / widths[:-1, None]
    falling = distance[2:] / widths[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    filters *= (2.0 / (edges[2:] - edges[:-2]))[:, None]
    filters.setflags(write=False)
    return filters


@cache
def _sparse_filterbank() -> Any:
    """The same as rows of what is not zero: 60 times fewer products, added in an order that no BLAS changes."""
    from scipy.sparse import csr_array

    return csr_array(mel_filterbank())


@cache
def _dct() -> NDArray[np.float64]:
    """The first rows of the orthonormal DCT-II: [13, 128]."""
    rows = np.arange(_COEFFICIENTS)[:, None]
    matrix = np.cos(np.pi * rows * (2 * np.arange(_MELS)[None, :] + 1) / (2 * _MELS)) * math.sqrt(2 / _MELS)
    matrix[0] /= math.sqrt(2)
    return np.asarray(matrix)


def mfcc_means(samples: NDArray[np.floating]) -> tuple[float, ...]:
    """Return the means over time of 13 mel-frequency cepstral coefficients, as ``librosa.feature.mfcc`` has them.

    The mean is taken before the cosine transform, which is linear. In double precision throughout, because the
    fingerprint prints three decimals: what two machines round differently must be far below them.

    Args:
        samples: [n] at 16 kHz, n ≥ 1.

    Raises:
        FingerprintError: There are no samples, or not all are finite.
    """
    signal = np.ascontiguousarray(samples, np.float64)
    if signal.ndim != 1 or not signal.size or not np.isfinite(signal).all():
        raise FingerprintError("the sound has no samples, or some that are no numbers")
    padded = np.pad(signal, _WINDOW // 2)  # librosa's center=True
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
    filters = _sparse_filterbank()
    decibels = np.empty((len(frames), _MELS))
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        spectrum = np.fft.rfft(frames[start : start + _FRAMES_AT_ONCE] * hann)
        power = spectrum.real**2 + spectrum.imag**2
        decibels[start : start + len(power)] = (filters @ power.T).T
    np.log10(np.maximum(decibels, _AMIN, out=decibels), out=decibels)
    decibels *= 10
    np.maximum(decibels, decibels.max() - _TOP_DB, out=decibels)
    return tuple(float(value) for value in _dct() @ decibels.mean(axis=0))
