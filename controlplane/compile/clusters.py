"""Services → clusters, and the cluster of the router. All of them speak HTTP/2, their health checks too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from controlplane.compile.endpoints import load_assignment, needs_dns
from controlplane.compile.names import cluster_name
from controlplane.compile.protobuf import ADS, duration, packed
from controlplane.compile.tiers import tier_clusters
from controlplane.compile.traffic import apply_policy, fill
from controlplane.model import ConnectionPool, Mesh, Service, Tier, TrafficPolicy
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import health_check_pb2
from xds.pb.envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2

__all__ = ["ROUTER_CLUSTER", "compile_clusters"]

ROUTER_CLUSTER = "modalmesh-router"

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

_CONNECT_TIMEOUT_MS = 1000

# On a socket of the same node: either there or not.
_ROUTER_CONNECT_TIMEOUT_MS = 250

# A picture goes up without waiting for WINDOW_UPDATE; larger bodies do wait.
_STREAM_WINDOW = 1 << 20
_CONNECTION_WINDOW = 16 << 20


def compile_clusters(mesh: Mesh, *, router_socket: Path) -> list[cluster_pb2.Cluster]:
    """Return a cluster for every service, every subset, every tier of either, and the router, sorted by name."""
    clusters = [cluster for service in mesh.services for cluster in _clusters(mesh, service)]
    services = mesh.by_name
    clusters += [
        _of_tier(mesh, services[found.service], found.subset or None, mesh.tier(found.tier))
        for found in tier_clusters(mesh)
    ]
    clusters.append(_router(router_socket))
    return sorted(clusters, key=lambda cluster: cluster.name)


def _clusters(mesh: Mesh, service: Service) -> Iterator[cluster_pb2.Cluster]:
    yield _service(mesh, service, None, service.policy)
    for subset in service.subsets:
        yield _service(mesh, service, subset.name, subset.policy)


def _of_tier(mesh: Mesh, service: Service, subset: str | None, tier: Tier) -> cluster_pb2.Cluster:
    """Return the cluster of a tier: what a DestinationRule says, and for what it leaves open the tier's policy."""
    found = service.subset(subset) if subset else None
    policy = found.policy if found else service.policy
    filled = replace(
        policy, pool=fill(policy.pool or ConnectionPool(), tier.pool), outlier=policy.outlier or tier.outlier
    )
    cluster = _service(mesh, service, subset, filled, tier=tier)
    if cluster.type == cluster_pb2.Cluster.EDS:
        # The endpoints are the same.
        cluster.eds_cluster_config.service_name = cluster_name(service.name, subset)
    return cluster


def _service(
    mesh: Mesh, service: Service, subset: str | None, policy: TrafficPolicy, *, tier: Tier | None = None
) -> cluster_pb2.Cluster:
    pool = policy.pool or ConnectionPool()
    name = cluster_name(service.name, subset, tier.name if tier else None)
    cluster = _cluster(name, pool.connect_timeout_ms or _CONNECT_TIMEOUT_MS, pool)
    fallbacks = () if subset else mesh.fallbacks(service)
    # Of a subset's endpoints alone it does not depend whether its cluster has them: all of a service's are one kind.
    if needs_dns(mesh, service):
        cluster.type = cluster_pb2.Cluster.STRICT_DNS
        cluster.dns_lookup_family = cluster_pb2.Cluster.V4_PREFERRED
        cluster.load_assignment.CopyFrom(load_assignment(service, subset, fallbacks))
        cluster.load_assignment.cluster_name = name
        # One name that can't be resolved must not hold up the start of everything else.
        cluster.wait_for_warm_on_init.value = False
    else:
        cluster.type = cluster_pb2.Cluster.EDS
        cluster.eds_cluster_config.eds_config.CopyFrom(ADS)
    if service.protocol == "grpc":
        cluster.health_checks.append(_grpc_health_check())
        # Else an endpoint that is taken out of the documents goes on being used for as long as it answers.
        cluster.ignore_health_on_host_removal = True
    apply_policy(cluster, policy, high_priority=tier is not None and tier.high_priority)
    return cluster


def _cluster(name: str, connect_timeout_ms: int, pool: ConnectionPool) -> cluster_pb2.Cluster:
    options = http_protocol_options_pb2.HttpProtocolOptions()
    http2 = options.explicit_http_config.http2_protocol_options
    http2.initial_stream_window_size.value = _STREAM_WINDOW
    http2.initial_connection_window_size.value = _CONNECTION_WINDOW
    if pool.max_concurrent_streams is not None:
        http2.max_concurrent_streams.value = pool.max_concurrent_streams
    common = options.common_http_protocol_options
    if pool.idle_timeout_ms is not None:
        common.idle_timeout.CopyFrom(duration(pool.idle_timeout_ms))
    if pool.max_connection_ms is not None:
        common.max_connection_duration.CopyFrom(duration(pool.max_connection_ms))
    if pool.max_requests_per_connection is not None:
        common.max_requests_per_connection.value = pool.max_requests_per_connection
    cluster = cluster_pb2.Cluster(name=name, connect_timeout=duration(connect_timeout_ms))
    cluster.typed_extension_protocol_options[_HTTP_OPTIONS].CopyFrom(packed(options))
    return cluster


def _grpc_health_check() -> health_check_pb2.HealthCheck:
    """Ask ``grpc.health.v1`` for the server as a whole; gRPC health checks are HTTP/2 always.

    The first good answer makes an endpoint well, two bad ones in a row make it unwell. Without traffic Envoy would ask
    once a minute, too seldom for a backend that has just come up.
    """
    return health_check_pb2.HealthCheck(
        timeout=duration(1000),
        interval=duration(2000),
        no_traffic_interval=duration(2000),
        unhealthy_interval=duration(1000),
        unhealthy_threshold={"value": 2},
        healthy_threshold={"value": 1},
        grpc_health_check=health_check_pb2.HealthCheck.GrpcHealthCheck(),
    )


def _router(socket: Path) -> cluster_pb2.Cluster:
    cluster = _cluster(ROUTER_CLUSTER, _ROUTER_CONNECT_TIMEOUT_MS, ConnectionPool())
    cluster.type = cluster_pb2.Cluster.STATIC
    cluster.load_assignment.cluster_name = ROUTER_CLUSTER
    endpoint = cluster.load_assignment.endpoints.add().lb_endpoints.add().endpoint
    endpoint.address.pipe.path = str(socket)
    return cluster
