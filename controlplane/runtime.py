"""The runtime directory: sockets, logs and files of one mesh on one node."""

from __future__ import annotations

from modalmesh.base.errors import MachineError
from modalmesh.base.settings import Settings

__all__ = ["RuntimeDirectoryError", "make_runtime_dir"]


class RuntimeDirectoryError(MachineError):
    """The runtime directory can't be made."""

    code = "MM1311"


def make_runtime_dir(settings: Settings) -> None:
    """Make the directory if it is missing, for this user only: whoever opens the sockets in it steers the mesh.

    Raises:
        RuntimeDirectoryError: It can't be made.
    """
    try:
        settings.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeDirectoryError(
            f"runtime directory {settings.runtime_dir} can't be made: {error.strerror}",
            hint="choose another with MODALMESH_RUNTIME_DIR",
        ) from error
