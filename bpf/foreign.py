"""Whose else's programs hang where ours do: reported, never evicted.

Cilium translates Kubernetes' service addresses on the same cgroup hooks and filters on tc; both go on. A range that it
owns must not be among ours, and what XDP redirects doesn't meet its filters: whoever runs both should know.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from ctypes import POINTER, byref, c_int, c_uint32
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bpf.errors import BpfError
from bpf.libbpf import ProgInfo, check, info, lib

__all__ = ["ForeignProgram", "on_cgroup", "on_interface", "owner"]

# enum bpf_attach_type
_CGROUP_HOOKS: Final = {
    "connect4": 10,
    "connect6": 11,
    "sendmsg4": 14,
    "sendmsg6": 15,
    "recvmsg4": 19,
    "recvmsg6": 20,
    "getpeername4": 29,
    "getpeername6": 30,
    "sock_ops": 3,
}
_INTERFACE_HOOKS: Final = {"tcx ingress": 46}
_EFFECTIVE: Final = 1  # BPF_F_QUERY_EFFECTIVE: also what hangs on cgroups above
_MOST: Final = 64  # BPF_CGROUP_MAX_PROGS

_CILIUM: Final = ("cil_", "sock4_", "sock6_")
"""Beginnings of the names of Cilium's programs: since 1.12, and before."""


@dataclass(frozen=True, slots=True, order=True)
class ForeignProgram:
    """Somebody else's program."""

    hook: str
    id: int
    name: str
    """Empty if this process may not ask (CAP_SYS_ADMIN)."""


def owner(program: ForeignProgram) -> str:
    """Return whose program it is, by its name: ``cilium`` or ``unknown``."""
    return "cilium" if program.name.startswith(_CILIUM) else "unknown"


def on_cgroup(cgroup: Path, ours: Collection[int]) -> list[ForeignProgram]:
    """Return others' programs on a cgroup and above it, at the hooks that we use."""
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _others(fd, _CGROUP_HOOKS, _EFFECTIVE, ours)
    finally:
        os.close(fd)


def on_interface(ifindex: int, ours: Collection[int]) -> list[ForeignProgram]:
    """Return others' tcx programs on an interface; those of an XDP hook show when ours is attached."""
    return _others(ifindex, _INTERFACE_HOOKS, 0, ours)


def _others(target: int, hooks: dict[str, int], flags: int, ours: Collection[int]) -> list[ForeignProgram]:
    found = []
    for hook, kind in hooks.items():
        try:
            ids = _query(target, kind, flags)
        except BpfError:
            continue  # a kernel without this hook has nobody on it
        found += [ForeignProgram(hook, number, _name(number)) for number in ids if number not in ours]
    return found


def _query(target: int, kind: int, flags: int) -> list[int]:
    function = lib().bpf_prog_query
    function.restype = c_int
    function.argtypes = (c_int, c_int, c_uint32, POINTER(c_uint32), POINTER(c_uint32), POINTER(c_uint32))
    count, attach_flags, ids = c_uint32(_MOST), c_uint32(), (c_uint32 * _MOST)()
    check(function(target, kind, flags, byref(attach_flags), ids, byref(count)), "query of a hook")
    return list(ids[: count.value])


def _name(number: int) -> str:
    try:
        fd = check(lib().bpf_prog_get_fd_by_id(number), f"open of program {number}")
    except BpfError:
        return ""
    try:
        return bytes(info(fd, ProgInfo).name).decode("ascii", "replace")
    finally:
        os.close(fd)
