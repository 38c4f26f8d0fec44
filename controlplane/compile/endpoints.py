"""Services → endpoints (ClusterLoadAssignment), one per service and one per subset."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from controlplane.compile.names import cluster_name
from controlplane.compile.protobuf import address
from controlplane.kinds.base import ip
from controlplane.model import Endpoint, Service
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2

__all__ = ["compile_endpoints", "load_assignment", "needs_dns"]


def needs_dns(service: Service) -> bool:
    """Return whether any endpoint is given by name.

    EDS carries IP addresses only; Envoy resolves names itself, in clusters that hold their endpoints.
    """
    return any(ip(endpoint.host) is None for endpoint in service.endpoints)


def compile_endpoints(services: Iterable[Service]) -> Iterator[endpoint_pb2.ClusterLoadAssignment]:
    """Return what EDS serves: the endpoints of every service that has only IP addresses, and of its subsets."""
    for service in services:
        if not needs_dns(service):
            yield load_assignment(service)
            for subset in service.subsets:
                yield load_assignment(service, subset.name)


def load_assignment(service: Service, subset: str | None = None) -> endpoint_pb2.ClusterLoadAssignment:
    """Return the endpoints of a service or subset, with weights, and labels as ``envoy.lb`` metadata."""
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=cluster_name(service.name, subset))
    endpoints = sorted(service.selected(subset), key=lambda endpoint: endpoint.locality)
    for locality, members in itertools.groupby(endpoints, key=lambda endpoint: endpoint.locality):
        _add_locality(message, locality, members)
    return message


def _add_locality(message: endpoint_pb2.ClusterLoadAssignment, locality: str, members: Iterable[Endpoint]) -> None:
    group = message.endpoints.add()
    if locality:
        region, _, rest = locality.partition("/")
        zone, _, sub_zone = rest.partition("/")
        group.locality.region, group.locality.zone, group.locality.sub_zone = region, zone, sub_zone
    for endpoint in members:
        item = group.lb_endpoints.add()
        item.endpoint.address.CopyFrom(address(endpoint.host, endpoint.port))
        item.load_balancing_weight.value = endpoint.weight
        if endpoint.labels:
            item.metadata.filter_metadata["envoy.lb"].update(dict(endpoint.labels))
