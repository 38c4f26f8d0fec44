"""From responses to the bytes of DATA frames, made once per distinct response and shared by all clients.

Under content-encoding zstd each message is one independent zstd frame around the gRPC prefix and the message, so that
no client needs a compression context of its own (a streaming one costs 1.3–2.4 MB) and all can share the bytes.

Envoy's decompressor takes what grows more than a hundredfold *within one DATA frame* for a bomb and silently drops the
rest of the DATA frame; it has no setting for zstd. So what each DATA frame of a message grows to is checked here; where
it is too much, the message is cut into several zstd frames (concatenated ones are allowed), each in DATA frames
of its own: a piece of a kilobyte can't be shrunk a hundredfold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import zstandard

from xds.grpc_wire import prefixed
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Form, Response

__all__ = [
    "CHUNK",
    "MAX_GROWTH",
    "Encoded",
    "Encoding",
    "Frames",
    "data_header",
    "encode",
    "plain_chunks",
    "zstd_chunks",
]

Encoding = Literal["identity", "zstd"]

CHUNK: Final = 16_384
"""Longest DATA frame that every HTTP/2 peer accepts (RFC 9113 §6.5.2, SETTINGS_MAX_FRAME_SIZE)."""

MAX_GROWTH: Final = 80
"""A margin below Envoy's 100."""

_SMALLEST_PIECE: Final = 1024
"""A zstd frame around 1024 equal bytes has 18 bytes: growth 57."""

_BUDGET: Final = 32 * 1024 * 1024
_REMEMBERED: Final = 128
"""Bytes, and messages, kept for sharing. Less only means that a message is encoded again for a client that comes late;
what is older than a few pushes nobody asks for."""


def encode(response: Response) -> bytes:
    """Return the serialised DeltaDiscoveryResponse or DiscoveryResponse; its resources were serialised when made."""
    # Fields of a protobuf message may stand in any order and be concatenated.
    return b"".join((_head(response), *_resources(response)))


def _head(response: Response) -> bytes:
    if response.form is Form.DELTA:
        return discovery_pb2.DeltaDiscoveryResponse(
            system_version_info=response.version,
            type_url=response.type_url,
            nonce=response.nonce,
            removed_resources=response.removed,
        ).SerializeToString()
    return discovery_pb2.DiscoveryResponse(
        version_info=response.version, type_url=response.type_url, nonce=response.nonce
    ).SerializeToString()


def _resources(response: Response) -> Iterator[bytes]:
    for resource in response.resources:
        if response.form is Form.DELTA:
            yield resource.heartbeat if response.heartbeat else resource.wire
        elif response.form is Form.SOTW_WRAPPED and resource.ttl is not None:
            yield resource.sotw_heartbeat(response.version) if response.heartbeat else resource.sotw_wrapped
        else:
            yield resource.sotw_wire


def data_header(length: int, stream_id: int) -> bytes:
    """Return the header of a DATA frame without flags (RFC 9113 §4.1)."""
    return length.to_bytes(3, "big") + b"\0\0" + stream_id.to_bytes(4, "big")


def plain_chunks(data: bytes) -> tuple[bytes, ...]:
    """Cut into pieces of equal length, each at most ``CHUNK`` bytes: a short last one would grow most."""
    count = max(1, -(-len(data) // CHUNK))
    step = -(-len(data) // count)
    return tuple(data[start : start + step] for start in range(0, len(data), step)) or (b"",)


def zstd_chunks(data: bytes, compress: Callable[[bytes], bytes]) -> tuple[bytes, ...]:
    """Compress into one zstd frame, or several where one would look like a bomb; each item is one DATA frame."""
    chunks = plain_chunks(compress(data))
    if len(data) <= _SMALLEST_PIECE or _is_safe(data, chunks):
        return chunks
    middle = len(data) // 2
    return zstd_chunks(data[:middle], compress) + zstd_chunks(data[middle:], compress)


def _is_safe(data: bytes, chunks: tuple[bytes, ...]) -> bool:
    if len(chunks) == 1:
        return len(data) <= MAX_GROWTH * len(chunks[0])
    # zstd gives out whole blocks, so growth is uneven: what each DATA frame gives has to be tried.
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    return all(len(decompressor.decompress(chunk)) <= MAX_GROWTH * len(chunk) for chunk in chunks)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A response as bytes, shared by all clients that take it.

    Attributes:
        chunks: What each DATA frame holds.
        message_length: Of prefix and message, before compression.
        sent_length: Of all DATA frames together.
        first_frame: Where there is one chunk, the whole DATA frame on stream 1, which nearly every client uses.
    """

    chunks: tuple[bytes, ...]
    message_length: int
    sent_length: int
    first_frame: bytes

    def frame(self, stream_id: int) -> bytes:
        """Return the whole DATA frame for a stream; empty where there are several chunks."""
        if stream_id == 1 or len(self.chunks) != 1:
            return self.first_frame
        return data_header(len(self.chunks[0]), stream_id) + self.chunks[0]


class Frames:
    """Encodes responses; remembers what it made, up to a number of bytes.

    Args:
        level: zstd level, 1–19.
        budget: Bytes to remember.
    """

    def __init__(self, level: int, budget: int = _BUDGET) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._budget = budget
        self._size = 0
        self._made: OrderedDict[tuple[int, Encoding], Encoded] = OrderedDict()

    def encoded(self, response: Response, encoding: Encoding) -> Encoded:
        """Return the bytes of a response: the same object for every client."""
        key = (response.number, encoding)
        known = self._made.get(key)
        if known is not None:
            return known
        message = prefixed(encode(response))
        chunks = zstd_chunks(message, self._compressor.compress) if encoding == "zstd" else plain_chunks(message)
        frame = data_header(len(chunks[0]), 1) + chunks[0] if len(chunks) == 1 else b""
        made = Encoded(chunks, len(message), sum(map(len, chunks)), frame)
        self._made[key] = made
        self._size += made.sent_length
        while len(self._made) > 1 and (self._size > self._budget or len(self._made) > _REMEMBERED):
            _, dropped = self._made.popitem(last=False)
            self._size -= dropped.sent_length
        return made
