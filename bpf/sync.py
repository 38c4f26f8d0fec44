"""From what the maps hold to what they should: changes by difference, in an order that misleads no packet. No I/O.

A ``Ledger`` is the twin of the maps' contents. ``plan_*`` compare it with what is desired and return changes; whoever
carries one out tells the ledger. What a packet or connection may meet between any two steps is what was in force, what
will be, or «pass»: never a slot that belongs to another function, never half a table.

- A slot whose function lost or changed its interface loses its entry in the device map before anything else happens.
- A function's slot is filled before a rule names it, and emptied after the last rule that named it is gone.
- A slot that anything still refers to is never given to another function.
- A service's table is written as a new generation, then the service names it, then the old one is removed
  (``programs/maps_service.h``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final, NamedTuple

from bpf.balance import alias_table
from bpf.desired import Desired, Table, Target
from bpf.layout import (
    GPU_SLOTS,
    Address,
    BackendSlot,
    Endpoint,
    GpuSlot,
    GpuSlotStats,
    MeshConfig,
    Service,
    ServiceKey,
    SlotKey,
    u32,
    unpack_u32,
)

__all__ = ["MIRRORED", "Change", "Drop", "Ledger", "Put", "Step", "plan_gpu", "plan_mesh"]

CONFIG: Final = "mesh_config"
QP_RULES: Final = "gpu_qp_rules"
FLOW_RULES: Final = "gpu_flow_rules"
IF_MAP: Final = "gpu_if_map"
SLOTS: Final = "gpu_slots"
SLOT_STATS: Final = "gpu_slot_stats"
SERVICES: Final = "services"
ROWS: Final = "backend_slots"
SERVICE_STATS: Final = "service_stats"
JOIN: Final = "join_endpoints"
MARKS: Final = "tier_marks"
ADDRESSES: Final = "tier_addresses"

MIRRORED: Final = (CONFIG, QP_RULES, FLOW_RULES, IF_MAP, SLOTS, SERVICES, ROWS, JOIN, MARKS, ADDRESSES)
"""Maps that policy fills and whose contents a ledger knows; the device map's values are interface indices (``u32``)."""

_ROW_KEY: Final = struct.Struct(SlotKey.FORMAT)
_NO_SLOT: Final = GpuSlot(bytes(6), bytes(6))


class Put(NamedTuple):
    """Write entries, in order."""

    map: str
    entries: tuple[tuple[bytes, bytes], ...]


class Drop(NamedTuple):
    """Remove entries; those that don't exist are passed over."""

    map: str
    keys: tuple[bytes, ...]


Step = Put | Drop


@dataclass(frozen=True, slots=True)
class Change:
    """Steps that belong together; where one fails, those after it are not taken.

    Attributes:
        subject: For people.
        undo: Steps to take when one up to ``commit`` fails.
        commit: Index of the step after which there is no way back; -1: nothing is undone.
        table: Service and what it leads to once all is done.
        freed: Slots that nobody uses any more once all is done.
    """

    subject: str
    steps: tuple[Step, ...]
    undo: tuple[Step, ...] = ()
    commit: int = -1
    table: tuple[ServiceKey, Table] | None = None
    freed: frozenset[int] = frozenset()


