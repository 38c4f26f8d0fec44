"""What an agent stands on: the directory for pins, which it locks, and the cgroup that it serves."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from bpf import places
from bpf.node_errors import AgentRunningError, BrokenPinsError
from modalmesh.base.settings import Settings

__all__ = ["cgroup_of", "own"]


def cgroup_of(settings: Settings) -> Path | None:
    """Return the cgroup whose processes are served, None if this node has none of version 2."""
    if settings.bpf.cgroup is not None:
        return settings.bpf.cgroup
    mounts = places.cgroup2_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    return mounts[0] if mounts else None


def own(pins: Path) -> int:
    """Make the directory for pins and lock it; return the descriptor that holds the lock.

    Raises:
        BrokenPinsError: It can't be had.
        AgentRunningError: Another agent has it.
    """
    try:
        pins.mkdir(exist_ok=True, mode=0o700)
        fd = os.open(pins, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BrokenPinsError(
            f"{pins} can't be made: {error.strerror}", hint="mount a bpf file system at /sys/fs/bpf, or set bpf.pins"
        ) from error
    if not places.is_bpf_filesystem(pins):
        os.close(fd)
        raise BrokenPinsError(f"{pins} is in no bpf file system", hint="mount -t bpf bpf /sys/fs/bpf")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise AgentRunningError(f"another agent owns {pins}", hint="stop it first") from error
    return fd
