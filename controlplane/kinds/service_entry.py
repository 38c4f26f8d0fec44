"""Istio's ``ServiceEntry``: a service that is not found anywhere else.

Istio's documentation of the kind holds for every field that is here. Each host becomes a service of that name.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from controlplane.kinds.base import Host, Kind, Model, Name, Port, ip

__all__ = ["PROTOCOLS", "ServiceEntry", "WorkloadEntry"]

PROTOCOLS = {"GRPC": "grpc", "HTTP2": "h2c"}
"""Istio's names → ours. HTTP is HTTP/1.1 and not among them."""


class PortEntry(Model):
    """A port of the service, and the one of its endpoints if it differs."""

    number: Port
    name: Annotated[str, Field(min_length=1)]
    protocol: str
    target_port: Port | None = None

    @model_validator(mode="after")
    def _spoken(self) -> Self:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol {self.protocol} is not spoken here: one of {', '.join(PROTOCOLS)}")
        return self


class WorkloadEntry(Model):
    """One place where the service runs."""

    address: Host
    ports: Annotated[dict[str, Port], Field(default_factory=dict)]
    labels: Annotated[dict[str, str], Field(default_factory=dict)]
    locality: str = ""
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1


def _address(text: str) -> str:
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        raise ValueError("is no IP address") from None
    if network.num_addresses != 1:
        raise ValueError("is a range of addresses; name single ones")
    return str(network.network_address)


class ServiceEntrySpec(Model):
    """What is to be."""

    hosts: Annotated[list[Name], Field(min_length=1)]
    addresses: Annotated[list[Annotated[str, AfterValidator(_address)]], Field(default_factory=list)]
    ports: Annotated[list[PortEntry], Field(min_length=1, max_length=1)]
    """One: a service has one protocol, and each of its endpoints one port."""
    location: Literal["MESH_EXTERNAL", "MESH_INTERNAL"] = "MESH_EXTERNAL"
    resolution: Literal["STATIC", "DNS"]
    endpoints: Annotated[list[WorkloadEntry], Field(default_factory=list)]

    @model_validator(mode="after")
    def _endpoints_fit(self) -> Self:
        if self.resolution == "STATIC":
            if not self.endpoints:
                raise ValueError("resolution STATIC needs «endpoints»")
            for entry in self.endpoints:
                if ip(entry.address) is None:
                    raise ValueError(f"resolution STATIC takes IP addresses; {entry.address!r} is a name")
        return self


class ServiceEntry(Kind):
    """The document."""

    api_version: Literal["networking.istio.io/v1", "networking.istio.io/v1beta1", "networking.istio.io/v1alpha3"]
    kind: Literal["ServiceEntry"]
    spec: ServiceEntrySpec
