"""What a connection and the calls on it need of each other.

Why apart: ``connection`` knows the wire and one peer, ``calls`` knows ADS and health, ``server`` knows groups and
snapshots; each can be read without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from xds.frames import Encoding, Frames
from xds.limits import Limits
from xds.metrics import Tally
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pushes import Pushes
from xds.snapshot import Snapshot
from xds.watchdog import Watchdog

__all__ = ["Call", "Link", "Serving", "Streaming"]


class Call(Protocol):
    """One gRPC call on a connection."""

    def on_message(self, message: bytes, now: float) -> None:
        """Take one request message.

        Raises:
            RefusedRequestError: It can't be parsed, or breaks the protocol.
        """
        ...

    def on_end(self) -> None:
        """The client has said all that it will say."""
        ...

    def tick(self, now: float) -> None:
        """Let time pass."""
        ...

    def forgotten(self) -> None:
        """The call is over."""
        ...


class Link(Protocol):
    """What a call can do to its connection."""

    @property
    def server(self) -> Serving:
        """Whose connection it is."""
        ...

    def begin(self, stream_id: int, encoding: Encoding) -> None:
        """Send the response's headers."""
        ...

    def queue(self, stream_id: int, chunks: Sequence[bytes]) -> None:
        """Send DATA frames as soon as flow control lets them; ``write`` must follow."""
        ...

    def push(self, stream_id: int, chunks: Sequence[bytes], frame: bytes) -> None:
        """Send DATA frames and write them; ``frame`` is the whole DATA frame where there is one chunk."""
        ...

    def write(self) -> None:
        """Hand what may be sent to the socket."""
        ...

    def finish(self, stream_id: int, status: int, message: str = "") -> None:
        """End a call with a gRPC status; what it has not sent is dropped."""
        ...

    def reset(self, stream_id: int) -> None:
        """End a call without a word: trailers would wait behind DATA that the peer does not take."""
        ...

    def abort(self) -> None:
        """End the connection at once."""
        ...


class Streaming(Protocol):
    """An ADS stream, as the server sees it."""

    group: str


class Serving(Protocol):
    """What connections and calls need of their server."""

    limits: Limits
    pushes: Pushes
    frames: Frames
    watchdog: Watchdog
    tally: Tally
    group_of: Callable[[base_pb2.Node], str]

    @property
    def serving(self) -> bool:
        """There is something to serve, and the server is not stopping."""
        ...

    def snapshot(self, group: str) -> Snapshot | None:
        """Return what a group shall hold."""
        ...

    def joined(self, stream: Streaming) -> None:
        """Register an ADS stream whose node is known."""
        ...

    def left(self, stream: Streaming) -> None:
        """Forget an ADS stream."""
        ...

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever ``serving`` changes; return what ends that."""
        ...
