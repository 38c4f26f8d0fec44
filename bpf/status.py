"""What is pinned on this node: maps and how full they are, links and what they hang on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from bpf import loader
from bpf.errors import BpfError
from bpf.layout import MeshConfig, u32
from bpf.libbpf import ProgInfo, info, lib
from bpf.links import Link
from bpf.maps import Map

__all__ = ["read_status"]

_FILLED_BY_INDEX: Final = frozenset({2, 6, 24})
"""Arrays, which are always full, and socket storage, which can't be listed."""

# enum bpf_link_type
_LINK_KINDS: Final = {2: "tracing", 3: "cgroup", 6: "xdp", 11: "tcx"}


def read_status(pins: Path) -> dict[str, Any]:
    """Return layout version, settings, maps and links.

    Raises:
        BpfError: This process may not look.
    """
    return {
        "pins": str(pins),
        "layout_version": loader.pinned_layout_version(pins),
        "config": _config(loader.maps_directory(pins) / "mesh_config"),
        "maps": [_map(path) for path in _sorted(loader.maps_directory(pins))],
        "links": [_link(path) for path in _sorted(pins / "links")],
    }


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise BpfError(f"{folder} can't be read: {error.strerror}", hint="run as root") from error


def _config(path: Path) -> dict[str, int] | None:
    if not path.exists():
        return None
    opened = Map.open(path)
    found = MeshConfig.unpack(opened.get(u32(0)) or MeshConfig(0).pack())
    opened.close()
    return {
        "proxy_mark": found.proxy_mark,
        "proxy_mask": found.proxy_mask,
        "join_highwater": found.join_highwater,
    }


def _map(path: Path) -> dict[str, Any]:
    opened = Map.open(path)
    entries = None if opened.type in _FILLED_BY_INDEX else sum(1 for _ in opened.keys())  # noqa: SIM118 - not a dict
    found = {"name": path.name, "id": opened.id, "entries": entries, "max_entries": opened.max_entries}
    opened.close()
    return found


def _link(path: Path) -> dict[str, Any]:
    with Link.open(path) as link:
        facts = link.facts
    return {
        "pin": path.name,
        "kind": _LINK_KINDS.get(facts.kind, str(facts.kind)),
        "program": _program_name(facts.program_id),
        "program_id": facts.program_id,
        "target": facts.target,
        "alive": bool(facts.target),
    }


def _program_name(number: int) -> str:
    fd = lib().bpf_prog_get_fd_by_id(number)
    if fd < 0:
        return ""
    try:
        return str(info(fd, ProgInfo).name.decode())
    finally:
        os.close(fd)
