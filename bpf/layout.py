"""Every key and value of every map, as Python values: the twin of ``programs/layout.h``.

Why a twin and not one generated from the other: this one carries addresses and names, that one bytes; the unit test
``tests/unit/bpf/test_layout.py`` compares sizes and offsets of both by the object's BTF. Whoever changes one raises
``LAYOUT_VERSION`` in both.

IPv4 addresses travel as ``::ffff:a.b.c.d``; here they are ``IPv4Address`` again. Ports are plain integers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import ClassVar, Final, Self

__all__ = [
    "ALWAYS",
    "BACKEND_SLOTS",
    "GPU_RULES",
    "GPU_SLOTS",
    "JOINED_SOCKETS",
    "LAYOUT_VERSION",
    "MARKS",
    "RTT_BUCKETS",
    "SERVICES",
    "TIERS",
    "UDP_FLOWS",
    "Address",
    "BackendSlot",
    "BackendStats",
    "Counter",
    "DevmapValue",
    "Endpoint",
    "GpuFlowKey",
    "GpuPassReason",
    "GpuQpKey",
    "GpuSlot",
    "GpuSlotStats",
    "JoinEvent",
    "JoinKey",
    "MeshConfig",
    "Service",
    "ServiceKey",
    "ServiceStats",
    "SlotKey",
    "TcpStats",
    "UdpReverseKey",
    "pack_address",
    "u32",
    "unpack_address",
    "unpack_u32",
    "unpack_u64",
]

LAYOUT_VERSION: Final = 1
GPU_SLOTS: Final = 256
GPU_RULES: Final = 16384
SERVICES: Final = 16384
BACKEND_SLOTS: Final = 65536
TIERS: Final = 16
MARKS: Final = 256
RTT_BUCKETS: Final = 24
JOINED_SOCKETS: Final = 32768
UDP_FLOWS: Final = 32768

ALWAYS: Final = 0xFFFF_FFFF
"""Threshold of a backend slot whose own endpoint always serves."""

Address = IPv4Address | IPv6Address

_MAPPED = b"\0" * 10 + b"\xff\xff"
ANY: Final = IPv6Address(0)
"""All zero: in a rule by queue pair, any address."""


def pack_address(address: Address) -> bytes:
    """Return 16 bytes; IPv4 is mapped into IPv6."""
    return _MAPPED + address.packed if isinstance(address, IPv4Address) else address.packed


def unpack_address(data: bytes) -> Address:
    """Return the address in 16 bytes; mapped ones become IPv4 again."""
    return IPv4Address(data[12:16]) if data[:12] == _MAPPED else IPv6Address(data)


def u32(value: int) -> bytes:
    """Return a ``__u32`` in the kernel's byte order: slots, tiers, indices, ids."""
    return struct.pack("=I", value)


def unpack_u32(data: bytes) -> int:
    """Return the ``__u32`` in four bytes."""
    return int.from_bytes(data[:4], _ORDER)


def unpack_u64(data: bytes) -> int:
    """Return the ``__u64`` in eight bytes."""
    return int.from_bytes(data[:8], _ORDER)


_ORDER: Final = "little" if struct.pack("=H", 1)[0] else "big"


class GpuPassReason(IntEnum):
    """Why a packet was left to the plain way; indices of ``gpu_pass_stats``."""

    NO_RULE = 0
    NOT_IP = 1
    TRUNCATED = 2
    MALFORMED = 3
    FRAGMENT = 4
    EXTENSIONS = 5
    NO_INTERFACE = 6
    BAD_SLOT = 7


class JoinEvent(IntEnum):
    """Indices of ``join_stats``."""

    ADDED = 0
    ADD_FAILED = 1
    REDIRECTED = 2
    NO_PEER = 3
    HIGHWATER = 4
    FAILED = 5
    PLAIN = 6
    MISMATCH = 7


