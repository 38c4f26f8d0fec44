"""SemanticRoutes → choices by content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from controlplane.documents import Document, Path
from controlplane.errors import ConflictError, UnknownNameError
from controlplane.kinds.base import full_name
from controlplane.kinds.semantic_route import DEFAULT_THRESHOLDS
from controlplane.kinds.semantic_route import SemanticRoute as SemanticRouteDocument
from controlplane.merge.context import Claims, Context
from controlplane.model import Route, SemanticRoute, SemanticService, overlap

__all__ = ["merge_semantic_routes"]


def merge_semantic_routes(
    context: Context, documents: Iterable[tuple[Document, SemanticRouteDocument]], routes: Sequence[Route]
) -> tuple[SemanticRoute, ...]:
    """Return the semantic routes of all documents, sorted by name; no two are for the same host.

    Args:
        context: Knows the services already.
        documents: Each with its content.
        routes: The plain ones: only their hosts take requests.
    """
    semantic: Claims[SemanticRoute] = Claims("SemanticRoute", context.problems)
    hosts: Claims[None] = Claims("host of a SemanticRoute", context.problems)
    routed = [host for route in routes for host in route.hosts]
    for document, content in documents:
        spec = content.spec
        for index, host in enumerate(spec.hosts):
            where = document.where(("spec", "hosts", index))
            hosts.claim(host, None, where)
            if not context.partial and not any(overlap(host, other) for other in routed):
                what = f"no VirtualService is for host {host!r}, so no request would come here"
                context.note(UnknownNameError(what, hint="add a VirtualService for it", where=where))
        _check_defaults(context, document, content)
        name, where = full_name(content), document.where(("metadata", "name"))
        services = _services(context, document, content)
        route = SemanticRoute(
            name=name,
            hosts=tuple(sorted(spec.hosts)),
            model=spec.model,
            top_k=spec.top_k,
            thresholds=tuple(sorted({**DEFAULT_THRESHOLDS, **spec.thresholds}.items())),
            services=tuple(sorted(services, key=lambda service: service.service)),
            defaults=tuple(sorted(spec.defaults.items())),
            where=where,
        )
        semantic.claim(name, route, where)
    return semantic.in_order()


def _services(context: Context, document: Document, content: SemanticRouteDocument) -> Iterator[SemanticService]:
    names: Claims[None] = Claims("service", context.problems)
    descriptions: Claims[None] = Claims("description", context.problems)
    for index, entry in enumerate(content.spec.services):
        path: Path = ("spec", "services", index)
        where = document.where((*path, "service"))
        names.claim(entry.service, None, where)
        context.check_service(entry.service, where)
        described = document.where((*path, "description"))
        if entry.description:
            # Nothing would tell two services with the same one apart.
            descriptions.claim(entry.description, None, described)
        if entry.model == content.spec.model:
            what = f"the service's model is called {entry.model!r}, by which clients leave the choice to the router"
            where = document.where((*path, "model"))
            context.note(ConflictError(what, hint="rename one of them («spec.model» names the other)", where=where))
        yield SemanticService(entry.service, entry.model, tuple(sorted(entry.modalities)), entry.description, described)


def _check_defaults(context: Context, document: Document, content: SemanticRouteDocument) -> None:
    takes = {entry.service: entry.modalities for entry in content.spec.services}
    for modality, service in content.spec.defaults.items():
        where = document.where(("spec", "defaults", modality))
        if service not in takes:
            what = f"the default for {modality}, {service!r}, is none of the services of this SemanticRoute"
            context.note(UnknownNameError(what, hint="list it under «services»", where=where))
        elif modality not in takes[service]:
            what = f"the default for {modality}, {service!r}, does not take {modality}"
            context.note(ConflictError(what, hint=f"it takes {', '.join(takes[service])}", where=where))
