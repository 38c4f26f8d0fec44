"""One mesh on this node: holds the runtime directory, runs the children, stops them whatever happens."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator

from controlplane.runtime import make_runtime_dir
from modalmesh.base.errors import MachineError
from modalmesh.base.settings import Settings
from modalmesh.launcher import preflight, stack
from modalmesh.launcher.children import Sink
from modalmesh.launcher.supervisor import Supervisor

__all__ = ["Ready", "Sink", "is_running", "running"]

Ready = Callable[[str, float], None]
"""Takes a child's name and the seconds it took to serve."""


@contextlib.contextmanager
def _held(settings: Settings) -> Iterator[None]:
    """Hold the runtime directory: two meshes in one would fight for its sockets.

    Raises:
        MachineError: It can't be made, or another mesh holds it.
    """
    directory = settings.runtime_dir
    make_runtime_dir(settings)
    try:
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise MachineError(
            f"{directory} can't be used: {error.strerror}", hint="choose another with MODALMESH_RUNTIME_DIR"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MachineError(
                f"a mesh runs in {directory} already",
                hint="stop it, or choose another directory with MODALMESH_RUNTIME_DIR",
            ) from error
        yield


def is_running(settings: Settings) -> bool:
    """Whether a mesh holds the runtime directory."""
    path = settings.runtime_dir / "lock"
    if not path.exists() or not os.access(path, os.W_OK):
        return False
    with path.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextlib.asynccontextmanager
async def running(settings: Settings, sink: Sink, ready: Ready | None = None) -> AsyncIterator[Supervisor]:
    """Bring the mesh up, and down again at the end.

    Args:
        settings: Where and what.
        sink: Gets every line the children print.
        ready: Told each child's name and the seconds it took to serve.

    Raises:
        ModalMeshError: The preflight failed, or a child did not come up.
    """
    with _held(settings):
        for warning in preflight.check(settings):
            sink("mesh", f"warning: {warning}")
        specs = stack.specs(settings)
        settings.access_log.unlink(missing_ok=True)
        supervisor = Supervisor(sink)
        try:
            await supervisor.start(specs, ready)
            yield supervisor
        finally:
            await supervisor.stop()
