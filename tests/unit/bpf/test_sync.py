"""Maps get from any state to any other, and no packet or connection is misled on the way.

The oracle is a machine that does what the programs do with the maps' bytes, asked after every single entry written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bpf.desired import Desired, Table, Target
from bpf.layout import (
    BackendSlot,
    GpuFlowKey,
    GpuQpKey,
    GpuSlot,
    MeshConfig,
    Service,
    ServiceKey,
    SlotKey,
    u32,
    unpack_u32,
)
from bpf.policy import Backend
from bpf.sync import MIRRORED, Change, Drop, Ledger, Put, Step, plan_gpu, plan_mesh

FUNCTIONS = [f"0000:3b:00.{number}" for number in range(4)]
FLOWS = [GpuFlowKey(IPv4Address("10.0.0.1"), port, 17) for port in range(1, 5)]
PAIRS = [GpuQpKey(IPv4Address("10.0.0.1"), number) for number in range(1, 4)]
KEYS = [ServiceKey(IPv4Address("198.18.0.1"), port, 6) for port in range(1, 4)]


def empty() -> dict[str, dict[bytes, bytes]]:
    return {name: {} for name in MIRRORED} | {"mesh_config": {u32(0): bytes(16)}}


def target(number: int) -> Target:
    return Target(100 + number, f"rep{number}", bytes([2, 0, 0, 0, 0, number]), bytes([2, 1, 0, 0, 0, number]))


# ---- what the programs see


def way(maps: dict[str, dict[bytes, bytes]], name: str, key: bytes) -> tuple[bytes, bytes, int] | None:
    """Addresses and interface that a packet gets, None: it passes."""
    slot = maps[name].get(key)
    if slot is None or slot not in maps["gpu_if_map"]:
        return None
    entry = GpuSlot.unpack(maps["gpu_slots"].get(slot, bytes(16)))
    return entry.destination_mac, entry.source_mac, unpack_u32(maps["gpu_if_map"][slot])


def tc_way(maps: dict[str, dict[bytes, bytes]], name: str, key: bytes) -> tuple[bytes, bytes, int] | None:
    slot = maps[name].get(key)
    entry = GpuSlot.unpack(maps["gpu_slots"].get(slot or b"", bytes(16)))
    return (entry.destination_mac, entry.source_mac, entry.ifindex) if entry.ifindex else None


def shares(maps: dict[str, dict[bytes, bytes]], key: ServiceKey) -> tuple[int, dict[tuple[str, int], float]] | None:
    """Tier and share of each backend; None: plain way. A table with a hole in it fails."""
    raw = maps["services"].get(key.pack())
    if raw is None:
        return None
    service = Service.unpack(raw)
    found: Counter[tuple[str, int]] = Counter()
    for index in range(service.slots):
        row = BackendSlot.unpack(maps["backend_slots"][SlotKey(service.id, service.generation, index).pack()])
        own = (row.threshold + 1) / 2**32 / service.slots
        found[str(row.own.address), row.own.port] += own  # type: ignore[assignment]
        found[str(row.other.address), row.other.port] += 1 / service.slots - own  # type: ignore[assignment]
        assert row.own.id
        assert row.other.id
    return service.tier, {end: round(share, 6) for end, share in found.items() if share > 1e-6}


def wanted_way(desired: Desired, pcie: str | None) -> tuple[bytes, bytes, int] | None:
    found = desired.targets.get(pcie or "")
    return (found.destination_mac, found.source_mac, found.ifindex) if found else None


def wanted_shares(table: Table | None) -> tuple[int, dict[tuple[str, int], float]] | None:
    if table is None:
        return None
    backends = [*table.backends, *((table.proxy,) if table.proxy else ())]
    total = sum(backend.weight for backend in backends)
    return table.tier, {(str(item.address), item.port): round(item.weight / total, 6) for item in backends}


def single(step: Step) -> list[Step]:
    """A step, entry by entry, as a program on another CPU may see it."""
    if isinstance(step, Put):
        return [Put(step.map, (entry,)) for entry in step.entries]
    return [Drop(step.map, (key,)) for key in step.keys]


# ---- strategies


@st.composite
def gpu_states(draw: st.DrawFn) -> Desired:
    functions = draw(st.frozensets(st.sampled_from(FUNCTIONS)))
    names = st.sampled_from(sorted(functions)) if functions else st.nothing()
    interfaces = draw(st.permutations(range(4)))
    return Desired(
        functions=functions,
        targets={
            pcie: target(interfaces[number])
            for number, pcie in enumerate(FUNCTIONS)
            if pcie in functions and draw(st.booleans())
        },
        flow_rules=draw(st.dictionaries(st.sampled_from(FLOWS), names)) if functions else {},
        qp_rules=draw(st.dictionaries(st.sampled_from(PAIRS), names)) if functions else {},
    )


backends = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7])), max_size=3, unique_by=lambda item: item[0]
).map(lambda items: tuple(Backend(IPv4Address(f"10.0.1.{host}"), 9000, weight) for host, weight in sorted(items)))
tables = st.builds(
    Table,
    st.integers(0, 2),
    backends,
    st.none() | st.just(Backend(IPv4Address("10.0.2.1"), 15001, 3)),
)
mesh_states = st.builds(
    Desired,
    config=st.builds(MeshConfig, proxy_mark=st.integers(0, 1), proxy_mask=st.just(1)),
    services=st.dictionaries(st.sampled_from(KEYS), tables),
    join_endpoints=st.frozensets(st.sampled_from(KEYS)),
    tier_marks=st.dictionaries(st.integers(1, 4), st.integers(1, 3)),
    tier_addresses=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 3)),
)


# ---- the GPU bypass


def _rules(desired: Desired) -> list[tuple[str, bytes, str | None]]:
    return [("gpu_flow_rules", key.pack(), desired.flow_rules.get(key)) for key in FLOWS] + [
        ("gpu_qp_rules", key.pack(), desired.qp_rules.get(key)) for key in PAIRS
    ]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(gpu_states(), st.booleans()), min_size=1, max_size=5))
def test_a_packet_goes_where_it_went_or_will_go_or_passes(states: list[tuple[Desired, bool]]) -> None:
    ledger = Ledger(empty())
    before = Desired()
    for state, restarted in states:
        if restarted:
            ledger = Ledger(ledger.contents)
        changes, unplaced = plan_gpu(ledger, state)
        assert not unplaced
        # The function by the old rule or the new one, at the interface that faced it or faces it now.
        allowed = {
            (name, key): {None, *(wanted_way(when, pcie) for when in (before, state) for pcie in (old, new))}
            for (name, key, old), (_, _, new) in zip(_rules(before), _rules(state), strict=True)
        }
        for change in changes:
            for step in change.steps:
                for one in single(step):
                    ledger.apply(one)
                    for (name, key), ways in allowed.items():
                        assert way(ledger.contents, name, key) in ways
                        assert tc_way(ledger.contents, name, key) in ways
            ledger.done(change)
        for name, key, pcie in _rules(state):
            assert way(ledger.contents, name, key) == tc_way(ledger.contents, name, key) == wanted_way(state, pcie)
        assert plan_gpu(ledger, state) == ([], frozenset())
        assert plan_gpu(Ledger(ledger.contents), state) == ([], frozenset())
        used = {ledger.slots[pcie] for pcie in state.targets if pcie in ledger.slots}
        assert {unpack_u32(key) for key in ledger.contents["gpu_if_map"]} == used
        before = state


@given(gpu_states(), st.data())
def test_interfaces_that_are_gone_are_let_go_first(state: Desired, data: st.DataObject) -> None:
    ledger = Ledger(empty())
    run(ledger, plan_gpu(ledger, state)[0])
    gone = data.draw(st.frozensets(st.sampled_from(sorted(state.targets)))) if state.targets else frozenset()
    after = replace(state, targets={pcie: found for pcie, found in state.targets.items() if pcie not in gone})
    dead = {u32(ledger.slots[pcie]) for pcie in gone if pcie in ledger.slots}
    changes, _ = plan_gpu(ledger, after)
    first = [change.steps[0] for change in changes[: len(dead)]]
    assert {key for step in first if isinstance(step, Drop) for key in step.keys} == dead


def test_slots_keep_their_functions_over_a_restart() -> None:
    ledger = Ledger(empty())
    state = Desired(
        functions=frozenset(FUNCTIONS[:2]),
        targets={FUNCTIONS[0]: target(0)},
        flow_rules={FLOWS[0]: FUNCTIONS[1], FLOWS[1]: FUNCTIONS[0]},
    )
    run(ledger, plan_gpu(ledger, state)[0])
    successor = Ledger(ledger.contents)
    assert plan_gpu(successor, state)[0] == []
    assert successor.slots == ledger.slots


def test_a_slot_rests_before_it_gets_another_meaning() -> None:
    ledger = Ledger(empty())
    first = Desired(
        functions=frozenset(FUNCTIONS[:1]), targets={FUNCTIONS[0]: target(0)}, flow_rules={FLOWS[0]: FUNCTIONS[0]}
    )
    second = Desired(
        functions=frozenset(FUNCTIONS[1:2]), targets={FUNCTIONS[1]: target(1)}, flow_rules={FLOWS[0]: FUNCTIONS[1]}
    )
    run(ledger, plan_gpu(ledger, first)[0])
    slot = ledger.slots[FUNCTIONS[0]]
    changes, _ = plan_gpu(ledger, second)
    assert ledger.slots[FUNCTIONS[1]] != slot
    assert frozenset().union(*(change.freed for change in changes)) == {slot}
    run(ledger, changes)
    third = replace(second, functions=second.functions | {FUNCTIONS[2]}, qp_rules={PAIRS[0]: FUNCTIONS[2]})
    plan_gpu(ledger, third, resting=frozenset({slot}))
    assert ledger.slots[FUNCTIONS[2]] != slot


def test_more_functions_than_slots() -> None:
    many = [f"0000:{number:02x}:00.0" for number in range(256)] + ["0001:00:00.0"]
    rules = {GpuFlowKey(IPv4Address("10.0.0.1"), number + 1, 17): pcie for number, pcie in enumerate(many)}
    ledger = Ledger(empty())
    changes, unplaced = plan_gpu(ledger, Desired(functions=frozenset(many), flow_rules=rules))
    run(ledger, changes)
    assert unplaced == {many[-1]}
    assert len(ledger.contents["gpu_flow_rules"]) == 256


# ---- service addresses and the rest


def run(ledger: Ledger, changes: list[Change]) -> None:
    for change in changes:
        for step in change.steps:
            ledger.apply(step)
        ledger.done(change)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(mesh_states, st.booleans()), min_size=1, max_size=5))
def test_a_connection_meets_the_old_table_or_the_new_one(states: list[tuple[Desired, bool]]) -> None:
    ledger = Ledger(empty())
    before = Desired()
    seen: set[tuple[int, int]] = set()
    for state, restarted in states:
        if restarted:
            ledger = Ledger(ledger.contents)
            seen.clear()  # it counts on from what it finds
        allowed = {
            key: [wanted_shares(before.services.get(key)), wanted_shares(state.services.get(key))] for key in KEYS
        }
        held = {(row.service, row.generation) for row in map(SlotKey.unpack, ledger.contents["backend_slots"])}
        for change in plan_mesh(ledger, state):
            for step in change.steps:
                for one in single(step):
                    ledger.apply(one)
                    for key, tables_ in allowed.items():
                        assert shares(ledger.contents, key) in tables_
            ledger.done(change)
        now = {(row.service, row.generation) for row in map(SlotKey.unpack, ledger.contents["backend_slots"])}
        assert not (now - held) & seen, "a generation got a second meaning"
        seen |= now
        for key in KEYS:
            assert shares(ledger.contents, key) == wanted_shares(state.services.get(key))
        assert len(ledger.contents["backend_slots"]) == sum(
            Service.unpack(value).slots for value in ledger.contents["services"].values()
        )
        assert ledger.contents["mesh_config"][u32(0)] == state.config.pack()
        assert ledger.contents["join_endpoints"].keys() == {key.pack() for key in state.join_endpoints}
        assert ledger.contents["tier_marks"] == {u32(mark): u32(tier) for mark, tier in state.tier_marks.items()}
        assert ledger.contents["tier_addresses"] == {
            key.pack(): u32(tier) for key, tier in state.tier_addresses.items()
        }
        assert plan_mesh(ledger, state) == []
        assert plan_mesh(Ledger(ledger.contents), state) == []
        before = state


@given(mesh_states, mesh_states, st.data())
def test_a_predecessor_that_died_between_two_steps(first: Desired, second: Desired, data: st.DataObject) -> None:
    ledger = Ledger(empty())
    run(ledger, plan_mesh(ledger, first))
    steps = [one for change in plan_mesh(ledger, second) for step in change.steps for one in single(step)]
    for one in steps[: data.draw(st.integers(0, len(steps)))]:
        ledger.apply(one)
    successor = Ledger(ledger.contents)
    run(successor, plan_mesh(successor, second))
    for key in KEYS:
        assert shares(successor.contents, key) == wanted_shares(second.services.get(key))
    assert len(successor.contents["backend_slots"]) == sum(
        Service.unpack(value).slots for value in successor.contents["services"].values()
    )


def _services(*hosts: int, tier: int = 0) -> Desired:
    listed = tuple(Backend(IPv4Address(f"10.0.1.{host}"), 9000, 1) for host in hosts)
    return Desired(services={KEYS[0]: Table(tier, listed, None)})


def test_a_tier_alone_rewrites_no_table() -> None:
    ledger = Ledger(empty())
    run(ledger, plan_mesh(ledger, _services(1, 2)))
    (change,) = plan_mesh(ledger, _services(1, 2, tier=2))
    assert [type(step) for step in change.steps] == [Put]
    assert change.steps[0].map == "services"


def test_a_service_whose_table_finds_no_room_is_taken_back() -> None:
    ledger = Ledger(empty())
    run(ledger, plan_mesh(ledger, _services(1, 2)))
    (change,) = plan_mesh(ledger, _services(1, 2, 3))
    before = {name: dict(entries) for name, entries in ledger.contents.items()}
    ledger.apply(change.steps[0])
    for step in change.undo:
        ledger.apply(step)
    assert ledger.contents == before
    assert change.commit == 1


def test_backends_keep_their_numbers_and_lose_them_when_nobody_names_them() -> None:
    ledger = Ledger(empty())
    run(ledger, plan_mesh(ledger, _services(1, 2)))
    numbers = dict(ledger.endpoint_ids)
    run(ledger, plan_mesh(ledger, _services(2, 3)))
    assert ledger.endpoint_ids.items() >= numbers.items()
    kept = ledger.forget_endpoints()
    assert {str(address) for address, _ in ledger.endpoint_ids} == {"10.0.1.2", "10.0.1.3"}
    assert set(ledger.endpoint_ids.values()) == kept
    run(ledger, plan_mesh(ledger, _services(1)))
    fresh = ledger.endpoint_ids[IPv4Address("10.0.1.1"), 9000]
    assert fresh not in numbers.values()


def test_maps_that_are_not_there_are_left_out() -> None:
    contents: dict[str, Any] = {
        name: held for name, held in empty().items() if not name.startswith(("gpu", "serv", "back"))
    }
    ledger = Ledger(contents)
    state = replace(_services(1), functions=frozenset(FUNCTIONS[:1]), flow_rules={FLOWS[0]: FUNCTIONS[0]})
    assert plan_gpu(ledger, state) == ([], frozenset())
    assert [change.subject for change in plan_mesh(ledger, state)] == ["configuration"]


def test_what_was_found_otherwise_is_put_right() -> None:
    ledger = Ledger(empty())
    state = _services(1, 2)
    run(ledger, plan_mesh(ledger, state))
    found = {name: dict(entries) for name, entries in ledger.contents.items()}
    del found["services"][KEYS[0].pack()]
    again = ledger.replaced(found)
    run(again, plan_mesh(again, state))
    assert shares(again.contents, KEYS[0]) == wanted_shares(state.services[KEYS[0]])
    assert len(again.contents["backend_slots"]) == 2
