"""The commands below ``modalmesh bpf``: a person's view of this node's kernel programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modalmesh.base import settings as configuration
from modalmesh.base.errors import ModalMeshError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
bpf = typer.Typer(no_args_is_help=True, help="Look at this node's kernel programs.")
trace = typer.Typer(no_args_is_help=True, help="Watch the kernel for a while, with Debian's bcc.")
app.add_typer(bpf, name="bpf")
bpf.add_typer(trace, name="trace")

_WIDTH_OF_PIPES = 200


class Output(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print it.")]
SecondsOption = Annotated[float, typer.Option(min=0.1, max=86_400, help="How long to watch.")]


@app.callback()
def _group() -> None:
    """Kernel programs."""


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_PIPES)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    empty = True
    for row in rows:
        empty = False
        table.add_row(*(escape("–" if cell is None else str(cell)) for cell in row))
    if empty:
        table.add_row(*("–" for _ in columns))
    _console().print(table)


def _cgroup(named: Path | None) -> Path | None:
    from bpf.places import cgroup2_mounts

    mounts = cgroup2_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    return named or (mounts[0] if mounts else None)


@bpf.command()
def probe(output: OutputOption = Output.TABLE) -> None:
    """Show which features this kernel offers, and why others are missing. Attaches nothing."""
    from bpf.probe import probe as look

    settings = configuration.load().bpf
    features = look(settings.pins, settings.cgroup)
    if output is Output.JSON:
        _print_json([dataclasses.asdict(feature) for feature in features])
        return
    rows = (
        (feature.name, "missing" if feature.missing else "yes", feature.needed_for, feature.missing)
        for feature in features
    )
    _print_table("Features of this node", ("feature", "there", "needed for", "why not"), rows)


@bpf.command()
def selftest(output: OutputOption = Output.TABLE) -> None:
    """Try the programs on this kernel: packets through the bypass, connections on loopback through joined sockets.

    Nothing that runs is touched: programs and maps are loaded anew, and a cgroup is made and removed.
    """
    from bpf import selftest as tests

    settings = configuration.load().bpf
    results: list[dict[str, object]] = []

    def attempt(name: str, result: Any) -> None:
        try:
            results.append({"test": name, "passed": True, "seen": result()})
        except ModalMeshError as error:
            results.append({"test": name, "passed": False, "seen": str(error)})

    cgroup = _cgroup(settings.cgroup)

    def join() -> str:
        from bpf.errors import SelftestError

        if cgroup is None:
            raise SelftestError("no cgroup version 2 is mounted", hint="mount -t cgroup2 none DIRECTORY")
        seen = tests.check_join(cgroup)
        return f"{seen.redirected} messages handed over; a writer was stopped after {seen.stopped_after >> 10} KiB"

    attempt("GPU bypass", lambda: f"{tests.check_bypass()} ns a packet")
    attempt("joined sockets", join)
    if output is Output.JSON:
        _print_json(results)
    else:
        rows = ((result["test"], "passed" if result["passed"] else "failed", result["seen"]) for result in results)
        _print_table("Self-test", ("test", "", "seen"), rows)
    if not all(result["passed"] for result in results):
        raise typer.Exit(1)


@bpf.command()
def status(output: OutputOption = Output.TABLE) -> None:
    """Show what is pinned on this node: maps and how full they are, links and what they hang on."""
    from bpf.status import read_status

    found = read_status(configuration.load().bpf.pins)
    if output is Output.JSON:
        _print_json(found)
        return
    layout = found["layout_version"]
    if layout is None and not found["links"]:
        typer.echo(f"nothing is pinned below {found['pins']}")
        return
    typer.echo(f"{found['pins']}: layout {layout}")
    _print_table(
        "Links",
        ("pin", "kind", "program", "id", "hangs on"),
        (
            (link["pin"], link["kind"], link["program"], link["program_id"], link["target"] or "nothing: it is gone")
            for link in found["links"]
        ),
    )
    _print_table(
        "Maps",
        ("name", "id", "entries", "at most"),
        ((each["name"], each["id"], each["entries"], each["max_entries"]) for each in found["maps"]),
    )


@bpf.command()
def counters(output: OutputOption = Output.TABLE) -> None:
    """Show what the programs have counted since they were first attached."""
    from bpf.counters import read_counters

    found = read_counters(configuration.load().bpf.pins)
    if output is Output.JSON:
        _print_json(found)
        return
    if "gpu" in found:
        _print_gpu(found["gpu"])
    if "services" in found:
        _print_services(found["services"])
    if "join" in found:
        rows = ((name.replace("_", " "), event["messages"], event["bytes"]) for name, event in found["join"].items())
        _print_table("Joined sockets", ("event", "messages", "bytes"), rows)
    if "tcp" in found:
        _print_tiers(found["tcp"]["tiers"])


def _print_gpu(gpu: dict[str, Any]) -> None:
    _print_table(
        "GPU slots",
        ("slot", "redirected", "bytes", "without interface", "bytes"),
        ((slot["slot"], *slot["redirected"].values(), *slot["no_interface"].values()) for slot in gpu["slots"]),
    )
    rows = ((name.replace("_", " "), seen["packets"], seen["bytes"]) for name, seen in gpu["passed"].items())
    _print_table("Packets that took the plain way", ("reason", "packets", "bytes"), rows)


def _print_services(services: dict[str, Any]) -> None:
    _print_table(
        "Services",
        ("id", "addresses", "connections", "datagrams", "no backend", "wrong family"),
        (
            (
                each["id"],
                " ".join(each["addresses"]) or None,
                each["connections"],
                each["datagrams"],
                each["no_backend"],
                each["wrong_family"],
            )
            for each in services["services"]
        ),
    )
    rows = ((each["id"], each["connections"], each["datagrams"]) for each in services["backends"])
    _print_table("Backends", ("id", "connections", "datagrams"), rows)


def _print_tiers(tiers: list[dict[str, Any]]) -> None:
    _print_table(
        "TCP by tier",
        ("tier", "opened", "accepted", "closed", "retransmitted", "sent", "received", "mean RTT µs", "p50 <", "p99 <"),
        (
            (
                each["tier"],
                each["active"],
                each["passive"],
                each["closed"],
                each["retransmissions"],
                each["bytes_sent"],
                each["bytes_received"],
                each["rtt_us"]["mean"],
                each["rtt_us"]["p50_below"],
                each["rtt_us"]["p99_below"],
            )
            for each in tiers
        ),
    )


@trace.command()
def connections(seconds: SecondsOption = 10.0, output: OutputOption = Output.TABLE) -> None:
    """Show how long each TCP connection from this node takes to be established, with its tier."""
    from bpf.tracing.connections import watch

    for seen in watch(configuration.load().bpf.pins, seconds):
        if output is Output.JSON:
            typer.echo(json.dumps(dataclasses.asdict(seen), default=str))
        else:
            result = f"{seen.microseconds:10.1f} µs" if seen.established else "    failed   "
            ends = f"{seen.source} {seen.source_port} → {seen.destination} {seen.destination_port}"
            typer.echo(f"{result}  tier {seen.tier}  {ends}  {seen.command} ({seen.pid})")


@trace.command()
def redirects(seconds: SecondsOption = 10.0, output: OutputOption = Output.TABLE) -> None:
    """Count packets that were sent to a GPU slot and dropped by the kernel on their way."""
    from bpf.tracing.counts import count_redirect_errors

    found = count_redirect_errors(configuration.load().bpf.pins, seconds)
    if output is Output.JSON:
        _print_json([dataclasses.asdict(each) for each in found])
        return
    _print_table(
        f"Redirected and dropped, in {seconds:g} s",
        ("slot", "interface", "stage", "error", "packets"),
        ((each.slot, each.ifindex, each.stage, each.error, each.packets) for each in found),
    )


@trace.command()
def drops(seconds: SecondsOption = 10.0, output: OutputOption = Output.TABLE) -> None:
    """Count packets that the kernel's stack drops, by interface and reason."""
    from bpf.tracing.counts import count_drops

    found = count_drops(seconds)
    if output is Output.JSON:
        _print_json([dataclasses.asdict(each) for each in found])
        return
    _print_table(
        f"Dropped in {seconds:g} s",
        ("interface", "reason", "packets"),
        ((each.ifindex or None, each.reason, each.packets) for each in found),
    )
