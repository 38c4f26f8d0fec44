"""Encoded pictures to the numbers a vision tower wants, as ``preprocessor_config.json`` says.

Follows Hugging Face's CLIPImageProcessor (resize, centre crop, rescale, normalise, in this order) on top of its
``load_image`` (EXIF orientation), so that a CLIP export gets the input it was trained on. Two things are done
differently, neither of which moves a vector: a large JPEG is decoded at a reduced scale, and 16-bit grey is reduced to
8 bits by its high byte (Pillow's own conversion clips it to white).

Pictures come from anybody: formats are an allow-list, sizes are checked in the header before a pixel is decoded, and
whatever a decoder raises becomes an ``ItemError``.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from router.encoder.errors import EncoderFilesError, ItemError

__all__ = ["FORMATS", "Preprocessing", "pixel_values", "read_preprocessing"]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

# The centre crop keeps a square: of a longer strip it sees less than 1/200, and the resized strip, of which only that
# is kept, would take memory out of proportion to the file.
_MAX_ASPECT = 200

# A JPEG is decoded at the smallest of 1/1, 1/2, 1/4, 1/8 that still has this many times the pixels per side that the
# resize makes: 20 to 40 instead of 150 to 210 ms at 4000 pixels a side. Cosine to the embedding of the full decode, 9
# pictures at 1000, 2000 and 4000 pixels: at least 0.9987, or 0.9937 with a margin of 1.
_DRAFT_MARGIN = 2

# Pillow warns of large pictures, where our own limit decides, and of damaged EXIF data, which says nothing of the
# pixels: a stranger must not be able to write into our log.
warnings.filterwarnings("ignore", module=r"PIL\.")

# EXIF 2.32, tag Orientation: what brings the stored picture upright; 1 is upright.
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})

Side = Annotated[int, Field(ge=1, le=4096)]
Channels = tuple[float, float, float]


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ShortestEdge(_Section):
    """Resize so that the shorter side has this many pixels; the aspect ratio stays."""

    shortest_edge: Side


class Exact(_Section):
    """Resize, or crop, to exactly this."""

    height: Side
    width: Side


def _short(value: object) -> object:
    return {"shortest_edge": value} if isinstance(value, int) else value


def _square(value: object) -> object:
    return {"height": value, "width": value} if isinstance(value, int) else value


class Preprocessing(_Section):
    """``preprocessor_config.json``; the defaults are CLIPImageProcessor's."""

    image_processor_type: Literal["CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPFeatureExtractor"] = (
        "CLIPImageProcessor"
    )
    do_resize: bool = True
    size: Annotated[ShortestEdge | Exact, BeforeValidator(_short)] = ShortestEdge(shortest_edge=224)
    resample: Annotated[int, Field(ge=0, le=5)] = 3
    """Pillow's number of the filter; 3: bicubic."""
    do_center_crop: bool = True
    crop_size: Annotated[Exact, BeforeValidator(_square)] = Exact(height=224, width=224)
    do_rescale: bool = True
    rescale_factor: Annotated[float, Field(gt=0)] = 1 / 255
    do_normalize: bool = True
    image_mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    image_std: Channels = (0.26862954, 0.26130258, 0.27577711)

    @model_validator(mode="after")
    def _has_one_shape(self) -> Self:
        if not self.do_center_crop and not (self.do_resize and isinstance(self.size, Exact)):
            raise ValueError("pictures would differ in shape: needs do_center_crop, or a size of height and width")
        if any(value <= 0 for value in self.image_std):
            raise ValueError("image_std must be above 0")
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what ``pixel_values`` returns."""
        size = self.crop_size if self.do_center_crop else self.size
        assert isinstance(size, Exact)  # noqa: S101  by _has_one_shape
        return 3, size.height, size.width

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after the resize (``get_resize_output_image_size`` of transformers)."""
        if not self.do_resize:
            return width, height
        if isinstance(self.size, Exact):
            return self.size.width, self.size.height
        short = self.size.shortest_edge
        longer = int(short * max(width, height) / min(width, height))
        return (short, longer) if width <= height else (longer, short)


