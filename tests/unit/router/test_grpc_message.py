from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import GrpcMessageError
from router.grpc_message import frame, is_compressed, unframe


def framed(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


@given(st.lists(st.binary(max_size=40)))
def test_what_is_framed_is_one_message(parts: list[bytes]) -> None:
    assert frame(parts) == framed(b"".join(parts))
    assert bytes(unframe(frame(parts))) == b"".join(parts)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_unpacks(encoding: str, pack: object) -> None:
    assert callable(pack)
    data = b"many words " * 1000
    body = framed(pack(data), 1)
    assert is_compressed(body)
    assert bytes(unframe(body, encoding)) == data
    assert bytes(unframe(body, encoding, most=len(data))) == data
    with pytest.raises(GrpcMessageError, match="more than"):
        unframe(body, encoding, most=len(data) - 1)


def test_an_uncompressed_message_may_travel_under_any_encoding() -> None:
    assert bytes(unframe(framed(b"abc"), "gzip")) == b"abc"
    assert bytes(unframe(framed(b"abc"), "zstd")) == b"abc"


def test_a_bomb_is_refused() -> None:
    bomb = framed(gzip.compress(bytes(64 << 20)), 1)
    tracemalloc.start()
    try:
        with pytest.raises(GrpcMessageError, match="more than"):
            unframe(bomb, "gzip", most=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"", ""),
        (b"\0\0\0", ""),
        (framed(b"abc")[:-1], ""),
        (framed(b"abc") + b"x", ""),
        (framed(b"abc") + framed(b"def"), ""),
        (framed(b"abc", 2), ""),
        (framed(b"abc", 1), ""),
        (framed(b"abc", 1), "identity"),
        (framed(b"abc", 1), "snappy"),
        (framed(b"abc", 1), "gzip"),
        (framed(gzip.compress(b"abc")[:-1], 1), "gzip"),
        (framed(gzip.compress(b"abc") + b"tail", 1), "gzip"),
        (framed(zlib.compress(b"abc"), 1), "gzip"),
    ],
)
def test_refuses(body: bytes, encoding: str) -> None:
    with pytest.raises(GrpcMessageError) as error:
        unframe(body, encoding)
    assert error.value.code == "MM1602"
