"""Services → endpoints (ClusterLoadAssignment), one per service and one per subset."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from controlplane.compile.names import cluster_name
from controlplane.compile.protobuf import address
from controlplane.kinds.base import ip
from controlplane.model import Endpoint, Mesh, Service
from xds.pb.envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2

__all__ = ["compile_endpoints", "load_assignment", "needs_dns"]


def needs_dns(mesh: Mesh, service: Service) -> bool:
    """Return whether any endpoint is given by name, of the service or of its fallbacks.

    EDS carries IP addresses only; Envoy resolves names itself, in clusters that hold their endpoints.
    """
    return any(ip(endpoint.host) is None for item in (service, *mesh.fallbacks(service)) for endpoint in item.endpoints)


def compile_endpoints(mesh: Mesh) -> Iterator[endpoint_pb2.ClusterLoadAssignment]:
    """Return what EDS serves: the endpoints of every service that has only IP addresses, and of its subsets."""
    for service in mesh.services:
        if not needs_dns(mesh, service):
            yield load_assignment(service, fallbacks=mesh.fallbacks(service))
            for subset in service.subsets:
                yield load_assignment(service, subset.name)


def load_assignment(
    service: Service, subset: str | None = None, fallbacks: Iterable[Service] = ()
) -> endpoint_pb2.ClusterLoadAssignment:
    """Return the endpoints of a service or subset, with weights, and labels as ``envoy.lb`` metadata.

    Those of each fallback have the next priority: Envoy sends them what the ones before can't take.
    """
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=cluster_name(service.name, subset))
    levels = (service.selected(subset), *(other.endpoints for other in fallbacks))
    for priority, found in enumerate(levels):
        endpoints = sorted(found, key=lambda endpoint: endpoint.locality)
        for locality, members in itertools.groupby(endpoints, key=lambda endpoint: endpoint.locality):
            _add_locality(message.endpoints.add(priority=priority), locality, members)
    return message


def _add_locality(
    group: endpoint_components_pb2.LocalityLbEndpoints, locality: str, members: Iterable[Endpoint]
) -> None:
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
