"""The control plane's process: watches documents, serves what they compile to.

Last good wins: an update with any problem is refused as a whole, each problem is logged on a line of its own, and what
is being served stays. One exception, because failing open beats not serving: when nothing is being served yet and only
the encoder fails, everything but the policies is served, and the encoder is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from controlplane import metrics
from controlplane.compile import Compiled, GatewayOptions, Options
from controlplane.directory import signature
from controlplane.embeddings import Embedder
from controlplane.errors import UnreadableError
from controlplane.rollout import ENVOY, ROUTER, Rollout
from controlplane.runtime import make_runtime_dir
from controlplane.update import Update, prepare
from controlplane.watch import changes
from modalmesh.base import metrics as metrics_endpoint
from modalmesh.base.errors import Where
from modalmesh.base.logging import get_logger
from modalmesh.base.settings import Settings
from router.encoder import files
from router.encoder.embed import Embeddings, embed_texts
from router.limits import envoy_wait_ms
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.server import AdsServer, Tls
from xds.snapshot import Snapshot
from xds.status import StatusServer

__all__ = ["Publisher", "embedder_of", "group_of", "options_of", "run", "serve", "tls_of"]

_log = get_logger()

_EMBED_TIMEOUT: Final = 120.0
"""Seconds; a CLIP text model on one slow core takes 20 for 100 descriptions."""

_FIRST_RETRY: Final = 2.0
_LONGEST_RETRY: Final = 60.0


def group_of(node: base_pb2.Node) -> str:
    """Return the snapshot group of a client: ``router`` by its metadata's ``role``, else ``envoy``."""
    fields = node.metadata.fields
    return ROUTER if "role" in fields and fields["role"].string_value == ROUTER else ENVOY


def options_of(settings: Settings) -> Options:
    """Return what of the settings is compiled into resources."""
    return Options(
        gateway=GatewayOptions(
            listen=settings.gateway.listen,
            access_log=settings.access_log,
            router_wait_ms=envoy_wait_ms(settings.router.encoder_timeout_ms),
        ),
        router_socket=settings.router_socket,
    )


def embedder_of(settings: Settings) -> Embedder:
    """Return the embedder that the settings ask for."""

    def fingerprint() -> str:
        return files.find(settings.encoder.path).fingerprint

    def embed(texts: Sequence[str]) -> Embeddings:
        return embed_texts(texts, settings=settings.encoder, timeout=_EMBED_TIMEOUT)

    return Embedder(settings.state_dir / "embeddings", fingerprint=fingerprint, embed=embed)


class Publisher:
    """Takes updates and rolls them out; decides what a failed one means."""

    def __init__(self, settings: Settings, server: AdsServer) -> None:
        self._documents = settings.controlplane.documents
        self._options = options_of(settings)
        self._embedder = embedder_of(settings)
        self._rollout = Rollout(server)
        self._served: Compiled | None = None
        # Until policies have been served once, an encoder that fails costs the policies and nothing else.
        self._policies_can_wait = True
        self._logged: tuple[str, ...] = ()
        self._retry = _FIRST_RETRY

    async def update(self) -> float | None:
        """Read the documents and publish them; return after how many seconds to try again, None: when they change."""
        try:
            update = await asyncio.to_thread(
                prepare, self._documents, self._embedder, self._options, without_policies=self._policies_can_wait
            )
        except Exception:
            # A mistake of ours must not take down what is being served.
            _log.exception("update failed; what is being served stays")
            metrics.UPDATES.labels("failed").inc()
            return None
        self._log_problems(update)
        if update.compiled is None:
            metrics.UPDATES.labels("refused").inc()
        else:
            await self._publish(update.compiled, without_policies=update.encoder_failed)
        if not update.encoder_failed:
            self._retry = _FIRST_RETRY
            return None
        delay, self._retry = self._retry, min(2 * self._retry, _LONGEST_RETRY)
        return delay

    async def close(self) -> None:
        """Stop; what is served stays."""
        await self._rollout.close()

    def _log_problems(self, update: Update) -> None:
        metrics.PROBLEMS.set(len(update.problems))
        lines = tuple(str(problem) for problem in update.problems)
        if lines == self._logged:
            return  # said already: a retry, or another file was touched
        if not lines:
            _log.info("documents are in order again")
        self._logged = lines
        for line in lines:
            _log.error("problem", what=line)
        if update.compiled is not None and lines:
            _log.warning("serving without policies: requests go where the plain routes send them")
        elif lines:
            stays = "what is being served stays" if self._served else "nothing is served yet"
            _log.error(f"documents refused; {stays}", problems=len(lines))

    async def _publish(self, compiled: Compiled, *, without_policies: bool) -> None:
        self._policies_can_wait = without_policies
        if compiled == self._served:
            metrics.UPDATES.labels("unchanged").inc()
            return
        await self._rollout.begin(compiled)
        self._served = compiled
        metrics.UPDATES.labels("without_policies" if without_policies else "published").inc()
        for group, snapshot in ((ENVOY, compiled.envoy), (ROUTER, compiled.router)):
            metrics.RESOURCES.labels(group).set(_count(snapshot))
        _log.info("published", envoy=_count(compiled.envoy), router=_count(compiled.router))


def _count(snapshot: Snapshot) -> int:
    return sum(len(snapshot.of_type(url)) for url in snapshot.type_urls)


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Be the control plane until ``stop`` is set.

    Raises:
        UnreadableError: The documents' directory does not exist.
        ListenError: An address or the admin socket is taken.
        MachineError: The runtime directory can't be made, or the metrics port is taken.
    """
    documents = settings.controlplane.documents
    if not documents.is_dir():
        raise UnreadableError(
            "not a directory", hint="name one with MODALMESH_CONTROLPLANE__DOCUMENTS", where=Where(str(documents))
        )
    make_runtime_dir(settings)
    metrics_endpoint.serve(settings.metrics.controlplane)
    async with _servers(settings) as server:
        publisher = Publisher(settings, server)
        changed = asyncio.Event()
        watcher = asyncio.create_task(_watch(documents, changed, stop), name="documents-watcher")
        try:
            while not stop.is_set():
                # Cleared before the documents are read: a change during the update leads to another one.
                changed.clear()
                retry = await publisher.update()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), retry)
        finally:
            stop.set()
            await publisher.close()
            await watcher


async def _watch(documents: Path, changed: asyncio.Event, stop: asyncio.Event) -> None:
    try:
        async for _ in changes(documents, await asyncio.to_thread(signature, documents), stop):
            changed.set()
    finally:
        stop.set()  # also when watching fails: a control plane that sees no change must not seem well
        changed.set()


def tls_of(settings: Settings) -> Tls | None:
    """Return what the xDS server shows to its clients; None: it speaks cleartext."""
    xds = settings.xds
    if xds.certificate is None or xds.key is None:
        return None
    return Tls(xds.certificate, xds.key, xds.client_ca)


@asynccontextmanager
async def _servers(settings: Settings) -> AsyncIterator[AdsServer]:
    server = AdsServer(settings.xds.listen, group_of, settings.xds.zstd_level, tls=tls_of(settings))
    status = StatusServer(settings.admin_socket, server.clients, server.faults)
    await server.start()
    try:
        await status.start()
        try:
            yield server
        finally:
            await status.close()
    finally:
        await server.close()


async def run(settings: Settings) -> None:
    """Be the control plane until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)
    _log.info("stopped")
