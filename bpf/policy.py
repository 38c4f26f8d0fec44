"""NodePolicy messages, checked and made ready to put into maps.

Each resource becomes an immutable ``Fragment`` once, when it changes; ``combine`` adds the fragments up and checks
what only shows between them. A policy that can't be used is refused as a whole with a text that says why, which the
control plane sees.
"""

from __future__ import annotations

import re
import socket
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from bpf.layout import ANY, TIERS, Address, GpuFlowKey, GpuQpKey, ServiceKey
from bpf.node_errors import NodePolicyError
from xds.pb.bpf import policy_pb2

__all__ = [
    "LOOPBACK",
    "TYPE_URL",
    "Backend",
    "Fragment",
    "Function",
    "Network",
    "Policy",
    "Proxy",
    "Service",
    "check",
    "combine",
    "parse",
    "parse_mac",
]

TYPE_URL: Final = "type.googleapis.com/modalmesh.bpf.v1.NodePolicy"

LOOPBACK: Final = "(loopback)"
"""In ``Service.endpoints``: backends on a loopback address, which are on every node. No node can have this id."""

Network = IPv4Network | IPv6Network

# Domain, bus, device, function (PCI Local Bus, 3.2.2.3.4); Linux prints domains of VMD devices with more digits.
_PCIE: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_WITH_PORTS: Final = frozenset({6, 17})
"""Protocols whose ports the programs read: TCP and UDP."""
_PROTOCOLS: Final[Mapping[int, int]] = {policy_pb2.TCP: 6, policy_pb2.UDP: 17}

# A wider range is a mistake: it would take a whole continent, or everything, off the network.
_WIDEST: Final[Mapping[int, int]] = {4: 8, 6: 16}
_NEVER_OWNED: Final = tuple(
    ip_network(text)
    for text in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/127", "fe80::/10", "ff00::/8")
)

_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Function:
    """A GPU's network function."""

    pcie: str
    plain_netdev: bool = False
    mac: bytes | None = None


class Backend(NamedTuple):
    """Where a service's connections may go; weight above 0."""

    address: Address
    port: int
    weight: int


@dataclass(frozen=True, slots=True)
class Proxy:
    """The node's proxy; ``address`` is None when only its mark is known."""

    address: Address | None
    port: int
    mark: int
    mask: int


@dataclass(frozen=True, slots=True)
class Service:
    """A service address and what stands behind it.

    Attributes:
        backends: By address and port; those without weight are left out.
        endpoints: Node id or ``LOOPBACK`` → endpoints of backends there, also those without weight (connections that
            were made before may still be open).
    """

    name: str
    key: ServiceKey
    tier: int
    backends: tuple[Backend, ...]
    endpoints: Mapping[str, tuple[ServiceKey, ...]]
    node_proxy_weight: int
    joins_sockets: bool


@dataclass(frozen=True, slots=True)
class Fragment:
    """One resource, checked by itself."""

    name: str
    node: str = ""
    functions: Mapping[str, Function] = field(default_factory=dict)
    queue_pairs: Mapping[GpuQpKey, str] = field(default_factory=dict)
    flows: Mapping[GpuFlowKey, str] = field(default_factory=dict)
    services: Mapping[ServiceKey, Service] = field(default_factory=dict)
    owned_ranges: frozenset[Network] = frozenset()
    tier_marks: Mapping[int, int] = field(default_factory=dict)
    proxy: Proxy | None = None
    targets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """IP version → sorted numbers of all addresses that traffic is sent to, for the check against owned ranges."""


@dataclass(frozen=True, slots=True)
class Policy:
    """All that is in force on one node; rules name functions by PCIe address."""

    functions: Mapping[str, Function] = field(default_factory=dict)
    queue_pairs: Mapping[GpuQpKey, str] = field(default_factory=dict)
    flows: Mapping[GpuFlowKey, str] = field(default_factory=dict)
    services: Mapping[ServiceKey, Service] = field(default_factory=dict)
    owned_ranges: frozenset[Network] = frozenset()
    tier_marks: Mapping[int, int] = field(default_factory=dict)
    proxy: Proxy | None = None


