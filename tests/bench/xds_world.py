"""What both servers of the fan-out benchmark serve: services with eight endpoints each, one of which changes."""

from __future__ import annotations

from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.snapshot import Resource, Snapshot
from xds.types import CLUSTER, ENDPOINT

__all__ = ["MARKED", "World", "cluster", "endpoint_set", "mark_of", "service_name"]

ENDPOINTS = 8
MARKED = 0
"""The service that changes; the port of its first endpoint is the number of the change."""


def service_name(number: int) -> str:
    return f"service-{number:05d}.prod.svc.cluster.local"


def cluster(number: int) -> Resource:
    message = cluster_pb2.Cluster(name=service_name(number), type=cluster_pb2.Cluster.EDS)
    message.connect_timeout.seconds = 1
    message.eds_cluster_config.eds_config.ads.SetInParent()
    message.eds_cluster_config.service_name = service_name(number)
    message.circuit_breakers.thresholds.add().max_requests.value = 1024 + number % 7
    message.lb_policy = cluster_pb2.Cluster.LEAST_REQUEST
    return Resource.of(CLUSTER, message.name, message)


def endpoint_set(number: int, mark: int = 0) -> Resource:
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=service_name(number))
    locality = message.endpoints.add()
    locality.locality.zone = f"zone-{number % 3}"
    for index in range(ENDPOINTS):
        item = locality.lb_endpoints.add()
        address = item.endpoint.address.socket_address
        address.address = f"10.{number // 250 % 250}.{number % 250}.{index + 1}"
        address.port_value = mark if index == 0 and mark else 8001
        item.load_balancing_weight.value = 1 + (number + index) % 5
        fields = item.metadata.filter_metadata["envoy.lb"].fields
        fields["modality"].string_value = "text" if number % 2 else "image"
        fields["gpu"].string_value = f"gpu-{(number * 7 + index) % 64:02d}"
    return Resource.of(ENDPOINT, message.cluster_name, message)


def mark_of(body: bytes) -> int:
    """Return the number of the change that a marked endpoint set carries."""
    message = endpoint_pb2.ClusterLoadAssignment.FromString(body)
    return int(message.endpoints[0].lb_endpoints[0].endpoint.address.socket_address.port_value)


class World:
    """All services, and the snapshot that they make."""

    def __init__(self, services: int) -> None:
        self.names = [service_name(number) for number in range(services)]
        self.snapshot = Snapshot(
            [*(cluster(number) for number in range(services)), *(endpoint_set(number) for number in range(services))]
        )

    def change(self, mark: int) -> Resource:
        """Change one endpoint; return its set, which the snapshot holds from now on."""
        changed = endpoint_set(MARKED, mark)
        self.snapshot = self.snapshot.updated([changed])
        return changed