@dataclass(slots=True)
class Ledger:
    """What the maps hold, and which numbers stand for what.

    Attributes:
        contents: Map → entries; a map that isn't there (its program was refused) is left out and nothing is planned
            for it.
        slots: PCIe address → slot.
        tables: Service → what it leads to, as far as known.
        endpoint_ids: Backend → key of ``backend_stats``.
    """

    contents: dict[str, dict[bytes, bytes]]
    slots: dict[str, int] = field(default_factory=dict)
    tables: dict[ServiceKey, Table] = field(default_factory=dict)
    endpoint_ids: dict[tuple[Address, int], int] = field(default_factory=dict)
    _next_service: int = 1
    _next_generation: int = 1
    _next_endpoint: int = 1

    def __post_init__(self) -> None:
        """Go on counting where a predecessor stopped, so that no number gets a second meaning."""
        services = [Service.unpack(value) for value in self.contents.get(SERVICES, {}).values()]
        rows = [SlotKey.unpack(key) for key in self.contents.get(ROWS, {})]
        self._next_service = 1 + max((item.id for item in services), default=0)
        self._next_service = max(self._next_service, 1 + max((row.service for row in rows), default=0))
        self._next_generation = 1 + max((item.generation for item in services), default=0)
        self._next_generation = max(self._next_generation, 1 + max((row.generation for row in rows), default=0))
        for value in self.contents.get(ROWS, {}).values():
            row = BackendSlot.unpack(value)
            for endpoint in (row.own, row.other):
                self.endpoint_ids[endpoint.address, endpoint.port] = endpoint.id
        self._next_endpoint = 1 + max(self.endpoint_ids.values(), default=0)

    def replaced(self, contents: dict[str, dict[bytes, bytes]]) -> Ledger:
        """Return a ledger of what the maps were found to hold, with this one's numbers."""
        other = Ledger(contents, slots=dict(self.slots))
        other._next_service = max(other._next_service, self._next_service)
        other._next_generation = max(other._next_generation, self._next_generation)
        other._next_endpoint = max(other._next_endpoint, self._next_endpoint)
        return other

    def apply(self, step: Step) -> None:
        """Note that a step was carried out."""
        entries = self.contents.get(step.map)
        if entries is None:
            return
        if isinstance(step, Put):
            entries.update(step.entries)
        else:
            for key in step.keys:
                entries.pop(key, None)

    def done(self, change: Change) -> None:
        """Note that all steps of a change were carried out."""
        if change.table is not None:
            key, table = change.table
            self.tables[key] = table

    def service_number(self) -> int:
        """Return a service id never used before."""
        self._next_service += 1
        return self._next_service - 1

    def generation_number(self) -> int:
        """Return a generation never used before, by any service."""
        self._next_generation += 1
        return self._next_generation - 1

    def endpoint_number(self, address: Address, port: int) -> int:
        """Return the id of a backend."""
        number = self.endpoint_ids.get((address, port))
        if number is None:
            number = self.endpoint_ids[address, port] = self._next_endpoint
            self._next_endpoint += 1
        return number

    def forget_endpoints(self) -> Set[int]:
        """Forget backends that no table names any more; return the ids of those that some does."""
        used: set[int] = set()
        for value in self.contents.get(ROWS, {}).values():
            row = BackendSlot.unpack(value)
            used.update((row.own.id, row.other.id))
        self.endpoint_ids = {endpoint: number for endpoint, number in self.endpoint_ids.items() if number in used}
        return used

    def service_ids(self) -> set[int]:
        """Return the ids of the services in force."""
        return {Service.unpack(value).id for value in self.contents.get(SERVICES, {}).values()}


# ---- the GPU bypass


def plan_gpu(
    ledger: Ledger, desired: Desired, *, resting: Set[int] = frozenset()
) -> tuple[list[Change], frozenset[str]]:
    """Return what to do for the GPU bypass, and the functions that got no slot because all are in use.

    Args:
        ledger: What the maps hold; slots are assigned in it.
        desired: What they should hold.
        resting: Slots freed so recently that a program may still be about to use them.
    """
    if IF_MAP not in ledger.contents:
        return [], frozenset()
    interfaces, slots = ledger.contents[IF_MAP], ledger.contents[SLOTS]
    unplaced = _assign(ledger, desired, resting)
    named = _named(desired)
    broken: list[Change] = []
    made: list[Change] = []
    for pcie, slot in sorted(ledger.slots.items(), key=lambda item: item[1]):
        target, key = desired.targets.get(pcie), u32(slot)
        # Emptied after its last rule is gone, unless its interface is gone already.
        if pcie not in named and (pcie not in desired.functions or target is not None):
            continue
        value = _slot_value(target, slots.get(key))
        ifindex = u32(target.ifindex) if target else None
        if interfaces.get(key) == ifindex and slots.get(key, _NO_SLOT.pack()) == value:
            continue
        steps: list[Step] = [Drop(IF_MAP, (key,))] if key in interfaces else []
        steps.append(Put(SLOTS, ((key, value),)))
        if ifindex is not None:
            steps.append(Put(IF_MAP, ((key, ifindex),)))
        (broken if key in interfaces else made).append(Change(f"function {pcie}", tuple(steps)))
    rules = [
        change
        for name, wanted in _rules(desired).items()
        for change in _difference(
            ledger, name, {key: u32(ledger.slots[pcie]) for key, pcie in wanted.items() if pcie in ledger.slots}
        )
    ]
    return [*broken, *made, *rules, *_freed(ledger, desired)], unplaced


def _rules(desired: Desired) -> dict[str, dict[bytes, str]]:
    return {
        QP_RULES: {key.pack(): pcie for key, pcie in desired.qp_rules.items()},
        FLOW_RULES: {key.pack(): pcie for key, pcie in desired.flow_rules.items()},
    }


def _named(desired: Desired) -> set[str]:
    return {*desired.qp_rules.values(), *desired.flow_rules.values()}


