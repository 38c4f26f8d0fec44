"""How the endpoints of a cluster are used: which is picked, how much may be under way, which are left out."""

from __future__ import annotations

from dataclasses import fields, replace

from controlplane.compile.protobuf import duration
from controlplane.model import ConnectionPool, LoadBalancer, OutlierDetection, TrafficPolicy
from xds.pb.envoy.config.cluster.v3 import circuit_breaker_pb2, cluster_pb2, outlier_detection_pb2
from xds.pb.envoy.config.core.v3 import base_pb2

__all__ = ["apply_policy"]

_LB_POLICY = {
    "round_robin": cluster_pb2.Cluster.ROUND_ROBIN,
    "least_request": cluster_pb2.Cluster.LEAST_REQUEST,
    "random": cluster_pb2.Cluster.RANDOM,
    "ring_hash": cluster_pb2.Cluster.RING_HASH,
    "maglev": cluster_pb2.Cluster.MAGLEV,
}

_MAX_RETRIES = 256
"""At once, of a service; with Envoy's 3 most retries under load would not be made."""

_DEFAULT_BALANCER = LoadBalancer("least_request")


def fill(pool: ConnectionPool, defaults: ConnectionPool) -> ConnectionPool:
    """Return limits, with those that are not given from elsewhere."""
    given = {field.name: getattr(pool, field.name) for field in fields(pool)}
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def apply_policy(cluster: cluster_pb2.Cluster, policy: TrafficPolicy, *, high_priority: bool = False) -> None:
    """Make a cluster do what a traffic policy says, as far as it is not a matter of connections.

    Args:
        cluster: Is changed.
        policy: What to do.
        high_priority: Its routes have high priority, for which Envoy counts by limits of their own.
    """
    _balance(cluster, policy.load_balancer or _DEFAULT_BALANCER)
    _limit(cluster, policy.pool or ConnectionPool(), high_priority=high_priority)
    if policy.outlier:
        _eject(cluster, policy.outlier)


def _balance(cluster: cluster_pb2.Cluster, balancer: LoadBalancer) -> None:
    """Set how an endpoint is picked; what a hash is made of stands with the routes."""
    cluster.lb_policy = _LB_POLICY[balancer.kind]
    if balancer.size is not None and balancer.kind == "ring_hash":
        cluster.ring_hash_lb_config.minimum_ring_size.value = balancer.size
        # Envoy's own maximum is smaller than what may be asked for as a minimum.
        cluster.ring_hash_lb_config.maximum_ring_size.value = max(balancer.size, 8 << 20)
    if balancer.size is not None and balancer.kind == "maglev":
        cluster.maglev_lb_config.table_size.value = balancer.size


def _limit(cluster: cluster_pb2.Cluster, pool: ConnectionPool, *, high_priority: bool) -> None:
    """Set the circuit breakers."""
    limits = circuit_breaker_pb2.CircuitBreakers.Thresholds()
    if high_priority:
        limits.priority = base_pb2.HIGH
    for field, value in (
        (limits.max_connections, pool.max_connections),
        (limits.max_pending_requests, pool.max_pending_requests),
        (limits.max_requests, pool.max_requests),
        (limits.max_retries, _MAX_RETRIES if pool.max_retries is None else pool.max_retries),
    ):
        if value is not None:
            field.value = value
    cluster.circuit_breakers.thresholds.append(limits)


def _eject(cluster: cluster_pb2.Cluster, outlier: OutlierDetection) -> None:
    """Set when an endpoint is left out for a while; a count of 0 turns that reason off."""
    message = outlier_detection_pb2.OutlierDetection(
        split_external_local_origin_errors=outlier.split_local,
        # Envoy's statistical reasons are not in what documents can say.
        enforcing_success_rate={"value": 0},
    )
    for count, enforcing, value in (
        (message.consecutive_5xx, message.enforcing_consecutive_5xx, outlier.consecutive_5xx),
        (
            message.consecutive_gateway_failure,
            message.enforcing_consecutive_gateway_failure,
            outlier.consecutive_gateway_errors,
        ),
        (
            message.consecutive_local_origin_failure,
            message.enforcing_consecutive_local_origin_failure,
            outlier.consecutive_local_failures,
        ),
    ):
        if value is not None:
            # By default Envoy only counts gateway failures and ejects nobody for them.
            enforcing.value = 100 if value else 0
            if value:
                count.value = value
    if outlier.interval_ms is not None:
        message.interval.CopyFrom(duration(outlier.interval_ms))
    if outlier.base_ejection_ms is not None:
        message.base_ejection_time.CopyFrom(duration(outlier.base_ejection_ms))
        # Envoy refuses a base above its maximum of 5 minutes.
        message.max_ejection_time.CopyFrom(duration(max(outlier.base_ejection_ms, 300_000)))
    if outlier.max_ejection_percent is not None:
        message.max_ejection_percent.value = outlier.max_ejection_percent
    else:
        # Of a service with fewer than ten endpoints Envoy's default of 10 % would eject none.
        message.always_eject_one_host.value = True
    if outlier.min_health_percent is not None:
        cluster.common_lb_config.healthy_panic_threshold.value = outlier.min_health_percent
    cluster.outlier_detection.CopyFrom(message)
