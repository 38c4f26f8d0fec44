"""The commands `run` and `up`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer
from rich.console import Console

from controlplane.runtime import make_runtime_dir
from modalmesh.base.errors import MachineError
from modalmesh.base.settings import Settings, load
from modalmesh.launcher import mesh, report
from modalmesh.launcher.requests import Outcome, Request, read_requests, send_all

__all__ = ["app"]

app = typer.Typer(rich_markup_mode="rich")

_COLOURS = {"mesh": "bold", "envoy": "magenta", "controlplane": "cyan", "router": "green", "encoder": "blue"}


@app.command()
def run(
    requests: Annotated[
        Path, typer.Option(metavar="FILE", help="The requests to send, and where each must go.")
    ] = Path("deploy/examples/quickstart.requests.yaml"),
    output: Annotated[
        Literal["table", "json"], typer.Option("--output", "-o", help="How to print the result.")
    ] = "table",
) -> None:
    """Bring the quickstart up, send real requests through Envoy, show where each went, and stop.

    Uses the mesh that `modalmesh up` keeps running, if there is one. Exit code 0: every request went where it should;
    1: one did not.
    """
    settings = load()
    wanted = read_requests(requests)
    console = Console(stderr=True)
    outcomes = asyncio.run(_run(settings, wanted, console))
    if output == "json":
        report.print_json(outcomes)
    else:
        # In a pipe or a log nobody knows the width; the table needs this much.
        report.print_table(outcomes, Console() if sys.stdout.isatty() else Console(width=130))
    wrong = sum(not outcome.right for outcome in outcomes)
    if wrong:
        console.print(f"[red]{wrong} of {len(outcomes)} requests did not go where they should.[/red]")
        raise typer.Exit(1)
    console.print(
        f"All {len(outcomes)} requests went where they should. `make up` keeps the mesh running.", highlight=False
    )


@app.command()
def up() -> None:
    """Bring the mesh up and keep it in the foreground, with the logs of all its processes; Ctrl-C stops everything.

    A process that dies is started again, after growing pauses.
    """
    settings = load()
    console = Console(stderr=True)
    asyncio.run(_up(settings, console))


async def _run(settings: Settings, wanted: list[Request], console: Console) -> list[Outcome]:
    if mesh.is_running(settings):
        console.print(f"Using the mesh that runs in {settings.runtime_dir}.", highlight=False)
        return await asyncio.to_thread(_send, settings, wanted)
    log_path = settings.runtime_dir / "run.log"
    make_runtime_dir(settings)
    try:
        log = log_path.open("w", encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"{log_path} can't be written: {error.strerror}", hint="choose another directory with MODALMESH_RUNTIME_DIR"
        ) from error
    with log:
        task = asyncio.create_task(_bring_up_and_send(settings, wanted, console, log))
        _cancel_on_signal(task)
        try:
            return await task
        except asyncio.CancelledError:
            console.print("Stopped.")
            raise typer.Exit(130) from None
        finally:
            console.print(f"[dim]What the processes said is in {log_path}.[/dim]", highlight=False)


async def _bring_up_and_send(settings: Settings, wanted: list[Request], console: Console, log: TextIO) -> list[Outcome]:
    def sink(name: str, line: str) -> None:
        if line.startswith("warning: "):
            console.print(line, style="yellow", highlight=False, markup=False)
        with contextlib.suppress(OSError):  # a full disk: the requests' outcome counts, not the log
            log.write(f"{name:>12} | {line}\n")
            log.flush()

    def ready(name: str, seconds: float) -> None:
        console.print(f"  {name:<12} ready after {seconds:4.1f} s", highlight=False)

    started = time.monotonic()
    with console.status("Starting the mesh: Triton, encoder, control plane, router, Envoy …") as status:
        async with mesh.running(settings, sink, ready):
            console.print(f"The mesh is up after {time.monotonic() - started:.1f} s.", highlight=False)
            status.update("Sending requests …")
            outcomes = await asyncio.to_thread(_send, settings, wanted)
            status.update("Stopping the mesh …")
    return outcomes


def _send(settings: Settings, wanted: list[Request]) -> list[Outcome]:
    return list(send_all(wanted, settings))


async def _up(settings: Settings, console: Console) -> None:
    def sink(name: str, line: str) -> None:
        colour = _COLOURS.get(name, "yellow")
        console.print(f"[{colour}]{name:>12}[/{colour}] │ ", end="", highlight=False)
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def ready(name: str, seconds: float) -> None:
        sink("mesh", f"{name} is ready after {seconds:.1f} s")

    task = asyncio.create_task(_keep_up(settings, sink, ready))
    _cancel_on_signal(task)
    try:
        await task
    except asyncio.CancelledError:
        sink("mesh", "stopped: no process is left")


async def _keep_up(settings: Settings, sink: mesh.Sink, ready: mesh.Ready) -> None:
    async with mesh.running(settings, sink, ready):
        sink("mesh", f"up: requests to {settings.gateway.listen} (KServe v2 gRPC), Ctrl-C stops")
        sink("mesh", "try, in another terminal: modalmesh status; modalmesh run; modalmesh explain --text Hello")
        await asyncio.Event().wait()


def _cancel_on_signal(task: asyncio.Task[object]) -> None:
    """Let SIGINT, SIGTERM or a closed terminal end the task in order; a second one changes nothing."""
    loop = asyncio.get_running_loop()
    asked = False

    def stop() -> None:
        nonlocal asked
        if not asked:  # cancelling again would cut the stopping short, and leave processes behind
            asked = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