def _assign(ledger: Ledger, desired: Desired, resting: Set[int]) -> frozenset[str]:
    """Give every function that a rule names a slot: the one it has, the one a predecessor gave it, or a free one."""
    named = _named(desired)
    if not ledger.slots:
        ledger.slots = _recovered(ledger, desired)
    busy = _referred(ledger) | set(ledger.slots.values()) | resting
    free = (slot for slot in range(GPU_SLOTS) if slot not in busy)
    for pcie in sorted(named - ledger.slots.keys()):
        slot = next(free, None)
        if slot is None:
            return frozenset(named - ledger.slots.keys())
        ledger.slots[pcie] = slot
    return frozenset()


def _recovered(ledger: Ledger, desired: Desired) -> dict[str, int]:
    """Return the slots that functions had under a predecessor, as far as they can be told without doubt.

    A slot is a function's if every rule that names it is the function's, or is no longer wanted and the slot holds
    exactly the function's interface.
    """
    owners: dict[int, set[str | None]] = {}
    for name, wanted in _rules(desired).items():
        for key, value in ledger.contents[name].items():
            owners.setdefault(unpack_u32(value), set()).add(wanted.get(key))
    slots: dict[str, int] = {}
    for slot, names in sorted(owners.items()):
        certain = {pcie for pcie in names if pcie is not None}
        if len(certain) != 1 or slot >= GPU_SLOTS:
            continue
        pcie = certain.pop()
        if None in names and not _holds(ledger, slot, desired.targets.get(pcie)):
            continue
        slots.setdefault(pcie, slot)
    return slots


def _holds(ledger: Ledger, slot: int, target: Target | None) -> bool:
    key = u32(slot)
    return (
        target is not None
        and ledger.contents[IF_MAP].get(key) == u32(target.ifindex)
        and ledger.contents[SLOTS].get(key) == _slot_value(target, None)
    )


def _referred(ledger: Ledger) -> set[int]:
    rules = (ledger.contents[QP_RULES], ledger.contents[FLOW_RULES])
    return {unpack_u32(value) for entries in rules for value in entries.values()} | {
        unpack_u32(key) for key in ledger.contents[IF_MAP]
    }


def _slot_value(target: Target | None, before: bytes | None) -> bytes:
    """Without a target the addresses stay: only the index, which tc follows, goes."""
    if target is not None:
        return GpuSlot(target.destination_mac, target.source_mac, target.ifindex).pack()
    old = GpuSlot.unpack(before) if before else _NO_SLOT
    return GpuSlot(old.destination_mac, old.source_mac).pack()


def _freed(ledger: Ledger, desired: Desired) -> list[Change]:
    """Slots of functions that no rule names any more, and those that a predecessor left filled."""
    named = _named(desired)
    ledger.slots = {pcie: slot for pcie, slot in ledger.slots.items() if pcie in named}
    owned = set(ledger.slots.values())
    filled = {unpack_u32(key) for key in ledger.contents[IF_MAP]} | {
        unpack_u32(key) for key, value in ledger.contents[SLOTS].items() if value != _NO_SLOT.pack()
    }
    gone = sorted(filled - owned)
    if not gone:
        return []
    keys = tuple(u32(slot) for slot in gone)
    return [
        Change(
            "slots that no rule names",
            (
                Drop(IF_MAP, keys),
                Put(SLOTS, tuple((key, _NO_SLOT.pack()) for key in keys)),
                Put(SLOT_STATS, tuple((key, GpuSlotStats().pack()) for key in keys)),
            ),
            freed=frozenset(gone),
        )
    ]


# ---- service addresses, joined sockets, tiers


def plan_mesh(ledger: Ledger, desired: Desired) -> list[Change]:
    """Return what to do for everything else."""
    return [
        # First: a proxy that is not exempt yet would be sent to itself.
        *_config(ledger, desired.config),
        *_leftovers(ledger),
        *_removed(ledger, desired.services),
        *_services(ledger, desired.services),
        *_difference(ledger, JOIN, {key.pack(): u32(1) for key in desired.join_endpoints}),
        *_difference(ledger, MARKS, {u32(mark): u32(tier) for mark, tier in desired.tier_marks.items()}),
        *_difference(ledger, ADDRESSES, {key.pack(): u32(tier) for key, tier in desired.tier_addresses.items()}),
    ]


def _config(ledger: Ledger, config: MeshConfig) -> list[Change]:
    entries = ledger.contents.get(CONFIG)
    if entries is None or entries.get(u32(0)) == config.pack():
        return []
    return [Change("configuration", (Put(CONFIG, ((u32(0), config.pack()),)),))]


