"""The part of an HTTP/2 connection that server and client share: frames, flow control, bounded output.

Why h2 and asyncio's protocols: the bytes of DATA frames must be ours, and one event loop serves thousands of streams. A
DATA frame is sent whole, as it was cut: what a receiver's decompressor sees at a time is part of the encoding (see
frames.py).

Why DATA frames pass h2 by, in both directions: they are nearly all of the traffic, and h2 takes 20–40 µs for each. What
is sent is a header of nine bytes and a payload that all clients share, booked in h2's windows. What is received is cut
here; h2 never hears of it, and its windows and ours add up to the one that the peer sees, since each gives back what
it took. Everything else, and DATA that is padded or ends a stream, goes through h2.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, RemoteSettingsChanged, WindowUpdated
from h2.exceptions import FrameTooLargeError, ProtocolError
from h2.settings import SettingCodes, Settings

from xds.frames import data_header

__all__ = ["WINDOW", "Http2Protocol", "as_text"]

_HIGH_WATER: Final = 256 * 1024
"""Bytes in the socket's buffer above which no more DATA is put into it."""

_MAX_BACKLOG: Final = 512 * 1024
"""Bytes in the socket's buffer above which the peer is cut off: DATA stops far below, so these are answers (to PING,
to SETTINGS) that it provokes and does not read."""

_BATCH: Final = 64 * 1024
"""DATA bytes between looks at the socket's buffer."""

_LONGEST_PAYLOAD: Final = 16_384
"""Of a frame that a peer may send: no larger SETTINGS_MAX_FRAME_SIZE is offered."""

_USUAL_WINDOW: Final = 65_535
"""RFC 9113 §6.9.2. A peer with at least this gives credit again long before a whole DATA frame no longer fits; one with
less may wait for every last byte, so its frames are cut."""

WINDOW: Final = 1024 * 1024
"""Bytes that a peer may send ahead, on a stream and on the connection. They are taken as they come, so it costs no
memory; with the usual 64 KiB, every third ACK that names 500 resources would need two frames of credit."""

_CREDIT_STEP: Final = WINDOW // 4
"""Bytes received after which the peer is given credit again."""

_HEAD: Final = 9
_DATA, _HEADERS, _CONTINUATION = 0x0, 0x1, 0x9
_END_HEADERS: Final = 0x4


