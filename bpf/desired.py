"""What the maps should hold: policy and interfaces in, values out. No I/O, no numbers.

Slots, ids and generations are not chosen here: they depend on what the maps hold already (``sync``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bpf.layout import GpuFlowKey, GpuQpKey, MeshConfig, ServiceKey
from bpf.policy import LOOPBACK, Backend, Policy, Service

__all__ = ["Desired", "Table", "Target", "desired"]


@dataclass(frozen=True, slots=True)
class Target:
    """The interface that faces a function, able to take packets."""

    ifindex: int
    name: str
    destination_mac: bytes
    source_mac: bytes


_NO_CONFIG: Final = MeshConfig()


class Table(NamedTuple):
    """What a service address leads to."""

    tier: int
    backends: tuple[Backend, ...]
    proxy: Backend | None
    """The node proxy with its weight."""


@dataclass(frozen=True, slots=True)
class Desired:
    """What the maps should hold; rules name functions by PCIe address.

    Attributes:
        targets: Of the functions that have one; rules of others pass packets on.
        join_endpoints: Listening endpoints on this node whose connections may be joined.
        tier_addresses: Endpoints on this node that serve one tier only.
    """

    config: MeshConfig = _NO_CONFIG
    functions: frozenset[str] = frozenset()
    targets: Mapping[str, Target] = field(default_factory=dict)
    qp_rules: Mapping[GpuQpKey, str] = field(default_factory=dict)
    flow_rules: Mapping[GpuFlowKey, str] = field(default_factory=dict)
    services: Mapping[ServiceKey, Table] = field(default_factory=dict)
    join_endpoints: frozenset[ServiceKey] = frozenset()
    tier_marks: Mapping[int, int] = field(default_factory=dict)
    tier_addresses: Mapping[ServiceKey, int] = field(default_factory=dict)


def desired(policy: Policy, node: str, targets: Mapping[str, Target]) -> Desired:
    """Return what the maps of a node should hold.

    Args:
        policy: In force.
        node: Id of this node: backends there are local.
        targets: PCIe address → interface, of functions that can take packets.
    """
    proxy = policy.proxy
    return Desired(
        config=MeshConfig(proxy_mark=proxy.mark, proxy_mask=proxy.mask) if proxy else MeshConfig(),
        functions=frozenset(policy.functions),
        targets={pcie: targets[pcie] for pcie in policy.functions if pcie in targets},
        qp_rules=policy.queue_pairs,
        flow_rules=policy.flows,
        services={
            key: Table(service.tier, service.backends, _proxy_of(policy, service))
            for key, service in policy.services.items()
        },
        join_endpoints=_joined(policy, node),
        tier_marks=policy.tier_marks,
        tier_addresses=_tiers(policy, node),
    )


def _proxy_of(policy: Policy, service: Service) -> Backend | None:
    proxy = policy.proxy
    if not service.node_proxy_weight or proxy is None or proxy.address is None:
        return None
    return Backend(proxy.address, proxy.port, service.node_proxy_weight)


def _local(service: Service, node: str) -> tuple[ServiceKey, ...]:
    return service.endpoints.get(node, ()) + service.endpoints.get(LOOPBACK, ())


def _joined(policy: Policy, node: str) -> frozenset[ServiceKey]:
    found: set[ServiceKey] = set()
    for service in policy.services.values():
        if service.joins_sockets:
            found.update(_local(service, node))
            proxy = _proxy_of(policy, service)
            if proxy is not None:
                found.add(ServiceKey(proxy.address, proxy.port, service.key.protocol))
    return frozenset(found)


def _tiers(policy: Policy, node: str) -> Mapping[ServiceKey, int]:
    """An endpoint that two tiers share says nothing about a connection's tier."""
    found: dict[ServiceKey, set[int]] = {}
    for service in policy.services.values():
        for endpoint in _local(service, node):
            found.setdefault(endpoint, set()).add(service.tier)
    return {endpoint: next(iter(tiers)) for endpoint, tiers in found.items() if len(tiers) == 1 and tiers != {0}}
