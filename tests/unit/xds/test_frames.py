from __future__ import annotations

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from xds.frames import CHUNK, MAX_GROWTH, Encoding, Frames, encode, plain_chunks, zstd_chunks
from xds.grpc_wire import prefixed
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Form, Pushes, Response
from xds.snapshot import Resource, content_version
from xds.types import CLUSTER

RANDOM = random.Random(7)  # noqa: S311
TEXT = b"".join(b"cluster-%d lb_policy LEAST_REQUEST timeout %d;" % (n, n * n) for n in range(400))
NOISE = RANDOM.randbytes(200_000)

compress = zstandard.ZstdCompressor(level=3).compress


def response(*bodies: bytes, removed: tuple[str, ...] = ()) -> Response:
    resources = tuple(
        Resource(CLUSTER, f"r{number}", body, content_version(body)) for number, body in enumerate(bodies)
    )
    return Pushes().response(Form.DELTA, CLUSTER, "v", resources, removed, after=0)


def decompressed(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(frame)


def all_frames(chunks: tuple[bytes, ...]) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(b"".join(chunks))


def growth(chunks: tuple[bytes, ...]) -> float:
    """The most that one DATA frame grows, as Envoy's decompressor sees it."""
    decompressor = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
    return max(len(decompressor.decompress(chunk)) / len(chunk) for chunk in chunks)


def test_a_response_is_encoded_as_protobuf() -> None:
    encoded = discovery_pb2.DeltaDiscoveryResponse.FromString(encode(response(b"one", b"two", removed=("x", "y"))))
    assert (encoded.type_url, encoded.system_version_info, encoded.nonce) == (CLUSTER, "v", "1")
    assert [(item.name, item.resource.value) for item in encoded.resources] == [("r0", b"one"), ("r1", b"two")]
    assert list(encoded.removed_resources) == ["x", "y"]


def test_a_message_is_one_zstd_frame_around_its_prefix() -> None:
    made = response(TEXT)
    chunks = Frames(3).encoded(made, "zstd").chunks
    assert len(chunks) == 1
    assert decompressed(chunks[0]) == prefixed(encode(made))


def test_a_long_message_is_one_zstd_frame_in_several_data_frames() -> None:
    made = response(NOISE)
    chunks = Frames(3).encoded(made, "zstd").chunks
    assert len(chunks) > 1
    assert max(map(len, chunks)) <= CHUNK
    assert decompressed(b"".join(chunks)) == prefixed(encode(made))


def test_identity_is_the_prefixed_message() -> None:
    made = response(NOISE)
    chunks = Frames(3).encoded(made, "identity").chunks
    assert max(map(len, chunks)) <= CHUNK
    assert b"".join(chunks) == prefixed(encode(made))


@pytest.mark.parametrize("encoding", ["zstd", "identity"])
def test_bytes_are_made_once(encoding: Encoding) -> None:
    frames, made = Frames(3), response(TEXT)
    first = frames.encoded(made, encoding)
    assert frames.encoded(made, encoding) is first


@pytest.mark.parametrize(
    "data",
    [
        bytes(5_000_000),
        bytes(200_000) + NOISE,
        NOISE + bytes(200_000),
        NOISE[:60_000] + bytes(400_000) + NOISE[:60_000] + bytes(100_000),
        (b"the same resource again and again, " * 40) * 2000,
        bytes(1024),
        bytes(81 * 19),
    ],
    ids=["zeros", "zeros-noise", "noise-zeros", "mixed", "repeated", "kilobyte", "just-too-much"],
)
def test_no_data_frame_looks_like_a_bomb(data: bytes) -> None:
    chunks = zstd_chunks(data, compress)
    assert growth(chunks) <= MAX_GROWTH
    assert max(map(len, chunks)) <= CHUNK
    assert all_frames(chunks) == data


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 20_000)), max_size=8))
def test_no_mixture_looks_like_a_bomb(parts: list[tuple[bytes, int]]) -> None:
    data = prefixed(b"".join(item * count for item, count in parts))
    chunks = zstd_chunks(data, compress)
    assert growth(chunks) <= MAX_GROWTH
    assert all_frames(chunks) == data


@given(st.integers(1, 5 * CHUNK))
def test_pieces_are_of_equal_length(length: int) -> None:
    data = bytes(length)
    pieces = plain_chunks(data)
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= CHUNK
    assert len(pieces) == -(-length // CHUNK)
    if len(pieces) > 1:
        assert min(map(len, pieces)) > CHUNK // 2 - len(pieces)


def test_the_memory_is_bounded_and_what_was_dropped_is_made_again() -> None:
    frames = Frames(3, budget=1000)
    pushes = Pushes()
    made = []
    for number in range(20):
        body = RANDOM.randbytes(400)
        item = Resource(CLUSTER, f"r{number}", body, content_version(body))
        made.append(pushes.response(Form.DELTA, CLUSTER, "v", (item,), (), after=0))
    first = frames.encoded(made[0], "zstd")
    for one in made:
        frames.encoded(one, "zstd")
    assert sum(made.sent_length for made in frames._made.values()) <= 1000
    again = frames.encoded(made[0], "zstd")
    assert again == first
    assert again is not first


def test_so_is_the_number_of_messages() -> None:
    frames, pushes = Frames(3), Pushes()
    for number in range(300):
        frames.encoded(pushes.response(Form.DELTA, CLUSTER, str(number), (), after=0), "identity")
    assert len(frames._made) == 128
