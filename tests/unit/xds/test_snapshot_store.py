from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.scripts import POLICY, cluster, endpoints, listener, policy, route
from xds.consistency import Checked, check
from xds.debounce import Debounce
from xds.snapshot import Resource, Snapshot
from xds.store import Change, SnapshotStore
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE


class TestDebounce:
    def test_a_change_after_quiet_goes_at_once(self) -> None:
        debounce = Debounce()
        for now in (5.0, 5.125, 5.3):
            debounce.note(now)
            assert debounce.due == now
            debounce.sent()

    def test_changes_soon_after_another_are_merged_until_it_is_quiet(self) -> None:
        debounce = Debounce()
        debounce.note(5.0)
        debounce.sent()
        for now in (5.05, 5.125, 5.2):
            debounce.note(now)
            assert debounce.due == pytest.approx(now + 0.1)
        debounce.sent()
        assert debounce.due is None
        # The quiet counts from the last change, not from when it was sent.
        debounce.note(5.31)
        assert debounce.due == 5.31

    def test_a_change_that_was_due_and_not_sent_waits_with_the_next(self) -> None:
        debounce = Debounce()
        debounce.note(5.0)
        debounce.note(5.01)
        assert debounce.due == pytest.approx(5.11)

    def test_an_endless_burst_is_sent_after_ten_seconds(self) -> None:
        debounce = Debounce()
        debounce.note(0.0)
        debounce.sent()
        now, sent = 0.05, []
        while now < 25.0:
            debounce.note(now)
            assert debounce.due is not None
            if debounce.due <= now:
                sent.append(now)
                debounce.sent()
            now += 0.05
        assert sent == pytest.approx([10.05, 20.1], abs=0.11)


def table(snapshot: Snapshot | None) -> dict[str, set[str]]:
    assert snapshot is not None
    return {url: set(snapshot.of_type(url)) for url in snapshot.type_urls}


class TestStore:
    def test_equal_input_is_no_change(self) -> None:
        store = SnapshotStore()
        store.set("g", Snapshot([policy("a")]), 0.0)
        assert [change.group for change in store.take(0.0)] == ["g"]
        store.set("g", Snapshot([policy("a")]), 9.0)
        assert store.due is None
        assert store.take(9.0) == []

    def test_what_comes_in_a_burst_is_one_change(self) -> None:
        store = SnapshotStore()
        store.set("g", Snapshot([policy("a")]), 0.0)
        (first,) = store.take(0.0)
        assert first == Change("g", Snapshot([policy("a")]), {}, ())
        for number in range(10):
            store.set("g", Snapshot([policy("a", str(number)), policy("b")]), 0.01 * (number + 1))
            assert store.take(0.01 * (number + 1)) == []
        assert store.due == pytest.approx(0.2)
        (second,) = store.take(0.21)
        assert second.changed == {POLICY: {"a", "b"}}
        assert second.snapshot.of_type(POLICY)["a"] == policy("a", "9")

    def test_a_burst_that_ends_where_it_began_changes_nothing(self) -> None:
        store = SnapshotStore()
        store.set("g", Snapshot([policy("a")]), 0.0)
        store.take(0.0)
        store.set("g", Snapshot([policy("a", "2")]), 0.01)
        assert store.waiting("g") is not None
        store.set("g", Snapshot([policy("a")]), 0.02)
        assert store.take(1.0) == []

    def test_groups_do_not_wait_for_each_other(self) -> None:
        store = SnapshotStore()
        store.set("one", Snapshot([policy("a")]), 0.0)
        store.take(0.0)
        store.set("one", Snapshot([policy("a", "2")]), 0.01)
        store.set("other", Snapshot([policy("b")]), 0.02)
        assert [change.group for change in store.take(0.02)] == ["other"]
        assert store.snapshot("one") == Snapshot([policy("a")])
        assert [change.group for change in store.take(0.2)] == ["one"]

    def test_nothing_was_set(self) -> None:
        store = SnapshotStore()
        assert store.empty
        assert store.snapshot("g") is None
        assert store.due is None


def served(*resources: Resource) -> Checked:
    return check(Snapshot(resources), None)


