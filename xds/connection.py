"""One client's HTTP/2 connection to the server, and the gRPC calls on it.

Why apart from server.py: this knows the wire and one peer, the server knows groups and snapshots. Whatever a peer does
ends its stream or its connection, never the process; each ending is counted by reason and logged once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol

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
from hyperframe.frame import GoAwayFrame

from modalmesh.base.logging import get_logger
from xds import metrics
from xds.calls import PATHS, AdsCall, call_of
from xds.errors import RefusedRequestError
from xds.frames import Encoding
from xds.grpc_wire import Deframer, Status, trailers
from xds.http2 import Http2Protocol, as_text
from xds.rpc import Call, Serving

__all__ = ["Connection", "Hosting"]

_log = get_logger()

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""RFC 9113 §3.4: what every HTTP/2 client sends first."""

_MAX_RESETS_PER_TICK: Final = 100
"""Streams that a client may open and reset, or have refused, between two ticks; more is an attack (CVE-2023-44487)."""

_LAST_STREAM: Final = 2**31 - 1

_GRPC: Final = [(":status", "200"), ("content-type", "application/grpc")]


class Hosting(Serving, Protocol):
    """What a connection needs of its server beside what its calls need."""

    def opened(self, connection: Connection) -> bool:
        """Register a connection; False: there are too many."""
        ...

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        ...


class _Stuck:
    """Notices that what waits for a peer does not get less."""

    __slots__ = ("_since", "_waiting")

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0

    def seconds(self, waiting: int, now: float) -> float:
        """Return for how long no byte has left."""
        if not waiting or waiting != self._waiting:
            self._waiting, self._since = waiting, now
        return now - self._since


class _Stream:
    """A call, and its messages as they come."""

    __slots__ = ("began", "call", "deframer", "ended", "stuck")

    def __init__(self, call: Call, limit: int) -> None:
        self.stuck = _Stuck()
        self.call = call
        self.deframer = Deframer(limit)
        self.began = False
        self.ended = False


