"""Asks Envoy's admin interface on its unix socket.

Why this exists: the admin interface speaks HTTP/1.1 over a unix socket, which the standard library's client can do once
it is told how to connect. It is one of the named HTTP/1.1 exceptions; nothing else of the mesh talks to it.
"""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

__all__ = ["configured", "get"]


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection whose transport is a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def get(path: Path, resource: str, timeout: float = 2.0) -> str:
    """Return the body of ``GET resource``.

    Args:
        path: The admin socket.
        resource: E.g. ``/stats?filter=cds``.
        timeout: Seconds for each step.

    Raises:
        OSError: Nobody listens there, or the answer is not 200.
    """
    connection = _UnixConnection(path, timeout)
    try:
        connection.request("GET", resource)
        response = connection.getresponse()
        body = response.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"Envoy's admin interface broke off: {error!r}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise OSError(f"Envoy's admin interface answers {response.status} to {resource}")
    return body


def configured(path: Path, own_listeners: int = 1) -> bool:
    """Whether Envoy serves what the control plane sent: it has accepted clusters and listeners, and one listens.

    Args:
        path: The admin socket.
        own_listeners: How many the bootstrap has.

    ``/ready`` alone says LIVE before any configuration arrived, because the bootstrap lets workers start at once
    (they carry the configuration stream).
    """
    try:
        stats = get(path, "/stats?filter=(cds|lds).update_success|total_listeners_active")
    except OSError:
        return False
    values = dict(line.rsplit(": ", 1) for line in stats.splitlines() if ": " in line)
    active = int(values.get("listener_manager.total_listeners_active", "0"))
    received = all(
        int(values.get(name, "0")) > 0
        for name in ("cluster_manager.cds.update_success", "listener_manager.lds.update_success")
    )
    return received and active > own_listeners
