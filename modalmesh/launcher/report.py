"""Shows outcomes to a person or a script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from modalmesh.launcher.requests import Outcome

__all__ = ["print_json", "print_table"]


def print_table(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a row for each request, and what went wrong below."""
    table = Table(title="Requests with model “auto”, sent through Envoy", title_justify="left", expand=False)
    table.add_column("request", max_width=36)
    table.add_column("modality", no_wrap=True)
    table.add_column("service\nmodel", no_wrap=True)
    table.add_column("similarity\nrunner-up", no_wrap=True)
    table.add_column("answer", max_width=22)
    table.add_column("ms in router\nand backend", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    console.print(table)
    for outcome in outcomes:
        if not outcome.right:
            console.print(f"[red]{outcome.request.title}: {_complaint(outcome)}[/red]", highlight=False)


def print_json(outcomes: Sequence[Outcome]) -> None:
    """Print a list of objects on standard output."""
    rows = [
        {
            "request": outcome.request.model_dump(exclude_none=True),
            "routed": dataclasses.asdict(outcome.routed) if outcome.routed else None,
            "answered_by": outcome.answered_by,
            "answer": outcome.answer,
            "right": outcome.right,
        }
        for outcome in outcomes
    ]
    print(json.dumps(rows, indent=2, ensure_ascii=False))  # noqa: T201


def _row(outcome: Outcome) -> list[str]:
    mark = "[green]✓[/green]" if outcome.right else "[red]✗[/red]"
    routed = outcome.routed
    if routed is None:
        return [outcome.request.title, "", "no decision was logged", "", outcome.answer, "", mark]
    service = f"{routed.service} [dim](default)[/dim]" if routed.reason == "default" else routed.service
    runner_up = "" if routed.runner_up_similarity is None else f"{routed.runner_up_similarity:.2f} {routed.runner_up}"
    backend = "–" if routed.backend_ms is None else f"{routed.backend_ms:.1f}"
    return [
        outcome.request.title,
        routed.modality,
        f"{service}\n[dim]{routed.model}[/dim]",
        f"{'–' if routed.similarity is None else format(routed.similarity, '.2f')}\n[dim]{runner_up}[/dim]",
        outcome.answer,
        f"{routed.router_ms:.1f}\n{backend}",
        mark,
    ]


def _complaint(outcome: Outcome) -> str:
    expected = f"should have gone to {outcome.request.expect} ({outcome.request.because})"
    if outcome.routed is None:
        return f"{expected}; no decision reached Envoy's access log; answer: {outcome.answer}"
    return (
        f"{expected}; went to {outcome.routed.service or 'no service'} ({outcome.routed.reason}), "
        f"answered by {outcome.answered_by or 'nobody'}: {outcome.answer}"
    )