def parse(name: str, body: bytes) -> Fragment:
    """Read and check a serialised NodePolicy.

    Args:
        name: The resource's name, for messages.
        body: ``modalmesh.bpf.v1.NodePolicy``.

    Raises:
        NodePolicyError: It can't be used; says why.
    """
    try:
        message = policy_pb2.NodePolicy.FromString(body)
    except DecodeError as error:
        raise NodePolicyError(f"policy {name!r} is no NodePolicy message") from error
    return check(name, message)


def check(name: str, message: policy_pb2.NodePolicy) -> Fragment:
    """Check a NodePolicy.

    Raises:
        NodePolicyError: It can't be used; says why.
    """
    try:
        services = _pairs(((item.key, item) for item in map(_service, message.services)), "service address")
        proxy = _proxy(message.node_proxy) if message.HasField("node_proxy") else None
        return Fragment(
            name=name,
            node=message.node,
            functions=_pairs(((item.pcie, item) for item in map(_function, message.functions)), "function"),
            queue_pairs=_pairs(map(_queue_pair, message.queue_pairs), "queue pair rule"),
            flows=_pairs(map(_flow, message.flows), "flow rule"),
            services=services,
            owned_ranges=frozenset(map(_owned, message.owned_ranges)),
            tier_marks=_pairs(map(_tier_mark, message.tier_marks), "tier mark"),
            proxy=proxy,
            targets=_targets(services.values(), proxy),
        )
    except NodePolicyError as error:
        raise NodePolicyError(f"policy {name!r}: {error.what}", hint=error.hint) from error


def combine(fragments: Iterable[Fragment], node: str) -> Policy:
    """Return what is in force on ``node``: the fragments that are for it or for every node, added up.

    Raises:
        NodePolicyError: Two of them contradict each other, or refer to what none has.
    """
    mine = sorted((item for item in fragments if item.node in ("", node)), key=lambda item: item.name)
    policy = Policy(
        functions=_union(mine, lambda item: item.functions, "function"),
        queue_pairs=_union(mine, lambda item: item.queue_pairs, "queue pair rule"),
        flows=_union(mine, lambda item: item.flows, "flow rule"),
        services=_union(mine, lambda item: item.services, "service address"),
        owned_ranges=frozenset().union(*(item.owned_ranges for item in mine)),
        tier_marks=_union(mine, lambda item: item.tier_marks, "tier mark"),
        proxy=_only_proxy(mine),
    )
    for rules in (policy.queue_pairs, policy.flows):
        for rule, function in rules.items():
            if function not in policy.functions:
                raise NodePolicyError(
                    f"a rule for {rule.address} names function {function}, which no policy of this node has"
                )
    if policy.proxy is None or policy.proxy.address is None:
        for service in policy.services.values():
            if service.node_proxy_weight:
                raise NodePolicyError(f"service {service.name!r} gives weight to the node proxy, but there is none")
    _check_ranges(policy.owned_ranges, mine)
    return policy


# ---- one message each


def _function(message: policy_pb2.GpuFunction) -> Function:
    pcie = _pcie(message.pcie)
    mac = parse_mac(message.mac) if message.mac else None
    if message.mac and mac is None:
        raise NodePolicyError(
            f"function {pcie}: {message.mac!r} is not the MAC address of one interface",
            hint="such as 02:00:00:00:00:01",
        )
    return Function(pcie, message.plain_netdev, mac)


def _queue_pair(message: policy_pb2.QueuePairRule) -> tuple[GpuQpKey, str]:
    if not 0 < message.queue_pair < 2**24:
        raise NodePolicyError(f"queue pair {message.queue_pair} is not from 1 to 16777215")
    address = _address(message.address, "queue pair rule") if message.address else ANY
    return GpuQpKey(address, message.queue_pair), _pcie(message.function)


