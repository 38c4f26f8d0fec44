"""Which processes make one node's mesh, and how each shows that it serves."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import tritonclient.grpc as kserve
from tritonclient.utils import InferenceServerException

from modalmesh.base.errors import MachineError, ModalMeshError
from modalmesh.base.settings import Settings, split_address
from modalmesh.launcher import envoy_admin, triton
from modalmesh.launcher.children import ChildSpec
from router.encoder import client as encoder_client
from router.encoder import files as encoder_files
from xds import status as xds_status

__all__ = ["specs"]

_PROBE_TIMEOUT = 2.0


def specs(settings: Settings) -> list[ChildSpec]:
    """Return the children in the order in which they depend on each other.

    Raises:
        MachineError: The Triton environment or the encoder's files are not there.
    """
    return [
        _triton(settings),
        _own(settings, "encoder", lambda: _encoder_ready(settings.encoder_socket)),
        _own(settings, "controlplane", lambda: _controlplane_ready(settings.admin_socket)),
        _own(settings, "router", lambda: _accepts(f"unix:{settings.router_socket}")),
        _own(
            settings,
            "envoy",
            lambda: asyncio.to_thread(
                envoy_admin.configured,
                settings.envoy_admin_socket,
                own_listeners=1 if settings.envoy.xds == "zstd" else 0,
            ),
            command=("envoy", "start"),
        ),
    ]


def _own(
    settings: Settings,
    name: str,
    ready: Callable[[], Awaitable[bool]],
    *,
    command: tuple[str, ...] | None = None,
) -> ChildSpec:
    """Return a child that is one of our own commands; its lines are for people unless settings say otherwise."""
    log_format = "console" if settings.log.format == "auto" else settings.log.format
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-m", "modalmesh.cli", *(command or (name,))),
        env={**os.environ, "MODALMESH_LOG__FORMAT": log_format, "PYTHONUNBUFFERED": "1"},
        ready=ready,
    )


def _triton(settings: Settings) -> ChildSpec:
    section = settings.triton
    host, port = split_address(section.listen)
    if host not in ("127.0.0.1", "localhost"):
        raise MachineError(
            f"the quickstart's Triton serves this machine only, not {section.listen}",
            hint="set MODALMESH_TRITON__LISTEN=127.0.0.1:PORT",
        )
    installation = triton.prepare(
        section.venv, settings.runtime_dir / "triton", repository=section.repository, modules=section.models
    )
    server = triton.command(
        installation,
        grpc_port=port,
        metrics_port=section.metrics_port or None,
        variables={"MODALMESH_STARTER": str(encoder_files.STARTER)},
    )
    return ChildSpec(
        name="triton",
        argv=server.argv,
        env=server.env,
        ready=lambda: asyncio.to_thread(_triton_ready, section.listen),
        ready_within=90.0,
        ended=lambda: triton.remove_shared_memory(server),
    )


def _triton_ready(address: str) -> bool:
    """Whether Triton serves; it is ready only when every model that it was told to load is."""
    client = kserve.InferenceServerClient(address)
    try:
        return bool(client.is_server_ready(client_timeout=_PROBE_TIMEOUT))
    except InferenceServerException:
        return False
    finally:
        client.close()


async def _encoder_ready(path: Path) -> bool:
    if not path.exists():
        return False
    client = encoder_client.EncoderClient(path)
    try:
        await client.describe(_PROBE_TIMEOUT)
    except ModalMeshError:
        return False
    finally:
        await client.close()
    return True


async def _controlplane_ready(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        await asyncio.to_thread(xds_status.fetch_status, path, _PROBE_TIMEOUT)
    except ModalMeshError:
        return False
    return True


async def _accepts(address: str) -> bool:
    path, _ = split_address(address)
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT):
            _, writer = await asyncio.open_unix_connection(path)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
