# ruff: noqa: S311  draws that are the same each time

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from router.cache.breaker import Breaker
from router.cache.key import Json
from router.cache.penetration import Doorkeeper, MissBudget
from router.cache.policy import CachePolicy, Verdict, judge


def ask(policy: CachePolicy | None = None, **changes: object) -> Verdict:
    arguments: dict[str, object] = {"generates": True, "streams": False, "parameters": {"temperature": 0}} | changes
    return judge(policy or CachePolicy(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parameters", [{}, {"temperature": 0.7}, {"temperature": True}, {"temperature": 0, "n": 2}, {"temperature": "0"}]
)
def test_sampling_is_not_stored_unless_the_route_says_so(parameters: Mapping[str, Json]) -> None:
    assert ask(parameters=parameters) == Verdict(serve=False, store=False, reason="sampled")
    assert ask(CachePolicy(store_sampled=True), parameters=parameters).store
    assert ask(parameters=parameters, generates=False).store


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.0}, {"do_sample": False}, {"top_k": 1}])
def test_what_does_not_sample_is(parameters: Mapping[str, Json]) -> None:
    assert ask(parameters=parameters) == Verdict(serve=True, store=True)


def test_tools_and_streams_are_not_stored_unless_the_route_says_so() -> None:
    assert ask(tools=[{}]).reason == "tools"
    assert ask(streams=True).reason == "streamed"
    assert ask(CachePolicy(store_with_tools=True), tools=[{}]).store
    assert ask(CachePolicy(store_streamed=True), streams=True).store


@pytest.mark.parametrize(
    ("header", "serve", "store"),
    [
        ("", True, True),
        ("no-store", False, False),
        ("No-Cache", False, True),
        ("max-age = 0", False, True),
        ("private, no-store", False, False),
        ("max-age=60", True, True),
    ],
)
def test_cache_control(header: str, serve: bool, store: bool) -> None:
    verdict = ask(cache_control=header)
    assert (verdict.serve, verdict.store) == (serve, store)


def test_lives_are_spread_by_the_key() -> None:
    policy = CachePolicy(ttl_s=100, ttl_jitter=0.1)
    lives = {policy.ttl_ms(bytes(28) + number.to_bytes(4, "little")) for number in (0, 2**31, 2**32 - 1)}
    assert max(lives) == 100_000
    assert 90_000 <= min(lives) < 90_001
    assert policy.ttl_ms(bytes(32)) == policy.ttl_ms(bytes(32))


def test_a_budget_fills_up_again_and_is_each_tenants_own() -> None:
    budget = MissBudget(10, 3, tenants=2)
    assert [budget.charge("a", 0.0).allowed for _ in range(4)] == [True, True, True, False]
    assert budget.charge("a", 0.0).retry_after == pytest.approx(0.1)
    assert budget.charge("b", 0.0).allowed
    assert budget.charge("a", 0.11).allowed
    assert not budget.charge("a", 0.11).allowed
    assert [budget.charge("a", 1000.0).allowed for _ in range(4)] == [True, True, True, False]
    assert budget.charge("a", 5.0).retry_after > 0  # a clock that goes back gives nothing
    assert budget.refused == 4 + 1


def test_no_budget_only_counts() -> None:
    budget = MissBudget(0, 1)
    assert all(budget.charge("a", 0.0).allowed for _ in range(100))
    assert budget.charged == 100


def test_a_flood_of_tenants_is_bounded() -> None:
    budget = MissBudget(1, 1, tenants=10)
    for number in range(1000):
        budget.charge(str(number), 0.0)
    assert len(budget._buckets) == 10


def test_the_doorkeeper_lets_in_what_comes_twice() -> None:
    door = Doorkeeper(1000)
    draw = random.Random(2)
    keys = [draw.randbytes(32) for _ in range(900)]
    first = sum(door.asked_before(key) for key in keys)
    assert first <= 9
    assert all(door.asked_before(key) for key in keys)


def test_the_doorkeeper_forgets_what_was_long_ago() -> None:
    draw = random.Random(1)
    door = Doorkeeper(1000)
    old = draw.randbytes(32)
    assert not door.asked_before(old)
    for _ in range(990):
        door.asked_before(draw.randbytes(32))
    assert door.asked_before(old)
    for _ in range(2200):
        door.asked_before(draw.randbytes(32))
    assert not door.asked_before(old)


def test_the_breaker_opens_tries_and_closes() -> None:
    breaker = Breaker(failures=2, pause=1.0, longest=3.0)
    breaker.failed(0.0)
    assert breaker.may_pass(0.0)
    breaker.failed(0.0)
    assert breaker.is_open
    assert not breaker.may_pass(0.9)
    assert breaker.may_pass(1.0)
    assert not breaker.may_pass(1.0)  # one tries
    breaker.failed(1.1)
    assert not breaker.may_pass(3.0)
    assert breaker.may_pass(3.2)
    breaker.failed(3.2)
    assert not breaker.may_pass(6.1)
    assert breaker.may_pass(6.3)  # never longer than three seconds
    breaker.succeeded()
    assert breaker.may_pass(6.3)
    assert breaker.may_pass(6.3)
    assert breaker.opened == 1
