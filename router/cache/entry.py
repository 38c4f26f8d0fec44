"""What is stored: an answer with what is needed to serve it, to bound its life and to find it again in a filter.

The form on disk and in the shared tier, little-endian::

    stamp 16 · checksum 8 · version 1 · flags 1 · stored at 8 · expires at 8 · fingerprint 16 · tag sum 8
    header length 4 · header · body

The stamp comes first so that the shared tier can be asked for it alone; it differs from one write of a key to the next.
A body over 1 KiB is compressed with zstd if that makes it smaller. The checksum covers everything after it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

import xxhash
import zstandard

from router.cache.errors import EntryError
from router.cache.filters import Layer

__all__ = ["STAMP_BYTES", "Entry", "pack", "unpack"]

STAMP_BYTES: Final = 16
COMPRESS_FROM: Final = 1024

_HEAD = struct.Struct("<16sQBBQQ16sQI")
_CHECKED_FROM = STAMP_BYTES + 8
_VERSION = 1
_ZSTD = 1
_FINE = 2
# An answer in the cache is at most this large; a frame that says more is damaged or hostile.
_LARGEST_BODY = 64 * 1024 * 1024
_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer. Times are milliseconds of the wall clock, since other nodes and other boots read them."""

    body: bytes
    """As the backend sent it."""
    header: bytes
    """What else the data path needs to answer with it, in a form of its own (status, content type, trailers)."""
    fingerprint: bytes
    layer: Layer
    stamp: bytes
    """16 random bytes, drawn by whoever stores it."""
    stored_ms: int
    expires_ms: int
    tag_sum: int = 0
    """The state of the purge marks under which it was computed (``coherence.py``); means something only where it was
    taken: on one node, or in the shared tier."""

    @property
    def weight(self) -> int:
        """Bytes that it takes in memory, with about what Python adds."""
        return len(self.body) + len(self.header) + 512

    def with_tag_sum(self, tag_sum: int) -> Entry:
        """Return the entry for another place."""
        return replace(self, tag_sum=tag_sum)


def pack(entry: Entry) -> bytes:
    """Return the bytes for disk and shared tier."""
    body, flags = entry.body, _FINE if entry.layer is Layer.FINE else 0
    if len(body) > COMPRESS_FROM:
        # A compressor is not safe under threads, and one costs 2 µs to make.
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
        if len(packed) < len(body):
            body, flags = packed, flags | _ZSTD
    head = bytearray(
        _HEAD.pack(
            entry.stamp,
            0,
            _VERSION,
            flags,
            entry.stored_ms,
            entry.expires_ms,
            entry.fingerprint,
            entry.tag_sum,
            len(entry.header),
        )
    )
    checksum = xxhash.xxh3_64()
    checksum.update(memoryview(head)[_CHECKED_FROM:])
    checksum.update(entry.header)
    checksum.update(body)
    struct.pack_into("<Q", head, STAMP_BYTES, checksum.intdigest())
    return b"".join((head, entry.header, body))


def unpack(data: bytes | bytearray | memoryview) -> Entry:
    """Return the entry.

    Raises:
        EntryError: The bytes are not what ``pack`` made.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise EntryError(f"{len(view)} bytes are no entry")
    stamp, checksum, version, flags, stored, expires, fingerprint, tag_sum, header_length = _HEAD.unpack_from(view)
    if version != _VERSION:
        raise EntryError(f"an entry of version {version}")
    if checksum != xxhash.xxh3_64_intdigest(view[_CHECKED_FROM:]) or header_length > len(view) - _HEAD.size:
        raise EntryError("an entry whose checksum does not fit")
    body = bytes(view[_HEAD.size + header_length :])
    if flags & _ZSTD:
        try:
            size = zstandard.frame_content_size(body)
            if not 0 <= size <= _LARGEST_BODY:
                raise EntryError(f"an entry whose body would unpack to {size} bytes")
            body = zstandard.ZstdDecompressor().decompress(body)
        except zstandard.ZstdError as error:
            raise EntryError(f"an entry whose body can't be unpacked: {error}") from error
    return Entry(
        body=body,
        header=bytes(view[_HEAD.size : _HEAD.size + header_length]),
        fingerprint=fingerprint,
        layer=Layer.FINE if flags & _FINE else Layer.COARSE,
        stamp=stamp,
        stored_ms=stored,
        expires_ms=expires,
        tag_sum=tag_sum,
    )
