"""The mesh as a drawing: Graphviz's DOT, with tiers and faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controlplane.compile.names import cluster_name
from controlplane.model import LEVEL_HEADER, Mesh, Route, Rule, overlap
from modalmesh.base.errors import DocumentError, Where

__all__ = ["as_dot"]

_FAULT = "color=red, fontcolor=red, penwidth=2"

_COLOURS = {"realtime": "darkorange", "elastic": "steelblue", "best-effort": "gray50"}
"""Of the built-in tiers; others are black."""


def as_dot(mesh: Mesh, problems: Sequence[DocumentError]) -> str:
    """Return the drawing: gateway, hosts, services; what calls what; faults in red, with their codes.

    Args:
        mesh: As far as it could be understood.
        problems: What is wrong with it; listed below the drawing as well.
    """
    return "\n".join(_Drawing(mesh, problems).lines()) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


class _Drawing:
    """One drawing."""

    def __init__(self, mesh: Mesh, problems: Sequence[DocumentError]) -> None:
        self._mesh = mesh
        self._problems = problems

    def lines(self) -> Iterator[str]:
        """Return the lines of the file."""
        yield "digraph mesh {"
        yield '  rankdir=LR; node [shape=box, fontname="sans-serif"]; edge [fontname="sans-serif", fontsize=10];'
        yield '  "gateway" [shape=house];'
        for service in self._mesh.services:
            label = f"{service.name}\n{service.protocol}, {len(service.endpoints)} endpoints"
            yield f"  {_quoted('service ' + service.name)} [label={_quoted(label)}{self._fault(service.where)}];"
        for route in self._mesh.routes:
            for host in route.hosts:
                yield from self._host(host, route)
        for service in self._mesh.services:
            for name in service.calls:
                yield f'  {_quoted("service " + service.name)} -> {_quoted("service " + name)} [label="calls"];'
            if service.fallback:
                other = _quoted("service " + service.fallback)
                yield f'  {_quoted("service " + service.name)} -> {other} [label="fallback", style=dashed];'
        if self._problems:
            label = "".join(f"{_quoted(str(problem))[1:-1]}\\l" for problem in self._problems)
            yield f'  labelloc=b; labeljust=l; fontcolor=red; label="{label}";'
        yield "}"

    def _fault(self, where: Where | None) -> str:
        """Return what marks a place that something is wrong with."""
        codes = sorted({problem.code for problem in self._problems if where and problem.where == where})
        return f", {_FAULT}, xlabel={_quoted(' '.join(codes))}" if codes else ""

    def _host(self, host: str, route: Route) -> Iterator[str]:
        name = _quoted(f"host {host}")
        tiers = " (tiers)" if self._mesh.has_tiers(host, route) else ""
        yield f"  {name} [label={_quoted(host + tiers)}, shape=ellipse{self._fault(route.where)}];"
        yield f'  "gateway" -> {name};'
        for rule in route.rules:
            yield from self._rule(name, route, rule)

    def _rule(self, host: str, route: Route, rule: Rule) -> Iterator[str]:
        levels = sorted({dict(match.headers)[LEVEL_HEADER].text for match in rule.matches if _has_level(match.headers)})
        colour = f", color={_COLOURS.get(levels[0], 'black')}" if len(levels) == 1 else ""
        shown = f"{rule.name}\n{', '.join(levels)}" if levels else rule.name
        fault = self._fault(rule.where)
        for place in rule.destinations:
            label = f"{shown}\n{cluster_name(place.service, place.subset)}" if place.subset else shown
            yield f"  {host} -> {_quoted('service ' + place.service)} [label={_quoted(label)}{fault or colour}];"
        for mirror in rule.mirrors:
            target = _quoted("service " + mirror.service)
            yield f"  {host} -> {target} [label={_quoted(f'{shown}: mirror')}, style=dotted{fault or colour}];"
        if rule.destinations:
            for choice in self._mesh.semantic_routes:
                if any(overlap(one, other) for one in route.hosts for other in choice.hosts):
                    for service in choice.services:
                        target = _quoted("service " + service.service)
                        yield f"  {host} -> {target} [label={_quoted(choice.name)}, style=bold];"


def _has_level(headers: tuple[tuple[str, object], ...]) -> bool:
    return any(name == LEVEL_HEADER for name, _ in headers)
