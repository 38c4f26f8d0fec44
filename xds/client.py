"""The ADS client that routers and node agents use: keeps a stream up, hands updates over, answers them.

What was received stays in force while the control plane is away; a new stream names the versions held, so that nothing
is sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import zstandard
from google.protobuf.message import DecodeError
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from modalmesh.base.errors import XdsError
from modalmesh.base.logging import get_logger
from modalmesh.base.settings import split_address
from xds import metrics
from xds.consumer import Consumer, Handler, Update
from xds.errors import BadResponseError, FetchError, RefusedRequestError, UnreachableError
from xds.frames import plain_chunks
from xds.grpc_wire import DELTA_PATH, Deframer, decode_message, prefixed
from xds.http2 import Http2Protocol, as_text
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2

__all__ = ["AdsClient", "Handler", "Update", "fetch"]

_log = get_logger()

_CONNECT_TIMEOUT: Final = 5.0
_FIRST_BACKOFF: Final = 0.1
_MAX_RESPONSE: Final = 256 * 1024 * 1024
"""Bytes of one decompressed response: a fleet's whole configuration, and no bomb."""
_STREAM_ID: Final = 1
_DECOMPRESS_STEP: Final = 1024
"""Compressed bytes handed to zstd at a time: each step may grow to 32 MiB at most before the limit is looked at."""


