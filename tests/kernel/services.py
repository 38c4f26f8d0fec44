"""Service tables written the way the node agent must write them, and servers that say who they are."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bpf import layout, links, loader
from bpf.balance import alias_table
from bpf.layout import BackendSlot, Endpoint, Service, ServiceKey, SlotKey
from bpf.loader import Object
from tests.kernel.lab import Lab, Tell

HOOKS = ("connect4", "connect6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6", "getpeername4", "getpeername6")


def attach_sock_lb(lab: Lab, cgroup: Path) -> Object:
    """The translation, for processes of ``cgroup``."""
    loaded: Object = lab.closing(loader.load("sock_lb"))
    for hook in HOOKS:
        lab.closing(links.attach_cgroup(loaded.programs[f"sock_lb_{hook}"], cgroup))
    return loaded


def set_service(
    loaded: Object,
    key: ServiceKey,
    number: int,
    backends: Sequence[tuple[Endpoint, int]],
    *,
    generation: int = 1,
    tier: int = 0,
) -> None:
    """New slots, then the service, then the old slots go."""
    columns = alias_table([weight for _, weight in backends])
    slots = loaded.maps["backend_slots"]
    slots.set_many(
        (
            SlotKey(number, generation, index).pack(),
            BackendSlot(backends[own][0], backends[other][0], threshold).pack(),
        )
        for index, (threshold, own, other) in enumerate(columns)
    )
    before = loaded.maps["services"].get(key.pack())
    loaded.maps["services"].set(key.pack(), Service(number, generation, len(columns), tier).pack())
    if before:
        old = Service.unpack(before)
        slots.delete_many(SlotKey(old.id, old.generation, index).pack() for index in range(old.slots))


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def serve_names(tell: Tell, ends: list[tuple[str, int]]) -> None:
    """Listen on each end by TCP and UDP; whoever connects or sends gets the end's name and its own address back."""
    by_socket: dict[socket.socket, tuple[str, bool]] = {}
    for address, port in ends:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            made = socket.socket(family_of(address), kind)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            if kind == socket.SOCK_STREAM:
                made.listen(512)
            by_socket[made] = (address, kind == socket.SOCK_STREAM)
    tell("ready")
    while True:
        for ready in select.select(list(by_socket), [], [], 60)[0]:
            name, is_stream = by_socket[ready]
            if is_stream:
                connection, _ = ready.accept()
                connection.sendall(name.encode())
                connection.close()
            else:
                _, sender = ready.recvfrom(100)
                ready.sendto(name.encode(), sender)


def totals(loaded: Object, name: str, kind: Any) -> dict[int, Any]:
    """A map's counters by number."""
    return {layout.unpack_u32(key): value for key, value in loaded.maps[name].totals(kind).items()}
