"""The commands ``router``, ``encoder`` and ``explain``."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modalmesh.base import logging
from modalmesh.base import settings as configuration
from modalmesh.base.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from router.explain import Explanation

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


class Output(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


@app.command()
def router() -> None:
    """Decide where requests go: Envoy's external processor, on a unix socket in the runtime directory.

    Policies come from the control plane (xds.listen), vectors from the encoder process. Neither has to be there first.
    """
    from router.app import run

    run(configuration.load())


@app.command()
def encoder() -> None:
    """Turn texts and pictures into vectors for the routers of this node, on a unix socket in the runtime directory.

    Without encoder.path this is a starter that reads English and knows ImageNet's 1000 kinds of things; give it a CLIP
    export for more.
    """
    from router.encoder.server import run

    run(configuration.load())


@app.command()
def explain(
    text: Annotated[str | None, typer.Option(help="A text, as a request would carry it.")] = None,
    image: Annotated[Path | None, typer.Option(help="A picture file.", metavar="FILE")] = None,
    authority: Annotated[
        str | None, typer.Option(help="The host a request would name; default: the gateway's address.", metavar="HOST")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Candidates to list; default: the policy's.", metavar="N")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TABLE,
) -> None:
    """Show which service a text or picture would be sent to, and why.

    Asks the running control plane for its policies and decides as the router does. The encoder process is used if it
    runs; else the encoder is loaded here, which takes a few seconds.
    """
    if (text is None) == (image is None):
        raise UsageError("explain needs either a text or a picture", hint="give --text or --image, and not both")

    from rich.console import Console

    from router import explain as explaining

    settings = configuration.load()
    # The result is on standard output; what is logged while it is found must neither mix with it nor drown it.
    logging.configure(settings.log.model_copy(update={"level": "warning"}), "explain")
    content = explaining.text(text) if text is not None else explaining.picture(image or Path())
    to_person = Console(stderr=True)

    async def find_out() -> Explanation:
        policies = await explaining.fetch_policies(settings)
        vector = await explaining.encode(content, settings, to_person.status)
        return explaining.explain(policies, authority or settings.gateway.listen, content, vector, top_k=top_k)

    explanation = asyncio.run(find_out())
    if output is Output.JSON:
        typer.echo(json.dumps(explaining.to_json(explanation), ensure_ascii=False, indent=2))
    else:
        _print(explanation, Console(highlight=False))


def _print(explanation: Explanation, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from router.decision import TEXTS

    decision, policy, vector = explanation.decision, explanation.policy, explanation.vector
    chosen = decision.service
    table = Table(title=f"Policy {escape(policy.name)}, {decision.modality} request", title_justify="left")
    table.add_column("")
    table.add_column("service")
    table.add_column("similarity", justify="right")
    table.add_column("description")
    descriptions = {service.service_id: service.description for service in policy.services}
    for candidate in decision.candidates:
        is_chosen = chosen is not None and candidate.service_id == chosen.service_id
        table.add_row(
            "→" if is_chosen else "",
            escape(candidate.service_id),
            f"{candidate.similarity:.3f}",
            escape(descriptions[candidate.service_id]),
            style="bold" if is_chosen else "",
        )
    console.print(table)
    if decision.threshold is not None:
        console.print(f"threshold  {decision.threshold:.3f} for {decision.modality}")
    console.print(f"reason     {decision.reason}: {TEXTS[decision.reason]}")
    if chosen:
        console.print(f"service    {escape(chosen.service_id)} (cluster {escape(chosen.cluster)})", style="bold")
        console.print(f"model      {escape(chosen.model)}", style="bold")
    else:
        console.print("service    none: the request passes unchanged", style="bold")
    place = "loaded here: the encoder process does not answer" if vector.loaded_here else "encoder process"
    console.print(f"encoder    {escape(vector.encoder)} {vector.fingerprint} ({place})")
    if vector.is_starter:
        console.print("[yellow]This is the starter encoder.[/] Set encoder.path to a CLIP export for real use.")
    if vector.note:
        console.print(f"note       {escape(vector.note)}")