class AdsClient:
    """Keeps subscriptions to a control plane.

    Args:
        address: ``host:port`` or ``unix:PATH``.
        node: Who this is; ``node.metadata["role"]`` selects the group.
        handlers: Type URL → function that takes an ``Update``. One that raises a ModalMeshError refuses the update
            as a whole: the control plane reads why.
        names: Type URL → names to subscribe to; default ``*``.
        max_backoff: Longest pause between two attempts to connect, in seconds.
        keepalive: Seconds of silence after which the server is pinged, and again until the connection is given up.
        tls: Makes the connection secure (``listening.client_context``).
    """

    def __init__(
        self,
        address: str,
        node: base_pb2.Node,
        handlers: Mapping[str, Handler],
        *,
        names: Mapping[str, Iterable[str]] | None = None,
        max_backoff: float = 5.0,
        keepalive: float = 20.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        split_address(address)  # a ValueError now, not at the first attempt
        self._address = address
        self._consumer = Consumer(node, handlers, names)
        self._max_backoff = max_backoff
        self._keepalive = keepalive
        self._tls = tls
        self._connection: _Connection | None = None
        self._told_lost = False

    @property
    def connected(self) -> bool:
        """A stream is open and the control plane has taken it; with nothing new to send it says no more than that."""
        return self._connection is not None and self._connection.accepted

    async def run(self) -> None:
        """Stay connected until cancelled; every loss of connection is logged, none is raised."""
        backoff = _FIRST_BACKOFF
        while True:
            accepted = False
            try:
                accepted = await self._session()
            except (XdsError, ProtocolError) as error:
                self._log_lost(str(error))
            if accepted:
                backoff = _FIRST_BACKOFF
            # Jitter: a fleet must not come back in step.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 — not a secret
            backoff = min(backoff * 2, self._max_backoff)

    async def _session(self) -> bool:
        """Hold one connection until it is lost; return whether the control plane had taken the stream."""
        connection = await _connect(self._address, self._consumer.on_response, self._on_accepted, self._tls)
        self._connection = connection
        metrics.CLIENT_CONNECTED.set(1)
        try:
            for request in self._consumer.first_requests():
                connection.send_request(request)
            self._log_lost(await connection.keep_alive(self._keepalive))
        finally:
            self._connection = None
            metrics.CLIENT_CONNECTED.set(0)
            connection.close()
        return connection.accepted

    def _on_accepted(self) -> None:
        _log.info("xds stream open", address=self._address)
        self._told_lost = False

    def _log_lost(self, why: str) -> None:
        """Say once that there is no stream; attempts that fail until there is one again are for who debugs."""
        say = _log.debug if self._told_lost else _log.warning
        say("no xds stream; what was received stays in force", address=self._address, why=why)
        self._told_lost = True


async def fetch(
    address: str,
    node: base_pb2.Node,
    type_url: str,
    timeout: float,  # noqa: ASYNC109 — a caller's budget, part of the interface
    *,
    names: Iterable[str] = ("*",),
    tls: ssl.SSLContext | None = None,
) -> dict[str, bytes]:
    """Return name → serialised message of a type's resources, once; no subscription is kept.

    Args:
        address: ``host:port`` or ``unix:PATH``.
        node: Who asks.
        type_url: The type.
        timeout: Seconds for everything.
        names: Names to ask for; default all.
        tls: Makes the connection secure.

    Raises:
        UnreachableError: Nobody answers at the address.
        FetchError: No answer in time, or a refusal.
    """
    answer: asyncio.Future[discovery_pb2.DeltaDiscoveryResponse] = asyncio.get_running_loop().create_future()

    def keep(response: discovery_pb2.DeltaDiscoveryResponse) -> None:
        if not answer.done():
            answer.set_result(response)

    request = discovery_pb2.DeltaDiscoveryRequest(node=node, type_url=type_url, resource_names_subscribe=tuple(names))
    try:
        async with asyncio.timeout(timeout):
            connection = await _connect(address, keep, lambda: None, tls)
            try:
                connection.send_request(request)
                await asyncio.wait((answer, connection.lost), return_when=asyncio.FIRST_COMPLETED)
            finally:
                connection.close()
    except TimeoutError as error:
        raise FetchError(
            f"no answer from {address} within {timeout:g} s", hint="is the control plane ready?"
        ) from error
    if not answer.done():
        raise FetchError(f"{address} refused: {connection.lost.result()}")
    return {resource.name: resource.resource.value for resource in answer.result().resources}


async def _connect(
    address: str, on_response: _OnResponse, on_accepted: Callable[[], None], tls: ssl.SSLContext | None
) -> _Connection:
    loop = asyncio.get_running_loop()
    host, port = split_address(address)

    def make() -> _Connection:
        return _Connection(on_response, on_accepted)

    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            if address.startswith("unix:"):
                _, connection = await loop.create_unix_connection(make, host)
            else:
                _, connection = await loop.create_connection(make, host, port, ssl=tls)
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise UnreachableError(
            f"nobody answers at {address}: {reason}", hint="is the control plane running?"
        ) from error
    return connection


_OnResponse = Callable[[discovery_pb2.DeltaDiscoveryResponse], "discovery_pb2.DeltaDiscoveryRequest | None"]
"""Takes a response, returns the answer to send."""


class _Connection(Http2Protocol):
    """One connection with one delta ADS stream.

    Attributes:
        lost: Done when the stream or connection has ended; its result says why.
        accepted: The server has answered the stream's headers with its own.
    """

    def __init__(self, on_response: _OnResponse, on_accepted: Callable[[], None]) -> None:
        super().__init__(client_side=True, settings={SettingCodes.ENABLE_PUSH: 0})
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.accepted = False
        self._on_response = on_response
        self._on_accepted = on_accepted
        self._deframer = Deframer(_MAX_RESPONSE)
        self._decompress: Callable[[bytes], bytes] | None = None
        self._last_heard = asyncio.get_running_loop().time()

    def send_request(self, request: discovery_pb2.DeltaDiscoveryRequest) -> None:
        """Send a request as soon as flow control lets it."""
        self.queue(_STREAM_ID, plain_chunks(prefixed(request.SerializeToString())))
        self.write()

    async def keep_alive(self, interval: float) -> str:
        """Wait until the stream is lost, pinging the server when it is silent; return why it was lost."""
        loop = asyncio.get_running_loop()
        pinged: float | None = None
        while not self.lost.done():
            await asyncio.wait((self.lost,), timeout=interval)
            if self.lost.done():
                break
            # The answer to a ping comes at once, so by now it is nearly as old as the ping.
            if pinged is not None and self._last_heard < pinged:
                return "the server is silent"
            pinged = None
            if loop.time() - self._last_heard >= interval:
                pinged = loop.time()
                self.h2.ping(b"modalmsh")
                self.write()
        return self.lost.result()

    def close(self) -> None:
        """End the connection."""
        self._lose("closed")
        self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the stream."""
        super().connection_made(transport)
        self.greet()
        self.h2.send_headers(
            _STREAM_ID,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", DELTA_PATH),
                (":authority", "modalmesh"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                ("accept-encoding", "zstd"),
            ],
        )
        self.write()

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so."""
        self._lose(f"connection lost{f': {exc}' if exc else ''}")

    def failed(self, reason: str, what: str) -> None:
        """End the connection."""
        self._lose(f"{reason}: {what}")
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Note that the server lives."""
        self._last_heard = asyncio.get_running_loop().time()
        super().data_received(data)

    def handle(self, event: Event) -> None:
        """Take one event."""
        if self.lost.done():
            return
        if isinstance(event, ResponseReceived):
            self._on_head({as_text(name): as_text(value) for name, value in event.headers})
        elif isinstance(event, TrailersReceived):
            headers = {as_text(name): as_text(value) for name, value in event.headers}
            self._lose(_reason(headers))
        elif isinstance(event, DataReceived):
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self._on_data(event.data)
        elif isinstance(event, StreamEnded):
            self._lose("the server ended the stream")
        elif isinstance(event, StreamReset):
            self._lose(f"the server reset the stream ({event.error_code!r})")
        elif isinstance(event, ConnectionTerminated):
            self._lose("the server closed the connection")

    def _on_head(self, headers: dict[str, str]) -> None:
        if headers.get(":status") != "200" or "grpc-status" in headers:
            self._lose(_reason(headers))
            return
        self.accepted = True
        self._on_accepted()
        if headers.get("content-encoding", "identity") == "zstd":
            self._decompress = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress

    def _on_data(self, data: bytes) -> None:
        step = _DECOMPRESS_STEP if self._decompress else max(1, len(data))
        try:
            for start in range(0, len(data), step):
                piece = data[start : start + step]
                self._on_piece(self._decompress(piece) if self._decompress else piece)
        except (RefusedRequestError, BadResponseError, zstandard.ZstdError) as error:
            # A stream that can't be read can't be answered either: a new one brings everything again.
            self._lose(f"the response can't be read: {error}")

    def _on_piece(self, piece: bytes) -> None:
        for message in self._deframer.feed(piece):
            try:
                response = discovery_pb2.DeltaDiscoveryResponse.FromString(message)
            except DecodeError as error:
                raise BadResponseError("a message is not a DeltaDiscoveryResponse") from error
            answer = self._on_response(response)
            if answer is not None:
                self.queue(_STREAM_ID, plain_chunks(prefixed(answer.SerializeToString())))

    def _lose(self, why: str) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # lost already: the first reason is the one
            self.lost.set_result(why)


def _reason(headers: Mapping[str, str]) -> str:
    if "grpc-status" not in headers:
        return f"HTTP status {headers.get(':status', 'none')}"
    message = decode_message(headers.get("grpc-message", ""))
    return f"{message or 'the server ended the stream'} (grpc-status {headers['grpc-status']})"
