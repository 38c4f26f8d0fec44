"""Reads what the router needs of a KServe v2 ``ModelInferRequest``, and renames its model, without touching tensors.

Source: the Open Inference Protocol's ``grpc_predict_v2.proto`` and, where it is silent, Triton's server: an input in
shared memory takes no entry of ``raw_input_contents``.

Content is looked for in tensors of datatype BYTES only; whatever else a request carries (an FP32 image, say) can't be
told apart by its bytes, and the answer is «no content». In each BYTES tensor the first elements are looked at:

- An element that begins as a JPEG, PNG, GIF, WebP or BMP file is a picture. A picture in any input makes the request an
  image request, whatever text comes with it: a service that takes only text could not answer it. With several, the
  first one stands for all.
- Else valid UTF-8 without NUL is text. The first tensor that has any counts; its elements, which are a batch or the
  lines of one request, are joined by line feeds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from router.errors import KServeError
from router.modality import Modality
from router.wire import BYTES, Budget, Field, encode_varint, walk

__all__ = ["LONGEST_TEXT", "MOST_ELEMENTS", "Content", "InferRequest", "Input", "find_content", "read", "rename"]

MOST_ELEMENTS = 16
"""Elements of one tensor that are looked at: enough to know what a batch is about."""

LONGEST_TEXT = 64 * 1024
"""Bytes of text handed on; the longest text tower in use reads a few hundred tokens."""

# Field numbers of inference.ModelInferRequest, .InferInputTensor, .InferTensorContents.
_MODEL_NAME, _ID, _INPUTS, _RAW_INPUT_CONTENTS = 1, 3, 5, 7
_TENSOR_NAME, _TENSOR_DATATYPE, _TENSOR_PARAMETERS, _TENSOR_CONTENTS = 1, 2, 4, 5
_BYTES_CONTENTS = 8
_LENGTH_DELIMITED = frozenset({1, 2, 3, 4, 5, 6, 7})
_TENSOR_LENGTH_DELIMITED = frozenset({1, 2, 4, 5})  # shape (3) may be packed or not

_SHARED_MEMORY = b"shared_memory_region"

# bmp(5) has but two letters of magic; the size of its second header makes sure that «BMW …» stays a text.
_BMP_HEADERS = frozenset({12, 16, 40, 52, 56, 64, 108, 124})


@dataclass(frozen=True, slots=True)
class Input:
    """An input tensor: where its content lies, unread."""

    name: str
    datatype: str
    raw: memoryview | None
    contents: tuple[memoryview, ...]
    """``InferTensorContents``; a message field that stands several times is merged, so all count."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What was read of a request; views point into the message."""

    model_name: str
    request_id: str
    model_name_span: tuple[int, int]
    """Where the field stands that decides the name; empty span at 0: nowhere."""
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Content:
    """What a request is about: text, or the first bytes to last of a picture file."""

    modality: Modality
    data: str | bytes


def read(message: bytes | memoryview) -> InferRequest:
    """Read a serialised ``ModelInferRequest``.

    Raises:
        KServeError: It breaks the wire format, or a field that is read has a wrong type.
    """
    view = memoryview(message)
    budget = Budget()
    model_name, request_id, span = "", "", (0, 0)
    tensors: list[memoryview] = []
    raw: list[memoryview] = []
    for field in walk(view, budget):
        if field.wire_type != BYTES:
            _refuse_wire_type(field, _LENGTH_DELIMITED)
        elif field.number == _MODEL_NAME:
            model_name, span = _text(field), (field.start, field.end)
        elif field.number == _ID:
            request_id = _text(field)
        elif field.number == _INPUTS:
            tensors.append(field.value)
        elif field.number == _RAW_INPUT_CONTENTS:
            raw.append(field.value)
    return InferRequest(model_name, request_id, span, tuple(_inputs(tensors, raw, budget)))


def rename(message: bytes | memoryview, request: InferRequest, model_name: str) -> tuple[bytes | memoryview, ...]:
    """Return the message's parts with another model name; every other byte stays as it is.

    Of several ``model_name`` fields the last one counts, so that one is replaced; without any one is put in front.
    """
    view = memoryview(message)
    start, end = request.model_name_span
    name = model_name.encode()
    return view[:start], bytes([_MODEL_NAME << 3 | BYTES]) + encode_varint(len(name)) + name, view[end:]