class _Numbers:
    """A structure of numbers only, all of one width."""

    FORMAT: ClassVar[str]

    def pack(self) -> bytes:
        """Return the bytes of the structure."""
        return struct.pack(self.FORMAT, *(getattr(self, field.name) for field in fields(self)))  # type: ignore[arg-type]

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the structure in ``data``."""
        return cls(*struct.unpack_from(cls.FORMAT, data))

    def __add__(self, other: Self) -> Self:
        """Return the sum of two, field by field: per-CPU values become one."""
        return type(self)(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True)
class MeshConfig(_Numbers):
    """Entry 0 of ``mesh_config``."""

    FORMAT: ClassVar[str] = "=4I"

    layout_version: int = LAYOUT_VERSION
    """Of who filled the maps; 0: nobody yet."""
    proxy_mark: int = 0
    proxy_mask: int = 0
    """Sockets with ``mark & proxy_mask == proxy_mark`` are the node proxy's own and not translated; 0: off."""
    join_highwater: int = 0
    """Bytes queued at a reader above which a joined direction goes back to TCP; 0: the program's 4 MiB."""


@dataclass(frozen=True, slots=True)
class Counter(_Numbers):
    """Packets (or messages) and bytes; value of ``gpu_pass_stats`` and ``join_stats``."""

    FORMAT: ClassVar[str] = "=2Q"

    packets: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class GpuQpKey:
    """Key of ``gpu_qp_rules``; value: the slot (``u32``)."""

    FORMAT: ClassVar[str] = "=16sI"

    address: Address
    """Destination; ``ANY``: any."""
    qp: int
    """Destination queue pair, 24 bits."""

    def pack(self) -> bytes:
        """Return 20 bytes."""
        return struct.pack(self.FORMAT, pack_address(self.address), self.qp)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the key in ``data``."""
        address, qp = struct.unpack_from(cls.FORMAT, data)
        return cls(unpack_address(address), qp)


@dataclass(frozen=True, slots=True)
class _AddressPortProtocol:
    FORMAT: ClassVar[str] = "!16sHBB"

    address: Address
    port: int
    protocol: int

    def pack(self) -> bytes:
        """Return 20 bytes."""
        return struct.pack(self.FORMAT, pack_address(self.address), self.port, self.protocol, 0)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the key in ``data``."""
        address, port, protocol, _ = struct.unpack_from(cls.FORMAT, data)
        return cls(unpack_address(address), port, protocol)


@dataclass(frozen=True, slots=True)
class GpuFlowKey(_AddressPortProtocol):
    """Key of ``gpu_flow_rules``; value: the slot (``u32``). Port 0: any; protocol 0: any (then port is 0 too)."""


@dataclass(frozen=True, slots=True)
class ServiceKey(_AddressPortProtocol):
    """Key of ``services``, ``join_endpoints`` and ``tier_addresses``; value of ``udp_reverse``.

    ``protocol`` is IPPROTO_TCP or IPPROTO_UDP. Addresses are exact: there is no wildcard.
    """


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """Value of ``gpu_slots``."""

    FORMAT: ClassVar[str] = "=6s6sI"

    destination_mac: bytes
    source_mac: bytes
    ifindex: int = 0
    """For tc; 0: no interface."""

    def pack(self) -> bytes:
        """Return 16 bytes."""
        return struct.pack(self.FORMAT, self.destination_mac, self.source_mac, self.ifindex)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the slot in ``data``."""
        return cls(*struct.unpack_from(cls.FORMAT, data))


@dataclass(frozen=True, slots=True)
class DevmapValue:
    """Value of ``gpu_if_map`` (``struct bpf_devmap_val``).

    Written: interface and, optionally, the descriptor of a program for its egress. Read back: the program's id.
    """

    FORMAT: ClassVar[str] = "=Ii"

    ifindex: int
    program: int = 0

    def pack(self) -> bytes:
        """Return eight bytes."""
        return struct.pack(self.FORMAT, self.ifindex, self.program)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the value in ``data``."""
        return cls(*struct.unpack_from(cls.FORMAT, data))


