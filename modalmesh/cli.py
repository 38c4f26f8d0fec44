"""The command ``modalmesh``: assembled from each package's own ``cli.py``, which is imported only when it is used.

Why a table: typer would import every package (numpy, onnxruntime, Envoy's messages) to print ``--help``. A command's
full help stands with the command; here is its one line.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from modalmesh.base.errors import ModalMeshError

__all__ = ["main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("modalmesh.launcher.cli", "Bring the quickstart up, send real requests, show where each went, stop."),
    "up": ("modalmesh.launcher.cli", "Bring the mesh up and keep it in the foreground."),
    "controlplane": ("controlplane.cli", "Serve configuration: documents in, compressed xDS out."),
    "validate": ("controlplane.cli", "Check a directory of documents without serving it."),
    "graph": ("controlplane.cli", "Draw a directory of documents: Graphviz's DOT, with tiers and faults."),
    "envoy": ("controlplane.cli", "Print an Envoy bootstrap, or start an Envoy with it."),
    "router": ("router.cli", "Decide where requests go: Envoy's external processor."),
    "encoder": ("router.cli", "Turn texts and pictures into vectors for the routers of this node."),
    "explain": ("router.cli", "Show which service a text or picture would be sent to, and why."),
    "cache": ("router.cache.cli", "See, empty or size the answer cache."),
    "node": ("bpf.node_cli", "Own the kernel programs of this node: load them, keep their maps as the policy says."),
    "bpf": ("bpf.cli", "Look at this node's kernel programs: probe, selftest, status, counters, trace."),
    "status": ("xds.cli", "Show what each xDS client was sent and has acknowledged."),
}
"""Command → module that holds it as ``app``, and its one line for ``modalmesh --help``."""


class _Lazy(typer.core.TyperGroup):
    """A group that imports a command's module when the command is used."""

    _listing = False

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the names in the order of the table."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return the command; while the whole help is printed, only its one line."""
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        if self._listing:
            return typer.core.TyperCommand(cmd_name, help=summary)
        return typer.main.get_group(importlib.import_module(module).app).get_command(ctx, cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the whole help from the table."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(cls=_Lazy, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"modalmesh {version('modalmesh')}")
        raise typer.Exit


@app.callback(help="A sidecar-less service mesh for multimodal GPU inference.")
def _options(
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.", metavar="FILE")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del debug  # read from sys.argv by main(), which must know it also when parsing fails
    if config:
        from modalmesh.base.settings import CONFIG_VARIABLE

        os.environ[CONFIG_VARIABLE] = str(config.absolute())  # children read the same file


def main() -> None:
    """Run the command; an error meant for people is one line and an exit code, never a traceback."""
    _make_streams_safe()
    try:
        app(prog_name="modalmesh")
    except ModalMeshError as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: unexpected {reason} (modalmesh --debug shows where) [MM1000]", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _make_streams_safe() -> None:
    """Let output go nowhere if it was closed (``>&-``), and show what its encoding lacks as an escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
