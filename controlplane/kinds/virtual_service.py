"""Istio's ``VirtualService``: which requests for a host go to which service, and what happens to them on the way.

Istio's documentation of the kind holds for every field that is here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from controlplane.kinds.actions import (
    CorsEntry,
    FaultEntry,
    HeadersEntry,
    PercentageEntry,
    RedirectEntry,
    ResponseEntry,
    RetriesEntry,
    RewriteEntry,
)
from controlplane.kinds.base import HostPattern, Kind, Model, Name, Port, Timeout
from controlplane.kinds.matching import GivenMatch, HeaderMatches, PathMatch, StringMatch

__all__ = [
    "API_VERSIONS",
    "DestinationEntry",
    "HttpRule",
    "RequestMatch",
    "RouteEntry",
    "StringMatch",
    "VirtualService",
]

API_VERSIONS = (
    "networking.istio.io/v1",
    "networking.istio.io/v1beta1",
    "networking.istio.io/v1alpha3",
)


class RequestMatch(Model):
    """All that is given must hold."""

    name: str | None = None
    uri: PathMatch | None = None
    ignore_uri_case: bool = False
    method: GivenMatch | None = None
    authority: GivenMatch | None = None
    headers: HeaderMatches
    without_headers: HeaderMatches
    query_params: Annotated[dict[str, StringMatch], Field(default_factory=dict)]
    port: Port | None = None


class PortSelector(Model):
    """A port of the destination."""

    number: Port


class DestinationEntry(Model):
    """A service, or a subset of it."""

    host: str
    subset: Name | None = None
    port: PortSelector | None = None


class RouteEntry(Model):
    """A destination and its share of the requests."""

    destination: DestinationEntry
    weight: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    headers: HeadersEntry | None = None


class MirrorEntry(Model):
    """Where a share of the requests is sent as well."""

    destination: DestinationEntry
    percentage: PercentageEntry | None = None


class DelegateEntry(Model):
    """The VirtualService whose rules take the place of this one."""

    name: Name
    namespace: Name | None = None


class HttpRule(Model):
    """The first rule of which some match holds decides."""

    name: str | None = None
    match: Annotated[list[RequestMatch], Field(min_length=1)] | None = None
    route: Annotated[list[RouteEntry], Field(min_length=1)] | None = None
    redirect: RedirectEntry | None = None
    direct_response: ResponseEntry | None = None
    delegate: DelegateEntry | None = None
    rewrite: RewriteEntry | None = None
    timeout: Timeout | None = None
    retries: RetriesEntry | None = None
    fault: FaultEntry | None = None
    mirror: DestinationEntry | None = None
    mirror_percentage: PercentageEntry | None = None
    mirrors: Annotated[list[MirrorEntry], Field(default_factory=list, max_length=16)]
    cors_policy: CorsEntry | None = None
    headers: HeadersEntry | None = None

    @model_validator(mode="after")
    def _one_outcome(self) -> Self:
        given = [
            name
            for name, value in (
                ("route", self.route),
                ("redirect", self.redirect),
                ("directResponse", self.direct_response),
                ("delegate", self.delegate),
            )
            if value is not None
        ]
        if len(given) != 1:
            found = " and ".join(f"«{name}»" for name in given) or "none"
            raise ValueError(f"needs one of «route», «redirect», «directResponse» and «delegate», has {found}")
        if given != ["route"] and (self.rewrite or self.mirror or self.mirrors or self.retries):
            raise ValueError(f"has «{given[0]}», so there is nothing to rewrite, to mirror or to try again")
        return self

    @model_validator(mode="after")
    def _mirrored(self) -> Self:
        if self.mirror_percentage is not None and self.mirror is None:
            raise ValueError("has «mirrorPercentage» without «mirror»")
        if self.mirror is not None and self.mirrors:
            raise ValueError("has both «mirror» and «mirrors»")
        return self


class VirtualServiceSpec(Model):
    """What is to be; without hosts it is for others to delegate to."""

    hosts: Annotated[list[HostPattern], Field(default_factory=list)]
    gateways: Annotated[list[str], Field(min_length=1)] | None = None
    http: Annotated[list[HttpRule], Field(min_length=1)]


class VirtualService(Kind):
    """The document."""

    api_version: Literal["networking.istio.io/v1", "networking.istio.io/v1beta1", "networking.istio.io/v1alpha3"]
    kind: Literal["VirtualService"]
    spec: VirtualServiceSpec
