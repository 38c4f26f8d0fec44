"""The ADS server: groups of clients, the snapshot that each shall hold, and the clients' state."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from modalmesh.base.logging import get_logger
from xds import metrics
from xds.calls import AdsCall
from xds.connection import Connection
from xds.describe import describe_client, describe_fault
from xds.errors import ListenError
from xds.frames import Frames
from xds.limits import Limits
from xds.listening import Tls, bound, server_context
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.xds import status_pb2
from xds.pushes import Pushes
from xds.rpc import Streaming
from xds.snapshot import Snapshot
from xds.store import Change, SnapshotStore
from xds.stream import News
from xds.types import short_name
from xds.watchdog import Watchdog

__all__ = ["AdsServer", "Limits", "Tls"]

_log = get_logger()

_LONGEST_TICK: Final = 0.5
_BACKLOG: Final = 1024
"""Connections that may wait to be accepted: a fleet comes back at once after a restart."""
_TICKED_TOGETHER: Final = 50
"""Connections that are looked after before anything else gets its turn."""
_CLOSING: Final = 1.0
"""Seconds that clients have to read the last bytes when the server closes."""


class AdsServer:
    """Serves ADS, delta and state-of-the-world, and gRPC health, over HTTP/2.

    All methods are called on the event loop that ``start`` ran on.

    Args:
        listen: ``host:port`` on loopback (port 0: any free one, see ``address``), or ``unix:PATH``; with client
            certificates any address.
        group_of: Node → group; a ModalMeshError that it raises ends the stream.
        zstd_level: 1–19.
        limits: What a client may take.
        tls: Certificate, key, and roots of clients' certificates; None: cleartext.
        store: Checks and debounces what is set.
    """

    def __init__(
        self,
        listen: str,
        group_of: Callable[[base_pb2.Node], str],
        zstd_level: int = 3,
        *,
        limits: Limits | None = None,
        tls: Tls | None = None,
        store: SnapshotStore | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.group_of = group_of
        self.pushes = Pushes()
        self.frames = Frames(zstd_level)
        self.watchdog = Watchdog()
        self.tally = metrics.Tally()
        self._listen = listen
        self._address = listen
        self._tls = tls
        self._store = store or SnapshotStore()
        self._due: asyncio.TimerHandle | None = None
        self._streams: defaultdict[str, dict[AdsCall, None]] = defaultdict(dict)
        self._connections: set[Connection] = set()
        self._health: dict[Callable[[], None], None] = {}
        self._server: asyncio.Server | None = None
        self._stopping = False
        self._ticker: asyncio.Task[None] | None = None
        self._path: Path | None = None
        self._drained = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it listens, with the real port."""
        return self._address

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenError: The address is taken, not on loopback, or not an address.
            TlsError: A certificate or key can't be used.
        """
        loop = asyncio.get_running_loop()
        context = server_context(self._tls) if self._tls is not None else None
        sock = bound(self._listen, anywhere=self._tls is not None and self._tls.ca is not None)
        if sock.family == socket.AF_UNIX:
            if context is not None:
                sock.close()
                raise ListenError("xDS server speaks TLS on TCP only", hint="a unix socket is private to its user")
            self._path = Path(sock.getsockname())
            self._server = await loop.create_unix_server(self._connection, sock=sock, backlog=_BACKLOG)
        else:
            host, port = sock.getsockname()[:2]
            self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._server = await loop.create_server(
                self._connection,
                sock=sock,
                backlog=_BACKLOG,
                ssl=context,
                ssl_handshake_timeout=self.limits.handshake if context is not None else None,
            )
        self._ticker = loop.create_task(self._tick(), name="xds-ticker")
        _log.info("xds server listening", address=self._address, tls=context is not None)

    async def close(self, drain: float = 0.0) -> None:
        """Stop: clients are told to come back, and keep what they have.

        Args:
            drain: Seconds that open streams go on while clients find another server; GOAWAY tells them to.
        """
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self._stopping = True
        self._health_changed()
        if drain > 0 and self._connections:
            for connection in list(self._connections):
                connection.drain()
            await self._until_drained(drain)
        if self._due is not None:
            self._due.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        for connection in list(self._connections):
            connection.shut_down()
        if self._connections:
            await self._until_drained(_CLOSING)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)
        self.tally.add(self._store.types)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def set_snapshot(self, group: str, snapshot: Snapshot) -> None:
        """Make this what a group shall hold, and push what changed; an equal snapshot pushes nothing.

        After a time of quiet the push happens at once, in a burst once for all (``debounce``).
        """
        self._store.set(group, snapshot, asyncio.get_running_loop().time())
        self._push()

    def clients(self) -> list[status_pb2.Client]:
        """Return the state of every client, by group and node."""
        self.tally.add(self._store.types)
        wall_offset = time.time() - asyncio.get_running_loop().time()
        described = [
            describe_client(
                stream.state,
                group=stream.group,
                encoding=stream.encoding,
                opened=stream.opened,
                waiting=self._store.waiting(stream.group),
                wall_offset=wall_offset,
            )
            for streams in self._streams.values()
            for stream in streams
            if stream.state is not None
        ]
        return sorted(described, key=lambda client: (client.group, client.node_id))

    def faults(self) -> list[status_pb2.Fault]:
        """Return what is not served as it was given, by group."""
        return [
            describe_fault(group, fault) for group, faults in sorted(self._store.faults().items()) for fault in faults
        ]

    # --- what connections and calls need (rpc.Serving, connection.Hosting)

    @property
    def serving(self) -> bool:
        """There is something to serve, and the server is not stopping."""
        return not self._store.empty and not self._stopping

    def snapshot(self, group: str) -> Snapshot | None:
        """Return what a group shall hold; None: nothing was set yet."""
        return self._store.snapshot(group)

    def opened(self, connection: Connection) -> bool:
        """Register a connection."""
        full = len(self._connections) >= self.limits.max_connections
        self._connections.add(connection)
        metrics.CONNECTIONS.inc()
        return not full

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        metrics.CONNECTIONS.dec()
        if self._server is None and not self._connections:
            self._drained.set()

    def joined(self, stream: Streaming) -> None:
        """Register a stream."""
        assert isinstance(stream, AdsCall)  # noqa: S101 — the protocol is wider than its one implementation
        self._streams[stream.group][stream] = None
        metrics.STREAMS.labels(stream.group).inc()

    def left(self, stream: Streaming) -> None:
        """Forget a stream."""
        if isinstance(stream, AdsCall) and stream in self._streams[stream.group]:
            del self._streams[stream.group][stream]
            metrics.STREAMS.labels(stream.group).dec()

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever ``serving`` changes."""
        self._health[changed] = None
        return lambda: self._health.pop(changed, None)

    # --- details

    def _connection(self) -> Connection:
        return Connection(self, asyncio.get_running_loop().time, alpn=self._tls is not None)

    async def _until_drained(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained.wait(), seconds)

    def _push(self) -> None:
        """Send what is due, and come back when something else is."""
        loop = asyncio.get_running_loop()
        was_serving = self.serving
        for change in self._store.take(loop.time()):
            self._log_faults(change)
            self._push_to(change)
        if self._due is not None:
            self._due.cancel()
        due = self._store.due
        self._due = None if due is None else loop.call_at(due, self._push)
        if self.serving != was_serving:
            self._health_changed()

    def _push_to(self, change: Change) -> None:
        now = asyncio.get_running_loop().time()
        news = News(change.changed)
        for stream in list(self._streams[change.group]):
            try:
                stream.on_snapshot(change.snapshot, news, now)
            except Exception:
                # One stream's trouble must not keep the others from their configuration.
                _log.exception("xds stream could not be updated", node=stream.state.node.id if stream.state else "")
                metrics.ENDED.labels("internal").inc()
                stream.abort()

    def _log_faults(self, change: Change) -> None:
        metrics.FAULTS.labels(change.group).set(len(change.faults))
        for fault in change.faults:
            _log.error(
                "resource is at fault; " + ("what was served before stays" if fault.replaced else "it is not served"),
                group=change.group,
                type=short_name(fault.type_url),
                name=fault.name,
                reason=fault.reason,
            )

    def _health_changed(self) -> None:
        for changed in list(self._health):
            changed()

    async def _tick(self) -> None:
        limits = self.limits
        shortest = min(
            limits.ack_timeout,
            limits.write_timeout,
            limits.handshake,
            limits.first_request,
            limits.keepalive_timeout,
        )
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_LONGEST_TICK, shortest / 4))
            self.tally.add(self._store.types)
            for number, connection in enumerate(list(self._connections), 1):
                try:
                    connection.tick(loop.time())
                except Exception:
                    _log.exception("xds connection ended by a mistake of the server")
                    metrics.ENDED.labels("internal").inc()
                    connection.abort()
                if number % _TICKED_TOGETHER == 0:
                    await asyncio.sleep(0)