def _flow(message: policy_pb2.FlowRule) -> tuple[GpuFlowKey, str]:
    address = _address(message.address, "flow rule")
    if message.port > 0xFFFF or message.protocol > 0xFF:
        raise NodePolicyError(
            f"flow rule for {address}: port {message.port} or protocol {message.protocol} is too large"
        )
    if message.port and message.protocol not in _WITH_PORTS:
        raise NodePolicyError(
            f"flow rule for {address}: port {message.port} needs protocol 6 (TCP) or 17 (UDP), not {message.protocol}"
        )
    return GpuFlowKey(address, message.port, message.protocol), _pcie(message.function)


def _service(message: policy_pb2.Service) -> Service:
    what = f"service {message.name!r}"
    if not message.name:
        raise NodePolicyError("a service has no name")
    if message.transport not in _PROTOCOLS:
        raise NodePolicyError(f"{what} has no transport", hint="TCP or UDP")
    if message.tier >= TIERS:
        raise NodePolicyError(f"{what}: tier {message.tier} is above {TIERS - 1}")
    protocol = _PROTOCOLS[message.transport]
    if message.joins_sockets and protocol != _PROTOCOLS[policy_pb2.TCP]:
        raise NodePolicyError(f"{what}: only TCP sockets can be joined")
    key = ServiceKey(_address(message.address, what), _port(message.port, what), protocol)
    weights: dict[tuple[Address, int], int] = {}
    endpoints: dict[str, list[ServiceKey]] = {}
    for item in message.backends:
        address, port = _backend(item, key, what)
        if (address, port) in weights:
            raise NodePolicyError(f"{what} has backend {address} port {port} twice")
        weights[address, port] = item.weight
        where = LOOPBACK if address.is_loopback else item.node
        if where:
            endpoints.setdefault(where, []).append(ServiceKey(address, port, protocol))
    return Service(
        name=message.name,
        key=key,
        tier=message.tier,
        backends=tuple(
            Backend(address, port, weight)
            for (address, port), weight in sorted(weights.items(), key=lambda item: (item[0][0].packed, item[0][1]))
            if weight
        ),
        endpoints={where: tuple(found) for where, found in endpoints.items()},
        node_proxy_weight=message.node_proxy_weight,
        joins_sockets=message.joins_sockets,
    )


def _backend(message: policy_pb2.Backend, service: ServiceKey, what: str) -> tuple[Address, int]:
    address, port = _address(message.address, what), _port(message.port, what)
    if isinstance(service.address, IPv4Address) and isinstance(address, IPv6Address):
        raise NodePolicyError(f"{what}: an IPv4 socket can't reach backend {address}")
    if (address, port) == (service.address, service.port):
        raise NodePolicyError(f"{what} is its own backend")
    if message.node == LOOPBACK:
        raise NodePolicyError(f"{what}: {LOOPBACK} is no node's id")
    return address, port


def _owned(text: str) -> Network:
    try:
        network = ip_network(text)
    except ValueError as error:
        raise NodePolicyError(f"owned range {text!r} is no network: {error}", hint="such as 198.18.0.0/16") from error
    if network.prefixlen < _WIDEST[network.version]:
        raise NodePolicyError(f"owned range {network} is wider than /{_WIDEST[network.version]}")
    for reserved in _NEVER_OWNED:
        if reserved.version == network.version and reserved.overlaps(network):
            raise NodePolicyError(f"owned range {network} overlaps {reserved}, which every node needs")
    return network


def _tier_mark(message: policy_pb2.TierMark) -> tuple[int, int]:
    if not message.mark or not 0 < message.tier < TIERS:
        raise NodePolicyError(
            f"tier mark {message.mark:#x} → {message.tier}: needs a mark and a tier from 1 to {TIERS - 1}"
        )
    return message.mark, message.tier


def _proxy(message: policy_pb2.NodeProxy) -> Proxy:
    if message.mark & ~message.mask:
        raise NodePolicyError(f"node proxy: mark {message.mark:#x} has bits outside its mask {message.mask:#x}")
    if message.mask and not message.mark:
        raise NodePolicyError("node proxy: mark 0 would match every socket that has none")
    if not message.address:
        return Proxy(None, 0, message.mark, message.mask)
    return Proxy(_address(message.address, "node proxy"), _port(message.port, "node proxy"), message.mark, message.mask)


