"""A unix socket of one server on one node: nobody else's, and only one process's.

gRPC removes whatever lies at the path before it binds, so a second instance would silently take the first one's
callers. A lock beside the socket, which the kernel lets go of when its process ends in whatever way, tells a living
owner from a left-over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from router.errors import SocketError

__all__ = ["private_mode", "reserved"]

# Whoever can connect may ask where requests would go, and keep the process busy.
_OWNER_ONLY = 0o177
_OWNER_AND_GROUP = 0o117

_HINT = "choose another directory with MODALMESH_RUNTIME_DIR"


@contextlib.contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Own ``path`` for as long as the context lasts; a left-over socket there is removed, before and after.

    Raises:
        SocketError: Another process owns it, it is no socket, or its directory can't be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_name(path.name + ".lock").open("wb"))
        except OSError as error:
            raise SocketError(f"{path.parent} can't be used: {error.strerror}", hint=_HINT) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SocketError(f"another process serves {path}", hint=f"stop it, or {_HINT}") from error
        _remove_socket(path)
        try:
            yield
        finally:
            _remove_socket(path)


@contextlib.contextmanager
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


def _remove_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"{path} is there and no socket", hint="move it away")
    path.unlink(missing_ok=True)