def as_text(value: bytes | str) -> str:
    """Return a header's name or value as text; bytes that are not UTF-8 become replacement characters."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class Http2Protocol(asyncio.Protocol):
    """One connection. Subclasses take events in ``handle``, data in ``take``, and end the connection in ``failed``."""

    transport: asyncio.Transport

    def __init__(self, *, client_side: bool, settings: Mapping[SettingCodes, int]) -> None:
        # Bytes, not text: a header that is not UTF-8 is the peer's mistake, not ours to crash on.
        self.h2 = H2Connection(H2Configuration(client_side=client_side, header_encoding=None))
        # A new object, since assigning to the old one counts only after the peer's acknowledgement.
        self.h2.local_settings = Settings(
            client=client_side,
            initial_values={
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
                **settings,
            },
        )
        self._incomplete = b""
        self._in_headers = False
        # Stream → bytes taken and not given back, of streams whose DATA is taken here.
        self._direct: dict[int, int] = {}
        self._uncredited = 0
        self._queues: dict[int, deque[bytes]] = {}
        self._out: list[bytes] = []
        # h2 was fed, or asked to say something, since its output was last taken.
        self._fed = False
        self._paused = False
        self._unwritten = 0

    # --- for subclasses

    def handle(self, event: Event) -> None:
        """Take an event that is not about flow control."""
        raise NotImplementedError

    def take(self, stream_id: int, data: bytes) -> None:
        """Take data of a stream that ``receive_directly`` was called for."""
        raise NotImplementedError

    def failed(self, reason: str, what: str) -> None:
        """The peer broke the protocol, or does not read; end the connection."""
        raise NotImplementedError

    def greet(self) -> None:
        """Send what begins a connection."""
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(WINDOW)
        self._fed = True

    def spoke(self) -> None:
        """Say that h2 was asked to send something, so that nothing overtakes it."""
        self._fed = True

    def receive_directly(self, stream_id: int) -> None:
        """Let DATA of a stream pass h2 by. Its HEADERS must not have had a content-length, which h2 would compare."""
        self._direct[stream_id] = 0

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER)

    def pause_writing(self) -> None:
        """Stop sending DATA."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on sending DATA."""
        self._paused = False
        self._pump_all()
        self.write()

    def data_received(self, data: bytes) -> None:
        """Feed the connection; a peer that breaks the protocol loses it, with a GOAWAY that says why."""
        if self._incomplete:
            data = self._incomplete + data
        position, end = 0, len(data)
        try:
            while end - position >= _HEAD:
                length = int.from_bytes(data[position : position + 3], "big")
                if length > _LONGEST_PAYLOAD:
                    raise FrameTooLargeError("a frame is too long")
                stop = position + _HEAD + length
                if stop > end:
                    break
                self._on_frame(data, position, stop)
                position = stop
                if self.transport.is_closing():
                    break
        except ProtocolError as error:
            self._incomplete = b""
            self.write()
            self.failed("protocol", str(error))
            return
        self._incomplete = data[position:]
        if self._fed or self._out:
            self.write()

    def _on_frame(self, data: bytes, position: int, stop: int) -> None:
        kind, flags = data[position + 3], data[position + 4]
        if kind == _DATA and not flags and not self._in_headers:
            stream_id = int.from_bytes(data[position + 5 : position + _HEAD], "big")
            owed = self._direct.get(stream_id)
            if owed is not None:
                count = stop - position - _HEAD
                self._direct[stream_id] = owed + count
                self._uncredited += count
                if self._uncredited >= _CREDIT_STEP or owed + count >= _CREDIT_STEP:
                    self._give_credit(stream_id)
                self.take(stream_id, data[position + _HEAD : stop])
                return
        elif kind in (_HEADERS, _CONTINUATION):
            self._in_headers = not flags & _END_HEADERS
        self._fed = True
        for event in self.h2.receive_data(data[position:stop]):
            if isinstance(event, WindowUpdated):
                if event.stream_id:
                    self._pump(event.stream_id)
                else:
                    self._pump_all()
            elif isinstance(event, RemoteSettingsChanged):
                self._pump_all()
            else:
                self.handle(event)

    def _give_credit(self, stream_id: int) -> None:
        """Open the windows again: what comes is taken at once, so they limit nothing but a burst."""
        self._put(_window_update(0, self._uncredited) + _window_update(stream_id, self._direct[stream_id]))
        self._uncredited = self._direct[stream_id] = 0

    # --- sending

    def push(self, stream_id: int, chunks: Sequence[bytes], frame: bytes) -> None:
        """Send DATA frames and write them; the usual case, one frame and nothing in its way, costs one call.

        Args:
            stream_id: The stream; its HEADERS have been sent.
            chunks: What each DATA frame holds.
            frame: Where there is one chunk: the whole DATA frame, with its header.
        """
        h2 = self.h2
        stream = h2.streams.get(stream_id)
        if stream is not None and frame and not self._queues and not self._paused and not self._out and not self._fed:
            size = len(chunks[0])
            if size <= h2.outbound_flow_control_window and size <= stream.outbound_flow_control_window:
                h2.outbound_flow_control_window -= size
                stream.outbound_flow_control_window -= size
                self.transport.write(frame)
                return
        self.queue(stream_id, chunks)
        self.write()

    def queue(self, stream_id: int, chunks: Iterable[bytes]) -> None:
        """Send DATA frames as soon as flow control lets them; ``write`` must follow."""
        waiting = self._queues.get(stream_id)
        if waiting is None:
            waiting = self._queues[stream_id] = deque()
        waiting.extend(chunks)
        self._pump(stream_id)

    def drop(self, stream_id: int) -> None:
        """Forget what a stream has not sent yet, and that its DATA is taken here."""
        self._queues.pop(stream_id, None)
        self._direct.pop(stream_id, None)

    def unsent(self, stream_id: int) -> int:
        """Return how many bytes of a stream's DATA flow control keeps back."""
        return sum(map(len, self._queues.get(stream_id, ())))

    def write(self) -> None:
        """Hand everything that may be sent to the socket."""
        self._unwritten = 0
        self._fed = False
        data = self.h2.data_to_send()
        out = self._out
        if data:
            out.append(data)
        if not out:
            return
        self._out = []
        if self.transport.is_closing():
            return
        if len(out) == 1:
            self.transport.write(out[0])
        else:
            self.transport.writelines(out)
        if self.transport.get_write_buffer_size() > _MAX_BACKLOG:
            self.transport.abort()
            self.failed("overflow", "does not read what it provokes")

    def _put(self, frame: bytes) -> None:
        """Add a frame made here, behind what h2 has made."""
        data = self.h2.data_to_send()
        if data:
            self._out.append(data)
        self._out.append(frame)

    def _pump_all(self) -> None:
        for stream_id in list(self._queues):
            self._pump(stream_id)

    def _pump(self, stream_id: int) -> None:
        chunks = self._queues.get(stream_id)
        if not chunks:
            return
        stream = self.h2.streams.get(stream_id)
        if stream is None or stream.closed:  # reset by the peer; its event follows
            self.drop(stream_id)
            return
        h2 = self.h2
        while chunks and not self._paused and not self.transport.is_closing():
            size = len(chunks[0])
            window = min(h2.outbound_flow_control_window, stream.outbound_flow_control_window)
            if window >= size:
                chunk = chunks.popleft()
            elif window > 0 and h2.remote_settings.initial_window_size < _USUAL_WINDOW:
                chunk, chunks[0], size = chunks[0][:window], chunks[0][window:], window
            else:
                break
            h2.outbound_flow_control_window -= size
            stream.outbound_flow_control_window -= size
            self._put(data_header(size, stream_id))
            self._out.append(chunk)
            self._unwritten += size
            if self._unwritten >= _BATCH:
                self.write()
        if not chunks:
            self._queues.pop(stream_id, None)


def _window_update(stream_id: int, count: int) -> bytes:
    return b"\0\0\4\x08\0" + stream_id.to_bytes(4, "big") + count.to_bytes(4, "big")
