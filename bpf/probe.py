"""What this node's kernel offers the data path: one line a feature, with the reason where one is missing.

Every program is loaded as it is, never attached: what the verifier says here is what it would say later.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from ctypes import byref, sizeof
from dataclasses import dataclass
from errno import ENODEV
from pathlib import Path
from typing import Final

from bpf import build, loader, places
from bpf.errors import BpfError, VerifierError
from bpf.libbpf import LinkCreateOpts, lib

__all__ = ["Feature", "probe"]

_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_PERFMON": 38, "CAP_BPF": 39}
"""What the node agent needs, and its bits (linux/capability.h)."""

_RAW_TRACEPOINT: Final = 17  # BPF_PROG_TYPE_RAW_TRACEPOINT
_TCX_INGRESS: Final = 46
_NO_INTERFACE: Final = 0x7FFF_FFFF

_NEEDED_FOR: Final = {
    "xdp_gpu_bypass": "GPU traffic from the wire past the stack",
    "tc_gpu_bypass": "the same for pods of this node",
    "sock_lb": "service addresses",
    "sock_join": "joined sockets",
    "tcp_signals": "TCP metrics",
}


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that the data path can use."""

    name: str
    needed_for: str
    missing: str
    """Why it isn't there; empty: it is."""


def probe(pins: Path, cgroup: Path | None) -> list[Feature]:
    """Look for every feature.

    Args:
        pins: Where maps and links shall be kept; it need not exist yet.
        cgroup: Whose processes shall be served; None: found by the mount table.
    """
    return list(_look(pins, cgroup))


def _look(pins: Path, cgroup: Path | None) -> Iterator[Feature]:
    yield Feature("capabilities", "everything", _missing_capabilities())
    yield Feature("libbpf", "everything", _reason(lambda: lib() and None))
    yield Feature("kernel types (BTF)", "joined sockets' guard", _missing_file(Path("/sys/kernel/btf/vmlinux")))
    yield Feature("bpf file system", "surviving a restart of the agent", _missing_pins(pins))
    yield Feature("cgroup version 2", "service addresses, joined sockets, TCP metrics", _missing_cgroup(cgroup))
    for name in build.NAMES:
        yield Feature(f"program {name}", _NEEDED_FOR[name], _refusal(name))
    yield Feature("tcx hooks", "GPU traffic of pods of this node", _missing_tcx())
    yield Feature("RDMA device", "RoCEv2 by a NIC", _missing_entries(Path("/sys/class/infiniband"), "no RDMA device"))
    yield Feature("switch ports", "SR-IOV functions by their representors", _missing_switch_ports())
    yield Feature(
        "clang", "building an object that doesn't fit", "" if shutil.which("clang") else "clang is not on PATH"
    )
    yield Feature("raw tracepoints", "modalmesh bpf trace", _missing_tracepoints())
    yield Feature("bcc", "modalmesh bpf trace", _missing_bcc())


def _reason(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except BpfError as error:
        return error.what
    return ""


def _missing_file(path: Path) -> str:
    return "" if path.exists() else f"{path} doesn't exist"


def _missing_capabilities() -> str:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    return f"this process lacks {', '.join(missing)}" if missing else ""


def _missing_pins(pins: Path) -> str:
    nearest = next(path for path in (pins, *pins.parents) if path.exists())
    if places.is_bpf_filesystem(nearest):
        return ""
    return f"{nearest} is in no bpf file system (mount -t bpf bpf /sys/fs/bpf)"


def _missing_cgroup(cgroup: Path | None) -> str:
    mounts = places.cgroup2_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    if not mounts:
        return "no cgroup version 2 is mounted (mount -t cgroup2 none DIRECTORY)"
    if cgroup is not None and not any(cgroup.is_relative_to(mount) for mount in mounts):
        return f"{cgroup} is in no cgroup version 2"
    return _missing_file(cgroup) if cgroup is not None else ""


def _refusal(name: str) -> str:
    try:
        loader.load(name).close()
    except VerifierError as error:
        # The last line before the statistics says what was wrong.
        lines = [line for line in error.log.splitlines() if line and not line.startswith(("processed", "libbpf", "--"))]
        return f"refused: {lines[-1].strip() if lines else 'no reason given'}"
    except BpfError as error:
        return error.what
    return ""


def _missing_tcx() -> str:
    try:
        loaded = loader.load("tc_gpu_bypass")
    except BpfError as error:
        return error.what.splitlines()[0]
    with loaded:
        options = LinkCreateOpts(sz=sizeof(LinkCreateOpts))
        fd = loaded.programs["tc_gpu_bypass"].fd
        result = lib().bpf_link_create(fd, _NO_INTERFACE, _TCX_INGRESS, byref(options))
    # A kernel that knows tcx misses the interface; one that doesn't, the attach type.
    return "" if result == -ENODEV else f"no tcx before Linux 6.6 ({os.strerror(-result)})"


def _missing_entries(folder: Path, reason: str) -> str:
    return "" if folder.is_dir() and any(folder.iterdir()) else reason


def _missing_switch_ports() -> str:
    for device in Path("/sys/class/net").iterdir():
        try:
            if (device / "phys_switch_id").read_text(encoding="ascii").strip():
                return ""
        except OSError:
            continue
    return "no interface is a port of a NIC's switch (switchdev mode)"


def _missing_tracepoints() -> str:
    result = lib().libbpf_probe_bpf_prog_type(_RAW_TRACEPOINT, None)
    return "" if result == 1 else "the kernel loads no raw tracepoint programs"


def _missing_bcc() -> str:
    return (
        "" if importlib.util.find_spec("bcc") else "Debian's python3-bpfcc is not installed, or hidden from this venv"
    )
