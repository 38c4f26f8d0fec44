"""The router process: policies come over ADS, requests from Envoy, vectors from the encoder process.

The order of start-up is free: until policies are there requests pass unchanged, until the encoder is there they take
their default routes. Which encoder runs is asked for again and again, because it may be restarted with another model;
policies whose vectors come from a different one are refused (NACK) as long as that is so.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from contextlib import suppress
from typing import Any

from modalmesh.base import metrics
from modalmesh.base.errors import EncoderError, ModalMeshError
from modalmesh.base.logging import configure, get_logger
from modalmesh.base.settings import Settings
from router.encoder.client import EncoderClient
from router.extproc import ExternalProcessor, ExtProcServer
from router.policy import TYPE_URL
from router.store import PolicyStore
from router.telemetry import POLICIES, POLICY_UPDATES
from xds.client import AdsClient, Update
from xds.listening import context_of
from xds.pb.envoy.config.core.v3 import base_pb2

__all__ = ["Subscription", "node", "run", "serve", "watch_encoder"]

log = get_logger()

_ASK_AGAIN = 5.0  # seconds between two questions which encoder runs
_ASK_AGAIN_SOON = 0.5  # while none has ever answered
_DESCRIBE_TIMEOUT = 2.0


def node(settings: Settings) -> base_pb2.Node:
    """Return the xDS node of this router; its role selects what it is sent."""
    result = base_pb2.Node(id=settings.router.node_id, user_agent_name="modalmesh-router")
    result.metadata.update({"role": "router"})
    return result


class Subscription:
    """Keeps a store up to date from the control plane.

    Args:
        store: Takes the updates.
        address: The control plane.
        identity: Who asks.
        tls: Makes the connection secure.
    """

    def __init__(
        self, store: PolicyStore, address: str, identity: base_pb2.Node, tls: ssl.SSLContext | None = None
    ) -> None:
        self._store = store
        self._client = AdsClient(address, identity, {TYPE_URL: self.take}, tls=tls)
        self._again = asyncio.Event()

    def take(self, update: Update) -> None:
        """Apply an update as a whole.

        Raises:
            PolicyError: It is refused; the control plane sees the text.
        """
        try:
            self._store.apply(update.changed, update.removed)
        except ModalMeshError as error:
            POLICY_UPDATES.labels("refused").inc()
            log.warning("policies refused, the last good ones stay", error=str(error))
            raise
        POLICY_UPDATES.labels("accepted").inc()
        POLICIES.set(len(self._store.current.policies))
        log.info("policies in force", policies=[policy.name for policy in self._store.current.policies])

    def ask_again(self) -> None:
        """Have what was refused sent again, since it may fit now: a server doesn't repeat itself on the same stream."""
        self._again.set()

    async def run(self) -> None:
        """Follow the control plane until cancelled."""
        asked = asyncio.create_task(self._again.wait())
        following = asyncio.create_task(self._client.run())
        try:
            while True:
                await asyncio.wait({following, asked}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    return following.result()  # it only ends by an error
                # A new stream names what is held, and gets what is missing.
                await _end(following)
                self._again.clear()
                asked = asyncio.create_task(self._again.wait())
                following = asyncio.create_task(self._client.run())
        finally:
            await _end(following, asked)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def watch_encoder(
    client: EncoderClient,
    store: PolicyStore,
    subscription: Subscription,
    *,
    ask_again: float = _ASK_AGAIN,
    ask_again_soon: float = _ASK_AGAIN_SOON,
) -> None:
    """Keep the store informed which encoder runs, until cancelled.

    Args:
        client: Asks it.
        store: Is told.
        subscription: Has policies sent again that another encoder was in the way of.
        ask_again: Seconds between two questions.
        ask_again_soon: Seconds between two questions as long as none was ever answered.
    """
    while True:
        try:
            described = await client.describe(_DESCRIBE_TIMEOUT)
        except EncoderError as error:
            log.debug("encoder not reached", error=str(error))
            await asyncio.sleep(ask_again if store.encoder else ask_again_soon)
            continue
        identity = (described.fingerprint, described.dimension)
        if identity != store.encoder:
            log.info("encoder found", name=described.name, fingerprint=described.fingerprint)
            for misfit in store.encoder_is(*identity):
                log.error("policy does not fit the encoder: its requests take default routes", error=str(misfit))
            if store.refused_for_encoder:
                subscription.ask_again()
        await asyncio.sleep(ask_again)


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run the router until ``stop`` is set.

    Raises:
        MachineError: The socket or the metrics port can't be had.
    """
    metrics.serve(settings.metrics.router)
    store = PolicyStore()
    encoder = EncoderClient(settings.encoder_socket)
    processor = ExternalProcessor(lambda: store.current, encoder, encoder_timeout_ms=settings.router.encoder_timeout_ms)
    server = ExtProcServer(settings.router_socket, processor)
    subscription = Subscription(store, settings.xds.listen, node(settings), context_of(settings.xds))
    await server.start()
    log.info("router listens", socket=str(settings.router_socket), control_plane=settings.xds.listen)
    background = [
        asyncio.create_task(subscription.run()),
        asyncio.create_task(watch_encoder(encoder, store, subscription)),
    ]
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({*background, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a background task only ends by an error: better restarted than half alive
    finally:
        await _end(*background, stopped)
        await server.close()
        await encoder.close()
        log.info("router stopped")


def run(settings: Settings) -> None:
    """Run the router until SIGTERM or SIGINT.

    Raises:
        MachineError: The socket or the metrics port can't be had.
    """
    configure(settings.log, "router")

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(settings, stop)

    with suppress(KeyboardInterrupt):
        asyncio.run(main())
