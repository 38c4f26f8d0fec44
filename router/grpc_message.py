"""The length-prefixed framing of gRPC: opens a body that is exactly one message, and frames one.

Source: gRPC's PROTOCOL-HTTP2.md, «Length-Prefixed-Message» and «Message-Encoding»; deflate there means zlib's format.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from router.errors import GrpcMessageError
from router.limits import LARGEST_UNPACKED

__all__ = ["frame", "is_compressed", "unframe"]

_PREFIX = struct.Struct(">BI")
_WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's manual, inflateInit2: 16 + 15 reads gzip


def is_compressed(body: bytes | memoryview) -> bool:
    """Tell whether the first message of the body is flagged as compressed."""
    return len(body) > 0 and body[0] == 1


def unframe(body: bytes | memoryview, encoding: str = "identity", *, most: int = LARGEST_UNPACKED) -> memoryview:
    """Return the one message of a body, unpacked if it is compressed.

    Args:
        body: All bytes of a unary request's body.
        encoding: The request's ``grpc-encoding`` (empty or absent: identity).
        most: Bytes that a compressed message may unpack to.

    Raises:
        GrpcMessageError: It is not exactly one message, or can't be unpacked.
    """
    if len(body) < _PREFIX.size:
        raise GrpcMessageError(f"a body of {len(body)} bytes holds no gRPC message")
    flag, length = _PREFIX.unpack_from(body)
    view = memoryview(body)[_PREFIX.size :]
    if flag > 1:
        raise GrpcMessageError(f"compressed-flag {flag} is neither 0 nor 1")
    if length != len(view):
        raise GrpcMessageError(f"the prefix announces {length} bytes, {len(view)} follow: not exactly one message")
    if not flag:
        return view
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise GrpcMessageError(f"compressed with {encoding or 'identity'!r}, which can't be opened")
    return memoryview(_unpack(view, bits, most))


def _unpack(data: memoryview, bits: int, most: int) -> bytes:
    stream = zlib.decompressobj(bits)
    try:
        unpacked = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise GrpcMessageError(f"the compressed message is broken: {error}") from error
    if len(unpacked) > most:
        raise GrpcMessageError(f"the compressed message unpacks to more than {most} bytes")
    if not stream.eof or stream.unused_data:
        raise GrpcMessageError("the compressed message is cut off, or followed by something else")
    return unpacked


def frame(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the parts as one uncompressed message, which is allowed whatever the request's ``grpc-encoding``."""
    pieces = list(parts)
    return b"".join([_PREFIX.pack(0, sum(len(piece) for piece in pieces)), *pieces])
