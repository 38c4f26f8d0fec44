"""Blackhole routes for the ranges that the mesh owns.

Why: what isn't translated (a process outside the cgroup, a packet that a container forwards) must not leave the node
for an address that only means something here. Ours are told from others' by their protocol number.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Set
from ipaddress import ip_network
from typing import Any, Final

from pyroute2.netlink.rtnl.rtmsg import rtmsg

from bpf import netlink
from bpf.node_errors import NetlinkError
from bpf.policy import Network

__all__ = ["ROUTE_PROTOCOL", "add_blackhole", "blackholes", "remove_blackhole", "sync_blackholes"]

ROUTE_PROTOCOL: Final = 77
"""Marks our routes among all others; free in iproute2's rt_protos."""

# linux/netlink.h, linux/rtnetlink.h
_ACK, _EXCL, _CREATE = 0x4, 0x200, 0x400
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_TABLE_MAIN: Final = 254
_SCOPE_UNIVERSE: Final = 0
_TYPE_BLACKHOLE: Final = 6


def sync_blackholes(wanted: Set[Network]) -> frozenset[Network]:
    """Have blackhole routes for exactly these networks; return those for which somebody else has a route.

    Raises:
        NetlinkError: The kernel refuses.
    """
    present = blackholes()
    for network in sorted(present - wanted, key=str):
        remove_blackhole(network)
    return frozenset(network for network in sorted(wanted - present, key=str) if not add_blackhole(network))


def add_blackhole(network: Network) -> bool:
    """Add a blackhole route of ours; say whether it stands.

    Returns:
        False: somebody else has a route for exactly this network, which stays.

    Raises:
        NetlinkError: The kernel refuses.
    """
    try:
        list(netlink.ask(_blackhole(network, _NEWROUTE), _ACK | _CREATE | _EXCL))
    except NetlinkError as error:
        if error.errno != errno.EEXIST:
            raise
        return network in blackholes()
    return True


def remove_blackhole(network: Network) -> None:
    """Remove a blackhole route of ours, if it is there.

    Raises:
        NetlinkError: The kernel refuses.
    """
    try:
        list(netlink.ask(_blackhole(network, _DELROUTE), _ACK))
    except NetlinkError as error:
        if error.errno != errno.ESRCH:
            raise


def blackholes() -> set[Network]:
    """Return the networks of our blackhole routes."""
    found = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        request = netlink.request(rtmsg, _GETROUTE)
        request["family"] = family
        for message in netlink.dump(request):
            # The kernel needn't filter: it looks at more than the family only on «strict» sockets.
            if message["proto"] == ROUTE_PROTOCOL and message["type"] == _TYPE_BLACKHOLE:
                found.add(ip_network(f"{message.get_attr('RTA_DST')}/{message['dst_len']}"))
    return found


def _blackhole(network: Network, kind: int) -> Any:
    message = netlink.request(rtmsg, kind)
    message["family"] = socket.AF_INET if network.version == 4 else socket.AF_INET6
    message["dst_len"] = network.prefixlen
    message["table"] = _TABLE_MAIN
    message["proto"] = ROUTE_PROTOCOL
    message["scope"] = _SCOPE_UNIVERSE
    message["type"] = _TYPE_BLACKHOLE
    message["attrs"] = [("RTA_DST", str(network.network_address))]
    return message
