"""From the policy's functions to interfaces that can take packets now, and the reasons where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from bpf import netlink, sysfs
from bpf.desired import Target
from bpf.interfaces import InterfaceTable
from bpf.node_errors import NetlinkError
from bpf.policy import Function

__all__ = ["find_targets", "find_uplinks"]


def find_targets(
    root: Path, table: InterfaceTable, functions: Iterable[Function]
) -> tuple[dict[str, Target], dict[str, str]]:
    """Return PCIe address → interface, and PCIe address → why there is none.

    Args:
        root: Of sysfs.
        table: Interfaces of this network namespace.
        functions: What to look for.
    """
    targets: dict[str, Target] = {}
    reasons: dict[str, str] = {}
    for function in functions:
        found = _target(root, table, function)
        if isinstance(found, Target):
            targets[function.pcie] = found
        else:
            reasons[function.pcie] = found
    return targets, reasons


def find_uplinks(root: Path, functions: Iterable[str]) -> tuple[str, ...]:
    """Return the uplinks of the cards whose functions are named by PCIe address."""
    return tuple(sorted({name for pcie in functions for name in sysfs.uplinks(root, pcie)}))


def _target(root: Path, table: InterfaceTable, function: Function) -> Target | str:
    facing = sysfs.find_facing(root, function)
    if not facing.interface:
        return facing.reason
    interface = table.named(facing.interface)
    if interface is None:
        return f"{facing.interface} is not in this network namespace"
    if not interface.usable:
        return f"{facing.interface} is down"
    mac = function.mac or facing.mac
    if mac is None and facing.number is not None:
        mac = _mac_of_card(root, table, function.pcie, facing.number)
    if mac is not None:
        return Target(interface.ifindex, interface.name, mac, interface.mac)
    if not function.plain_netdev:
        return "nothing says its MAC address; give it in the policy"
    return Target(interface.ifindex, interface.name, bytes(6), bytes(6))  # packets keep theirs


def _mac_of_card(root: Path, table: InterfaceTable, pcie: str, number: int) -> bytes | None:
    """Where the function was handed to a container or a machine, only its card still knows."""
    for name in sysfs.uplinks(root, pcie):
        uplink = table.named(name)
        if uplink is not None:
            with contextlib.suppress(NetlinkError):
                return netlink.vf_macs(uplink.ifindex).get(number)
    return None
