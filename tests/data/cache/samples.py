"""Sounds and pictures that come out the same on every machine: only exact arithmetic makes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RATE = 16_000


def sounds() -> dict[str, NDArray[np.float64]]:
    return {
        "chirp": chirp(RATE * 2),
        "noise": noise(RATE),
        "clicks": clicks(RATE * 3),
        "short": chirp(700),
        "silence": np.zeros(4000),
        "long": np.concatenate([noise(RATE * 4), chirp(RATE * 5), np.zeros(RATE)]),
    }


def noise(count: int) -> NDArray[np.float64]:
    state = 12345
    values: list[float] = []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        values.append(state / 2**30 - 1)
    return np.array(values) / 2


def chirp(count: int) -> NDArray[np.float64]:
    # A square wave whose period shrinks: rational arithmetic only.
    place = np.arange(count)
    period = 200 - (place * 150) // max(count, 1)
    return np.where(place % period * 2 < period, 0.25, -0.25)


def clicks(count: int) -> NDArray[np.float64]:
    values = np.zeros(count)
    values[::997] = 0.9
    values[500::1999] = -0.4
    return values


def pictures() -> dict[str, Image.Image]:
    y, x = np.mgrid[0:240, 0:320]
    return {
        "gradient": Image.fromarray(((x * 7 + y * 3) % 256).astype(np.uint8)),
        "rings": Image.fromarray((((x - 160) ** 2 + (y - 120) ** 2) // 97 % 256).astype(np.uint8)),
        "checks": Image.fromarray(((x // 40 + y // 30) % 2 * 200 + x // 8).astype(np.uint8)),
        "colour": Image.fromarray(np.stack([x % 256, y % 256, (x * y) // 300 % 256], -1).astype(np.uint8)),
    }
