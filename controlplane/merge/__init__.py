"""Documents → one ``Mesh``, with every reference between them checked.

All problems are collected: who mends a directory wants to see them in one run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from controlplane import kinds
from controlplane.directory import Source
from controlplane.documents import Document
from controlplane.errors import EmptySourceError
from controlplane.kinds.destination_rule import DestinationRule
from controlplane.kinds.qos_policy import QosPolicy
from controlplane.kinds.semantic_route import SemanticRoute
from controlplane.kinds.service_discovery import ServiceDiscovery
from controlplane.kinds.service_entry import ServiceEntry
from controlplane.kinds.virtual_service import VirtualService
from controlplane.merge.context import Context
from controlplane.merge.destinations import merge_destinations
from controlplane.merge.qos import check_levels, merge_qos
from controlplane.merge.routes import merge_routes
from controlplane.merge.semantic import merge_semantic_routes
from controlplane.merge.services import merge_services
from controlplane.model import Mesh
from controlplane.topology import find_faults
from modalmesh.base.errors import DocumentError, Where

__all__ = ["Merged", "merge"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Merged:
    """A mesh, or what is wrong, sorted by place.

    Attributes:
        draft: The mesh as far as it can be understood, to be drawn, not to be served.
    """

    mesh: Mesh | None
    draft: Mesh
    problems: tuple[DocumentError, ...]


def merge(source: Source) -> Merged:
    """Build the mesh that the documents describe.

    The problems of the source count too: a directory of which a part can't be read does not say what its author means.
    """
    problems = list(source.problems)
    read: list[kinds.Read] = []
    for document in source.documents:
        result = kinds.read(document)
        if isinstance(result, kinds.Read):
            read.append(result)
        else:
            problems.extend(result)
    context = Context(problems, partial=bool(problems))
    merge_services(context, _of(read, ServiceDiscovery), _of(read, ServiceEntry))
    merge_destinations(context, _of(read, DestinationRule))
    services = tuple(context.services[name] for name in sorted(context.services))
    routes = merge_routes(context, _of(read, VirtualService))
    qos = merge_qos(context, _of(read, QosPolicy))
    check_levels(context, routes, qos)
    semantic_routes = merge_semantic_routes(context, _of(read, SemanticRoute), routes)
    mesh = Mesh(services, routes, semantic_routes, qos.tiers, qos.default, qos.hosts)
    problems.extend(find_faults(mesh))
    if not problems and not services:
        problems.append(
            EmptySourceError("no document names a service", hint="add a service-discovery.yaml with «services:»")
        )
    if problems:
        # A rule that several delegate to is looked at several times.
        distinct = {(problem.where or Where(""), problem.what): problem for problem in problems}
        return Merged(None, mesh, tuple(distinct[place] for place in sorted(distinct)))
    return Merged(mesh, mesh, ())


def _of(read: Iterable[kinds.Read], kind: type[T]) -> list[tuple[Document, T]]:
    return [(item.document, item.content) for item in read if isinstance(item.content, kind)]
