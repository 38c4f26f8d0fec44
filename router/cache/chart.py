"""Hit ratio over capacity as a picture: SVG written by hand, PNG by Pillow, so that no plotting library is needed."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from router.cache.simulate import Row

__all__ = ["to_png", "to_svg"]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 56
# Okabe and Ito's palette: told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#555555")
_INK, _GRID = "#222222", "#DDDDDD"
_SCALE = 2  # a PNG is drawn at this many pixels a point


@dataclass(frozen=True, slots=True)
class _Line:
    points: Sequence[tuple[float, float]]
    colour: str
    width: float
    dots: bool = False


@dataclass(frozen=True, slots=True)
class _Text:
    x: float
    y: float
    text: str
    anchor: str = "middle"
    colour: str = _INK
    size: int = 12


def _layout(title: str, rows: Sequence[Row]) -> list[_Line | _Text]:
    capacities = sorted({row.capacity for row in rows})
    low, high = math.log(capacities[0]), math.log(capacities[-1])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(capacity: int) -> float:
        return _LEFT + width * ((math.log(capacity) - low) / (high - low) if high > low else 0.5)

    def y(ratio: float) -> float:
        return _TOP + height * (1 - ratio)

    shapes: list[_Line | _Text] = [_Text(_WIDTH / 2, 24, title, size=15)]
    for percent in range(0, 101, 20):
        level = y(percent / 100)
        shapes.append(_Line([(_LEFT, level), (_LEFT + width, level)], _GRID, 1))
        shapes.append(_Text(_LEFT - 8, level + 4, f"{percent} %", "end"))
    last = -100.0
    for capacity in capacities:
        place = x(capacity)
        shapes.append(_Line([(place, _TOP), (place, _TOP + height)], _GRID, 1))
        if place - last > 44:
            shapes.append(_Text(place, _TOP + height + 18, f"{capacity}"))
            last = place
    shapes.append(_Text(_LEFT + width / 2, _HEIGHT - 12, "capacity in keys (logarithmic)"))
    policies = list(dict.fromkeys(row.policy for row in rows))
    for number, policy in enumerate(policies):
        colour = _COLOURS[number % len(_COLOURS)]
        points = sorted((row.capacity, row.ratio) for row in rows if row.policy == policy)
        shapes.append(_Line([(x(capacity), y(ratio)) for capacity, ratio in points], colour, 2, dots=True))
        level = _TOP + 12 + 22 * number
        shapes.append(_Line([(_WIDTH - _RIGHT + 14, level - 4), (_WIDTH - _RIGHT + 34, level - 4)], colour, 3))
        shapes.append(_Text(_WIDTH - _RIGHT + 40, level, policy, "start"))
    return shapes


def to_svg(title: str, rows: Sequence[Row]) -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for shape in _layout(title, rows):
        if isinstance(shape, _Text):
            parts.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" font-size="{shape.size}"'
                f' fill="{shape.colour}">{escape(shape.text)}</text>'
            )
            continue
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width}"/>')
        if shape.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{shape.colour}"/>' for x, y in shape.points]
    return "\n".join([*parts, "</svg>", ""])


def to_png(title: str, rows: Sequence[Row]) -> bytes:
    """Return the picture as PNG."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (_WIDTH * _SCALE, _HEIGHT * _SCALE), "white")
    draw = ImageDraw.Draw(image)
    anchors = {"middle": "ms", "start": "ls", "end": "rs"}
    for shape in _layout(title, rows):
        if isinstance(shape, _Text):
            font = ImageFont.load_default(shape.size * _SCALE)
            place = (shape.x * _SCALE, shape.y * _SCALE)
            draw.text(place, shape.text, shape.colour, font=font, anchor=anchors[shape.anchor])
            continue
        points = [(x * _SCALE, y * _SCALE) for x, y in shape.points]
        if len(points) > 1:
            draw.line(points, shape.colour, int(shape.width * _SCALE), joint="curve")
        if shape.dots:
            radius = 3 * _SCALE
            for x, y in points:
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), shape.colour)
    target = io.BytesIO()
    image.save(target, "PNG", optimize=True)
    return target.getvalue()
