"""Istio's ``VirtualService``: which requests for a host go to which service.

The part of it that is supported so far; Istio's documentation of the kind holds for every field that is here.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from controlplane.kinds.base import HostPattern, Kind, Milliseconds, Model, Port

__all__ = ["API_VERSIONS", "HttpRule", "RequestMatch", "StringMatch", "VirtualService"]

API_VERSIONS = (
    "networking.istio.io/v1",
    "networking.istio.io/v1beta1",
    "networking.istio.io/v1alpha3",
)

# RFC 9110 §5.6.2, in lower case as HTTP/2 demands (RFC 9113 §8.2).
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,256}", re.ASCII)


class StringMatch(Model):
    """A text is this, or begins with this."""

    exact: str | None = None
    prefix: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.exact is not None and self.prefix is not None:
            raise ValueError("has both «exact» and «prefix»")
        return self


def _given(match: StringMatch) -> StringMatch:
    if match.exact is None and match.prefix is None:
        raise ValueError("needs «exact» or «prefix»")
    return match


GivenMatch = Annotated[StringMatch, AfterValidator(_given)]


def _path(match: StringMatch) -> StringMatch:
    if not (match.exact or match.prefix or "").startswith("/"):
        raise ValueError("a path begins with «/»")
    return match


def _headers(headers: dict[str, StringMatch]) -> dict[str, StringMatch]:
    for name in headers:
        if not _HEADER.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a header in lower case")
        if name.startswith("x-modalmesh-"):
            raise ValueError(f"{name!r} never comes from a client: the gateway removes it")
    return headers


class RequestMatch(Model):
    """All that is given must hold."""

    name: str | None = None
    uri: Annotated[GivenMatch, AfterValidator(_path)] | None = None
    method: GivenMatch | None = None
    authority: GivenMatch | None = None
    headers: Annotated[dict[str, StringMatch], AfterValidator(_headers)] = Field(default_factory=dict)
    """An empty match asks only that the header is there."""


class PortSelector(Model):
    """A port of the destination."""

    number: Port


class DestinationEntry(Model):
    """A service."""

    host: str
    port: PortSelector | None = None


class RouteEntry(Model):
    """A destination and its share of the requests."""

    destination: DestinationEntry
    weight: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


class HttpRule(Model):
    """The first rule of which some match holds decides."""

    name: str | None = None
    match: Annotated[list[RequestMatch], Field(min_length=1)] | None = None
    route: Annotated[list[RouteEntry], Field(min_length=1)]
    timeout: Milliseconds | None = None


class VirtualServiceSpec(Model):
    """What is to be."""

    hosts: Annotated[list[HostPattern], Field(min_length=1)]
    gateways: Annotated[list[str], Field(min_length=1)] | None = None
    http: Annotated[list[HttpRule], Field(min_length=1)]


class VirtualService(Kind):
    """The document."""

    api_version: Literal["networking.istio.io/v1", "networking.istio.io/v1beta1", "networking.istio.io/v1alpha3"]
    kind: Literal["VirtualService"]
    spec: VirtualServiceSpec
