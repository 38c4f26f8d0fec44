"""Service discovery documents → services."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.documents import Document, Path
from controlplane.errors import ConflictError, FieldError
from controlplane.kinds.service_discovery import ServiceDiscovery, ServiceEntry, labels
from controlplane.merge.context import Claims, Context
from controlplane.model import Endpoint, Service

__all__ = ["PROTOCOLS", "check_calls", "merge_services"]

PROTOCOLS = ("grpc", "h2c")
"""Values of the tag ``protocol``; without the tag: h2c."""

# Envoy refuses a locality whose weights add up to more.
_LARGEST_SUM = 2**32 - 1


def merge_services(context: Context, documents: Sequence[tuple[Document, ServiceDiscovery]]) -> tuple[Service, ...]:
    """Return the services of all documents, sorted by name, and let the context know them."""
    services: Claims[Service] = Claims("service", context.problems)
    for document, discovery in documents:
        for index, entry in enumerate(discovery.services):
            where = document.where(("services", index, "name"))
            services.claim(entry.name, _service(context, document, ("services", index), entry), where)
    merged = services.in_order()
    context.services = {service.name: service for service in merged}
    for document, discovery in documents:
        check_calls(context, document, discovery)
    return merged


def _service(context: Context, document: Document, path: Path, entry: ServiceEntry) -> Service:
    places: Claims[None] = Claims("endpoint", context.problems)
    for index, item in enumerate(entry.endpoints):
        places.claim(f"{item.host.lower()}:{item.port}", None, document.where((*path, "endpoints", index)))
    if sum(item.weight for item in entry.endpoints) > _LARGEST_SUM:
        what = f"the weights of {entry.name!r} add up to more than {_LARGEST_SUM}"
        context.note(FieldError(what, where=document.where((*path, "endpoints"))))
    endpoints = tuple(Endpoint(item.host, item.port, item.weight, labels(item.tags)) for item in entry.endpoints)
    return Service(
        name=entry.name,
        endpoints=tuple(sorted(endpoints, key=lambda endpoint: (endpoint.host, endpoint.port))),
        protocol=_protocol(context, document, path, endpoints),
        calls=tuple(sorted(entry.calls)),
        where=document.where((*path, "name")),
    )


def _protocol(context: Context, document: Document, path: Path, endpoints: Sequence[Endpoint]) -> str:
    """Return what all endpoints say: Envoy has one protocol and one health check per cluster."""
    found = [dict(endpoint.labels).get("protocol", "h2c") for endpoint in endpoints]
    for index, protocol in enumerate(found):
        where = document.where((*path, "endpoints", index, "tags"))
        if protocol not in PROTOCOLS:
            what = f"protocol={protocol} is not supported"
            context.note(FieldError(what, hint=f"one of {', '.join(PROTOCOLS)}", where=where))
        elif protocol != found[0]:
            what = f"protocol is {protocol} here, but {found[0]} at the first endpoint of the service"
            context.note(ConflictError(what, hint="give all endpoints the same tag", where=where))
    return found[0]


def check_calls(context: Context, document: Document, discovery: ServiceDiscovery) -> None:
    """Note every called service that there is not, or that is named twice."""
    for index, entry in enumerate(discovery.services):
        called: Claims[None] = Claims("called service", context.problems)
        for place, name in enumerate(entry.calls):
            where = document.where(("services", index, "calls", place))
            called.claim(name, None, where)
            context.check_service(name, where)
