"""Istio's ``DestinationRule``: subsets of a service, and how its endpoints are used.

Istio's documentation of the kind holds for every field that is here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from controlplane.kinds.base import Kind, Milliseconds, Model, Name, Timeout
from controlplane.kinds.matching import HeaderName

__all__ = ["DestinationRule", "TrafficPolicyEntry"]

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
WholePercent = Annotated[int, Field(ge=0, le=100)]


class CookieEntry(Model):
    """A cookie; with ``ttl`` it is made where it is missing."""

    name: Annotated[str, Field(min_length=1)]
    path: str = ""
    ttl: Timeout | None = None


class RingHashEntry(Model):
    """The smallest ring."""

    minimum_ring_size: Annotated[int, Field(ge=1, le=8_388_608)] = 1024


class MaglevEntry(Model):
    """The table; Envoy wants a prime number."""

    table_size: Annotated[int, Field(ge=2, le=5_000_011)] = 65_537

    @model_validator(mode="after")
    def _prime(self) -> Self:
        size = self.table_size
        if size < 2 or any(size % divisor == 0 for divisor in range(2, int(size**0.5) + 1)):
            raise ValueError("tableSize is not a prime number")
        return self


class ConsistentHashEntry(Model):
    """Requests that have the same of something go to the same endpoint."""

    http_header_name: HeaderName | None = None
    http_cookie: CookieEntry | None = None
    use_source_ip: bool | None = None
    http_query_parameter_name: Annotated[str, Field(min_length=1)] | None = None
    ring_hash: RingHashEntry | None = None
    maglev: MaglevEntry | None = None
    minimum_ring_size: Annotated[int, Field(ge=1, le=8_388_608)] | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        keys = (self.http_header_name, self.http_cookie, self.use_source_ip or None, self.http_query_parameter_name)
        if sum(key is not None for key in keys) != 1:
            raise ValueError("needs one of «httpHeaderName», «httpCookie», «useSourceIp», «httpQueryParameterName»")
        if sum(item is not None for item in (self.ring_hash, self.maglev, self.minimum_ring_size)) > 1:
            raise ValueError("has more than one of «ringHash», «maglev» and «minimumRingSize»")
        return self


class LoadBalancerEntry(Model):
    """How an endpoint is picked."""

    simple: Literal["ROUND_ROBIN", "LEAST_REQUEST", "LEAST_CONN", "RANDOM", "UNSPECIFIED"] | None = None
    consistent_hash: ConsistentHashEntry | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.simple is None) == (self.consistent_hash is None):
            raise ValueError("needs one of «simple» and «consistentHash»")
        return self


class TcpPoolEntry(Model):
    """Of connections."""

    max_connections: Count | None = None
    connect_timeout: Milliseconds | None = None
    max_connection_duration: Milliseconds | None = None
    idle_timeout: Milliseconds | None = None


class HttpPoolEntry(Model):
    """Of requests; the names of the first two are Istio's and hold for HTTP/2 as well."""

    http1_max_pending_requests: Count | None = Field(default=None, alias="http1MaxPendingRequests")
    http2_max_requests: Count | None = Field(default=None, alias="http2MaxRequests")
    max_requests_per_connection: CountOrZero | None = None
    max_retries: CountOrZero | None = None
    idle_timeout: Milliseconds | None = None
    max_concurrent_streams: Count | None = None
    h2_upgrade_policy: Literal["DEFAULT", "UPGRADE"] | None = None
    """HTTP/2 is spoken anyway; DO_NOT_UPGRADE asks for what this mesh never does."""


class ConnectionPoolEntry(Model):
    """Limits."""

    tcp: TcpPoolEntry | None = None
    http: HttpPoolEntry | None = None


class OutlierEntry(Model):
    """When an endpoint is left out for a while."""

    split_external_local_origin_errors: bool = False
    consecutive_local_origin_failures: CountOrZero | None = None
    consecutive_gateway_errors: CountOrZero | None = None
    consecutive_5xx_errors: CountOrZero | None = Field(default=None, alias="consecutive5xxErrors")
    interval: Milliseconds | None = None
    base_ejection_time: Milliseconds | None = None
    max_ejection_percent: WholePercent | None = None
    min_health_percent: WholePercent | None = None


class TlsEntry(Model):
    """Only that there is none: identities come from the mesh."""

    mode: Literal["DISABLE"]


class TrafficPolicyEntry(Model):
    """How endpoints are used."""

    load_balancer: LoadBalancerEntry | None = None
    connection_pool: ConnectionPoolEntry | None = None
    outlier_detection: OutlierEntry | None = None
    tls: TlsEntry | None = None


class SubsetEntry(Model):
    """The endpoints that carry all of these labels; none: all endpoints."""

    name: Name
    labels: Annotated[dict[str, str], Field(default_factory=dict)]
    traffic_policy: TrafficPolicyEntry | None = None


class DestinationRuleSpec(Model):
    """What is to be."""

    host: str
    traffic_policy: TrafficPolicyEntry | None = None
    subsets: Annotated[list[SubsetEntry], Field(default_factory=list)]


class DestinationRule(Kind):
    """The document."""

    api_version: Literal["networking.istio.io/v1", "networking.istio.io/v1beta1", "networking.istio.io/v1alpha3"]
    kind: Literal["DestinationRule"]
    spec: DestinationRuleSpec
