"""VirtualServices → routes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.documents import Document, Path
from controlplane.errors import (
    ClaimedMatchError,
    DelegateCycleError,
    DelegateError,
    FieldError,
    UnknownNameError,
)
from controlplane.kinds.base import full_name, milliseconds
from controlplane.kinds.virtual_service import DestinationEntry, HttpRule, MirrorEntry, RequestMatch, VirtualService
from controlplane.merge import actions
from controlplane.merge.context import Claims, Context
from controlplane.merge.texts import edits, text_match, text_matches
from controlplane.model import Destination, HeaderEdits, Match, Mirror, Route, Rule, TextMatch
from modalmesh.base.errors import Where

__all__ = ["GATEWAYS", "merge_routes"]

GATEWAYS = ("mesh", "modalmesh-gateway")
"""Names by which a VirtualService may say that it is for the listener of the node's Envoy, the only one there is."""

_DEEPEST = 3
"""Istio allows 1; each level multiplies rules."""

_Documents = Mapping[str, tuple[Document, VirtualService]]


def merge_routes(context: Context, documents: Iterable[tuple[Document, VirtualService]]) -> tuple[Route, ...]:
    """Return the routes of all documents, sorted by name; no two are for the same host."""
    routes: Claims[Route] = Claims("VirtualService", context.problems)
    hosts: Claims[None] = Claims("host", context.problems)
    documents = list(documents)
    merge = _Rules(context, {full_name(content): (document, content) for document, content in documents}, set())
    for document, content in documents:
        _check_gateways(context, document, content)
        for index, host in enumerate(content.spec.hosts):
            hosts.claim(host, None, document.where(("spec", "hosts", index)))
        name, where = full_name(content), document.where(("metadata", "name"))
        rules = tuple(merge.of(document, content, (name,))) if content.spec.hosts else ()
        _check_claims(context, rules)
        routes.claim(name, Route(name, tuple(sorted(content.spec.hosts)), rules, where), where)
    for name, (document, content) in merge.documents.items():
        if not content.spec.hosts and name not in merge.delegated and not context.partial:
            what = f"VirtualService {name!r} has no hosts, and none delegates to it"
            context.note(DelegateError(what, hint="give it «hosts»", where=document.where(("spec",))))
    return tuple(route for route in routes.in_order() if route.hosts)


def _check_gateways(context: Context, document: Document, content: VirtualService) -> None:
    for index, gateway in enumerate(content.spec.gateways or ()):
        if gateway not in GATEWAYS:
            where = document.where(("spec", "gateways", index))
            hint = f"one of {', '.join(GATEWAYS)}, or leave «gateways» out"
            context.note(UnknownNameError(f"there is no gateway {gateway!r}", hint=hint, where=where))


def _check_claims(context: Context, rules: Sequence[Rule]) -> None:
    """Note every match that an earlier rule of the same hosts has as well: its requests never come."""
    taken: dict[Match, Rule] = {}
    for rule in rules:
        for match in dict.fromkeys(rule.matches):
            other = taken.setdefault(match, rule)
            if other is not rule:
                what = f"rule {rule.name!r} is for the same requests as rule {other.name!r} at {other.where}"
                hint = "the first one gets them all: make the matches differ, or remove one"
                context.note(ClaimedMatchError(what, hint=hint, where=rule.where))


