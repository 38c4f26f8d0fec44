"""VirtualServices → routes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from controlplane.documents import Document, Path
from controlplane.errors import FieldError, UnknownNameError
from controlplane.kinds.base import full_name, milliseconds
from controlplane.kinds.virtual_service import HttpRule, RequestMatch, RouteEntry, StringMatch, VirtualService
from controlplane.merge.context import Claims, Context
from controlplane.model import Destination, Match, Route, Rule, TextMatch

__all__ = ["GATEWAYS", "merge_routes"]

GATEWAYS = ("mesh", "modalmesh-gateway")
"""Names by which a VirtualService may say that it is for the listener of the node's Envoy, the only one there is."""


def merge_routes(context: Context, documents: Iterable[tuple[Document, VirtualService]]) -> tuple[Route, ...]:
    """Return the routes of all documents, sorted by name; no two are for the same host."""
    routes: Claims[Route] = Claims("VirtualService", context.problems)
    hosts: Claims[None] = Claims("host", context.problems)
    for document, content in documents:
        _check_gateways(context, document, content)
        for index, host in enumerate(content.spec.hosts):
            hosts.claim(host, None, document.where(("spec", "hosts", index)))
        name, where = full_name(content), document.where(("metadata", "name"))
        rules = tuple(_rules(context, document, content.spec.http))
        routes.claim(name, Route(name, tuple(sorted(content.spec.hosts)), rules, where), where)
    return routes.in_order()


def _check_gateways(context: Context, document: Document, content: VirtualService) -> None:
    for index, gateway in enumerate(content.spec.gateways or ()):
        if gateway not in GATEWAYS:
            where = document.where(("spec", "gateways", index))
            hint = f"one of {', '.join(GATEWAYS)}, or leave «gateways» out"
            context.note(UnknownNameError(f"there is no gateway {gateway!r}", hint=hint, where=where))


def _rules(context: Context, document: Document, entries: Sequence[HttpRule]) -> Iterator[Rule]:
    names: Claims[None] = Claims("rule", context.problems)
    for index, entry in enumerate(entries):
        path: Path = ("spec", "http", index)
        name = entry.name or str(index)
        names.claim(name, None, document.where((*path, "name")))
        yield Rule(
            name=name,
            matches=tuple(_match(item) for item in entry.match or ()) or (Match(),),
            destinations=tuple(_destinations(context, document, (*path, "route"), entry.route)),
            timeout_ms=milliseconds(entry.timeout) if entry.timeout else None,
        )


def _match(entry: RequestMatch) -> Match:
    headers = {name: _text(match) for name, match in entry.headers.items()}
    # In HTTP/2 these two are headers (RFC 9113 §8.3.1).
    if entry.method:
        headers[":method"] = _text(entry.method)
    if entry.authority:
        headers[":authority"] = _text(entry.authority)
    return Match(path=_text(entry.uri) if entry.uri else None, headers=tuple(sorted(headers.items())))


def _text(match: StringMatch) -> TextMatch:
    return TextMatch(match.exact) if match.exact is not None else TextMatch(match.prefix or "", prefix=True)


def _destinations(
    context: Context, document: Document, path: Path, entries: Sequence[RouteEntry]
) -> Iterator[Destination]:
    """Return those that get requests."""
    claimed: Claims[None] = Claims("destination", context.problems)
    total = 0
    for index, entry in enumerate(entries):
        here: Path = (*path, index)
        host = entry.destination.host
        _check_destination(context, document, here, entry)
        claimed.claim(host, None, document.where((*here, "destination", "host")))
        if entry.weight is None and len(entries) > 1:
            what = f"{host!r} is one of {len(entries)} destinations and has no weight"
            context.note(FieldError(what, hint="give each a weight", where=document.where(here)))
        weight = 1 if entry.weight is None else entry.weight
        total += weight
        if weight:
            yield Destination(host, weight)
    if not total:
        context.note(FieldError("all weights are 0", hint="give one a weight", where=document.where(path)))


def _check_destination(context: Context, document: Document, path: Path, entry: RouteEntry) -> None:
    host, port = entry.destination.host, entry.destination.port
    service = context.check_service(host, document.where((*path, "destination", "host")))
    ports = {endpoint.port for endpoint in service.endpoints} if service else set()
    if port and service and ports != {port.number}:
        listed = ", ".join(str(number) for number in sorted(ports)[:5])
        what = f"port {port.number} is not the port of every endpoint of {host!r} ({listed})"
        where = document.where((*path, "destination", "port", "number"))
        context.note(UnknownNameError(what, hint="leave «port» out: each endpoint has one", where=where))
