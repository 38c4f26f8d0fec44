"""The ADS server: groups of clients, the snapshot that each shall hold, and the clients' state.

Clients are not authenticated yet, so it listens on loopback or a unix socket only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from modalmesh.base.logging import get_logger
from modalmesh.base.settings import split_address
from xds import metrics
from xds.connection import AdsStream, Connection, Limits
from xds.errors import ListenError
from xds.frames import Frames
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.xds import status_pb2
from xds.pushes import Pushes
from xds.snapshot import Snapshot
from xds.subscription import Subscription

__all__ = ["AdsServer", "Limits"]

_log = get_logger()

_LONGEST_TICK: Final = 0.5
_BACKLOG: Final = 1024
"""Connections that may wait to be accepted: a fleet comes back at once after a restart."""
_CLOSING: Final = 1.0
"""Seconds that clients have to read the last bytes when the server closes."""


class AdsServer:
    """Serves delta ADS over HTTP/2. All methods are called on the event loop that ``start`` ran on.

    Args:
        listen: ``host:port`` on loopback (port 0: any free one, see ``address``), or ``unix:PATH``.
        group_of: Node → group; a ModalMeshError that it raises ends the stream.
        zstd_level: 1–19.
        limits: What a client may take.
    """

    def __init__(
        self,
        listen: str,
        group_of: Callable[[base_pb2.Node], str],
        zstd_level: int = 3,
        *,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.group_of = group_of
        self.pushes = Pushes()
        self.frames = Frames(zstd_level)
        self._listen = listen
        self._address = listen
        self._snapshots: dict[str, Snapshot] = {}
        self._streams: defaultdict[str, dict[AdsStream, None]] = defaultdict(dict)
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
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
        """
        loop = asyncio.get_running_loop()
        sock = _bound(self._listen)
        if sock.family == socket.AF_UNIX:
            self._path = Path(sock.getsockname())
            self._server = await loop.create_unix_server(self._connection, sock=sock, backlog=_BACKLOG)
        else:
            host, port = sock.getsockname()[:2]
            self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._server = await loop.create_server(self._connection, sock=sock, backlog=_BACKLOG)
        self._ticker = loop.create_task(self._tick(), name="xds-ticker")
        _log.info("xds server listening", address=self._address)

    async def close(self) -> None:
        """Stop: clients are told to come back, and keep what they have."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        for connection in list(self._connections):
            connection.shut_down()
        if self._connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drained.wait(), _CLOSING)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def set_snapshot(self, group: str, snapshot: Snapshot) -> None:
        """Make this what the group shall hold, and push what changed; an equal snapshot pushes nothing."""
        old = self._snapshots.get(group)
        if old == snapshot:
            return
        changed = {} if old is None else snapshot.changed_since(old)
        self._snapshots[group] = snapshot
        now = asyncio.get_running_loop().time()
        for stream in list(self._streams[group]):
            try:
                stream.on_snapshot(snapshot, changed, now)
            except Exception:
                # One stream's trouble must not keep the others from their configuration.
                _log.exception("xds stream could not be updated", node=stream.state.node.id if stream.state else "")
                metrics.ENDED.labels("internal").inc()
                stream.connection.abort()

    def clients(self) -> list[status_pb2.Client]:
        """Return the state of every client, by group and node."""
        now = asyncio.get_running_loop().time()
        wall = time.time()
        described = [
            _describe(stream, wall_offset=wall - now) for streams in self._streams.values() for stream in streams
        ]
        return sorted(described, key=lambda client: (client.group, client.node_id))

    # --- what connections need (connection.Serving)

    def snapshot(self, group: str) -> Snapshot | None:
        """Return what a group shall hold; None: nothing was set yet."""
        return self._snapshots.get(group)

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

    def joined(self, stream: AdsStream) -> None:
        """Register a stream."""
        self._streams[stream.group][stream] = None
        metrics.STREAMS.labels(stream.group).inc()

    def left(self, stream: AdsStream) -> None:
        """Forget a stream."""
        if stream in self._streams[stream.group]:
            del self._streams[stream.group][stream]
            metrics.STREAMS.labels(stream.group).dec()

    def _connection(self) -> Connection:
        return Connection(self, asyncio.get_running_loop().time)

    async def _tick(self) -> None:
        limits = self.limits
        shortest = min(limits.ack_timeout, limits.handshake, limits.first_request, limits.keepalive_timeout)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_LONGEST_TICK, shortest / 4))
            for connection in list(self._connections):
                try:
                    connection.tick(loop.time())
                except Exception:
                    _log.exception("xds connection ended by a mistake of the server")
                    metrics.ENDED.labels("internal").inc()
                    connection.abort()


def _bound(listen: str) -> socket.socket:
    """Return a socket bound to the address."""
    try:
        # Port 0 is no address for anyone else, so split_address refuses it.
        host, port = (listen[:-2].strip("[]"), 0) if listen.endswith(":0") else split_address(listen)
    except ValueError as error:
        raise ListenError(f"xDS server can't listen: {error}") from error
    try:
        if listen.startswith("unix:"):
            return _bound_unix(Path(host))
        if not _is_loopback(host):
            raise ListenError(
                f"xDS server must not listen on {host}: its clients are not authenticated",
                hint="choose a loopback address or unix:PATH with MODALMESH_XDS__LISTEN",
            )
        address = "127.0.0.1" if host == "localhost" else host
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise ListenError(
            f"xDS server can't listen on {listen}: {'the address is in use' if taken else error.strerror or error}",
            hint="choose another with MODALMESH_XDS__LISTEN",
        ) from error


def _bound_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # A socket file outlives its process; only one that nobody answers may be replaced (bind refuses the other).
        if path.is_socket() and not _answers(path):
            path.unlink(missing_ok=True)
        sock.bind(str(path))
        path.chmod(0o600)  # before listen(): nobody else ever connects
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _describe(stream: AdsStream, *, wall_offset: float) -> status_pb2.Client:
    state = stream.state
    assert state is not None  # noqa: S101 — streams join with their first request
    client = status_pb2.Client(
        node_id=state.node.id,
        group=stream.group,
        encoding=stream.encoding,
        connected_since=_timestamp(stream.opened + wall_offset),
    )
    for type_url, subscription in state.types.items():
        client.types.append(
            status_pb2.Type(
                type_url=type_url,
                resources=len(subscription.held),
                sent_version=subscription.sent_version,
                acked_version=subscription.acked_version,
                current_version=state.snapshot.version(type_url) if state.snapshot is not None else "",
                state=_state(subscription),
                last_error=subscription.error,
                since=_timestamp(subscription.since + wall_offset),
            )
        )
    return client


def _state(subscription: Subscription) -> status_pb2.State:
    if subscription.in_flight is not None:
        return status_pb2.STALE
    if subscription.error:
        return status_pb2.NACKED
    if not subscription.last_number and not subscription.held:
        return status_pb2.NOT_SENT
    return status_pb2.STALE if subscription.pending else status_pb2.SYNCED


def _timestamp(seconds: float) -> Timestamp:
    result = Timestamp()
    result.FromMilliseconds(int(seconds * 1000))
    return result
