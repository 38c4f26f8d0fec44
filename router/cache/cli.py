"""The command ``cache``: what is in it, what must go, and what a policy would have done."""

from __future__ import annotations

import asyncio
import json
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modalmesh.base import logging
from modalmesh.base import settings as configuration
from modalmesh.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modalmesh.base.settings import Settings
    from router.cache.cache import AnswerCache
    from router.cache.model import PurgeReport
    from router.cache.simulate import Row

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
cache = typer.Typer(no_args_is_help=True, help="See, empty or size the answer cache.")
app.add_typer(cache, name="cache")


class Output(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print it.")]


@cache.command()
def simulate(
    file: Annotated[Path, typer.Argument(help="A trace: one key a line, plain or gzip.", metavar="FILE")],
    capacity: Annotated[
        list[int] | None,
        typer.Option("--capacity", "-c", min=1, help="Keys held at once; may be given several times.", metavar="N"),
    ] = None,
    text_keys: Annotated[
        bool, typer.Option("--text-keys", help="Every line is a key, not only lines that begin with a number.")
    ] = False,
    chart: Annotated[
        Path | None, typer.Option(help="Draw hit ratio over capacity: .svg or .png.", metavar="FILE")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Replay a trace against LRU, LRU-2, LRU-3, the adaptive default and the best possible (Bélády).

    Without --capacity, sizes span the trace: from 1/128 of its distinct keys to all of them.
    """
    if chart and chart.suffix.lower() not in {".svg", ".png"}:
        raise UsageError(f"{chart} is neither .svg nor .png", hint="give the chart one of these endings")

    from rich.console import Console

    from router.cache import simulate as simulating
    from router.cache.traces import read_trace

    keys = read_trace(file, text_keys=text_keys)
    capacities = sorted(set(capacity)) if capacity else simulating.default_capacities(keys)
    rows: list[Row] = []
    with Console(stderr=True).status("") as status:
        for size in capacities:
            for policy in simulating.POLICIES:
                status.update(f"{len(keys)} references, {policy}, {size} keys")
                rows += simulating.simulate(keys, [size], [policy])
    if chart:
        _draw(chart, f"{file.name}: {len(keys)} references to {len(set(keys))} keys", rows)
    if output is Output.JSON:
        document = {
            "trace": str(file),
            "references": len(keys),
            "distinct": len(set(keys)),
            "rows": [
                {"capacity": row.capacity, "policy": row.policy, "hits": row.hits, "hit_ratio": round(row.ratio, 6)}
                for row in rows
            ],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(rows, f"{file.name}: {len(keys)} references to {len(set(keys))} keys")


def _draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    from router.cache import chart as drawing

    picture = drawing.to_png(title, rows) if path.suffix.lower() == ".png" else drawing.to_svg(title, rows).encode()
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}") from error


def _print(rows: Sequence[Row], title: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    policies = list(dict.fromkeys(row.policy for row in rows))
    table = Table(
        title=escape(title), caption="hit ratio in %, below it the hits", title_justify="left", caption_justify="left"
    )
    table.add_column("capacity", justify="right")
    for policy in policies:
        table.add_column(policy, justify="right")
    for size in sorted({row.capacity for row in rows}):
        by_policy = {row.policy: row for row in rows if row.capacity == size}
        table.add_row(
            str(size), *(f"{100 * by_policy[name].ratio:.1f}\n[dim]{by_policy[name].hits}[/]" for name in policies)
        )
    Console(highlight=False).print(table)


@cache.command()
def stats(output: OutputOption = Output.TABLE) -> None:
    """Show what this node's cache holds: filter, disk, shared tier. What is in a router's memory, its metrics tell."""
    settings = configuration.load()
    logging.configure(settings.log.model_copy(update={"level": "error"}), "cache")
    figures = asyncio.run(_stats(settings))
    if output is Output.JSON:
        typer.echo(json.dumps(figures, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Answer cache", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for part, values in figures.items():
        for name, value in values.items():
            table.add_row(
                f"{part} {name}".replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value)
            )
    Console(highlight=False).print(table)


async def _stats(settings: Settings) -> dict[str, dict[str, Any]]:
    from router.cache import assemble
    from router.cache.errors import SharedTierError

    node = _opened(settings)
    figures: dict[str, dict[str, Any]] = {}
    try:
        for state in node.filter.states():
            figures[f"{state.layer} filter"] = {
                "generation": state.generation,
                "complete": state.complete,
                "fill": state.fill,
                "false_positive_rate": state.rate,
                "keys": state.keys,
            }
        if node.disk:
            disk = node.disk.state()
            figures["disk"] = {"entries": disk.entries, "bytes": disk.bytes, "capacity": disk.capacity}
        shared = assemble.shared_tier(settings)
        if shared:
            try:
                figures["shared"] = {
                    "round_trip_ms": await shared.ping() * 1000,
                    "eviction_policy": await shared.eviction_policy() or "unknown",
                }
            except SharedTierError as error:
                figures["shared"] = {"error": str(error)}
            finally:
                await shared.close()
    finally:
        node.close_files()
    return figures


class Purge(StrEnum):
    """What must go."""

    KEY = "key"
    SERVICE = "service"
    MODEL = "model"
    VERSION = "version"
    ALL = "all"


@cache.command()
def purge(
    what: Annotated[Purge, typer.Argument(help="What must go.")],
    name: Annotated[
        str, typer.Argument(help="The key in hex, the service, the model, or MODEL@VERSION.", metavar="NAME")
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Make answers worthless, in every process of this node at once and in the shared tier for all nodes.

    Answers that are being computed now are not stored either. Exit code 1 if the shared tier could not be told.
    """
    if (what is Purge.ALL) == bool(name):
        raise UsageError("purge wants to know which", hint="purge all, or purge key|service|model|version NAME")
    if what is Purge.VERSION and not all(name.partition("@")):
        raise UsageError(f"{name!r} is not MODEL@VERSION")
    if what is Purge.KEY and not re.fullmatch("[0-9a-fA-F]{64}", name):
        raise UsageError(f"{name!r} is no key", hint="a key is 64 hexadecimal digits")
    settings = configuration.load()
    logging.configure(settings.log.model_copy(update={"level": "error"}), "cache")

    async def run() -> PurgeReport:
        node = _opened(settings, shared=True)
        try:
            if what is Purge.KEY:
                return await node.purge_key_everywhere(bytes.fromhex(name))
            return await (node.purge_all() if what is Purge.ALL else node.purge_tag(what.value, name))
        finally:
            await node.close()

    report = asyncio.run(run())
    if output is Output.JSON:
        typer.echo(json.dumps({"node": report.node, "shared": report.shared}))
    else:
        typer.echo("purged on this node" + ("" if report.shared else "; the shared tier does not answer: try again"))
    if not report.shared:
        raise typer.Exit(1)


def _opened(settings: Settings, *, shared: bool = False) -> AnswerCache:
    from router.cache import assemble
    from router.cache.cache import AnswerCache
    from router.cache.errors import CacheFilesError

    place = assemble.directory(settings)
    if not (place / "marks").exists():
        raise CacheFilesError(f"there is no cache in {place}", hint="name the folder with cache.directory")
    if shared:
        return assemble.from_settings(settings)
    return AnswerCache(place, options=assemble.options(settings))
