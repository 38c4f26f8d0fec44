"""The unix socket of one server on one node: nobody else's, and only one process's.

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

from router.encoder.errors import EncoderSocketError

__all__ = ["owner_only", "reserved"]


@contextlib.contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Own ``path`` for as long as the context lasts; a left-over socket there is removed, before and after.

    Raises:
        EncoderSocketError: Another process owns it, it is no socket, or its directory can't be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_name(path.name + ".lock").open("wb"))
        except OSError as error:
            raise EncoderSocketError(
                f"{path.parent} can't be used: {error.strerror}", hint="choose another runtime_dir, or run as its owner"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EncoderSocketError(
                f"another encoder process serves {path}", hint="stop it, or choose another runtime_dir"
            ) from error
        _remove_socket(path)
        try:
            yield
        finally:
            _remove_socket(path)


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Files and sockets made meanwhile are the owner's alone; there is no moment at which others could connect."""
    before = os.umask(0o177)
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
        raise EncoderSocketError(f"{path} is there and no socket", hint="move it away")
    path.unlink(missing_ok=True)
