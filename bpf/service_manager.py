"""What the agent tells whoever watches over it: systemd by its socket (sd_notify(3)), others by a file's age."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

__all__ = ["notify", "touch"]


def notify(state: str) -> None:
    """Send a line such as ``READY=1`` to systemd, if it started this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def touch(path: Path) -> None:
    """Set a file's time to now: a probe takes one that is too old for a hung process."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch()