def _leftovers(ledger: Ledger) -> list[Change]:
    """Rows that no service names: a predecessor died between two steps."""
    if ledger.tables or not ledger.contents.get(ROWS):
        return []  # only a ledger that has just been read can find any
    named = {(item.id, item.generation) for item in map(Service.unpack, ledger.contents[SERVICES].values())}
    found = tuple(
        key
        for key in ledger.contents[ROWS]
        if (SlotKey.unpack(key).service, SlotKey.unpack(key).generation) not in named
    )
    return [Change("rows of no service", (Drop(ROWS, found),))] if found else []


def _removed(ledger: Ledger, services: Mapping[ServiceKey, Table]) -> list[Change]:
    entries = ledger.contents.get(SERVICES)
    if entries is None or (
        len(entries) == len(services) == len(ledger.tables) and services.keys() == ledger.tables.keys()
    ):
        return []
    wanted = {key.pack() for key in services}
    changes = []
    for raw in [raw for raw in entries if raw not in wanted]:
        service, key = Service.unpack(entries[raw]), ServiceKey.unpack(raw)
        ledger.tables.pop(key, None)
        steps: tuple[Step, ...] = (
            Drop(SERVICES, (raw,)),
            Drop(ROWS, _row_keys(service)),
            Drop(SERVICE_STATS, (u32(service.id),)),
        )
        changes.append(Change(f"service address {_text(key)}", steps))
    return changes


def _services(ledger: Ledger, services: Mapping[ServiceKey, Table]) -> list[Change]:
    entries = ledger.contents.get(SERVICES)
    if entries is None:
        return []
    changes = []
    for key, table in services.items():
        if ledger.tables.get(key) == table:
            continue
        raw = key.pack()
        rows = _rows(ledger, table)
        held = Service.unpack(entries[raw]) if raw in entries else None
        subject = f"service address {_text(key)}"
        if held is not None and _held_rows(ledger, held) == rows:
            if held.tier == table.tier:
                ledger.tables[key] = table
                continue
            value = Service(held.id, held.generation, held.slots, table.tier).pack()
            changes.append(Change(subject, (Put(SERVICES, ((raw, value),)),), table=(key, table)))
            continue
        number = held.id if held else ledger.service_number()
        new = Service(number, ledger.generation_number(), len(rows), table.tier)
        filled = tuple(zip(_row_keys(new), rows, strict=True))
        steps: list[Step] = [Put(ROWS, filled), Put(SERVICES, ((raw, new.pack()),))]
        if held is not None:
            steps.append(Drop(ROWS, _row_keys(held)))
        changes.append(Change(subject, tuple(steps), undo=(Drop(ROWS, _row_keys(new)),), commit=1, table=(key, table)))
    return changes


def _rows(ledger: Ledger, table: Table) -> list[bytes]:
    """The values of ``backend_slots``; each endpoint is packed once (``BackendSlot.pack`` would do it for each row)."""
    backends = [*table.backends, *((table.proxy,) if table.proxy else ())]
    ends = [Endpoint(address, port, ledger.endpoint_number(address, port)).pack() for address, port, _ in backends]
    columns = alias_table([backend.weight for backend in backends])
    return [ends[column.own] + ends[column.other] + u32(column.threshold) for column in columns]


def _row_keys(service: Service) -> tuple[bytes, ...]:
    pack = _ROW_KEY.pack
    return tuple(pack(service.id, service.generation, index) for index in range(service.slots))


def _held_rows(ledger: Ledger, service: Service) -> list[bytes | None]:
    return [ledger.contents[ROWS].get(key) for key in _row_keys(service)]


def _difference(ledger: Ledger, name: str, wanted: Mapping[bytes, bytes]) -> list[Change]:
    """A map whose entries stand for themselves: what goes makes room, what is new comes last and may find none."""
    entries = ledger.contents.get(name)
    if entries is None or entries == wanted:
        return []
    gone = tuple(key for key in entries if key not in wanted)
    changed = tuple((key, value) for key, value in wanted.items() if entries.get(key, value) != value)
    fresh = tuple((key, value) for key, value in wanted.items() if key not in entries)
    steps: Iterable[Step] = (Drop(name, gone), Put(name, changed), Put(name, fresh))
    filled = tuple(step for step in steps if (step.keys if isinstance(step, Drop) else step.entries))
    return [Change(f"map {name}", filled)]


def _text(key: ServiceKey) -> str:
    address = str(key.address) if isinstance(key.address, IPv4Address) else f"[{key.address}]"
    return f"{address}:{key.port}/{ {6: 'tcp', 17: 'udp'}.get(key.protocol, key.protocol) }"
