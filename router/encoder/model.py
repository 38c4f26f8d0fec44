"""The dual encoder: texts and pictures to unit vectors of one space, by ONNX Runtime on the CPU.

Every item runs by itself. A batch of equally long texts would gain nothing from 16 tokens on (at 8 tokens 2.8 instead
of 5 ms each), and pictures gain nothing at all; in exchange an item's vector depends on that item alone, bit for bit,
also in a model with dynamic quantisation, which takes its scales from the whole batch. That matters because vectors
are content: a description's vector must not change when another service is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from router.encoder.errors import EncoderModelError, ItemError
from router.encoder.files import EncoderFiles, find
from router.encoder.preprocess import pixel_values, read_preprocessing
from router.encoder.text import MeanPoolingHead, Tokens

__all__ = ["DualEncoder"]

_Item = TypeVar("_Item", str, bytes)

_TYPES: dict[str, type[np.generic]] = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}

# Below this a vector has no direction worth the name: float32 rounding of a sum of unit vectors is about 1e-7.
_SHORTEST = 1e-6

_EXPORT_HINT = "export it with text_embeds and image_embeds as outputs (see router/encoder/README.md)"


class _Model:
    """One ONNX session: its inputs by name, one output that is wanted."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # warnings of graph optimisation say nothing to an operator
        # Threads that wait must not take the processor from Envoy beside them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has no base class of its own
            reason = " ".join(str(error).split())
            raise EncoderModelError(f"{path} can't be loaded: {reason}", hint="export the encoder again") from error
        self.path = path
        self.inputs: dict[str, Any] = {value.name: value for value in self._session.get_inputs()}
        self.outputs: list[str] = [value.name for value in self._session.get_outputs()]
        for value in self.inputs.values():
            if value.type not in _TYPES:
                raise EncoderModelError(f"{path}: input {value.name} is a {value.type}", hint=_EXPORT_HINT)
            if value.shape and isinstance(value.shape[0], int) and value.shape[0] != 1:
                raise EncoderModelError(
                    f"{path}: input {value.name} has a fixed batch of {value.shape[0]}",
                    hint="export it with a dynamic batch",
                )

    def need_inputs(self, required: str, optional: Sequence[str] = ()) -> None:
        """Raise unless ``required`` is an input, and every other one is in ``optional``."""
        if required not in self.inputs or not self.inputs.keys() <= {required, *optional}:
            raise EncoderModelError(f"{self.path}: inputs are {', '.join(self.inputs)}", hint=_EXPORT_HINT)

    def need_output(self, name: str) -> None:
        if name not in self.outputs:
            raise EncoderModelError(
                f"{self.path}: outputs are {', '.join(self.outputs)}; {name} is missing", hint=_EXPORT_HINT
            )

    def run(self, output: str, feeds: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        typed = {name: value.astype(_TYPES[self.inputs[name].type], copy=False) for name, value in feeds.items()}
        try:
            (result,) = self._session.run([output], typed)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise EncoderModelError(f"{self.path} failed: {reason}") from error
        return np.asarray(result, np.float32)


class DualEncoder:
    """Two towers that end in one space. Not for several threads at once (its owner has one).

    Attributes:
        name: For people.
        note: What a user must know before trusting it; empty for an export of which nothing is known.
        dimension: Length of every vector.
        fingerprint: Equal fingerprints mean comparable vectors.
        max_tokens: Tokens a text may have; longer text is cut.
    """

    name: str
    note: str
    dimension: int
    fingerprint: str
    max_tokens: int

    def __init__(self, files: EncoderFiles, *, threads: int, max_pixels: int) -> None:
        self.name = files.name
        self.note = files.note
        self.fingerprint = files.fingerprint
        self._max_pixels = max_pixels
        self._preprocessing = read_preprocessing(files.preprocessor)
        self._head = MeanPoolingHead(files.text.head) if files.text.head else None

        self._vision = _Model(files.vision_model, threads)
        self._vision.need_inputs("pixel_values")
        self._vision.need_output("image_embeds")

        self._text = _Model(files.text.model, threads)
        self._text.need_inputs("input_ids", ("attention_mask", "token_type_ids", "position_ids"))
        self._text_output = "last_hidden_state" if self._head else "text_embeds"
        self._text.need_output(self._text_output)
        self._length = _fixed_length(self._text)
        self.max_tokens = min(files.text.max_tokens, self._length or files.text.max_tokens)
        self._tokens = Tokens(files.text.tokenizer, max_tokens=self.max_tokens, scripts=files.text.scripts)
        self.dimension = self._probe(files)

    @classmethod
    def load(cls, path: Path | None = None, *, threads: int = 1, max_pixels: int = 64_000_000) -> Self:
        """Load the encoder in a directory; about half a second for the starter.

        Args:
            path: A CLIP export in Hugging Face's ONNX layout; None: the starter.
            threads: Processor threads a model may use.
            max_pixels: Pictures with more are refused before they are decoded.

        Raises:
            EncoderFilesError: A file is missing or can't be read.
            EncoderModelError: A model can't be loaded, or the towers don't fit each other.
        """
        return cls(find(path), threads=threads, max_pixels=max_pixels)

    def encode_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [texts, dimension], each row of unit length.

        Raises:
            ItemError: A text can't be encoded; ``item`` says which.
        """
        return self._rows(texts, lambda text: self._text_vector(self._tokens.ids(text)))

    def encode_images(self, pictures: Sequence[bytes]) -> NDArray[np.float32]:
        """Return [pictures, dimension], each row of unit length.

        Raises:
            ItemError: A picture can't be decoded; ``item`` says which.
        """

        def vector(picture: bytes) -> NDArray[np.float32]:
            return self._image_vector(pixel_values(picture, self._preprocessing, max_pixels=self._max_pixels))

        return self._rows(pictures, vector)

    def _rows(self, items: Sequence[_Item], vector: Callable[[_Item], NDArray[np.float32]]) -> NDArray[np.float32]:
        rows = np.empty((len(items), self.dimension), np.float32)
        for index, item in enumerate(items):
            try:
                rows[index] = _unit(vector(item))
            except ItemError as error:
                error.item = index
                raise
        return rows

    def _text_vector(self, ids: list[int]) -> NDArray[np.float32]:
        length = self._length or len(ids)
        padded = np.array([self._tokens.pad(ids, length)], np.int64)
        mask = (np.arange(length) < len(ids)).astype(np.int64)[None]
        every = {
            "input_ids": padded,
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(padded),
            "position_ids": np.arange(length, dtype=np.int64)[None],
        }
        result = self._text.run(self._text_output, {name: every[name] for name in self._text.inputs})
        rows = self._head(result, mask) if self._head else result
        return np.asarray(rows[0])

    def _image_vector(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(self._vision.run("image_embeds", {"pixel_values": pixels[None]})[0])

    def _probe(self, files: EncoderFiles) -> int:
        """Run both towers once: only a run shows that shapes fit. The first real request is then no slower either."""
        image = self._image_vector(np.zeros(self._preprocessing.shape, np.float32))
        try:
            text = self._text_vector(self._tokens.ids("a photo"))
        except ItemError as error:
            raise EncoderModelError(
                f"{files.text.tokenizer} does not know the words «a photo»: {error.what}"
            ) from error
        for model, vector in ((files.vision_model, image), (files.text.model, text)):
            if vector.ndim != 1:
                raise EncoderModelError(f"{model}: not one vector an item but {vector.shape}", hint=_EXPORT_HINT)
        if image.shape != text.shape:
            raise EncoderModelError(
                f"the towers end in different spaces: text {text.shape[0]}, image {image.shape[0]} dimensions",
                hint="take both models from one export",
            )
        if files.dimension not in {None, image.shape[0]}:
            raise EncoderModelError(f"encoder.json says {files.dimension} dimensions, the models {image.shape[0]}")
        return int(image.shape[0])


def _fixed_length(model: _Model) -> int | None:
    shape = model.inputs["input_ids"].shape
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else None


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(length) or length < _SHORTEST:
        raise ItemError("the encoder finds nothing in it: its vector has no direction")
    return vector / np.float32(length)
