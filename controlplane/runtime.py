"""The runtime directory: sockets, logs and files of one mesh on one node."""

from __future__ import annotations

import os
import stat

from modalmesh.base.errors import MachineError
from modalmesh.base.settings import Settings

__all__ = ["RuntimeDirectoryError", "make_runtime_dir"]


class RuntimeDirectoryError(MachineError):
    """The runtime directory can't be made, or is not this user's alone to write to."""

    code = "MM1311"


def make_runtime_dir(settings: Settings) -> None:
    """Make the directory if it is missing, for this user only: whoever opens the sockets in it steers the mesh.

    Raises:
        RuntimeDirectoryError: It can't be made, or others could put sockets of their own into it.
    """
    path, hint = settings.runtime_dir, "choose another with MODALMESH_RUNTIME_DIR"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise RuntimeDirectoryError(f"runtime directory {path} can't be made: {error.strerror}", hint=hint) from error
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        raise RuntimeDirectoryError(f"others may write to the runtime directory {path}", hint=hint)