@dataclass(slots=True)
class _Rules:
    """Rules of VirtualServices, those that others are delegated to in their place."""

    context: Context
    documents: _Documents
    delegated: set[str]

    def of(self, document: Document, content: VirtualService, way: tuple[str, ...]) -> Iterator[Rule]:
        """Return the rules of one document; ``way`` names it and those that led here."""
        names: Claims[None] = Claims("rule", self.context.problems)
        for index, entry in enumerate(content.spec.http):
            path: Path = ("spec", "http", index)
            name = entry.name or str(index)
            names.claim(name, None, document.where((*path, "name")))
            rule = _rule(self.context, document, path, entry, name)
            if entry.delegate is None:
                yield rule
            else:
                target = _target(entry, content)
                yield from self._delegated(document.where((*path, "delegate")), target, rule, way)

    def _delegated(self, where: Where, target: str, outer: Rule, way: tuple[str, ...]) -> Iterator[Rule]:
        problem = self._problem(target, way)
        if problem is not None:
            if not (self.context.partial and isinstance(problem, UnknownNameError)):
                problem.where = where
                self.context.note(problem)
            return
        self.delegated.add(target)
        document, content = self.documents[target]
        for inner in self.of(document, content, (*way, target)):
            matches = tuple(
                found for one in outer.matches for other in inner.matches if (found := _both(one, other)) is not None
            )
            if not matches:
                what = f"no request fits both this rule and rule {outer.name!r}, which delegates to it"
                hint = f"that one is at {outer.where}; a path here begins with the one there"
                self.context.note(DelegateError(what, hint=hint, where=inner.where))
            yield replace(
                inner,
                name=f"{outer.name}.{inner.name}",
                matches=matches,
                timeout_ms=outer.timeout_ms if inner.timeout_ms is None else inner.timeout_ms,
                fault=inner.fault or outer.fault,
                cors=inner.cors or outer.cors,
                headers=_joined(outer.headers, inner.headers),
            )

    def _problem(
        self, target: str, way: tuple[str, ...]
    ) -> DelegateError | DelegateCycleError | UnknownNameError | None:
        if target in way:
            circle = " → ".join((*way[way.index(target) :], target))
            return DelegateCycleError(f"VirtualServices delegate in a circle: {circle}", hint="break it at one of them")
        if len(way) > _DEEPEST:
            return DelegateError(
                f"more than {_DEEPEST} VirtualServices delegate to each other", hint="shorten the chain"
            )
        if target not in self.documents:
            hint = "it is looked for in the namespace of this one, unless «namespace» says another"
            return UnknownNameError(f"there is no VirtualService {target!r}", hint=hint)
        if self.documents[target][1].spec.hosts:
            what = f"VirtualService {target!r} has hosts of its own, so nothing can be delegated to it"
            return DelegateError(what, hint="remove its «hosts», or name another")
        return None


def _target(entry: HttpRule, content: VirtualService) -> str:
    assert entry.delegate is not None  # noqa: S101 - the caller has looked
    namespace = entry.delegate.namespace or content.metadata.namespace
    return f"{namespace}/{entry.delegate.name}" if namespace else entry.delegate.name


def _joined(outer: HeaderEdits, inner: HeaderEdits) -> HeaderEdits:
    """Return both; where both set the same header, the inner one has its way."""
    return HeaderEdits(
        set=tuple(sorted({**dict(outer.set), **dict(inner.set)}.items())),
        add=tuple(sorted({**dict(outer.add), **dict(inner.add)}.items())),
        remove=tuple(sorted({*outer.remove, *inner.remove})),
        response_set=tuple(sorted({**dict(outer.response_set), **dict(inner.response_set)}.items())),
        response_add=tuple(sorted({**dict(outer.response_add), **dict(inner.response_add)}.items())),
        response_remove=tuple(sorted({*outer.response_remove, *inner.response_remove})),
    )


def _both(outer: Match, inner: Match) -> Match | None:
    """Return what fits both, None if nothing does or it can't be said in one match."""
    if outer.path is None or inner.path is None or outer.path == inner.path:
        path = inner.path or outer.path
    elif outer.path.prefix and not inner.path.regex and inner.path.text.startswith(outer.path.text):
        path = inner.path
    else:
        return None
    for one, other in ((outer.headers, inner.headers), (outer.query, inner.query)):
        if any(dict(other).get(name, text) != text for name, text in one):
            return None
    if outer.port and inner.port and outer.port != inner.port:
        return None
    return Match(
        path=path,
        headers=tuple(sorted({*outer.headers, *inner.headers})),
        without=tuple(sorted({*outer.without, *inner.without})),
        query=tuple(sorted({*outer.query, *inner.query})),
        port=outer.port or inner.port,
        ignore_case=outer.ignore_case or inner.ignore_case,
    )


