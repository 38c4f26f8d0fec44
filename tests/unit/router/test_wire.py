from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import KServeError
from router.wire import MOST_FIELDS, Budget, encode_varint, walk


def fields(data: bytes) -> list[tuple[int, int, bytes]]:
    return [(f.number, f.wire_type, bytes(f.value)) for f in walk(memoryview(data), Budget())]


def test_yields_each_wire_type_and_its_span() -> None:
    data = b"\x08\x96\x01" + b"\x11" + bytes(8) + b"\x1a\x02hi" + b"\x25" + bytes(4)
    assert fields(data) == [(1, 0, b""), (2, 1, b""), (3, 2, b"hi"), (4, 5, b"")]
    assert [(f.start, f.end) for f in walk(memoryview(data), Budget())] == [(0, 3), (3, 12), (12, 16), (16, 21)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a", id="length missing"),
        pytest.param(b"\x0a\x05abcd", id="length beyond the end"),
        pytest.param(b"\x0a\xff\xff\xff\xff\x0f", id="length of 4 GiB"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="length of 64 bits"),
        pytest.param(b"\x08\x80", id="varint cut off"),
        pytest.param(b"\x08" + b"\x80" * 10 + b"\x01", id="varint of eleven bytes"),
        pytest.param(b"\x80\x80\x80\x80\x80\x01", id="tag of six bytes"),
        pytest.param(b"\xff\xff\xff\xff\x7f", id="tag above 32 bits"),
        pytest.param(b"\x00\x00", id="field number 0"),
        pytest.param(b"\x0b\x0c", id="group"),
        pytest.param(b"\x0c", id="end of a group"),
        pytest.param(b"\x0e", id="wire type 6"),
        pytest.param(b"\x0f", id="wire type 7"),
        pytest.param(b"\x11" + bytes(7), id="fixed64 cut off"),
        pytest.param(b"\x25" + bytes(3), id="fixed32 cut off"),
        pytest.param(b"\x2a\x00" * (MOST_FIELDS + 1), id="too many fields"),
    ],
)
def test_refuses_what_breaks_the_format(data: bytes) -> None:
    with pytest.raises(KServeError) as error:
        fields(data)
    assert error.value.code == "MM1601"


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_varints_come_back(value: int) -> None:
    assert fields(b"\x08" + encode_varint(value)) == [(1, 0, b"")]
