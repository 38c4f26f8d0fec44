"""From a function's PCIe address to the interface that faces it.

XDP transmits on its target, and a virtual function's own interface sends out of the function, not into it. What faces
the function is its representor: the port of the same embedded switch (``phys_switch_id``) whose name
(``phys_port_name``, ``pf0vf2``) is the function's number. Both are what the kernel's switchdev model promises
(Documentation/networking/switchdev.rst, «Port Netdev Naming»; representors.rst).

The root of sysfs is a parameter, so that tests can build a machine out of directories.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bpf.policy import Function, parse_mac

__all__ = ["Facing", "find_facing", "uplinks"]

_VF_PORT: Final = re.compile(r"(?:c[0-9]+)?pf(?P<pf>[0-9]+)vf(?P<vf>[0-9]+)")
_BARE_PORT: Final = re.compile(r"(?P<vf>[0-9]+)")
"""Drivers older than the naming rule give the number alone."""
_UPLINK_PORT: Final = re.compile(r"p[0-9]+(?:s[0-9]+)?")
_LONGEST_ATTRIBUTE: Final = 4096  # a sysfs attribute is one page at most


@dataclass(frozen=True, slots=True)
class Facing:
    """Where a function was looked for.

    Attributes:
        interface: Name of the interface that faces it, empty if there is none.
        mac: The function's own address, None if the system doesn't say.
        number: Of a virtual function, by which its card knows it.
        reason: Why there is no interface.
    """

    interface: str = ""
    mac: bytes | None = None
    number: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Port:
    interface: str
    switch: str
    name: str


def find_facing(root: Path, function: Function) -> Facing:
    """Return the interface that faces a function.

    Args:
        root: Of sysfs, usually ``/sys``.
        function: Its address, and whether its own interface will do.
    """
    device = root / "bus" / "pci" / "devices" / function.pcie
    if not device.is_dir():
        return Facing(reason="no such PCIe device")
    facing = _representor(root, device)
    if facing.interface or not function.plain_netdev:
        return facing
    own = _interfaces(device)
    if len(own) != 1:
        return Facing(reason=f"{facing.reason}; it has {len(own)} interfaces of its own")
    return Facing(own[0], function.mac)


def uplinks(root: Path, pcie: str) -> tuple[str, ...]:
    """Return the interfaces by which a function's network card reaches the network."""
    device = root / "bus" / "pci" / "devices" / pcie
    parent = _physical_function(device)
    if parent is None:
        return ()
    own = _interfaces(parent)
    return tuple(name for name in own if _UPLINK_PORT.fullmatch(_attribute(root, name, "phys_port_name")))


def _representor(root: Path, device: Path) -> Facing:
    parent = _physical_function(device)
    if parent is None:
        return Facing(reason="it is no virtual function and so has no representor")
    number = _number(parent, device)
    if number is None:
        return Facing(reason=f"{parent.name} doesn't list it among its virtual functions")
    ports = _ports(root)
    switches = {port.switch for port in ports if port.interface in _interfaces(parent)}
    if not switches:
        return Facing(reason=f"{parent.name} is not in switchdev mode")
    candidates = [port for port in ports if port.switch in switches]
    exact = [port.interface for port in candidates if _is_vf(port.name, _pf_number(parent), number)]
    # A card that gives bare numbers has one physical function behind each switch.
    found = exact or [port.interface for port in candidates if _is_bare(port.name, number)]
    if len(found) != 1:
        return Facing(reason=f"{len(found)} representors for virtual function {number} of {parent.name}")
    return Facing(found[0], _own_mac(root, device), number)


def _physical_function(device: Path) -> Path | None:
    link = device / "physfn"
    return device.parent / link.resolve().name if link.exists() else None


def _number(parent: Path, device: Path) -> int | None:
    for link in parent.glob("virtfn*"):
        if link.resolve().name == device.resolve().name:
            digits = link.name.removeprefix("virtfn")
            return int(digits) if digits.isdecimal() else None
    return None


def _pf_number(parent: Path) -> int:
    """The function digit of the PCIe address: drivers number their physical functions by it."""
    return int(parent.name.rpartition(".")[2])


def _is_vf(port: str, pf: int, vf: int) -> bool:
    match = _VF_PORT.fullmatch(port)
    return match is not None and (int(match["pf"]), int(match["vf"])) == (pf, vf)


def _is_bare(port: str, vf: int) -> bool:
    match = _BARE_PORT.fullmatch(port)
    return match is not None and int(match["vf"]) == vf


def _ports(root: Path) -> list[_Port]:
    """Every interface that is a port of an embedded switch."""
    found = []
    for name in _listed(root / "class" / "net"):
        switch = _attribute(root, name, "phys_switch_id")
        if switch:
            found.append(_Port(name, switch, _attribute(root, name, "phys_port_name")))
    return found


def _interfaces(device: Path) -> list[str]:
    return _listed(device / "net")


def _own_mac(root: Path, device: Path) -> bytes | None:
    own = _interfaces(device)
    return parse_mac(_attribute(root, own[0], "address")) if len(own) == 1 else None


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _attribute(root: Path, interface: str, name: str) -> str:
    """Interfaces that are no switch ports answer EOPNOTSUPP; one that just went, ENOENT."""
    try:
        with (root / "class" / "net" / interface / name).open("rb") as file:
            return file.read(_LONGEST_ATTRIBUTE).decode("ascii", "replace").strip()
    except OSError:
        return ""
