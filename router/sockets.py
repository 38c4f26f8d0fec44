"""A unix socket's place in the file system: taken only if nobody listens there."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modalmesh.base.errors import MachineError

__all__ = ["claim", "private_mode"]

# Whoever can connect may ask where requests would go, and keep the router busy.
_OWNER_ONLY = 0o177
_OWNER_AND_GROUP = 0o117


def claim(path: Path) -> None:
    """Make room for a socket: the directory is created, a socket that nobody listens on is removed.

    Raises:
        MachineError: Somebody listens there, something else than a socket stands there, or it isn't writable.
    """
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise MachineError(f"{path} can't be used: {error.strerror}", hint="set runtime_dir") from error
    if not stat.S_ISSOCK(mode):
        raise MachineError(f"{path} is no socket", hint="remove it, or set runtime_dir")
    if _is_alive(path):
        raise MachineError(f"another process listens on {path}", hint="stop it, or set runtime_dir")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"{path} can't be removed: {error.strerror}", hint="set runtime_dir") from error


@contextmanager
def private_mode(path: Path) -> Iterator[None]:
    """Let a socket bound inside be its owner's alone (0600), or its group's too (0660) in a setgid directory.

    The latter is how an operator lets an Envoy in that runs as another user. The mask belongs to the process: for
    start-up only.
    """
    shared = path.parent.stat().st_mode & stat.S_ISGID
    before = os.umask(_OWNER_AND_GROUP if shared else _OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(before)


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True  # somebody listens, but doesn't accept
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
        return True
