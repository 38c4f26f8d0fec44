"""Service discovery documents and ServiceEntries → services."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.documents import Document, Path
from controlplane.errors import ConflictError, FieldError, UnknownNameError
from controlplane.kinds.base import full_name
from controlplane.kinds.service_discovery import ServiceDiscovery, labels
from controlplane.kinds.service_discovery import ServiceEntry as DiscoveredEntry
from controlplane.kinds.service_entry import PROTOCOLS as ISTIO_PROTOCOLS
from controlplane.kinds.service_entry import ServiceEntry, ServiceEntrySpec, WorkloadEntry
from controlplane.merge.context import Claims, Context
from controlplane.model import Endpoint, Service

__all__ = ["PROTOCOLS", "check_calls", "merge_services"]

PROTOCOLS = ("grpc", "h2c")
"""Values of the tag ``protocol``; without the tag: h2c."""

# Envoy refuses a locality whose weights add up to more.
_LARGEST_SUM = 2**32 - 1


def merge_services(
    context: Context,
    documents: Sequence[tuple[Document, ServiceDiscovery]],
    entries: Sequence[tuple[Document, ServiceEntry]],
) -> None:
    """Let the context know the services of all documents."""
    services: Claims[Service] = Claims("service", context.problems)
    names: Claims[None] = Claims("ServiceEntry", context.problems)
    addresses: Claims[None] = Claims("address", context.problems)
    for document, discovery in documents:
        for index, entry in enumerate(discovery.services):
            where = document.where(("services", index, "name"))
            services.claim(entry.name, _service(context, document, ("services", index), entry), where)
    for document, content in entries:
        names.claim(full_name(content), None, document.where(("metadata", "name")))
        for index, address in enumerate(content.spec.addresses):
            addresses.claim(address, None, document.where(("spec", "addresses", index)))
        for index, host in enumerate(content.spec.hosts):
            where = document.where(("spec", "hosts", index))
            services.claim(host, _from_entry(context, document, content.spec, host), where)
    context.services = {service.name: service for service in services.in_order()}
    for document, discovery in documents:
        check_calls(context, document, discovery)


def _from_entry(context: Context, document: Document, spec: ServiceEntrySpec, host: str) -> Service:
    port = spec.ports[0]
    places: Claims[None] = Claims("endpoint", context.problems)
    found = []
    # Found by DNS and given none: the host itself is where it runs.
    for index, item in enumerate(spec.endpoints or [WorkloadEntry(address=host)]):
        number = item.ports.get(port.name, port.target_port or port.number)
        places.claim(f"{item.address.lower()}:{number}", None, document.where(("spec", "endpoints", index)))
        for name in item.ports:
            if name != port.name:
                where = document.where(("spec", "endpoints", index, "ports", name))
                context.note(UnknownNameError(f"there is no port {name!r}", hint=f"it is {port.name!r}", where=where))
        found.append(Endpoint(item.address, number, item.weight, tuple(sorted(item.labels.items())), item.locality))
    return Service(
        name=host,
        endpoints=tuple(sorted(found, key=lambda endpoint: (endpoint.host, endpoint.port))),
        protocol=ISTIO_PROTOCOLS[port.protocol],
        addresses=tuple(sorted(spec.addresses)),
        where=document.where(("spec", "hosts")),
    )


def _service(context: Context, document: Document, path: Path, entry: DiscoveredEntry) -> Service:
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
        fallback=entry.fallback,
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
    """Note every called service or fallback that there is not, or that is named twice, or that speaks otherwise."""
    for index, entry in enumerate(discovery.services):
        called: Claims[None] = Claims("called service", context.problems)
        for place, name in enumerate(entry.calls):
            where = document.where(("services", index, "calls", place))
            called.claim(name, None, where)
            context.check_service(name, where)
        if entry.fallback is None:
            continue
        where = document.where(("services", index, "fallback"))
        other = context.check_service(entry.fallback, where)
        own = context.services.get(entry.name)
        if other and own and other.protocol != own.protocol:
            what = f"the fallback {other.name!r} speaks {other.protocol}, {own.name!r} speaks {own.protocol}"
            context.note(ConflictError(what, hint="name one of the same protocol", where=where))
