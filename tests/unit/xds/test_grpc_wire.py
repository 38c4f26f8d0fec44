from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.errors import RefusedRequestError
from xds.grpc_wire import Deframer, Status, decode_message, prefixed, trailers


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 20))
def test_messages_come_out_however_the_bytes_arrive(messages: list[bytes], step: int) -> None:
    data = b"".join(map(prefixed, messages))
    deframer = Deframer(100)
    out = [message for start in range(0, len(data), step) for message in deframer.feed(data[start : start + step])]
    assert out == messages


def test_a_long_message_is_refused_by_its_prefix() -> None:
    deframer = Deframer(100)
    assert list(deframer.feed(prefixed(bytes(100)))) == [bytes(100)]
    with pytest.raises(RefusedRequestError, match="has 101 bytes, the limit is 100") as caught:
        list(deframer.feed(prefixed(bytes(101))[:5]))
    assert caught.value.grpc_status == Status.RESOURCE_EXHAUSTED


def test_a_message_compressed_by_grpc_is_refused() -> None:
    with pytest.raises(RefusedRequestError, match="compressed") as caught:
        list(Deframer(100).feed(b"\1\0\0\0\1x"))
    assert caught.value.grpc_status == Status.UNIMPLEMENTED


@given(st.text(max_size=200))
def test_status_messages_survive_any_text(text: str) -> None:
    fields = dict(trailers(3, text))
    assert fields["grpc-status"] == "3"
    value = fields.get("grpc-message", "")
    assert value.isascii()
    assert value.isprintable()
    assert decode_message(value) == text
