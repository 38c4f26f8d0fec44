"""The command ``node``: the agent, its installation, its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modalmesh.base import logging
from modalmesh.base import settings as configuration
from modalmesh.base.errors import UsageError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
node = typer.Typer(
    invoke_without_command=True,
    help="Own the kernel programs of this node: load them, keep their maps as the policy says.",
)
app.add_typer(node, name="node")


@node.callback()
def run(
    context: typer.Context,
    policy: Annotated[
        Path | None,
        typer.Option(help="YAML file with a NodePolicy, in place of the control plane.", metavar="FILE"),
    ] = None,
    cleanup: Annotated[
        bool, typer.Option("--cleanup", help="Remove everything that the agent has left in the kernel, and stop.")
    ] = False,
) -> None:
    """Own the kernel programs of this node: load them, keep their maps as the policy says.

    Policies come from the control plane (xds.listen) or from a file. What is set up stays in force when the agent
    stops, and its successor takes it over; --cleanup takes it away.
    """
    if context.invoked_subcommand is not None:
        if policy or cleanup:
            raise UsageError("--policy and --cleanup belong to «modalmesh node» itself")
        return
    import asyncio

    from bpf import node as process

    settings = configuration.load()
    if policy is not None:
        section = settings.node.model_copy(update={"policy": policy.absolute()})
        settings = settings.model_copy(update={"node": section})
    logging.configure(settings.log, "node")
    if cleanup:
        process.clean_up(settings)
        return

    async def serve() -> None:
        stop = asyncio.Event()
        process.stop_on_signals(stop)
        await process.serve(settings, stop)

    asyncio.run(serve())


@node.command()
def install(
    only_print: Annotated[bool, typer.Option("--print", help="Print the unit; write nothing.")] = False,
    path: Annotated[Path | None, typer.Option(help="Where to write it.", metavar="FILE", show_default=False)] = None,
) -> None:
    """Write the systemd unit that runs the agent with the capabilities it needs and no others.

    In Kubernetes use deploy/kubernetes/node-agent.yaml.
    """
    from bpf import install as installing

    text = installing.unit(configuration.load())
    if only_print:
        typer.echo(text, nl=False)
        return
    path = path or installing.UNIT
    installing.write(text, path)
    typer.echo(f"{path} is written. Start it with: systemctl daemon-reload && systemctl enable --now {path.name}")
