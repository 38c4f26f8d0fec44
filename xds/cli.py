"""The command ``modalmesh status``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:  # at run time only when the command is used: --help stays fast
    from rich.text import Text

    from xds.pb.xds import status_pb2

app = typer.Typer(rich_markup_mode="rich")

__all__ = ["app"]

_WIDTH_OF_PIPES: Final = 240
"""Columns where there is no terminal: nothing is cut off, and grep sees one line per row."""


class Output(enum.StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"


_COLOURS: Final = {"synced": "green", "stale": "yellow", "nacked": "red"}


@app.callback()
def _group() -> None:
    """Configuration transport."""


@app.command()
def status(
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print.")] = Output.TABLE,
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for the control plane.")] = 5.0,
) -> None:
    """Show what each xDS client was sent and has acknowledged.

    [green]synced[/green]: has everything.

    [yellow]stale[/yellow]: has not acknowledged what was sent, or waits for its turn.

    [red]nacked[/red]: refused what was sent and keeps what it had.

    not-sent: asked for nothing that exists.

    Versions come from content: equal versions mean equal configuration.
    """
    from modalmesh.base import settings
    from xds.status import fetch_report

    report = fetch_report(settings.load().admin_socket, timeout)
    if output is Output.JSON:
        typer.echo(_as_json(report))
    else:
        _print_table(report.clients)
        _print_faults(report.faults)


def _as_json(report: status_pb2.ListResponse) -> str:
    from google.protobuf import json_format

    return json_format.MessageToJson(
        report,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )


def _print_table(clients: Sequence[status_pb2.Client]) -> None:
    from rich.console import Console
    from rich.table import Table

    from xds.types import short_name

    console = Console()
    if not clients:
        console.print("No client is connected.")
        return
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_PIPES)
    table = Table("node", "group", "type", "resources", "sent", "acknowledged", "state", "last error", box=None)
    for client in clients:
        for item in client.types:
            table.add_row(
                _plain(client.node_id),
                _plain(client.group),
                _plain(short_name(item.type_url)),
                str(item.resources),
                item.sent_version or "-",
                item.acked_version or "-",
                _state(item),
                _plain(item.last_error),
            )
    console.print(table)


def _print_faults(faults: Sequence[status_pb2.Fault]) -> None:
    from rich.console import Console

    from xds.types import short_name

    console = Console(soft_wrap=True)
    for fault in faults:
        instead = "what was served before stays" if fault.replaced else "not served"
        where = f"{fault.group}: {short_name(fault.type_url)} {fault.name}"
        console.print(_plain(f"{where}: {instead}, because it {fault.reason}"))


def _state(item: status_pb2.Type) -> Text:
    from rich.text import Text

    from xds.pb.xds import status_pb2

    name = status_pb2.State.Name(item.state).lower().replace("_", "-")
    return Text(name, style=_COLOURS.get(name, ""))


def _plain(text: str) -> Text:
    """Return what a client said of itself, without markup and without control characters for the terminal."""
    from rich.text import Text

    return Text("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))