class Connection(Http2Protocol):
    """One client's connection.

    Args:
        server: Whose.
        clock: Seconds.
        alpn: With TLS: a peer that did not choose h2 is let go.
    """

    def __init__(self, server: Hosting, clock: Callable[[], float], *, alpn: bool = False) -> None:
        super().__init__(client_side=False, settings={SettingCodes.MAX_CONCURRENT_STREAMS: server.limits.max_streams})
        self._host = server
        self._streams: dict[int, _Stream] = {}
        self._clock = clock
        self._alpn = alpn
        self._opened = self._heard = clock()
        self._pinged = False
        self._prelude: bytearray | None = bytearray()
        self._resets = 0
        self._over = False
        self._lingered = False
        self._draining = False
        self._stuck = _Stuck()

    @property
    def server(self) -> Serving:
        """Whose connection it is."""
        return self._host

    @property
    def calls(self) -> list[Call]:
        """The calls in progress."""
        return [stream.call for stream in self._streams.values()]

    # --- asyncio

    def connection_made(self, transport: object) -> None:
        """Wait for the preface: a client that speaks something else gets no byte."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if not self._host.opened(self):
            self._end("capacity", "too many connections")
        elif self._alpn:
            tls = self.transport.get_extra_info("ssl_object")
            if tls is None or tls.selected_alpn_protocol() != "h2":
                self._end("tls", "did not choose h2 by ALPN")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the streams."""
        del exc
        self._over = True
        for stream_id in list(self._streams):
            self._forget(stream_id)
        self._host.closed(self)

    def data_received(self, data: bytes) -> None:
        """Check the preface, then let HTTP/2 go on; a mistake of ours costs this connection, not the process."""
        if self._over:
            return
        self._heard = self._clock()
        self._pinged = False
        try:
            if self._prelude is not None:
                rest = self._after_preface(data)
                if rest is None:
                    return
                data = rest
            super().data_received(data)
        except Exception:
            _log.exception("xds connection ended by a mistake of the server")
            self._end("internal", "")

    def _after_preface(self, data: bytes) -> bytes | None:
        """Return what follows the preface once all of it has come."""
        assert self._prelude is not None  # noqa: S101 — the caller looked
        self._prelude += data
        head = bytes(self._prelude[: len(_PREFACE)])
        if not _PREFACE.startswith(head):
            self._end("handshake", "does not speak HTTP/2")
            return None
        if len(head) < len(_PREFACE):
            return None
        rest = bytes(self._prelude[len(_PREFACE) :])
        self._prelude = None
        self.greet()
        self.h2.receive_data(_PREFACE)
        return rest

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
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            stream = self._streams.get(event.stream_id)
            if stream is not None and event.stream_ended is not None:
                stream.ended = True
            self.take(event.stream_id, event.data)
        elif isinstance(event, StreamEnded):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.ended = True
                stream.call.on_end()
        elif isinstance(event, StreamReset):
            self._count_reset()
            self._forget(event.stream_id)
        elif isinstance(event, ConnectionTerminated):
            self._close()

    def take(self, stream_id: int, data: bytes) -> None:
        """Take data of a call."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        now = self._clock()
        try:
            message = stream.deframer.whole(data)
            if message is not None:
                stream.call.on_message(message, now)
                return
            for message in stream.deframer.feed(data):
                stream.call.on_message(message, now)
                if stream_id not in self._streams:
                    return
        except RefusedRequestError as error:
            metrics.ENDED.labels("refused").inc()
            _log.warning("xds stream ended", reason="refused", what=str(error))
            self.finish(stream_id, error.grpc_status, str(error))

    def _on_request(self, event: RequestReceived) -> None:
        headers = {as_text(name): as_text(value) for name, value in event.headers}
        ended = event.stream_ended is not None
        if self._draining:
            # It may have been on its way when GOAWAY was sent; the client tries again elsewhere.
            with contextlib.suppress(ProtocolError):
                self.h2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith("application/grpc"):
            # Not gRPC: the specification asks for 415.
            self._respond(event.stream_id, [(":status", "415")], ended=ended)
            return
        refusal = _refusal(headers)
        if refusal:
            self._respond(event.stream_id, _GRPC + trailers(Status.UNIMPLEMENTED, refusal), ended=ended)
            return
        offered: Encoding = "zstd" if _accepts_zstd(headers.get("accept-encoding", "")) else "identity"
        call = call_of(headers[":path"], self, event.stream_id, offered, self._clock())
        stream = self._streams[event.stream_id] = _Stream(call, self._host.limits.max_request)
        stream.ended = ended
        if "content-length" not in headers:
            self.receive_directly(event.stream_id)

    # --- time

    def tick(self, now: float) -> None:
        """Let time pass: limits are enforced, what waited long enough is sent."""
        self._resets = 0
        if self._over:
            # The last bytes had at least a tick to leave; a peer that does not read them must not stay for ever.
            if self._lingered:
                self.transport.abort()
            self._lingered = True
            return
        if self._prelude is not None:
            if now - self._opened >= self._host.limits.handshake:
                self._end("handshake", "sent no HTTP/2 preface")
            return
        if self._is_gone(now) or self._is_stuck(now):
            return
        for stream_id, stream in list(self._streams.items()):
            if stream.stuck.seconds(self.unsent(stream_id), now) >= self._host.limits.write_timeout:
                metrics.ENDED.labels("write_timeout").inc()
                _log.warning("xds stream ended", reason="write_timeout", what="gives no credit")
                self.reset(stream_id)
            else:
                stream.call.tick(now)
        self.write()

    def _is_gone(self, now: float) -> bool:
        """Ping a silent peer; end the connection of one that stays silent."""
        limits = self._host.limits
        silence = now - self._heard
        if silence >= limits.keepalive_idle + limits.keepalive_timeout and self._pinged:
            self._end("keepalive", f"was silent for {silence:.0f} s")
            return True
        if silence >= limits.keepalive_idle and not self._pinged:
            self._pinged = True
            self.h2.ping(b"modalmsh")
        return False

    def _is_stuck(self, now: float) -> bool:
        """End the connection of a peer that does not read."""
        seconds = self._stuck.seconds(self.transport.get_write_buffer_size(), now)
        if seconds < self._host.limits.write_timeout:
            return False
        self._end("write_timeout", f"read nothing for {seconds:.0f} s")
        self.transport.abort()
        return True

    # --- what calls ask for (rpc.Link)

    def begin(self, stream_id: int, encoding: Encoding) -> None:
        """Send the response's headers."""
        head = [*_GRPC, ("content-encoding", "zstd")] if encoding == "zstd" else _GRPC
        self.spoke()
        with contextlib.suppress(ProtocolError):  # reset in the meantime
            self.h2.send_headers(stream_id, head)
            self._streams[stream_id].began = True

    def finish(self, stream_id: int, status: int, message: str = "") -> None:
        """End a call with a gRPC status; what flow control keeps back is dropped."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._forget(stream_id)
        head = trailers(status, message)
        self._finish(stream_id, head if stream.began else _GRPC + head, ended=stream.ended)

    def reset(self, stream_id: int) -> None:
        """End a call without a word."""
        self._forget(stream_id)
        self.spoke()
        with contextlib.suppress(ProtocolError):  # the peer was faster
            self.h2.reset_stream(stream_id, ErrorCodes.CANCEL)

    # --- endings

    def drain(self) -> None:
        """Tell the client to open its next streams elsewhere; those that are open go on."""
        if self._over or self._prelude is not None or self._draining:
            return
        self._draining = True
        # By hand: h2 takes a GOAWAY for the end.
        self._put(GoAwayFrame(stream_id=0, last_stream_id=_LAST_STREAM, error_code=0).serialize())
        self.write()

    def shut_down(self) -> None:
        """End all ADS streams as «try again», all others too, and the connection."""
        if not self._over and self._prelude is None:
            for stream_id, stream in list(self._streams.items()):
                if isinstance(stream.call, AdsCall):
                    stream.call.stop()
                else:
                    self.finish(stream_id, Status.UNAVAILABLE, "the server is stopping")
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
        self.spoke()
        with contextlib.suppress(ProtocolError):  # the peer was faster
            self.h2.send_headers(stream_id, headers, end_stream=True)
            if not ended:
                self.h2.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    def _forget(self, stream_id: int) -> None:
        self.drop(stream_id)
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.call.forgotten()

    def _count_reset(self) -> None:
        self._resets += 1
        if self._resets > _MAX_RESETS_PER_TICK and not self._over:
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


def _refusal(headers: Mapping[str, str]) -> str:
    """Return why a gRPC request can't be served; "" if it can."""
    path = headers.get(":path", "")
    if path not in PATHS:
        return f"{path} is not served; what is: {' '.join(PATHS)}"
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