@dataclass(frozen=True, slots=True)
class GpuSlotStats(_Numbers):
    """Value of ``gpu_slot_stats``."""

    FORMAT: ClassVar[str] = "=4Q"

    redirected_packets: int = 0
    redirected_bytes: int = 0
    no_interface_packets: int = 0
    no_interface_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Service(_Numbers):
    """Value of ``services``."""

    FORMAT: ClassVar[str] = "=4I"

    id: int
    generation: int
    """Of its table: write the new generation's slots, then this, then remove the old slots."""
    slots: int
    """Size of its table; 0: no backend, connections take the plain way."""
    tier: int = 0


@dataclass(frozen=True, slots=True)
class SlotKey(_Numbers):
    """Key of ``backend_slots``."""

    FORMAT: ClassVar[str] = "=3I"

    service: int
    generation: int
    index: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A backend."""

    FORMAT: ClassVar[str] = "!16sHH"

    address: Address
    port: int
    id: int
    """Key of ``backend_stats``; never 0."""

    def pack(self) -> bytes:
        """Return 24 bytes."""
        return struct.pack(self.FORMAT, pack_address(self.address), self.port, 0) + u32(self.id)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the endpoint in ``data``."""
        address, port, _ = struct.unpack_from(cls.FORMAT, data)
        return cls(unpack_address(address), port, unpack_u32(data[20:24]))


@dataclass(frozen=True, slots=True)
class BackendSlot:
    """Value of ``backend_slots``: one column of an alias table (``balance.alias_table``)."""

    own: Endpoint
    other: Endpoint
    threshold: int
    """``own`` if a random 32-bit number is at most this."""

    def pack(self) -> bytes:
        """Return 52 bytes."""
        return self.own.pack() + self.other.pack() + u32(self.threshold)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the slot in ``data``."""
        return cls(Endpoint.unpack(data[:24]), Endpoint.unpack(data[24:48]), unpack_u32(data[48:52]))


@dataclass(frozen=True, slots=True)
class UdpReverseKey:
    """Key of ``udp_reverse``."""

    FORMAT: ClassVar[str] = "!16sHHI"

    cookie: int
    address: Address
    port: int

    def pack(self) -> bytes:
        """Return 32 bytes."""
        return struct.pack("=Q", self.cookie) + struct.pack(self.FORMAT, pack_address(self.address), self.port, 0, 0)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the key in ``data``."""
        address, port, _, _ = struct.unpack_from(cls.FORMAT, data, 8)
        return cls(unpack_u64(data), unpack_address(address), port)


@dataclass(frozen=True, slots=True)
class ServiceStats(_Numbers):
    """Value of ``service_stats``, by ``Service.id``."""

    FORMAT: ClassVar[str] = "=4Q"

    connections: int = 0
    datagrams: int = 0
    no_backend: int = 0
    wrong_family: int = 0


@dataclass(frozen=True, slots=True)
class BackendStats(_Numbers):
    """Value of ``backend_stats``, by ``Endpoint.id``."""

    FORMAT: ClassVar[str] = "=2Q"

    connections: int = 0
    datagrams: int = 0


@dataclass(frozen=True, slots=True)
class JoinKey:
    """Key of ``join_sockets`` and ``join_peers``."""

    FORMAT: ClassVar[str] = "=16s16sIIQ"

    local_address: Address
    remote_address: Address
    local_port: int
    remote_port: int
    netns: int = 0

    def pack(self) -> bytes:
        """Return 48 bytes."""
        return struct.pack(
            self.FORMAT,
            pack_address(self.local_address),
            pack_address(self.remote_address),
            self.local_port,
            self.remote_port,
            self.netns,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the key in ``data``."""
        local, remote, local_port, remote_port, netns = struct.unpack_from(cls.FORMAT, data)
        return cls(unpack_address(local), unpack_address(remote), local_port, remote_port, netns)


@dataclass(frozen=True, slots=True)
class TcpStats(_Numbers):
    """Value of ``tcp_stats``, by tier."""

    FORMAT: ClassVar[str] = "=8Q"

    active: int = 0
    passive: int = 0
    closed: int = 0
    retransmissions: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    rtt_samples: int = 0
    rtt_sum_us: int = 0
