"""One client's HTTP/2 connection to the server, and the ADS streams on it.

Why apart from server.py: this knows the wire and one peer, the server knows groups and snapshots. Whatever a peer does
ends its stream or its connection, never the process; each ending is counted by reason and logged once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final, Protocol

from google.protobuf.message import DecodeError
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from modalmesh.base.errors import ModalMeshError
from modalmesh.base.logging import get_logger
from xds import metrics
from xds.delta import DeltaStream
from xds.errors import RefusedRequestError
from xds.frames import Encoding, Frames
from xds.grpc_wire import DELTA_PATH, Deframer, Status, trailers
from xds.http2 import Http2Protocol, as_text
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Pushes, Response
from xds.snapshot import Snapshot
from xds.types import short_name

__all__ = ["AdsStream", "Connection", "Limits", "Serving"]

_log = get_logger()

_MESSAGE_BYTES: Final = metrics.BYTES.labels("message")
_SENT_BYTES: Final = metrics.BYTES.labels("sent")

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""RFC 9113 §3.4: what every HTTP/2 client sends first."""

_MAX_RESETS_PER_TICK: Final = 100
"""Streams that a client may open and reset, or have refused, between two ticks; more is an attack (CVE-2023-44487)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may take, in seconds, bytes and numbers.

    Attributes:
        ack_timeout: A response without ACK or NACK for so long resets its stream: Envoy loses a message that it can't
            decompress without saying so. Above 15 s, since Envoy delays ACKs of clusters while they warm
            (initial_fetch_timeout).
        handshake: From connecting to the HTTP/2 preface.
        first_request: From opening a stream to its first request.
        keepalive_idle: Silence after which the peer is pinged.
        keepalive_timeout: Silence after the ping that ends the connection.
        max_request: Longest request message. Envoy's first has 61 kB; names and versions it holds come on top.
        max_connections: Of the whole server.
        max_streams: Per connection; a relay may carry many clients.
    """

    ack_timeout: float = 20.0
    handshake: float = 10.0
    first_request: float = 10.0
    keepalive_idle: float = 30.0
    keepalive_timeout: float = 10.0
    max_request: int = 4 * 1024 * 1024
    max_connections: int = 4096
    max_streams: int = 128

    def __post_init__(self) -> None:
        if any(getattr(self, item.name) <= 0 for item in fields(self)):
            raise ValueError("limits are above zero")


class Serving(Protocol):
    """What a connection needs of its server."""

    limits: Limits
    pushes: Pushes
    frames: Frames
    group_of: Callable[[base_pb2.Node], str]

    def snapshot(self, group: str) -> Snapshot | None:
        """Return what a group shall hold."""
        ...

    def opened(self, connection: Connection) -> bool:
        """Register a connection; False: there are too many."""
        ...

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        ...

    def joined(self, stream: AdsStream) -> None:
        """Register a stream whose node is known."""
        ...

    def left(self, stream: AdsStream) -> None:
        """Forget a stream."""
        ...


class AdsStream:
    """One ADS stream: the state machine, and how its responses are encoded.

    Attributes:
        opened: Seconds on the loop's clock.
        group: Set with the first request.
        state: The protocol's state, likewise.
    """

    def __init__(self, connection: Connection, stream_id: int, encoding: Encoding, opened: float) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.encoding = encoding
        self.opened = opened
        self.group = ""
        self.state: DeltaStream | None = None
        self.deframer = Deframer(connection.server.limits.max_request)

    def on_message(self, message: bytes, now: float) -> None:
        """Take one request message.

        Raises:
            RefusedRequestError: It can't be parsed, or breaks the protocol.
        """
        try:
            request = discovery_pb2.DeltaDiscoveryRequest.FromString(message)
        except DecodeError as error:
            raise RefusedRequestError("a message is not a DeltaDiscoveryRequest") from error
        server = self.connection.server
        if self.state is None:
            try:
                group = server.group_of(request.node)
            except ModalMeshError as error:
                raise RefusedRequestError(f"the node fits no group: {error}") from error
            state = DeltaStream(server.snapshot(group), server.pushes, now)
            responses = state.on_request(request, now)
            self.group, self.state = group, state
            server.joined(self)
            _log.info("xds client connected", node=state.node.id, group=group, encoding=self.encoding)
        else:
            answer = self.state.answer_of(request)
            responses = self.state.on_request(request, now)
            if answer is not None:
                self._count_answer(request, answer)
        self.send(responses)

    def on_snapshot(self, snapshot: Snapshot, changed: Mapping[str, frozenset[str]], now: float) -> None:
        """Tell the client what changed."""
        if self.state is not None:
            self.send(self.state.on_snapshot(snapshot, changed, now))
            self.connection.write()

    def send(self, responses: list[Response]) -> None:
        """Queue responses."""
        frames = self.connection.server.frames
        for response in responses:
            chunks = frames.chunks(response, self.encoding)
            metrics.RESPONSES.labels(self._label(response.type_url)).inc()
            _MESSAGE_BYTES.inc(frames.message_length(response))
            _SENT_BYTES.inc(sum(map(len, chunks)))
            self.connection.queue(self.stream_id, chunks)

    def _count_answer(self, request: discovery_pb2.DeltaDiscoveryRequest, answer: str) -> None:
        metrics.ANSWERS.labels(self._label(request.type_url), answer).inc()
        if answer == "nack" and self.state is not None:
            _log.warning(
                "xds client refused a response; it keeps what it had",
                node=self.state.node.id,
                type=short_name(request.type_url),
                error=self.state.types[request.type_url].error,
            )

    def _label(self, type_url: str) -> str:
        known = self.state is not None and self.state.snapshot is not None
        if known and type_url in self.state.snapshot.type_urls:  # type: ignore[union-attr]
            return short_name(type_url)
        return "other"


