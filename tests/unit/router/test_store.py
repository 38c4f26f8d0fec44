from __future__ import annotations

from collections.abc import Callable

import pytest

from router.errors import EncoderMismatchError, PolicyError
from router.store import PolicyStore
from xds.pb.router import policy_pb2

Build = Callable[..., policy_pb2.SemanticPolicy]
FINGERPRINT = "00112233aabbccdd"


def names(store: PolicyStore) -> list[str]:
    return [policy.name for policy in store.current.policies]


@pytest.fixture
def store(policy_message: Build) -> PolicyStore:
    store = PolicyStore()
    store.apply({"one": policy_message(hosts=["one.com"]).SerializeToString()})
    return store


def test_updates_add_replace_and_remove(store: PolicyStore, policy_message: Build) -> None:
    store.apply({"two": policy_message(hosts=["two.com"]).SerializeToString()})
    assert names(store) == ["one", "two"]
    store.apply({"two": policy_message(hosts=["three.com"]).SerializeToString()}, ["one", "never there"])
    assert names(store) == ["two"]
    assert store.current.hosts == ("three.com",)


@pytest.mark.parametrize("hosts", [["one.com"], []])
def test_a_refused_update_changes_nothing(store: PolicyStore, policy_message: Build, hosts: list[str]) -> None:
    before = store.current
    good = policy_message(hosts=["two.com"]).SerializeToString()
    with pytest.raises(PolicyError):
        store.apply({"two": good, "three": policy_message(hosts=hosts).SerializeToString()}, ["nothing"])
    assert store.current is before
    store.apply({})
    assert names(store) == ["one"]
    assert not store.refused_for_encoder


def test_a_host_may_move_between_policies_in_one_update(store: PolicyStore, policy_message: Build) -> None:
    store.apply({"two": policy_message(hosts=["one.com"]).SerializeToString()}, ["one"])
    assert names(store) == ["two"]


def test_an_update_does_not_touch_a_set_in_use(store: PolicyStore) -> None:
    in_use = store.current
    store.apply({}, ["one"])
    assert [policy.name for policy in in_use.policies] == ["one"]
    assert names(store) == []


def test_before_the_encoder_is_known_policies_are_accepted_and_checked_later(store: PolicyStore) -> None:
    assert store.encoder is None
    (wrong,) = store.encoder_is("ffff", 4)
    assert "'one'" in str(wrong)
    assert names(store) == ["one"]
    assert store.encoder_is(FINGERPRINT, 4) == []


def test_with_a_known_encoder_others_policies_are_refused(store: PolicyStore, policy_message: Build) -> None:
    store.encoder_is(FINGERPRINT, 4)
    other = policy_message(hosts=["two.com"], encoder=policy_pb2.EncoderIdentity(fingerprint="ffff", dimension=4))
    with pytest.raises(EncoderMismatchError, match="'two' was computed with encoder ffff"):
        store.apply({"two": other.SerializeToString()})
    assert names(store) == ["one"]
    assert store.refused_for_encoder
    store.encoder_is("ffff", 4)
    store.apply({"two": other.SerializeToString()}, ["one"])
    assert names(store) == ["two"]
    assert not store.refused_for_encoder
