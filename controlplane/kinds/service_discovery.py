"""``service-discovery.yaml``: the services and where they run. No apiVersion; recognised by ``services:``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from controlplane.kinds.base import Host, Model, Name, Port

__all__ = ["EndpointEntry", "ServiceDiscovery", "ServiceEntry", "labels"]


def _tag(text: str) -> str:
    if not text.partition("=")[0].strip() or text != text.strip() or not text.isprintable():
        raise ValueError("is not a tag: «name» or «name=value»")
    return text


def labels(tags: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return tags as labels, sorted: ``k=v`` is k: v, a bare ``t`` is t: "true".

    Raises:
        ValueError: Two tags give one label different values.
    """
    found: dict[str, str] = {}
    for tag in tags:
        name, separator, value = tag.partition("=")
        value = value if separator else "true"
        if found.setdefault(name, value) != value:
            raise ValueError(f"tags give {name!r} two values: {found[name]!r} and {value!r}")
    return tuple(sorted(found.items()))


def _consistent(tags: list[str]) -> list[str]:
    labels(tags)
    return tags


class EndpointEntry(Model):
    """One place where a service runs."""

    host: Host
    port: Port
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    tags: Annotated[list[Annotated[str, AfterValidator(_tag)]], AfterValidator(_consistent)] = Field(
        default_factory=list
    )


class ServiceEntry(Model):
    """A service."""

    name: Name
    endpoints: Annotated[list[EndpointEntry], Field(min_length=1)]
    calls: list[str] = Field(default_factory=list)
    """Services that this one calls."""
    fallback: str | None = None
    """The service that takes the requests when too few endpoints of this one are well."""


class ServiceDiscovery(Model):
    """The document."""

    services: list[ServiceEntry]
