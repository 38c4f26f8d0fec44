from __future__ import annotations

import struct
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from router.errors import KServeError
from router.kserve import LONGEST_TEXT, Content, find_content, read, rename
from router.modality import Modality

JPEG = b"\xff\xd8\xff\xe0" + bytes(30)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(30)
GIF = b"GIF89a" + bytes(30)
WEBP = b"RIFF\x24\x00\x00\x00WEBPVP8 " + bytes(30)
BMP = b"BM\x66\x00\x00\x00" + bytes(4) + b"\x36\x00\x00\x00\x28\x00\x00\x00" + bytes(30)

Request = service_pb2.ModelInferRequest


def raw(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def request(*inputs: tuple[str, bytes], model: str = "auto") -> Any:
    message = Request(model_name=model, id="r1")
    for place, (datatype, content) in enumerate(inputs):
        message.inputs.add(name=f"in{place}", datatype=datatype, shape=[1])
        message.raw_input_contents.append(content)
    return message


def content_of(message: Any) -> Content | None:
    return find_content(read(message.SerializeToString()))


# -- against the protobuf classes -----------------------------------------------------------------------------------

texts = st.text(max_size=12)
parameters = st.dictionaries(
    st.sampled_from(["priority", "shared_memory_region", "sequence_id", ""]),
    st.one_of(
        st.builds(lambda v: service_pb2.InferParameter(int64_param=v), st.integers(-5, 2**40)),
        st.builds(lambda v: service_pb2.InferParameter(string_param=v), texts),
    ),
    max_size=2,
)
tensors = st.builds(
    lambda name, datatype, shape, contents, params: service_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=contents, parameters=params
    ),
    texts,
    st.sampled_from(["BYTES", "FP32", ""]),
    st.lists(st.integers(-1, 2**33), max_size=3),
    st.one_of(
        st.none(),
        st.builds(lambda v: service_pb2.InferTensorContents(bytes_contents=v), st.lists(st.binary(max_size=9))),
        st.builds(lambda v: service_pb2.InferTensorContents(fp32_contents=v), st.lists(st.floats(width=32))),
    ),
    parameters,
)
requests = st.builds(
    lambda model, version, id_, inputs, raws, params: Request(
        model_name=model,
        model_version=version,
        id=id_,
        inputs=inputs,
        raw_input_contents=raws,
        parameters=params,
        outputs=[service_pb2.ModelInferRequest.InferRequestedOutputTensor(name="out")],
    ),
    texts,
    texts,
    texts,
    st.lists(tensors, max_size=3),
    st.lists(st.binary(max_size=20), max_size=3),
    parameters,
)


def check_against(parsed: Any, data: bytes) -> None:
    seen = read(data)
    assert seen.model_name == parsed.model_name
    assert seen.request_id == parsed.id
    assert [(i.name, i.datatype) for i in seen.inputs] == [(i.name, i.datatype) for i in parsed.inputs]
    raws = iter(parsed.raw_input_contents)
    for mine, theirs in zip(seen.inputs, parsed.inputs, strict=True):
        if "shared_memory_region" in theirs.parameters:
            assert (mine.raw, mine.contents) == (None, ())
            continue
        expected = next(raws, None)
        assert (None if mine.raw is None else bytes(mine.raw)) == expected
        merged = service_pb2.InferTensorContents.FromString(b"".join(mine.contents))
        assert merged.SerializeToString(deterministic=True) == theirs.contents.SerializeToString(deterministic=True)


@given(requests)
def test_reads_what_protobuf_reads(message: Any) -> None:
    check_against(message, message.SerializeToString())


@given(requests, texts)
def test_renaming_changes_the_name_and_nothing_else(message: Any, name: str) -> None:
    data = message.SerializeToString()
    renamed = b"".join(rename(data, read(data), name))
    message.model_name = name
    assert Request.FromString(renamed).SerializeToString(deterministic=True) == message.SerializeToString(
        deterministic=True
    )
    assert read(renamed).model_name == name


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=60), st.builds(lambda m: m.SerializeToString(), requests)), st.data())
@example(b"\x0a\x04auto\x0a\x01x", None)  # the last model_name counts
@example(b"\x2a\x07\x2a\x03\x42\x01a\x2a\x00", None)  # contents that stand twice are merged
def test_hostile_bytes_are_refused_or_read_as_protobuf_reads_them(data: bytes, choice: Any) -> None:
    if choice is not None and data:
        for _ in range(choice.draw(st.integers(0, 3))):
            place = choice.draw(st.integers(0, len(data) - 1))
            data = data[:place] + bytes([choice.draw(st.integers(0, 255))]) + data[place + 1 :]
        data = data[: choice.draw(st.integers(0, len(data)))]
    try:
        seen = read(data)
        find_content(seen)
    except KServeError:
        return
    try:
        parsed = Request.FromString(data)
    except DecodeError:
        return  # something that is not read here is wrong, e.g. inside an output
    check_against(parsed, data)
    renamed = b"".join(rename(data, seen, "other"))
    parsed.model_name = "other"
    assert Request.FromString(renamed) == parsed or "nan" in str(parsed)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x08\x01", id="model_name as varint"),
        pytest.param(b"\x1d\x00\x00\x00\x00", id="id as fixed32"),
        pytest.param(b"\x28\x01", id="inputs as varint"),
        pytest.param(b"\x38\x01", id="raw_input_contents as varint"),
        pytest.param(b"\x2a\x02\x10\x01", id="datatype as varint"),
        pytest.param(b"\x0a\x01\xff", id="model_name no UTF-8"),
        pytest.param(b"\x2a\x03\x12\x01\xff", id="datatype no UTF-8"),
        pytest.param(b"\x2a\x05\x22\x03\x0a\x09k", id="parameter longer than its tensor"),
        pytest.param(b"\x2a\x02\x0a\x05", id="name longer than its tensor"),
        pytest.param(b"\x2a" + b"\xff" * 4 + b"\x07", id="tensor of 2 GiB"),
    ],
)
def test_refuses(data: bytes) -> None:
    with pytest.raises(KServeError):
        read(data)


