"""DestinationRules → subsets and traffic policies of services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from controlplane.documents import Document, Path
from controlplane.errors import EmptySubsetError
from controlplane.kinds import destination_rule as kind
from controlplane.kinds.base import full_name, milliseconds
from controlplane.merge.context import Claims, Context
from controlplane.model import (
    ConnectionPool,
    HashOn,
    LoadBalancer,
    OutlierDetection,
    Service,
    Subset,
    TrafficPolicy,
)

__all__ = ["merge_destinations", "outlier_detection", "traffic_policy"]

_SIMPLE: Mapping[str, LoadBalancer | None] = {
    "ROUND_ROBIN": LoadBalancer("round_robin"),
    "LEAST_REQUEST": LoadBalancer("least_request"),
    "LEAST_CONN": LoadBalancer("least_request"),
    "RANDOM": LoadBalancer("random"),
    "UNSPECIFIED": None,
}


def merge_destinations(context: Context, documents: Iterable[tuple[Document, kind.DestinationRule]]) -> None:
    """Give the services that the context knows what the documents say of them; a service has one document."""
    names: Claims[None] = Claims("DestinationRule", context.problems)
    hosts: Claims[None] = Claims("DestinationRule for", context.problems)
    services = dict(context.services)
    for document, content in documents:
        names.claim(full_name(content), None, document.where(("metadata", "name")))
        where = document.where(("spec", "host"))
        service = context.check_service(content.spec.host, where)
        if service is None:
            continue
        hosts.claim(service.name, None, where)
        policy = traffic_policy(content.spec.traffic_policy)
        services[service.name] = replace(
            service, policy=policy, subsets=_subsets(context, document, content, service, policy)
        )
    context.services = services


def _subsets(
    context: Context, document: Document, content: kind.DestinationRule, service: Service, policy: TrafficPolicy
) -> tuple[Subset, ...]:
    subsets: Claims[Subset] = Claims(f"subset of {service.name}:", context.problems)
    for index, entry in enumerate(content.spec.subsets):
        path: Path = ("spec", "subsets", index)
        where = document.where((*path, "name"))
        own = traffic_policy(entry.traffic_policy)
        # As Istio has it: a section that the subset has takes the place of the service's as a whole.
        filled = TrafficPolicy(
            load_balancer=own.load_balancer or policy.load_balancer,
            pool=own.pool or policy.pool,
            outlier=own.outlier or policy.outlier,
        )
        subset = Subset(entry.name, tuple(sorted(entry.labels.items())), filled, where)
        subsets.claim(entry.name, subset, where)
        if not replace(service, subsets=(subset,)).selected(subset.name):
            shown = ", ".join(f"{name}={value}" for name, value in subset.labels)
            what = f"subset {entry.name!r} ({shown}) selects no endpoint of {service.name!r}"
            hint = "tag an endpoint with these labels, or change them"
            context.note(EmptySubsetError(what, hint=hint, where=document.where((*path, "labels"))))
    return subsets.in_order()


def traffic_policy(entry: kind.TrafficPolicyEntry | None) -> TrafficPolicy:
    """Return what a document says about the use of endpoints."""
    if entry is None:
        return TrafficPolicy()
    return TrafficPolicy(
        load_balancer=_load_balancer(entry.load_balancer) if entry.load_balancer else None,
        pool=_pool(entry.connection_pool) if entry.connection_pool else None,
        outlier=outlier_detection(entry.outlier_detection) if entry.outlier_detection else None,
    )


def _load_balancer(entry: kind.LoadBalancerEntry) -> LoadBalancer | None:
    if entry.simple is not None:
        return _SIMPLE[entry.simple]
    consistent = entry.consistent_hash
    assert consistent is not None  # noqa: S101 - the kind has looked
    if consistent.maglev is not None:
        return LoadBalancer("maglev", _hash_on(consistent), consistent.maglev.table_size)
    size = consistent.ring_hash.minimum_ring_size if consistent.ring_hash else consistent.minimum_ring_size
    return LoadBalancer("ring_hash", _hash_on(consistent), size)


def _hash_on(entry: kind.ConsistentHashEntry) -> HashOn:
    if entry.http_header_name is not None:
        return HashOn("header", entry.http_header_name)
    if entry.http_cookie is not None:
        cookie = entry.http_cookie
        return HashOn("cookie", cookie.name, cookie.path, milliseconds(cookie.ttl) if cookie.ttl else None)
    if entry.http_query_parameter_name is not None:
        return HashOn("query", entry.http_query_parameter_name)
    return HashOn("source")


def _ms(text: str | None) -> int | None:
    return milliseconds(text) if text is not None else None


def _pool(entry: kind.ConnectionPoolEntry) -> ConnectionPool:
    tcp, http = entry.tcp or kind.TcpPoolEntry(), entry.http or kind.HttpPoolEntry()
    return ConnectionPool(
        max_connections=tcp.max_connections,
        max_pending_requests=http.http1_max_pending_requests,
        max_requests=http.http2_max_requests,
        max_retries=http.max_retries,
        max_requests_per_connection=http.max_requests_per_connection or None,
        max_concurrent_streams=http.max_concurrent_streams,
        connect_timeout_ms=_ms(tcp.connect_timeout),
        idle_timeout_ms=_ms(http.idle_timeout or tcp.idle_timeout),
        max_connection_ms=_ms(tcp.max_connection_duration),
    )


def outlier_detection(entry: kind.OutlierEntry) -> OutlierDetection:
    """Return when an endpoint is left out."""
    return OutlierDetection(
        consecutive_5xx=entry.consecutive_5xx_errors,
        consecutive_gateway_errors=entry.consecutive_gateway_errors,
        consecutive_local_failures=entry.consecutive_local_origin_failures,
        split_local=entry.split_external_local_origin_errors,
        interval_ms=_ms(entry.interval),
        base_ejection_ms=_ms(entry.base_ejection_time),
        max_ejection_percent=entry.max_ejection_percent,
        min_health_percent=entry.min_health_percent,
    )
