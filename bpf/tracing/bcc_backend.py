"""Lets ``bcc`` compile and load a small program on a node that has neither kernel headers nor kprobes.

``bcc`` wants the kernel's source tree. Our programs take every kernel structure's layout from BTF, so a tree of a few
files that point to the user-space headers (linux-libc-dev) is enough, and compiling takes 0.3 s instead of 2.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bpf.errors import TraceError

__all__ = ["loaded"]

_HEADERS: Final = Path("/usr/include")
_ARCHITECTURES: Final = {"x86_64": "x86", "aarch64": "arm64"}

# __LINUX_BPF_H__: bcc brings its own linux/bpf.h, and includes this one under its guard.
_KCONFIG: Final = "#define CONFIG_BPF_SYSCALL 1\n#define CONFIG_64BIT 1\n#define __LINUX_BPF_H__\n"
_TYPES: Final = """\
#ifndef MODALMESH_TYPES_H
#define MODALMESH_TYPES_H
#include <uapi/linux/types.h>
typedef __u8 u8; typedef __u16 u16; typedef __u32 u32; typedef __u64 u64;
typedef __s8 s8; typedef __s16 s16; typedef __s32 s32; typedef __s64 s64;
typedef _Bool bool;
typedef unsigned long size_t; typedef unsigned long uintptr_t;
#define true 1
#define false 0
#endif
"""


def _make_tree(root: Path) -> None:
    machine = platform.machine()
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        raise TraceError(f"tracing is not prepared for {machine} machines")
    asm = _HEADERS / f"{machine}-linux-gnu" / "asm"
    for name, target in (
        ("include/uapi/linux", _HEADERS / "linux"),
        ("include/uapi/asm-generic", _HEADERS / "asm-generic"),
        (f"arch/{architecture}/include/uapi/asm", asm),
    ):
        if not target.is_dir():
            raise TraceError(f"{target} is missing", hint="install Debian's linux-libc-dev")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    for name, content in (
        ("include/linux/kconfig.h", _KCONFIG),
        ("include/linux/types.h", _TYPES),
        ("include/linux/log2.h", ""),
        (f"arch/{architecture}/include/asm/page.h", "#define PAGE_SIZE 4096\n"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="ascii")


@contextlib.contextmanager
def loaded(program: str) -> Iterator[Any]:
    """Compile and load a program; yields bcc's ``BPF``.

    Raises:
        TraceError: ``bcc`` is missing, or compiling or loading failed.
    """
    try:
        bcc = importlib.import_module("bcc")
    except ImportError as error:
        raise TraceError(
            "tracing needs bcc, which this Python doesn't find",
            hint="install Debian's python3-bpfcc, and make the environment with --system-site-packages",
        ) from error
    if not hasattr(bcc, "BPF"):
        raise TraceError("the bcc found here is another program", hint="remove PyPI's bcc; install python3-bpfcc")
    with tempfile.TemporaryDirectory(prefix="modalmesh-bcc-") as folder:
        _make_tree(Path(folder))
        before = os.environ.get("BCC_KERNEL_SOURCE")
        os.environ["BCC_KERNEL_SOURCE"] = folder
        try:
            made = bcc.BPF(text=program.encode())
        except Exception as error:  # bcc raises plain Exception
            raise TraceError(f"bcc can't load the tracing program: {error}", hint="is this process root?") from error
        finally:
            if before is None:
                del os.environ["BCC_KERNEL_SOURCE"]
            else:
                os.environ["BCC_KERNEL_SOURCE"] = before
    try:
        yield made
    finally:
        made.cleanup()