class Connection(Http2Protocol):
    """One client's connection."""

    def __init__(self, server: Serving, clock: Callable[[], float]) -> None:
        super().__init__(client_side=False, settings={SettingCodes.MAX_CONCURRENT_STREAMS: server.limits.max_streams})
        self.server = server
        self.streams: dict[int, AdsStream] = {}
        self._clock = clock
        self._opened = self._heard = clock()
        self._pinged = False
        self._prelude: bytearray | None = bytearray()
        self._resets = 0
        self._over = False
        self._lingered = False

    # --- asyncio

    def connection_made(self, transport: object) -> None:
        """Wait for the preface: a client that speaks something else gets no byte."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if not self.server.opened(self):
            self._end("capacity", "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the streams."""
        del exc
        self._over = True
        for stream in list(self.streams.values()):
            self._forget(stream)
        self.server.closed(self)

    def data_received(self, data: bytes) -> None:
        """Check the preface, then let HTTP/2 go on; a mistake of ours costs this connection, not the process."""
        if self._over:
            return
        self._heard = self._clock()
        self._pinged = False
        try:
            if self._prelude is not None:
                self._prelude += data
                head = bytes(self._prelude[: len(_PREFACE)])
                if not _PREFACE.startswith(head):
                    self._end("handshake", "does not speak HTTP/2")
                    return
                if len(head) < len(_PREFACE):
                    return
                data, self._prelude = bytes(self._prelude), None
                self.h2.initiate_connection()
            super().data_received(data)
        except Exception:
            _log.exception("xds connection ended by a mistake of the server")
            self._end("internal", "")

    def failed(self, reason: str, what: str) -> None:
        """End the connection."""
        self._end(reason, what)

    # --- events

    def handle(self, event: Event) -> None:
        """Take one event of the connection."""
        if self._over:
            return
        if isinstance(event, RequestReceived):
            self._on_request(event)
        elif isinstance(event, DataReceived):
            self._on_data(event)
        elif isinstance(event, StreamEnded):
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                self.refuse(stream, Status.OK, client_ended=True)
        elif isinstance(event, StreamReset):
            self._count_reset()
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                self._forget(stream)
        elif isinstance(event, ConnectionTerminated):
            self._close()

    def _on_request(self, event: RequestReceived) -> None:
        headers = {as_text(name): as_text(value) for name, value in event.headers}
        ended = event.stream_ended is not None
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith("application/grpc"):
            # Not gRPC: the specification asks for 415.
            self._respond(event.stream_id, [(":status", "415")], ended=ended)
            return
        refusal = _refusal(headers)
        if refusal:
            head = [(":status", "200"), ("content-type", "application/grpc")]
            self._respond(event.stream_id, head + trailers(Status.UNIMPLEMENTED, refusal), ended=ended)
            return
        encoding: Encoding = "zstd" if _accepts_zstd(headers.get("accept-encoding", "")) else "identity"
        head = [(":status", "200"), ("content-type", "application/grpc")]
        if encoding == "zstd":
            head.append(("content-encoding", "zstd"))
        try:
            self.h2.send_headers(event.stream_id, head)
        except ProtocolError:
            return  # reset in the same read
        self.streams[event.stream_id] = AdsStream(self, event.stream_id, encoding, self._clock())

    def _on_data(self, event: DataReceived) -> None:
        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        stream = self.streams.get(event.stream_id)
        if stream is None:
            return
        try:
            for message in stream.deframer.feed(event.data):
                stream.on_message(message, self._clock())
        except RefusedRequestError as error:
            self._say("refused", stream, str(error))
            self.refuse(stream, error.grpc_status, str(error), client_ended=event.stream_ended is not None)

    def tick(self, now: float) -> None:
        """Let time pass: limits are enforced, what waited long enough is sent."""
        limits = self.server.limits
        self._resets = 0
        if self._over:
            # The last bytes had at least a tick to leave; a peer that does not read them must not stay for ever.
            if self._lingered:
                self.transport.abort()
            self._lingered = True
            return
        if self._prelude is not None:
            if now - self._opened >= limits.handshake:
                self._end("handshake", "sent no HTTP/2 preface")
            return
        silence = now - self._heard
        if silence >= limits.keepalive_idle + limits.keepalive_timeout and self._pinged:
            self._end("keepalive", f"was silent for {silence:.0f} s")
            return
        if silence >= limits.keepalive_idle and not self._pinged:
            self._pinged = True
            self.h2.ping(b"modalmsh")
        for stream in list(self.streams.values()):
            self._tick_stream(stream, now)
        self.write()

    def _tick_stream(self, stream: AdsStream, now: float) -> None:
        limits = self.server.limits
        if stream.state is None:
            if now - stream.opened >= limits.first_request:
                self._say("first_request", stream, "no request came")
                self.refuse(stream, Status.DEADLINE_EXCEEDED, "no request came")
            return
        overdue = stream.state.overdue(now, limits.ack_timeout)
        if overdue is not None:
            self._say("ack_timeout", stream, f"{short_name(overdue)} had no ACK for {limits.ack_timeout:g} s")
            # RST_STREAM, not trailers: they would wait behind DATA that the peer does not take.
            self._reset(stream, ErrorCodes.CANCEL)
            return
        stream.send(stream.state.on_tick(now))

    # --- endings

    def refuse(self, stream: AdsStream, status: int, message: str = "", *, client_ended: bool = False) -> None:
        """End a stream with a gRPC status; what it has not sent is dropped."""
        self._forget(stream)
        self._finish(stream.stream_id, trailers(status, message), ended=client_ended)

    def shut_down(self) -> None:
        """End all streams as «try again», and the connection."""
        if not self._over and self._prelude is None:
            for stream in list(self.streams.values()):
                self.refuse(stream, Status.UNAVAILABLE, "the control plane is stopping")
        self._close()

    def abort(self) -> None:
        """End the connection at once."""
        self._over = True
        self.transport.abort()

    def _respond(self, stream_id: int, headers: list[tuple[str, str]], *, ended: bool) -> None:
        """Answer with headers alone."""
        metrics.ENDED.labels("refused").inc()
        self._count_reset()
        self._finish(stream_id, headers, ended=ended)

    def _finish(self, stream_id: int, headers: list[tuple[str, str]], *, ended: bool) -> None:
        """Send the last headers of a stream; RST_STREAM says that nothing more need come (RFC 9113 §8.1)."""
        with contextlib.suppress(ProtocolError):  # the peer was faster
            self.h2.send_headers(stream_id, headers, end_stream=True)
            if not ended:
                self.h2.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    def _reset(self, stream: AdsStream, code: ErrorCodes) -> None:
        self._forget(stream)
        with contextlib.suppress(ProtocolError):  # the peer was faster
            self.h2.reset_stream(stream.stream_id, code)

    def _forget(self, stream: AdsStream) -> None:
        self.drop(stream.stream_id)
        self.streams.pop(stream.stream_id, None)
        if stream.state is not None:
            self.server.left(stream)

    def _count_reset(self) -> None:
        self._resets += 1
        if self._resets > _MAX_RESETS_PER_TICK:
            self.h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._end("overflow", "opens and abandons streams without end")

    def _close(self) -> None:
        if self._over:
            return
        self._over = True
        if self._prelude is None:
            with contextlib.suppress(ProtocolError):  # closed already
                self.h2.close_connection()
        self.write()
        self.transport.close()

    def _end(self, reason: str, what: str) -> None:
        if self._over:
            return
        self._over = True
        metrics.ENDED.labels(reason).inc()
        _log.info("xds connection ended", reason=reason, what=what)
        if self._prelude is None and not self.transport.is_closing():
            self.write()
        self.transport.close()

    @staticmethod
    def _say(reason: str, stream: AdsStream, what: str) -> None:
        metrics.ENDED.labels(reason).inc()
        node = stream.state.node.id if stream.state is not None else ""
        _log.warning("xds stream ended", reason=reason, node=node, what=what)


def _refusal(headers: Mapping[str, str]) -> str:
    """Return why a gRPC request can't be served; "" if it can."""
    path = headers.get(":path", "")
    if path != DELTA_PATH:
        return f"{path} is not served; only delta ADS is: {DELTA_PATH}"
    for name in ("content-encoding", "grpc-encoding"):
        if headers.get(name, "identity") != "identity":
            return f"requests with {name} {headers[name]} are not understood; send them uncompressed"
    return ""


def _accepts_zstd(accept_encoding: str) -> bool:
    """RFC 9110 §12.5.3, as far as it concerns zstd: named, and not with weight 0."""
    for item in accept_encoding.lower().split(","):
        coding, _, weight = item.partition(";")
        if coding.strip() == "zstd":
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
