"""The table of network interfaces, from the kernel's messages. No I/O.

An interface may vanish and come back under the same name with another index; the table goes by index, as the kernel
does, and answers by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Interface", "InterfaceTable"]

_UP: Final = 0x1  # IFF_UP
_LOWER_UP: Final = 0x10000  # IFF_LOWER_UP: the driver has a carrier


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface."""

    ifindex: int
    name: str
    flags: int
    mac: bytes

    @property
    def usable(self) -> bool:
        """It can take packets: a redirect to one that is down or without carrier loses them (ENETDOWN, ENXIO)."""
        return self.flags & _UP != 0 and self.flags & _LOWER_UP != 0


class InterfaceTable:
    """All interfaces of a network namespace."""

    def __init__(self) -> None:
        self._by_index: dict[int, Interface] = {}

    def set(self, interface: Interface) -> bool:
        """Take an interface as it is now; say whether that is news."""
        if self._by_index.get(interface.ifindex) == interface:
            return False
        self._by_index[interface.ifindex] = interface
        return True

    def remove(self, ifindex: int) -> bool:
        """Take note that an interface is gone; say whether that is news."""
        return self._by_index.pop(ifindex, None) is not None

    def replace(self, interfaces: list[Interface]) -> bool:
        """Take the whole table; say whether that is news."""
        new = {interface.ifindex: interface for interface in interfaces}
        changed, self._by_index = new != self._by_index, new
        return changed

    def named(self, name: str) -> Interface | None:
        """Return the interface of a name; while one is renamed two may have it, and the younger counts."""
        found = [interface for interface in self._by_index.values() if interface.name == name]
        return max(found, key=lambda interface: interface.ifindex, default=None)

    def get(self, ifindex: int) -> Interface | None:
        """Return the interface of an index."""
        return self._by_index.get(ifindex)

    def __len__(self) -> int:
        return len(self._by_index)