def _rule(context: Context, document: Document, path: Path, entry: HttpRule, name: str) -> Rule:
    mirrors = list(entry.mirrors)
    if entry.mirror:
        mirrors.append(MirrorEntry(destination=entry.mirror, percentage=entry.mirror_percentage))
    return Rule(
        name=name,
        matches=tuple(_match(item) for item in entry.match or ()) or (Match(),),
        destinations=tuple(_destinations(context, document, (*path, "route"), entry)),
        timeout_ms=milliseconds(entry.timeout) if entry.timeout else None,
        retries=actions.retries(entry.retries) if entry.retries else None,
        fault=actions.fault(entry.fault) if entry.fault else None,
        mirrors=tuple(_mirrors(context, document, path, mirrors)),
        headers=edits(entry.headers),
        rewrite=actions.rewrite(entry.rewrite) if entry.rewrite else None,
        redirect=actions.redirect(entry.redirect) if entry.redirect else None,
        response=actions.response(entry.direct_response) if entry.direct_response else None,
        cors=actions.cors(entry.cors_policy) if entry.cors_policy else None,
        where=document.where(path),
    )


def _match(entry: RequestMatch) -> Match:
    headers: dict[str, TextMatch] = dict(text_matches(entry.headers))
    # In HTTP/2 these two are headers (RFC 9113 §8.3.1).
    if entry.method:
        headers[":method"] = text_match(entry.method)
    if entry.authority:
        headers[":authority"] = text_match(entry.authority)
    return Match(
        path=text_match(entry.uri) if entry.uri else None,
        headers=tuple(sorted(headers.items())),
        without=text_matches(entry.without_headers),
        query=text_matches(entry.query_params),
        port=entry.port,
        ignore_case=entry.ignore_uri_case,
    )


def _destinations(context: Context, document: Document, path: Path, rule: HttpRule) -> Iterator[Destination]:
    """Return those that get requests."""
    entries = rule.route or ()
    claimed: Claims[None] = Claims("destination", context.problems)
    total = 0
    for index, entry in enumerate(entries):
        here: Path = (*path, index)
        name = _service(context, document, (*here, "destination"), entry.destination)
        shown = f"{name}, subset {entry.destination.subset}" if entry.destination.subset else name
        claimed.claim(shown, None, document.where((*here, "destination", "host")))
        if entry.weight is None and len(entries) > 1:
            what = f"{shown!r} is one of {len(entries)} destinations and has no weight"
            context.note(FieldError(what, hint="give each a weight", where=document.where(here)))
        weight = 1 if entry.weight is None else entry.weight
        total += weight
        if weight:
            yield Destination(name, weight, entry.destination.subset, edits(entry.headers))
    if entries and not total:
        context.note(FieldError("all weights are 0", hint="give one a weight", where=document.where(path)))


def _mirrors(context: Context, document: Document, path: Path, entries: Sequence[MirrorEntry]) -> Iterator[Mirror]:
    for index, entry in enumerate(entries):
        here: Path = (*path, "mirrors", index, "destination")
        if (*path, "mirror") in document.lines:
            here = (*path, "mirror")
        name = _service(context, document, here, entry.destination)
        share = actions.millionths(entry.percentage)
        if share:
            yield Mirror(name, entry.destination.subset, share)


def _service(context: Context, document: Document, path: Path, entry: DestinationEntry) -> str:
    """Return the name of the service; note what is wrong with it, its subset and its port."""
    service = context.check_service(entry.host, document.where((*path, "host")))
    if service is None:
        return entry.host
    if entry.subset and service.subset(entry.subset) is None and not context.partial:
        known = ", ".join(subset.name for subset in service.subsets) or "none"
        what = f"there is no subset {entry.subset!r} of {service.name!r}"
        hint = f"known: {known}; a DestinationRule adds them"
        context.note(UnknownNameError(what, hint=hint, where=document.where((*path, "subset"))))
    ports = {endpoint.port for endpoint in service.endpoints}
    if entry.port and ports != {entry.port.number}:
        listed = ", ".join(str(number) for number in sorted(ports)[:5])
        what = f"port {entry.port.number} is not the port of every endpoint of {service.name!r} ({listed})"
        where = document.where((*path, "port", "number"))
        context.note(UnknownNameError(what, hint="leave «port» out: each endpoint has one", where=where))
    return service.name