# ---- values


def _pcie(text: str) -> str:
    lower = text.lower()
    if not _PCIE.fullmatch(lower):
        raise NodePolicyError(f"{text!r} is no PCIe address", hint="such as 0000:3b:00.2")
    return lower


def parse_mac(text: str) -> bytes | None:
    """Return the six bytes of the MAC address of one interface, None if ``text`` is none."""
    lower = text.strip().lower()
    if not _MAC.fullmatch(lower):
        return None
    mac = bytes.fromhex(lower.replace(":", ""))
    return None if mac[0] & 1 or not any(mac) else mac


def _address(text: str, what: str) -> Address:
    try:
        # A policy may name tens of thousands: the C library reads them in a tenth of the time. It is as strict.
        address: Address = IPv4Address(socket.inet_pton(socket.AF_INET, text))
    except (OSError, ValueError):
        return _other_address(text, what)
    return _one_host(address, text, what)


def _other_address(text: str, what: str) -> Address:
    try:
        address = ip_address(text)
    except ValueError as error:
        raise NodePolicyError(f"{what}: {text!r} is no IP address") from error
    if isinstance(address, IPv6Address) and (address.scope_id or address.ipv4_mapped):
        raise NodePolicyError(f"{what}: {text!r} can't be used", hint="write IPv4 as such, and no scope")
    return _one_host(address, text, what)


def _one_host(address: Address, text: str, what: str) -> Address:
    if address.is_unspecified or address.is_multicast:
        raise NodePolicyError(f"{what}: {text!r} is not the address of one host")
    return address


def _port(port: int, what: str) -> int:
    if not 0 < port < 0x10000:
        raise NodePolicyError(f"{what}: port {port} is not from 1 to 65535")
    return port


# ---- many


def _pairs(items: Iterable[tuple[_K, _T]], what: str) -> dict[_K, _T]:
    found: dict[_K, _T] = {}
    for key, value in items:
        if key in found:
            raise NodePolicyError(f"{what} {key} occurs twice")
        found[key] = value
    return found


def _union(fragments: list[Fragment], of: Callable[[Fragment], Mapping[_K, _T]], what: str) -> Mapping[_K, _T]:
    result: dict[_K, _T] = {}
    for item in fragments:
        part = of(item)
        if not part:
            continue
        if not result.keys().isdisjoint(part):
            key = next(key for key in part if key in result)
            other = next(fragment for fragment in fragments if key in of(fragment))
            raise NodePolicyError(f"policies {other.name!r} and {item.name!r} both have {what} {key}")
        result |= part
    return MappingProxyType(result)


def _only_proxy(fragments: list[Fragment]) -> Proxy | None:
    having = [item for item in fragments if item.proxy is not None]
    if len(having) > 1:
        raise NodePolicyError(f"policies {having[0].name!r} and {having[1].name!r} both have a node proxy")
    return having[0].proxy if having else None


def _targets(services: Iterable[Service], proxy: Proxy | None) -> dict[int, tuple[int, ...]]:
    found: dict[int, set[int]] = {4: set(), 6: set()}
    for service in services:
        for backend in service.backends:
            found[backend.address.version].add(int(backend.address))
    if proxy is not None and proxy.address is not None:
        found[proxy.address.version].add(int(proxy.address))
    return {version: tuple(sorted(numbers)) for version, numbers in found.items()}


def _check_ranges(ranges: frozenset[Network], fragments: list[Fragment]) -> None:
    for network in ranges:
        first, last = int(network.network_address), int(network.broadcast_address)
        for item in fragments:
            numbers = item.targets.get(network.version, ())
            index = bisect_left(numbers, first)
            if index < len(numbers) and numbers[index] <= last:
                kind = IPv4Address if network.version == 4 else IPv6Address
                raise NodePolicyError(
                    f"owned range {network} covers {kind(numbers[index])}, which policy {item.name!r} sends traffic to",
                    hint="a blackhole route would cut it off",
                )
