"""What models that take one byte string per item have in common: batching, and errors for each request alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import onnxruntime
import triton_python_backend_utils as pb_utils

Item = TypeVar("Item")
Array = npt.NDArray[Any]


class BytesModel(Generic[Item]):
    """One input ``[n, 1]`` of bytes; outputs of ``n`` rows.

    A subclass says how bytes become an item, and what comes out for a list of items.
    """

    def load(self, config: dict[str, Any]) -> None:
        """Read what is needed to serve, once, before the first request."""
        raise NotImplementedError

    def parse(self, data: bytes) -> Item:
        """Turn what a caller sent into an item; ``ValueError`` refuses it, with what the caller is told."""
        raise NotImplementedError

    def infer(self, items: list[Item]) -> dict[str, Array]:
        """Give each output, by name, with a row for each item."""
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        """Triton's hook: the model is being loaded."""
        config = json.loads(args["model_config"])
        (self._input,) = (tensor["name"] for tensor in config["input"])
        self.load(config)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Triton's hook: answer a batch; the scheduler put requests of several callers together."""
        items: list[Item] = []
        answers: list[slice | str] = []  # for each request, its rows, or why it is refused
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, self._input).as_numpy().ravel()
            try:
                parsed = [self.parse(row) for row in rows]
            except ValueError as error:
                answers.append(f"{self._input}: {error}")
            else:
                answers.append(slice(len(items), len(items) + len(parsed)))
                items += parsed
        outputs = self.infer(items) if items else {}
        return [self._response(answer, outputs) for answer in answers]

    @staticmethod
    def _response(answer: slice | str, outputs: dict[str, Array]) -> Any:
        if isinstance(answer, str):
            error = pb_utils.TritonError(answer, pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, rows[answer]) for name, rows in outputs.items()])


def starter_file(name: str) -> Path:
    """Find a file of the starter encoder, whose folder the server's environment names."""
    return Path(os.environ["MODALMESH_STARTER"]) / name


def session(model: Path) -> onnxruntime.InferenceSession:
    """Open an ONNX model on the CPU.

    Each model name is a process of its own, so onnxruntime's default, a thread for every core in each of them,
    would make them fight: ``OMP_NUM_THREADS`` rules here too.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
