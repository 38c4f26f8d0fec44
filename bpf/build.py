"""Building objects with clang: ``make`` does it for the package, the loader on a node where an object doesn't fit.

The programs need the kernel's user-space headers only (Debian's linux-libc-dev) and libbpf's; no kernel source.

    python -m bpf.build              builds what is missing or older than its sources, in the package
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

from bpf.errors import ObjectError

__all__ = ["NAMES", "build", "build_on_node", "build_package", "node_directory", "packaged_object"]

SOURCES: Final = Path(__file__).parent / "programs"

NAMES: Final = ("xdp_gpu_bypass", "tc_gpu_bypass", "sock_lb", "sock_join", "tcp_signals")
"""Every object, by the name of its source."""

_TIMEOUT_S: Final = 120.0


def packaged_object(name: str) -> Path:
    """Return where the package keeps an object; the file may be missing."""
    return SOURCES / f"{name}.bpf.o"


def node_directory() -> Path:
    """Return where objects built on this node are kept: nobody but this user may write there."""
    return Path("/var/cache/modalmesh/bpf") if os.geteuid() == 0 else Path.home() / ".cache" / "modalmesh" / "bpf"


def command(source: Path, target: Path) -> list[str]:
    """Return the compiler's arguments."""
    return [
        os.environ.get("CLANG", "clang"),
        "-target",
        "bpf",
        "-mcpu=v3",  # atomic and 32-bit instructions, Linux 5.12
        "-O2",
        "-g",  # BTF
        "-Wall",
        "-Wextra",
        "-Werror",
        # asm/types.h lies in the architecture's directory, which -target bpf doesn't search.
        f"-I/usr/include/{platform.machine()}-linux-gnu",
        "-c",
        str(source),
        "-o",
        str(target),
    ]


def build(name: str, target: Path) -> None:
    """Build one object.

    Raises:
        ObjectError: clang is missing or refuses; carries what it says.
    """
    partial = target.with_suffix(f".{os.getpid()}")
    arguments = command(SOURCES / f"{name}.bpf.c", partial)
    try:
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        partial.replace(target)
    except FileNotFoundError as error:
        raise ObjectError(
            f"object {name} doesn't fit this node and clang is not installed", hint="apt-get install clang libbpf-dev"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ObjectError(f"clang can't build {name}: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ObjectError(f"clang did not finish {name} in {_TIMEOUT_S:.0f} s") from error
    finally:
        partial.unlink(missing_ok=True)


def build_on_node(name: str, directory: Path | None = None) -> Path:
    """Build one object from the package's sources and return the file."""
    directory = directory or node_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    target = directory / f"{name}.bpf.o"
    build(name, target)
    return target


def build_package() -> list[str]:
    """Build the package's objects that are missing or older than any source; return their names."""
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
    stale = [
        name for name in NAMES if not packaged_object(name).exists() or packaged_object(name).stat().st_mtime < newest
    ]
    for name in stale:
        build(name, packaged_object(name))
    return stale


if __name__ == "__main__":
    try:
        build_package()
    except ObjectError as problem:
        sys.exit(f"error: {problem}")
