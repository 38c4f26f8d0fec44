"""The part of an HTTP/2 connection that server and client share: reading, flow control, bounded output.

Why h2 and asyncio's protocols: the bytes of DATA frames must be ours, and one event loop serves thousands of streams. A
DATA frame is sent whole, as it was cut: what a receiver's decompressor sees at a time is part of the encoding (see
frames.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, RemoteSettingsChanged, WindowUpdated
from h2.exceptions import FrameTooLargeError, ProtocolError
from h2.settings import SettingCodes, Settings

__all__ = ["Http2Protocol", "as_text"]

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


def as_text(value: bytes | str) -> str:
    """Return a header's name or value as text; bytes that are not UTF-8 become replacement characters."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class Http2Protocol(asyncio.Protocol):
    """One connection. Subclasses take events in ``handle`` and end the connection in ``failed``."""

    transport: asyncio.Transport

    def __init__(self, *, client_side: bool, settings: Mapping[SettingCodes, int]) -> None:
        # Bytes, not text: a header that is not UTF-8 is the peer's mistake, not ours to crash on.
        self.h2 = H2Connection(H2Configuration(client_side=client_side, header_encoding=None))
        # A new object, since assigning to the old one counts only after the peer's acknowledgement.
        self.h2.local_settings = Settings(
            client=client_side,
            initial_values={SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE, **settings},
        )
        self._queues: dict[int, deque[bytes]] = {}
        self._paused = False
        self._unwritten = 0

    def handle(self, event: Event) -> None:
        """Take an event that is not about flow control."""
        raise NotImplementedError

    def failed(self, reason: str, what: str) -> None:
        """The peer broke the protocol, or does not read; end the connection."""
        raise NotImplementedError

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
        try:
            events = self.h2.receive_data(data)
            # h2 looks at a frame's length only when all of it has come, and keeps up to 16 MiB until then.
            head = self.h2.incoming_buffer._data[:3]
            if len(head) == 3 and int.from_bytes(head, "big") > _LONGEST_PAYLOAD:
                raise FrameTooLargeError("a frame is too long")
        except ProtocolError as error:
            self.write()
            self.failed("protocol", str(error))
            return
        for event in events:
            if isinstance(event, WindowUpdated):
                if event.stream_id:
                    self._pump(event.stream_id)
                else:
                    self._pump_all()
            elif isinstance(event, RemoteSettingsChanged):
                self._pump_all()
            else:
                self.handle(event)
        self.write()

    def queue(self, stream_id: int, chunks: Iterable[bytes]) -> None:
        """Send DATA frames as soon as flow control lets them; ``write`` must follow."""
        self._queues.setdefault(stream_id, deque()).extend(chunks)
        self._pump(stream_id)

    def drop(self, stream_id: int) -> None:
        """Forget what a stream has not sent yet."""
        self._queues.pop(stream_id, None)

    def unsent(self, stream_id: int) -> int:
        """Return the number of DATA frames of a stream that wait."""
        return len(self._queues.get(stream_id, ()))

    def write(self) -> None:
        """Hand everything that may be sent to the socket."""
        self._unwritten = 0
        data = self.h2.data_to_send()
        if not data or self.transport.is_closing():
            return
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > _MAX_BACKLOG:
            self.transport.abort()
            self.failed("overflow", "does not read what it provokes")

    def _pump_all(self) -> None:
        for stream_id in list(self._queues):
            self._pump(stream_id)

    def _pump(self, stream_id: int) -> None:
        chunks = self._queues.get(stream_id)
        try:
            while chunks and not self._paused and not self.transport.is_closing():
                window = self.h2.local_flow_control_window(stream_id)
                if window >= len(chunks[0]):
                    size = len(chunks[0])
                    self.h2.send_data(stream_id, chunks.popleft())
                elif window > 0 and self.h2.remote_settings.initial_window_size < _USUAL_WINDOW:
                    size = window
                    self.h2.send_data(stream_id, chunks[0][:size])
                    chunks[0] = chunks[0][size:]
                else:
                    break
                self._unwritten += size
                if self._unwritten >= _BATCH:
                    self.write()
        except ProtocolError:
            # The peer reset the stream in the same read; its event follows.
            self.drop(stream_id)