def find_content(request: InferRequest) -> Content | None:
    """Return what the request is about, None if no BYTES tensor holds a picture or text.

    Raises:
        KServeError: A BYTES tensor that is looked at is cut off or malformed.
    """
    text: Content | None = None
    budget = Budget()
    for tensor in request.inputs:
        if tensor.datatype != "BYTES":
            continue
        elements = list(islice(_elements(tensor, budget), MOST_ELEMENTS))
        for element in elements:
            if _is_picture(element):
                return Content(Modality.IMAGE, bytes(element))
        if text is None:
            text = _joined_text(elements)
    return text


def _inputs(tensors: list[memoryview], raw: list[memoryview], budget: Budget) -> Iterator[Input]:
    unused = iter(raw)
    for tensor in tensors:
        name = datatype = ""
        contents: list[memoryview] = []
        shared = False
        for field in walk(tensor, budget):
            if field.wire_type != BYTES:
                _refuse_wire_type(field, _TENSOR_LENGTH_DELIMITED)
            elif field.number == _TENSOR_NAME:
                name = _text(field)
            elif field.number == _TENSOR_DATATYPE:
                datatype = _text(field)
            elif field.number == _TENSOR_PARAMETERS:
                shared = shared or _key(field.value, budget) == _SHARED_MEMORY
            elif field.number == _TENSOR_CONTENTS:
                contents.append(field.value)
        yield Input(name, datatype, None if shared else next(unused, None), () if shared else tuple(contents))


def _key(entry: memoryview, budget: Budget) -> bytes:
    """Return the key of a map entry."""
    key = b""
    for field in walk(entry, budget):
        if field.number == 1 and field.wire_type == BYTES:
            key = bytes(field.value[: len(_SHARED_MEMORY) + 1])
    return key


def _elements(tensor: Input, budget: Budget) -> Iterator[memoryview]:
    if tensor.raw is None:
        for message in tensor.contents:
            for field in walk(message, budget):
                if field.number == _BYTES_CONTENTS:
                    _refuse_wire_type(field, frozenset({_BYTES_CONTENTS}))
                    yield field.value
        return
    raw, at = tensor.raw, 0
    while at < len(raw):
        if len(raw) - at < 4:
            raise KServeError(f"input {tensor.name!r}: the length of an element is cut off")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4
        if length > len(raw) - at:
            raise KServeError(f"input {tensor.name!r}: an element is longer than its tensor")
        yield raw[at : at + length]
        at += length


def _joined_text(elements: list[memoryview]) -> Content | None:
    texts: list[str] = []
    left = LONGEST_TEXT
    for element in elements:
        cut = bytes(element[:left])
        try:
            # Only where the cut fell may a character be incomplete.
            text = cut.decode(errors="strict") if len(cut) == len(element) else _decode_cut(cut)
        except UnicodeDecodeError:
            continue
        if "\0" in text or not text.strip():
            continue
        texts.append(text)
        left -= len(cut)
        if left <= 0:
            break
    return Content(Modality.TEXT, "\n".join(texts)) if texts else None


def _decode_cut(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise
        return data[: error.start].decode()


def _is_picture(element: memoryview) -> bool:
    head = bytes(element[:18])
    return (
        head.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"))
        or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
        # Every block of a GIF ends with NUL (GIF89a, §16), which no text has.
        or (head.startswith((b"GIF87a", b"GIF89a")) and b"\0" in bytes(element[6:1024]))
        or (head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS)
    )


def _text(field: Field) -> str:
    try:
        return str(field.value, "utf-8")
    except UnicodeDecodeError as error:
        raise KServeError(f"byte {field.start}: field {field.number} is no UTF-8") from error


def _refuse_wire_type(field: Field, length_delimited: frozenset[int]) -> None:
    if field.wire_type != BYTES and field.number in length_delimited:
        raise KServeError(
            f"byte {field.start}: field {field.number} has wire type {field.wire_type} instead of {BYTES}"
        )
