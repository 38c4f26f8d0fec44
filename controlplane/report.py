"""What ``modalmesh validate`` prints: the problems, or a summary of what would be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from controlplane.compile.endpoints import needs_dns
from controlplane.compile.names import cluster_name
from controlplane.compile.routes import DEFAULT_TIMEOUT_MS
from controlplane.model import Match, Mesh, Rule, TextMatch
from modalmesh.base.errors import ModalMeshError

__all__ = ["as_dict", "tables"]


def as_dict(mesh: Mesh | None, problems: Sequence[ModalMeshError]) -> dict[str, Any]:
    """Return the result for a script: ``valid``, ``problems``, and counts of what would be served."""
    return {
        "valid": mesh is not None,
        "problems": [
            {
                "code": problem.code,
                "file": problem.where.file if problem.where else "",
                "line": problem.where.line if problem.where else 0,
                "what": problem.what,
                "hint": problem.hint,
            }
            for problem in problems
        ],
        "services": [service.name for service in mesh.services] if mesh else [],
        "hosts": sorted(host for route in mesh.routes for host in route.hosts) if mesh else [],
        "semantic_routes": [route.name for route in mesh.semantic_routes] if mesh else [],
    }


def tables(mesh: Mesh) -> Iterator[Table]:
    """Return the summary: services, routes, choices by content."""
    yield _services(mesh)
    if mesh.routes:
        yield _routes(mesh)
    if mesh.semantic_routes:
        yield _semantic_routes(mesh)


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def _row(table: Table, *cells: str) -> None:
    # As text: what stands in documents is not markup.
    table.add_row(*(Text(cell) for cell in cells))


def _services(mesh: Mesh) -> Table:
    table = _table("service", "protocol", "endpoints", "found by")
    for service in mesh.services:
        shown = ", ".join(
            f"{endpoint.host}:{endpoint.port}" + (f" ×{endpoint.weight}" if endpoint.weight > 1 else "")
            for endpoint in service.endpoints[:3]
        )
        more = f" and {len(service.endpoints) - 3} more" if len(service.endpoints) > 3 else ""
        _row(table, service.name, service.protocol, shown + more, "DNS" if needs_dns(mesh, service) else "EDS")
    return table


def _routes(mesh: Mesh) -> Table:
    table = _table("host", "rule", "request", "goes to", "timeout")
    for route in mesh.routes:
        for host in route.hosts:
            for rule in route.rules:
                timeout = (DEFAULT_TIMEOUT_MS if rule.timeout_ms is None else rule.timeout_ms) / 1000
                requests = " or ".join(_match(match) for match in rule.matches)
                _row(table, host, f"{route.name}.{rule.name}", requests, _destinations(rule), f"{timeout:g} s")
    return table


def _match(match: Match) -> str:
    parts = [_text(match.path)] if match.path else []
    parts += [f"{name} {_text(text)}" for name, text in match.headers]
    parts += [f"?{name} {_text(text)}" for name, text in match.query]
    parts += [f"not {name} {_text(text)}" for name, text in match.without]
    parts += [f"port {match.port}"] if match.port else []
    return ", ".join(parts) or "any"


def _text(text: TextMatch) -> str:
    if text.regex:
        return f"/{text.text}/"
    if not text.prefix:
        return text.text
    return f"{text.text}…" if text.text else "is there"


def _destinations(rule: Rule) -> str:
    if rule.redirect:
        return f"redirect {rule.redirect.code}"
    if rule.response:
        return f"answer {rule.response.status}"
    total = sum(destination.weight for destination in rule.destinations)
    names = [cluster_name(item.service, item.subset) for item in rule.destinations]
    if len(names) == 1:
        return names[0]
    shares = [f"{item.weight / total:.0%}" for item in rule.destinations]
    return ", ".join(f"{name} {share}" for name, share in zip(names, shares, strict=True))


def _semantic_routes(mesh: Mesh) -> Table:
    table = _table("semantic route", "hosts", "service", "model", "takes", "description")
    for route in mesh.semantic_routes:
        defaults = dict(route.defaults)
        for service in route.services:
            takes = ", ".join(
                f"{modality} (default)" if defaults.get(modality) == service.service else modality
                for modality in service.modalities
            )
            shown = service.description if len(service.description) <= 60 else service.description[:59] + "…"
            _row(table, route.name, ", ".join(route.hosts), service.service, service.model, takes, shown)
    return table
