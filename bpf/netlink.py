"""Interfaces and routes by netlink: pyroute2's messages on plain sockets.

Why not pyroute2's own sockets: they queue events without a bound and bring an event loop of their own. Here a socket
is read when the loop says so; when the kernel had to drop events (ENOBUFS), the whole table is asked for again.

Everything happens in the network namespace of this process.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.marshal import MarshalRtnl

from bpf.interfaces import Interface, InterfaceTable
from bpf.node_errors import NetlinkError
from bpf.policy import parse_mac

__all__ = ["LinkMonitor", "ask", "dump", "request", "vf_macs"]

# linux/netlink.h, linux/rtnetlink.h
_NETLINK_ROUTE: Final = 0
_GROUP_LINK: Final = 1
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWROUTE, _DELROUTE = 24, 25
_FILTER_VF: Final = 1  # RTEXT_FILTER_VF: say what the virtual functions are
_BRIDGE: Final = socket.AF_BRIDGE if hasattr(socket, "AF_BRIDGE") else 7

_TIMEOUT_S: Final = 2.0
_BUFFER: Final = 1 << 20
_DATAGRAM: Final = 1 << 16
_AT_A_TIME: Final = 256
"""Datagrams read before anybody else gets a turn."""

_sequence = itertools.count(1)


class LinkMonitor:
    """Keeps a table of interfaces up to date.

    Attributes:
        table: As of the last event read.
    """

    def __init__(self) -> None:
        """Subscribe first and ask for everything then, so that no event falls between.

        Raises:
            NetlinkError: The kernel doesn't answer.
        """
        self.table = InterfaceTable()
        self._socket = _open(_GROUP_LINK)
        self._socket.setblocking(False)
        self.resync()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def resync(self) -> bool:
        """Ask for the whole table; say whether it differs.

        Raises:
            NetlinkError: The kernel doesn't answer.
        """
        return self.table.replace([_interface(message) for message in dump(request(ifinfmsg, _GETLINK))])

    def read(self) -> bool:
        """Take the events that have come; say whether any was news.

        Raises:
            NetlinkError: Events were lost, and the kernel doesn't say either what is there.
        """
        news = False
        for _ in range(_AT_A_TIME):
            try:
                data = self._socket.recv(_DATAGRAM)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise NetlinkError(f"events about interfaces can't be read: {error.strerror}") from error
                news |= self.resync()
                continue
            for kind, message in _messages(data):
                news |= self._take(kind, message)
        return news

    def _take(self, kind: int, message: Any) -> bool:
        # A bridge sends RTM_DELLINK of its own family when a port leaves it; the interface itself stays.
        if kind not in (_NEWLINK, _DELLINK) or message["family"] == _BRIDGE:
            return False
        if kind == _DELLINK:
            return self.table.remove(message["index"])
        return self.table.set(_interface(message))


def vf_macs(ifindex: int) -> dict[int, bytes]:
    """Return number → MAC address of the virtual functions of a card, as its physical interface knows them."""
    message = request(ifinfmsg, _GETLINK)
    message["index"] = ifindex
    message["attrs"] = [("IFLA_EXT_MASK", _FILTER_VF)]
    found: dict[int, bytes] = {}
    for answer in ask(message, 0):
        for info in (answer.get_attr("IFLA_VFINFO_LIST") or {}).get("attrs", ()):
            mac = info[1].get_attr("IFLA_VF_MAC")
            address = parse_mac(mac["mac"]) if mac else None
            if address is not None:
                found[mac["vf"]] = address
    return found


# ---- messages


def _interface(message: Any) -> Interface:
    mac = message.get_attr("IFLA_ADDRESS") or ""
    return Interface(
        ifindex=message["index"],
        name=message.get_attr("IFLA_IFNAME") or "",
        flags=message["flags"],
        mac=parse_mac(mac) or bytes(6),
    )


def request(kind: Callable[[], Any], number: int) -> Any:
    """Return an empty message of a pyroute2 class and one of the kernel's types."""
    message = kind()
    message["header"]["type"] = number
    return message


def _open(groups: int = 0) -> socket.socket:
    try:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_ROUTE)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        opened.bind((0, groups))
    except OSError as error:
        raise NetlinkError(f"no netlink socket: {error.strerror}", errno=error.errno or 0) from error
    return opened


def dump(message: Any) -> Iterator[Any]:
    """Ask for everything; see ``ask``."""
    return ask(message, _DUMP)


def ask(message: Any, flags: int) -> Iterator[Any]:
    """Send a request on a socket of its own; yield the answer's messages.

    Raises:
        NetlinkError: The kernel refuses or doesn't answer.
    """
    sequence = next(_sequence) & 0x7FFF_FFFF
    message["header"]["flags"] = _REQUEST | flags
    message["header"]["sequence_number"] = sequence
    message.encode()
    with contextlib.closing(_open()) as asking:
        asking.settimeout(_TIMEOUT_S)
        try:
            asking.send(message.data)
            while True:
                ended = False
                for kind, answer in _messages(asking.recv(_DATAGRAM)):
                    if kind in (_ERROR, _DONE):
                        _check(answer)
                        ended = True
                    else:
                        yield answer
                        ended |= not flags & (_DUMP | _ACK)
                if ended:
                    return
        except OSError as error:
            raise NetlinkError(f"the kernel does not answer: {error}", errno=error.errno or 0) from error


def _check(error: int) -> None:
    if error:
        raise NetlinkError(f"the kernel refused: {os.strerror(-error)}", errno=-error)


def _messages(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield type and message of each; of errors and ends of dumps, the kernel's number instead (0: none)."""
    offset = 0
    while offset + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, offset)
        if not 16 <= length <= len(data) - offset:
            return
        part = data[offset : offset + length]
        if kind in (_ERROR, _DONE):
            yield kind, struct.unpack_from("=i", part, 16)[0] if length >= 20 else 0
        elif kind in (_NEWLINK, _DELLINK, _NEWROUTE, _DELROUTE):
            for message in MarshalRtnl().parse(part):
                yield kind, message
        offset += (length + 3) // 4 * 4
