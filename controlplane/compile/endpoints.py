"""Services → endpoints (ClusterLoadAssignment), one per service."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.compile.protobuf import address
from controlplane.kinds.base import ip
from controlplane.model import Service
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2

__all__ = ["compile_endpoints", "load_assignment", "needs_dns"]


def needs_dns(service: Service) -> bool:
    """Return whether any endpoint is given by name.

    EDS carries IP addresses only; Envoy resolves names itself, in clusters that hold their endpoints.
    """
    return any(ip(endpoint.host) is None for endpoint in service.endpoints)


def compile_endpoints(services: Iterable[Service]) -> list[endpoint_pb2.ClusterLoadAssignment]:
    """Return what EDS serves: the endpoints of every service that has only IP addresses."""
    return [load_assignment(service) for service in services if not needs_dns(service)]


def load_assignment(service: Service) -> endpoint_pb2.ClusterLoadAssignment:
    """Return the endpoints of a service with weights, and labels as ``envoy.lb`` metadata, by which subsets select."""
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=service.name)
    locality = message.endpoints.add()
    for endpoint in service.endpoints:
        item = locality.lb_endpoints.add()
        item.endpoint.address.CopyFrom(address(endpoint.host, endpoint.port))
        item.load_balancing_weight.value = endpoint.weight
        if endpoint.labels:
            item.metadata.filter_metadata["envoy.lb"].update(dict(endpoint.labels))
    return message
