from __future__ import annotations

import io
import json
import math
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from router.encoder.errors import EncoderFilesError, ItemError
from router.encoder.model import DualEncoder
from router.encoder.preprocess import Preprocessing, pixel_values, read_preprocessing

CLIP = Preprocessing()
LIMIT = 64_000_000


def encoded(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth, so that JPEG keeps it, and without any symmetry."""
    small = np.random.default_rng(3).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def straightforward(image: Image.Image, config: Preprocessing) -> NDArray[np.float64]:
    """CLIPImageProcessor once more, step by step, in float64, on a fully decoded picture."""
    rgb = image.convert("RGB")
    if config.do_resize:
        edge = getattr(config.size, "shortest_edge", None)
        if edge:
            width, height = rgb.size
            size = (edge, int(edge * height / width)) if width <= height else (int(edge * width / height), edge)
        else:
            size = (config.size.width, config.size.height)  # type: ignore[union-attr]
        rgb = rgb.resize(size, config.resample)
    pixels = np.asarray(rgb, np.float64)
    if config.do_center_crop:
        crop = config.crop_size
        canvas = np.zeros((crop.height, crop.width, 3))
        for row in range(crop.height):
            for column in range(crop.width):
                # Where the output's pixel lies in the picture; outside: black.
                y = row + _offset(pixels.shape[0], crop.height)
                x = column + _offset(pixels.shape[1], crop.width)
                if 0 <= y < pixels.shape[0] and 0 <= x < pixels.shape[1]:
                    canvas[row, column] = pixels[y, x]
        pixels = canvas
    if config.do_rescale:
        pixels = pixels * config.rescale_factor
    if config.do_normalize:
        pixels = (pixels - np.array(config.image_mean)) / np.array(config.image_std)
    return pixels.transpose(2, 0, 1)


def _offset(have: int, want: int) -> int:
    return (have - want) // 2 if have >= want else -math.ceil((want - have) / 2)


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    short=st.integers(1, 30),
    crop=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    steps=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    resample=st.sampled_from([0, 1, 2, 3]),
)
def test_equals_a_straightforward_implementation(
    *, width: int, height: int, short: int, crop: tuple[int, int], steps: tuple[bool, bool, bool], resample: int
) -> None:
    config = Preprocessing.model_validate(
        {
            "do_resize": steps[0],
            "size": {"shortest_edge": short},
            "resample": resample,
            "crop_size": {"height": crop[0], "width": crop[1]},
            "do_rescale": steps[1],
            "do_normalize": steps[2],
        }
    )
    image = noise(width, height)

    values = pixel_values(encoded(image), config, max_pixels=LIMIT)

    assert values.dtype == np.float32
    assert values.shape == (3, *crop)
    np.testing.assert_allclose(values, straightforward(image, config), rtol=1e-4, atol=1e-4)


def test_an_exact_size_needs_no_crop() -> None:
    config = Preprocessing.model_validate({"size": {"height": 6, "width": 9}, "do_center_crop": False})
    image = noise(31, 17)

    values = pixel_values(encoded(image), config, max_pixels=LIMIT)

    assert values.shape == (3, 6, 9)
    np.testing.assert_allclose(values, straightforward(image, config), atol=1e-4)


@pytest.mark.parametrize("size", [(1600, 1200), (1100, 2300)])
def test_a_reduced_decode_keeps_the_embedding(
    starter: DualEncoder, photographs: dict[str, bytes], size: tuple[int, int]
) -> None:
    for name in ("cat", "temple"):
        jpeg = encoded(Image.open(io.BytesIO(photographs[name])).convert("RGB").resize(size), "JPEG", quality=90)
        full = encoded(Image.open(io.BytesIO(jpeg)))  # the same pixels in a format that is decoded at full scale

        reduced, whole = starter.encode_images([jpeg, full])

        assert not np.array_equal(reduced, whole), "the reduced decode did not take place"
        assert reduced @ whole >= 0.99


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_data_says(format_: str, orientation: int) -> None:
    # A different implementation of the eight: where each stored row and column goes (EXIF 2.32, Orientation).
    upright = np.asarray(noise(48, 32))
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    every: dict[str, dict[str, int | bool]] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    options = every.get(format_, {})
    picture = encoded(Image.fromarray(np.ascontiguousarray(stored)), format_, exif=exif, **options)
    config = Preprocessing.model_validate({"do_resize": False, "crop_size": {"height": 32, "width": 48}})

    values = pixel_values(picture, config, max_pixels=LIMIT)

    np.testing.assert_allclose(
        values, straightforward(Image.fromarray(upright), config), atol=0.2 if format_ == "JPEG" else 1e-4
    )


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"II*\0\xff\xff\xff\xff\xff\xff", b"no TIFF header"])
def test_damaged_exif_data_says_nothing_about_the_pixels(format_: str, exif: bytes) -> None:
    picture = encoded(noise(20, 20), format_, exif=b"Exif\0\0" + exif)
    assert pixel_values(picture, CLIP, max_pixels=LIMIT).shape == (3, 224, 224)


def as_rgb(image: Image.Image) -> NDArray[np.float32]:
    return pixel_values(encoded(image.convert("RGB")), CLIP, max_pixels=LIMIT)


@pytest.mark.parametrize(
    ("mode", "format_"),
    [("L", "PNG"), ("1", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("RGBA", "WEBP"), ("P", "GIF")],
)
def test_every_kind_of_pixel_becomes_colours(mode: str, format_: str) -> None:
    image = noise(60, 60, mode)
    options = {"lossless": True} if format_ == "WEBP" else {}
    np.testing.assert_allclose(
        pixel_values(encoded(image, format_, **options), CLIP, max_pixels=LIMIT), as_rgb(image), atol=1e-5
    )


def test_colours_behind_transparency_stay() -> None:
    image = noise(30, 30, "RGBA")
    image.putalpha(0)
    options = {"lossless": True, "exact": True}
    for picture in (encoded(image), encoded(image, "WEBP", **options)):
        np.testing.assert_allclose(pixel_values(picture, CLIP, max_pixels=LIMIT), as_rgb(noise(30, 30)), atol=1e-5)


def test_a_palette_with_transparency_gives_no_warning() -> None:
    image = noise(30, 30, "P")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = pixel_values(encoded(image, transparency=bytes(range(256))), CLIP, max_pixels=LIMIT)
    np.testing.assert_allclose(values, as_rgb(image), atol=1e-5)


def test_16_bit_grey_is_not_clipped_to_white() -> None:
    grey = np.asarray(noise(40, 40, "L")).astype(np.uint16)
    picture = encoded(Image.fromarray(grey << 8 | 0x7F))
    np.testing.assert_allclose(pixel_values(picture, CLIP, max_pixels=LIMIT), as_rgb(noise(40, 40, "L")), atol=1e-5)


def test_cmyk_jpeg() -> None:
    picture = encoded(Image.new("CMYK", (50, 50), (0, 255, 255, 0)), "JPEG", quality=95)
    config = Preprocessing.model_validate({"do_normalize": False})
    red, green, blue = pixel_values(picture, config, max_pixels=LIMIT).mean(axis=(1, 2))
    assert red > 0.9
    assert green < 0.1
    assert blue < 0.1


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(format_: str) -> None:
    first, second = Image.new("RGB", (30, 30), (255, 0, 0)), Image.new("RGB", (30, 30), (0, 0, 255))
    options = {"lossless": True} if format_ == "WEBP" else {}
    picture = encoded(first, format_, save_all=True, append_images=[second], **options)
    np.testing.assert_allclose(pixel_values(picture, CLIP, max_pixels=LIMIT), as_rgb(first), atol=1e-5)


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def webp_header(width: int, height: int) -> bytes:
    body = (
        b"VP8X"
        + struct.pack("<I", 10)
        + b"\0\0\0\0"
        + struct.pack("<I", width - 1)[:3]
        + struct.pack("<I", height - 1)[:3]
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


@pytest.mark.parametrize(
    "picture",
    [
        png_header(8001, 8001),
        png_header(2**31 - 1, 2**31 - 1),
        b"BM" + struct.pack("<IHHI", 60, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 30000, 30000, 1, 24, 0, 0, 0, 0, 0, 0),
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
        + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00;",
        webp_header(16383, 16383),
    ],
    ids=["png", "png-largest", "bmp", "gif", "webp"],
)  # fmt: skip
def test_a_bomb_is_refused_by_its_header(picture: bytes) -> None:
    with pytest.raises(ItemError, match=r"pixels|decoded"):
        pixel_values(picture, CLIP, max_pixels=LIMIT)


def test_the_limit_is_exact() -> None:
    picture = encoded(noise(30, 20))
    pixel_values(picture, CLIP, max_pixels=600)
    with pytest.raises(ItemError, match="30 × 20 pixels, more than 599"):
        pixel_values(picture, CLIP, max_pixels=599)


def test_a_strip_is_refused_before_it_is_blown_up() -> None:
    with pytest.raises(ItemError, match="strip"):
        pixel_values(encoded(Image.new("L", (100_000, 1))), CLIP, max_pixels=LIMIT)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_a_truncated_picture_is_refused(format_: str) -> None:
    whole = encoded(noise(200, 150), format_)
    for length in (1, 10, 40, len(whole) // 2, len(whole) * 9 // 10):
        with pytest.raises(ItemError):
            pixel_values(whole[:length], CLIP, max_pixels=LIMIT)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (b"", "no bytes"),
        (b"\0" * 1000, "no picture in a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture in a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture in a known format"),
        (encoded(noise(9, 9), "TIFF"), "no picture in a known format"),
        (encoded(noise(9, 9), "ICO", sizes=[(9, 9)]), "no picture in a known format"),
        (encoded(noise(9, 9), "PPM"), "no picture in a known format"),
    ],
)
def test_what_is_no_picture_is_refused(picture: bytes, message: str) -> None:
    with pytest.raises(ItemError, match=message):
        pixel_values(picture, CLIP, max_pixels=LIMIT)


@settings(max_examples=150, deadline=None)
@given(
    format_=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP"]),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damage_gives_pixels_or_an_item_error(format_: str, damage: list[tuple[int, int]]) -> None:
    picture = bytearray(encoded(noise(16, 12), format_))
    for place, value in damage:
        picture[place % len(picture)] = value
    try:
        values = pixel_values(bytes(picture), CLIP, max_pixels=1_000_000)
    except ItemError:
        return
    assert np.isfinite(values).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "document"),
        ('{"image_processor_type": "SiglipImageProcessor"}', "image_processor_type"),
        ('{"do_center_crop": false}', "differ in shape"),
        ('{"size": {"longest_edge": 5}}', "size"),
        ('{"size": {"shortest_edge": 100000}}', "size"),
        ('{"image_std": [0, 1, 1]}', "image_std"),
    ],
)
def test_a_configuration_of_something_else_is_refused(tmp_path: Path, config: str, message: str) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(config)
    with pytest.raises(EncoderFilesError, match=message):
        read_preprocessing(path)


def test_old_and_new_spellings_of_a_size_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"size": 8, "crop_size": 8}))
    assert read_preprocessing(path) == Preprocessing.model_validate(
        {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    )