def test_millions_of_fields_are_refused_early() -> None:
    with pytest.raises(KServeError, match="more than"):
        read(b"\x0a\x04auto" + b"\x2a\x00" * 4_000_000)
    with pytest.raises(KServeError, match="more than"):
        read(b"\x0a\x04auto" + b"\x2a\x90\x4e" + b"\x18\x01" * 5000)


# -- content ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", [JPEG, PNG, GIF, WEBP, BMP], ids=["JPEG", "PNG", "GIF", "WebP", "BMP"])
def test_pictures_are_known_by_their_first_bytes(picture: bytes) -> None:
    assert content_of(request(("BYTES", raw(picture)))) == Content(Modality.IMAGE, picture)
    typed = Request(model_name="auto")
    typed.inputs.add(name="in", datatype="BYTES").contents.bytes_contents.append(picture)
    assert content_of(typed) == Content(Modality.IMAGE, picture)


@pytest.mark.parametrize(
    "text",
    ["BMW builds cars", "BM", "GIF89a is a format for small pictures", "RIFF", "Grüße, 世界 🙂", "שלום", "  padded "],
)
def test_text_is_text(text: str) -> None:
    assert content_of(request(("BYTES", raw(text.encode())))) == Content(Modality.TEXT, text)


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param([], id="no inputs"),
        pytest.param([("FP32", struct.pack("<f", 1.0))], id="FP32"),
        pytest.param([("UINT8", JPEG)], id="UINT8 that looks like a picture"),
        pytest.param([("BYTES", b"")], id="no elements"),
        pytest.param([("BYTES", raw(b""))], id="empty element"),
        pytest.param([("BYTES", raw(b" \n\t"))], id="blank"),
        pytest.param([("BYTES", raw(b"\xfe\xff\x00a"))], id="no UTF-8"),
        pytest.param([("BYTES", raw(bytes(8)))], id="NUL"),
    ],
)
def test_nothing_recognised(inputs: list[tuple[str, bytes]]) -> None:
    assert content_of(request(*inputs)) is None


def test_inputs_without_content_are_passed_over() -> None:
    message = request(("FP32", bytes(4)), ("BYTES", raw(b"\xfe")), ("BYTES", raw(b"hello")), ("BYTES", raw(b"later")))
    assert content_of(message) == Content(Modality.TEXT, "hello")


def test_an_input_in_shared_memory_takes_no_raw_entry() -> None:
    message = Request(model_name="auto", raw_input_contents=[raw(b"hello")])
    shared = message.inputs.add(name="big", datatype="BYTES")
    shared.parameters["shared_memory_region"].string_param = "region"
    message.inputs.add(name="text", datatype="BYTES")
    assert content_of(message) == Content(Modality.TEXT, "hello")


def test_a_picture_anywhere_makes_it_an_image_request() -> None:
    assert content_of(request(("BYTES", raw(b"what is this?")), ("BYTES", raw(JPEG)))) == Content(Modality.IMAGE, JPEG)


def test_elements_of_text_are_joined_and_of_pictures_the_first_counts() -> None:
    assert content_of(request(("BYTES", raw(b"one", b"", b"two")))) == Content(Modality.TEXT, "one\ntwo")
    assert content_of(request(("BYTES", raw(JPEG, PNG)))) == Content(Modality.IMAGE, JPEG)


def test_long_text_is_cut_between_characters() -> None:
    found = content_of(request(("BYTES", raw(b"x" + "ü".encode() * LONGEST_TEXT, b"more"))))
    assert found is not None
    assert found.data == "x" + "ü" * ((LONGEST_TEXT - 1) // 2)


def test_of_many_elements_the_first_are_looked_at() -> None:
    found = content_of(request(("BYTES", raw(*[b"%d" % place for place in range(100_000)]))))
    assert found == Content(Modality.TEXT, "\n".join(str(place) for place in range(16)))


@pytest.mark.parametrize("content", [b"\x01\x00\x00", b"\x05\x00\x00\x00abcd", b"\xff\xff\xff\xffabcd"])
def test_a_cut_tensor_is_refused(content: bytes) -> None:
    with pytest.raises(KServeError, match="in0"):
        content_of(request(("BYTES", content)))


def test_views_are_not_copies() -> None:
    data = request(("FP32", bytes(1000))).SerializeToString()
    view = read(data).inputs[0].raw
    assert view is not None
    assert view.obj is data


def test_rename_takes_the_parts_by_reference() -> None:
    data = request(("FP32", bytes(1000))).SerializeToString()
    parts: tuple[Any, ...] = rename(data, read(data), "vit")
    assert [part.obj is data for part in (parts[0], parts[2])] == [True, True]
