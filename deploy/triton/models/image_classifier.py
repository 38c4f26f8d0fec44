"""ImageNet's labels for a picture: EfficientNet-Lite0."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import numpy.typing as npt
from bytes_model import BytesModel, session, starter_file
from PIL import Image, UnidentifiedImageError

# A few kilobytes of PNG can claim gigabytes of pixels. 50 million is more than cameras in phones usually save.
MAX_PIXELS = 50_000_000
# Only these of Pillow's many decoders ever see a caller's bytes.
FORMATS = ("JPEG", "PNG", "WEBP")
Floats = npt.NDArray[np.float32]


class TritonPythonModel(BytesModel[Floats]):
    """An encoded picture in, the most likely labels and their probabilities out, best first."""

    def load(self, config: dict[str, Any]) -> None:
        """Read the network, its labels and how it wants pictures; the configuration says how many labels go out."""
        self._top = int(next(o for o in config["output"] if o["name"] == "LABEL")["dims"][0])
        self._labels = np.array(json.loads(starter_file("labels.json").read_text("utf-8")), dtype=np.object_)
        how = json.loads(starter_file("preprocessor_config.json").read_text("utf-8"))
        self._edge: int = how["size"]["shortest_edge"]
        self._crop: int = how["crop_size"]["height"]
        self._filter = Image.Resampling(how["resample"])
        mean, std = (np.array(how[key], np.float32) for key in ("image_mean", "image_std"))
        self._scale = np.float32(how["rescale_factor"]) / std
        self._shift = mean / std
        self._session = session(starter_file("vision_model.onnx"))

    def parse(self, data: bytes) -> Floats:
        """Decode, resize and crop."""
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError as error:
            msg = f"not a picture in any of {', '.join(FORMATS)}"
            raise ValueError(msg) from error
        except Exception as error:
            raise _unreadable(error) from error
        width, height = image.size  # from the header; nothing is decoded yet
        if width * height > MAX_PIXELS:
            msg = f"picture of {width}x{height} pixels; {MAX_PIXELS} at most"
            raise ValueError(msg)
        try:
            pixels: Floats = np.asarray(self._resize(image), np.float32) * self._scale - self._shift
        except Exception as error:
            raise _unreadable(error) from error
        channels_first: Floats = pixels.transpose(2, 0, 1)
        return channels_first

    def _resize(self, image: Image.Image) -> Image.Image:
        ratio = self._edge / min(image.size)
        width, height = (round(side * ratio) for side in image.size)
        image.draft("RGB", (width, height))  # JPEG only: decodes at the fraction of its size that this still allows
        # Only what the crop keeps is resized: a strip one pixel high would become gigabytes.
        left, top = (width - self._crop) / 2, (height - self._crop) / 2
        across, down = image.width / width, image.height / height
        box = (left * across, top * down, (left + self._crop) * across, (top + self._crop) * down)
        return image.convert("RGB").resize((self._crop, self._crop), self._filter, box)

    def infer(self, items: list[Floats]) -> dict[str, npt.NDArray[Any]]:
        """Classify a batch of pictures."""
        (probabilities,) = self._session.run(["class_probs"], {"pixel_values": np.stack(items)})
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self._top]
        return {"LABEL": self._labels[best], "SCORE": np.take_along_axis(probabilities, best, axis=1)}


def _unreadable(error: Exception) -> ValueError:
    """Blame the caller, whatever it was: a decoder fails in many ways on bytes that aren't what they claim."""
    return ValueError(f"not a readable picture ({error})")