class TestConsistency:
    def test_what_is_whole_is_served_as_it_is(self) -> None:
        whole = Snapshot([cluster("a"), endpoints("a"), listener("l", route="r"), route("r")])
        checked = check(whole, None)
        assert checked.snapshot is whole
        assert checked.faults == ()
        changed = whole.updated([cluster("a", 2)])
        assert check(changed, checked).snapshot is changed

    def test_a_cluster_without_endpoints_is_taken_out_alone(self) -> None:
        checked = served(cluster("a"), cluster("b"), endpoints("b"))
        assert table(checked.snapshot) == {CLUSTER: {"b"}, ENDPOINT: {"b"}}
        (fault,) = checked.faults
        assert (fault.type_url, fault.name, fault.replaced) == (CLUSTER, "a", False)
        assert fault.reason == "waits for EDS 'a', which is not there"

    def test_what_was_served_stays_in_place_of_what_is_at_fault(self) -> None:
        before = served(cluster("a"), endpoints("a"), cluster("b"), endpoints("b"))
        checked = check(Snapshot([cluster("a", 2), cluster("b", 2), endpoints("b")]), before)
        assert checked.snapshot == Snapshot([cluster("a"), endpoints("a"), cluster("b", 2), endpoints("b")])
        assert [(fault.name, fault.replaced) for fault in checked.faults] == [("a", True)]
        # It is given whole again.
        healed = check(Snapshot([cluster("a", 2), endpoints("a"), cluster("b", 2), endpoints("b")]), checked)
        assert healed.faults == ()
        assert healed.snapshot is healed.given

    def test_endpoints_that_go_alone_are_noticed(self) -> None:
        before = served(cluster("a"), endpoints("a"))
        checked = check(Snapshot([cluster("a")]), before)
        assert checked.snapshot == before.snapshot
        assert len(checked.faults) == 1

    def test_a_listener_without_its_routes_is_taken_out(self) -> None:
        checked = served(listener("l", route="r"), listener("m"))
        assert table(checked.snapshot) == {LISTENER: {"m"}}

    def test_invalid_endpoints_take_their_cluster_along_and_nothing_else(self) -> None:
        checked = served(cluster("a"), endpoints("a", ports=[70_000]), cluster("b"), endpoints("b"), route("r"))
        assert table(checked.snapshot) == {CLUSTER: {"b"}, ENDPOINT: {"b"}, ROUTE: {"r"}}
        assert {(fault.type_url, fault.name) for fault in checked.faults} == {(CLUSTER, "a"), (ENDPOINT, "a")}

    def test_a_fault_that_stays_does_not_hide_others(self) -> None:
        before = served(cluster("a"), cluster("b"), endpoints("b"))
        checked = check(Snapshot([cluster("a"), cluster("b"), cluster("c"), endpoints("b")]), before)
        assert [fault.name for fault in checked.faults] == ["a", "c"]


NAMES = "abc"
worlds = st.lists(
    st.one_of(
        st.builds(cluster, st.sampled_from(NAMES), st.integers(-1, 2)),
        st.builds(endpoints, st.sampled_from(NAMES), ports=st.lists(st.sampled_from([1, 70_000]), max_size=1)),
        st.builds(lambda name, other: listener(name, route=other), st.sampled_from(NAMES), st.sampled_from(NAMES)),
        st.builds(route, st.sampled_from(NAMES)),
    ),
    unique_by=lambda resource: (resource.type_url, resource.name),
)


@given(st.lists(worlds, max_size=5))
def test_what_is_served_is_whole_and_what_is_at_fault_is_said(history: list[list[Resource]]) -> None:
    checked: Checked | None = None
    for resources in history:
        given_now = Snapshot(resources)
        checked = check(given_now, checked)
        for url in checked.snapshot.type_urls:
            for resource in checked.snapshot.of_type(url).values():
                assert not resource.problem
                target = {CLUSTER: ENDPOINT, LISTENER: ROUTE}.get(url, "")
                assert set(resource.awaits) <= checked.snapshot.of_type(target).keys()
        named = {(fault.type_url, fault.name) for fault in checked.faults}
        for url in given_now.type_urls:
            for name, resource in given_now.of_type(url).items():
                assert checked.snapshot.of_type(url).get(name) == resource or (url, name) in named
