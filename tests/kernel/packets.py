"""Frames, byte by byte."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

CLIENT, SERVER = b"\x02\0\0\0\0\x01", b"\x02\0\0\0\0\x02"
TCP, UDP = 6, 17


def ethernet(payload: bytes, kind: int) -> bytes:
    return SERVER + CLIENT + struct.pack("!H", kind) + payload


def vlan(frame: bytes, *tags: int, kind: int = 0x8100) -> bytes:
    """The frame with tags, outermost first; the outermost is of ``kind``."""
    for tag in reversed(tags):
        frame = frame[:12] + struct.pack("!HH", 0x8100, tag) + frame[12:]
    return frame[:12] + struct.pack("!H", kind) + frame[14:]


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip4(
    destination: str,
    protocol: int,
    payload: bytes,
    *,
    source: str = "192.0.2.1",
    options: bytes = b"",
    fragment: int = 0,
    length: int | None = None,
    header_words: int | None = None,
) -> bytes:
    size = 20 + len(options)
    first = 0x40 | (size // 4 if header_words is None else header_words)
    total = size + len(payload) if length is None else length
    head = struct.pack("!BBHHHBBH", first, 0, total, 1, fragment, 64, protocol, 0)
    head += IPv4Address(source).packed + IPv4Address(destination).packed + options
    head = head[:10] + struct.pack("!H", _checksum(head)) + head[12:]
    return ethernet(head + payload, 0x0800)


def ip6(
    destination: str, protocol: int, payload: bytes, *, source: str = "2001:db8::1", length: int | None = None
) -> bytes:
    total = len(payload) if length is None else length
    head = struct.pack("!IHBB", 0x6000_0000, total, protocol, 64)
    return ethernet(head + IPv6Address(source).packed + IPv6Address(destination).packed + payload, 0x86DD)


def extension(following: int, size: int = 8, routing: tuple[int, int] = (0, 0)) -> bytes:
    """An IPv6 extension header that isn't AH; ``routing`` is its type and the segments left."""
    return struct.pack("!BBBB", following, size // 8 - 1, *routing).ljust(size, b"\0")


def authentication(following: int) -> bytes:
    """An AH header with a digest of 12 bytes (RFC 4302)."""
    return struct.pack("!BBHII", following, 4, 0, 1, 1) + bytes(12)


def udp(port: int, payload: bytes = b"payload", *, source: int = 49152, length: int | None = None) -> bytes:
    return struct.pack("!HHHH", source, port, 8 + len(payload) if length is None else length, 0) + payload


def tcp(port: int, payload: bytes = b"", *, source: int = 49152) -> bytes:
    return struct.pack("!HHIIBBHHH", source, port, 1, 1, 0x50, 0x18, 1024, 0, 0) + payload


def roce(qp: int, payload: bytes = b"x" * 64) -> bytes:
    """RoCEv2: UDP to 4791, base transport header, payload, invariant checksum."""
    return udp(4791, struct.pack("!BBHII", 4, 0, 0xFFFF, qp, 1) + payload + bytes(4))
