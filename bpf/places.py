"""Where a node keeps cgroups and pinned objects: found in its mount table, mounted where they are missing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from bpf.errors import BpfError
from bpf.libbpf import from_errno

__all__ = ["cgroup2_mounts", "is_bpf_filesystem", "mount_bpf_filesystem", "unmount"]

_BPF_FS_MAGIC: Final = 0xCAFE4A11  # linux/magic.h
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _unescaped(field: str) -> str:
    return field.encode().decode("unicode_escape")  # mountinfo writes blanks as \040 (proc(5))


def cgroup2_mounts(mountinfo: str) -> list[Path]:
    """Return where cgroup version 2 is mounted.

    Args:
        mountinfo: Content of ``/proc/self/mountinfo``.
    """
    found = []
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.split(" ")[0] == "cgroup2":
            found.append(Path(_unescaped(fields.split(" ")[4])))
    return found


class _StatFs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_char * 248))


def is_bpf_filesystem(path: Path) -> bool:
    """Say whether ``path`` lies in a bpf file system."""
    buffer = _StatFs()
    if _libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        return False
    return int(buffer.f_type) & 0xFFFF_FFFF == _BPF_FS_MAGIC


def mount_bpf_filesystem(path: Path) -> None:
    """Mount a bpf file system.

    Raises:
        BpfError: The kernel refuses.
    """
    path.mkdir(parents=True, exist_ok=True)
    if _libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, b"mode=0700") != 0:
        raise from_errno(ctypes.get_errno(), f"mount of a bpf file system at {path}", BpfError, "CAP_SYS_ADMIN mounts")


def unmount(path: Path) -> None:
    """Unmount; what is pinned only there is gone."""
    if _libc.umount2(os.fsencode(path), 0) != 0:
        raise from_errno(ctypes.get_errno(), f"unmount of {path}")