def read_preprocessing(path: Path) -> Preprocessing:
    """Read ``preprocessor_config.json``.

    Raises:
        EncoderFilesError: It can't be read, or asks for something other than CLIP's preprocessing.
    """
    try:
        return Preprocessing.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EncoderFilesError(f"{path} can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise EncoderFilesError(
            f"{path}: {place or 'document'}: {first['msg'].removeprefix('Value error, ')}",
            hint="export the encoder again",
        ) from error


def pixel_values(picture: bytes, preprocessing: Preprocessing, *, max_pixels: int) -> NDArray[np.float32]:
    """Decode a picture (of an animation, the first frame) and prepare it for the vision tower.

    Args:
        picture: JPEG, PNG, WebP, GIF or BMP.
        preprocessing: What the tower wants.
        max_pixels: Width times height, by the header, above which nothing is decoded.

    Returns:
        [3, height, width]; colours behind transparency count as they are, as in CLIP's own ``convert("RGB")``.

    Raises:
        ItemError: It is not a picture that can be taken; says why.
    """
    image = _decode(picture, preprocessing, max_pixels)
    values = _center_crop(np.asarray(image), preprocessing).astype(np.float32)
    if preprocessing.do_rescale:
        values *= np.float32(preprocessing.rescale_factor)
    if preprocessing.do_normalize:
        values -= np.asarray(preprocessing.image_mean, np.float32)
        values /= np.asarray(preprocessing.image_std, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def _decode(picture: bytes, preprocessing: Preprocessing, max_pixels: int) -> Image.Image:
    """Return the picture upright, in RGB, resized."""
    if not picture:
        raise ItemError("the picture has no bytes")
    try:
        with Image.open(io.BytesIO(picture), formats=FORMATS) as image:
            _check_size(image, max_pixels)
            return _upright_and_resized(image, preprocessing)
    except ItemError:
        raise
    except UnidentifiedImageError:
        raise ItemError("is no picture in a known format", hint="send JPEG, PNG, WebP, GIF or BMP") from None
    except Image.DecompressionBombError as error:
        raise ItemError("the picture has more pixels than Pillow decodes", hint="send a smaller one") from error
    except MemoryError as error:
        raise ItemError("the picture needs more memory than there is", hint="send a smaller one") from error
    except Exception as error:  # decoders raise a dozen types on bytes made to hurt them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ItemError(f"the picture can't be decoded: {reason}", hint="it may be cut off or damaged") from error


def _check_size(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise ItemError("the picture has no pixels")
    if width * height > max_pixels:
        raise ItemError(
            f"the picture has {width} × {height} pixels, more than {max_pixels}",
            hint="send a smaller one, or raise encoder.max_pixels",
        )
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise ItemError(f"the picture is a strip of {width} × {height} pixels", hint="send a part of it")


def _upright_and_resized(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    # Other formats may keep their EXIF data behind the pixels: there it is known after the load.
    jpeg = image.format in {"JPEG", "MPO"}
    if not jpeg:
        image.load()
    orientation = _orientation(image)
    width, height = image.size[::-1] if orientation in _SIDEWAYS else image.size
    target = preprocessing.resized(width, height)
    if jpeg:
        stored = target[::-1] if orientation in _SIDEWAYS else target
        image.draft(None, (stored[0] * _DRAFT_MARGIN, stored[1] * _DRAFT_MARGIN))
        image.load()
    colours = _rgb(image)
    if orientation in _UPRIGHT:
        colours = colours.transpose(_UPRIGHT[orientation])
    return colours.resize(target, Image.Resampling(preprocessing.resample)) if preprocessing.do_resize else colours


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF data says nothing about the pixels
        return 1
    return value if isinstance(value, int) else 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow wants this step between, and warns without it
    return image.convert("RGB")


def _center_crop(pixels: NDArray[np.uint8], preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Cut the middle out of [height, width, 3]; a smaller picture gets a black border (as in transformers)."""
    if not preprocessing.do_center_crop:
        return pixels
    _, height, width = preprocessing.shape
    have_height, have_width = pixels.shape[:2]
    if height > have_height or width > have_width:
        border = np.zeros((max(height, have_height), max(width, have_width), 3), np.uint8)
        # Rounded up, as there: one pixel more above and to the left.
        top = -(-(border.shape[0] - have_height) // 2)
        left = -(-(border.shape[1] - have_width) // 2)
        border[top : top + have_height, left : left + have_width] = pixels
        pixels = border
    top = (pixels.shape[0] - height) // 2
    left = (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
