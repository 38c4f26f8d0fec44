"""The commands ``controlplane``, ``validate``, ``graph`` and ``envoy``."""

from __future__ import annotations

import enum
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from modalmesh.base import settings as settings_module
from modalmesh.base.errors import MachineError, Where

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
envoy = typer.Typer(no_args_is_help=True, help="Print an Envoy bootstrap, or start an Envoy with it.")
app.add_typer(envoy, name="envoy")


_WIDTH_OF_PIPES = 240
"""Columns where there is no terminal: nothing is cut off."""


class Output(enum.StrEnum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"


@app.command()
def controlplane(
    documents: Annotated[
        Path | None, typer.Option(help="Directory of documents, in place of the setting's.", metavar="DIR")
    ] = None,
) -> None:
    """Serve configuration: documents in, compressed xDS out.

    Watches the directory; a broken edit is refused with file and line, and what is being served stays. Stops at SIGTERM
    or Ctrl-C; clients keep what they have.
    """
    import asyncio

    import uvloop

    from controlplane import server
    from modalmesh.base import logging

    settings = settings_module.load()
    if documents is not None:
        section = settings.controlplane.model_copy(update={"documents": documents})
        settings = settings.model_copy(update={"controlplane": section})
    logging.configure(settings.log, "controlplane")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run(settings))


@app.command()
def validate(
    directory: Annotated[Path, typer.Argument(help="Directory of documents.", metavar="DIR", show_default=False)],
    output: Annotated[Output, typer.Option("--output", "-o", help="Form of the result.")] = Output.TABLE,
) -> None:
    """Check a directory of documents without serving it.

    Prints every problem with file and line and exits with 1, or a summary of what would be served.
    """
    from rich.console import Console

    from controlplane import report
    from controlplane.compile import compile_mesh
    from controlplane.directory import read
    from controlplane.errors import UnreadableError
    from controlplane.merge import merge
    from controlplane.server import options_of

    if not directory.is_dir():
        raise UnreadableError("not a directory", hint="name one that exists", where=Where(str(directory)))
    merged = merge(read(directory))
    if merged.mesh is not None:
        compile_mesh(merged.mesh, None, options_of(settings_module.load()))
    if output is Output.JSON:
        typer.echo(json.dumps(report.as_dict(merged.mesh, merged.problems), indent=2, ensure_ascii=False))
    elif merged.mesh is not None:
        console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_OF_PIPES)
        for table in report.tables(merged.mesh):
            console.print(table)
            console.print()
        console.print(f"{directory} is valid.", highlight=False, markup=False)
    else:
        for problem in merged.problems:
            typer.echo(str(problem), err=True)
        count = len(merged.problems)
        typer.echo(f"{count} problem{'s' if count > 1 else ''} in {directory}", err=True)
    if merged.mesh is None:
        raise typer.Exit(1)


@app.command()
def graph(
    directory: Annotated[Path, typer.Argument(help="Directory of documents.", metavar="DIR", show_default=False)],
) -> None:
    """Draw a directory of documents: Graphviz's DOT, with tiers and faults in red.

    Exits with 1 if there are faults; the drawing is complete all the same, as far as the documents can be understood.
    """
    from controlplane.directory import read
    from controlplane.errors import UnreadableError
    from controlplane.graph import as_dot
    from controlplane.merge import merge

    if not directory.is_dir():
        raise UnreadableError("not a directory", hint="name one that exists", where=Where(str(directory)))
    merged = merge(read(directory))
    typer.echo(as_dot(merged.draft, merged.problems), nl=False)
    if merged.problems:
        raise typer.Exit(1)


@envoy.command()
def bootstrap() -> None:
    """Print the bootstrap that an Envoy of this mesh is started with, as JSON."""
    from controlplane.bootstrap import as_json, build

    typer.echo(as_json(build(settings_module.load())), nl=False)


@envoy.command()
def start(
    log_level: Annotated[str, typer.Option(help="Envoy's own log level.")] = "warning",
) -> None:
    """Write the bootstrap to the runtime directory and become an Envoy that uses it.

    The process is replaced, so signals reach Envoy itself.
    """
    from controlplane.bootstrap import write
    from controlplane.envoy_binary import find_envoy
    from controlplane.runtime import make_runtime_dir

    settings = settings_module.load()
    binary = find_envoy(settings.envoy.binary)
    make_runtime_dir(settings)
    path = settings.runtime_dir / "envoy.json"
    _hold(settings.runtime_dir / "envoy.lock")
    try:
        write(settings, path)
    except OSError as error:
        raise MachineError(
            f"{path} can't be written: {error.strerror}", hint="is there room, and is it ours?"
        ) from error
    arguments = [
        str(binary),
        *("--config-path", str(path)),
        *("--concurrency", str(settings.envoy.concurrency)),
        *("--log-level", log_level),
        # Its warnings come once per request as long as the router is away; counters tell of that.
        *("--component-log-level", "ext_proc:error"),
        # With it, each Envoy of a machine would need a base id of its own.
        "--disable-hot-restart",
        # By default up to 10 s pass before a line of the access log is written.
        *("--file-flush-interval-msec", "200"),
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(binary, arguments)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise MachineError(
            f"{binary} can't be executed: {error.strerror}", hint="is it an Envoy for this machine?"
        ) from error


def _hold(path: Path) -> None:
    """Take a lock that lasts as long as the Envoy this process becomes: two would take each other's sockets."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise MachineError(
            f"{path} can't be written: {error.strerror}", hint="is there room, and is it ours?"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise MachineError(
            f"another Envoy runs in {path.parent}", hint="stop it, or choose another with MODALMESH_RUNTIME_DIR"
        ) from error
    os.set_inheritable(descriptor, True)


def _unwritable(path: Path, error: OSError) -> MachineError:
    return MachineError(f"{path} can't be written: {error.strerror}", hint="is there room, and is it ours?")
