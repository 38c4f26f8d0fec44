"""LRU-K against its definition, the figures of the traces, and the paper's table; the adaptive default beside both."""

# ruff: noqa: S311  draws that are the same each time

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cache.adaptive import Adaptive
from router.cache.belady import belady_hits
from router.cache.lruk import LruK
from router.cache.simulate import replay
from router.cache.traces import read_trace
from tests.unit.cache.conftest import TRACES


@cache
def trace(name: str) -> Sequence[int]:
    return read_trace(TRACES / f"{name}.trace.gz")


# name, capacity, hits of LRU, LRU-2, LRU-3, best possible in %
ROWS = [
    ("2_pools", 50, 11804, 23870, 24493, 39.7),
    ("2_pools", 100, 21946, 45593, 48957, 50.6),
    ("2_pools", 200, 36794, 50392, 50349, 56.4),
    ("cpp", 50, 838, 2605, 3432, 62.8),
    ("cpp", 100, 6307, 7008, 6997, 82.5),
    ("cpp", 200, 7433, 7656, 7659, 86.0),
    ("ps", 500, 5072, 5492, 5492, 58.1),
    ("ps", 2000, 7364, 6430, 5495, 70.5),
    ("sprite", 200, 53435, 58473, 66123, 68.9),
    ("sprite", 600, 111477, 107981, 107829, 90.0),
    ("sprite", 1000, 121452, 116848, 114356, 93.2),
]


@pytest.mark.parametrize(("name", "capacity", "lru", "lru2", "lru3", "best"), ROWS)
def test_hits_on_the_traces(*, name: str, capacity: int, lru: int, lru2: int, lru3: int, best: float) -> None:
    keys = trace(name)
    assert [replay(LruK(capacity, k=k), keys) for k in (1, 2, 3)] == [lru, lru2, lru3]
    # The table has 90.0 for sprite at 600, where 89.95 is found.
    assert 100 * belady_hits(keys, capacity) / len(keys) == pytest.approx(best, abs=0.06)


@pytest.mark.parametrize(("name", "capacity", "lru", "lru2", "lru3", "best"), ROWS)
def test_adaptive_is_within_half_a_point_of_the_better(
    *, name: str, capacity: int, lru: int, lru2: int, lru3: int, best: float
) -> None:
    del lru2, best
    keys = trace(name)
    assert 100 * (max(lru, lru3) - replay(Adaptive(capacity), keys)) / len(keys) <= 0.5


@pytest.mark.parametrize(
    ("name", "capacity", "window10", "window20", "crp", "both"),
    [
        ("2_pools", 100, 45.2, 41.5, 48.9, 47.2),
        ("ps", 2000, 52.6, 52.6, 70.5, 70.5),
        ("sprite", 600, 82.1, 82.8, 79.6, 80.9),
        ("sprite", 1000, 88.2, 89.1, 84.7, 87.0),
    ],
)
def test_window_and_correlated_references(
    *, name: str, capacity: int, window10: float, window20: float, crp: float, both: float
) -> None:
    keys = trace(name)
    variants: list[LruK[int, None]] = [
        LruK(capacity, window=0.1),
        LruK(capacity, window=0.2),
        LruK(capacity, correlated=50),
        LruK(capacity, window=0.05, correlated=50),
    ]
    found = [round(100 * replay(variant, keys) / len(keys), 1) for variant in variants]
    assert found == [window10, window20, crp, both]


def two_pools(count: int, seed: int) -> list[int]:
    """The LRU-K paper's first experiment: hot and cold references take turns."""
    draw = random.Random(seed)
    return [draw.randrange(100) if turn % 2 else 100 + draw.randrange(10_000) for turn in range(count)]


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (60, (0.14, 0.291, 0.300)),
        (80, (0.18, 0.382, 0.400)),
        (100, (0.22, 0.459, 0.495)),
        (120, (0.26, 0.496, 0.501)),
        (200, (0.37, 0.505, None)),
        (450, (0.50, 0.517, 0.518)),
    ],
)
def test_the_papers_table(buffer: int, expected: tuple[float | None, ...]) -> None:
    keys = two_pools(100_000, 7)
    warm, counted = keys[:30_000], keys[30_000:]
    for k, ratio in enumerate(expected, 1):
        policy: LruK[int, None] = LruK(buffer, k=k)
        replay(policy, warm)
        if ratio is not None:
            assert replay(policy, counted) / len(counted) == pytest.approx(ratio, abs=0.01)


class Oracle:
    """LRU-K as it is defined, by looking at every key at every eviction."""

    def __init__(self, capacity: int, k: int, correlated: int) -> None:
        self.capacity, self.k, self.correlated = capacity, k, correlated
        self.clock = 0
        self.history: dict[int, list[int]] = {}
        self.held: dict[int, int] = {}

    def refer(self, key: int, weight: int) -> bool:
        self.clock += 1
        times = self.history.setdefault(key, [])
        if times and self.correlated and self.clock - times[-1] <= self.correlated:
            times[-1] = self.clock
        else:
            times.append(self.clock)
        if key in self.held:
            return True
        while sum(self.held.values()) + weight > self.capacity:
            victim = min(self.held, key=self.rank)
            del self.held[victim]
        self.held[key] = weight
        return False

    def rank(self, key: int) -> tuple[int, int]:
        times = self.history[key]
        return (times[-self.k] if len(times) >= self.k else 0, times[-1])


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(st.integers(0, 14), max_size=150),
    capacity=st.integers(3, 9),
    k=st.integers(1, 5),
    correlated=st.sampled_from([0, 0, 1, 3]),
    heavy=st.booleans(),
)
def test_lruk_is_what_the_definition_says(keys: list[int], capacity: int, k: int, correlated: int, heavy: bool) -> None:
    oracle, policy = Oracle(capacity, k, correlated), LruK[int, int](capacity, k=k, correlated=correlated)
    for key in keys:
        weight = 1 + key % 3 if heavy else 1
        hit = policy.get(key)
        assert (hit is not None) == oracle.refer(key, weight)
        if hit is None:
            policy.put(key, key, weight)
        assert set(policy) == set(oracle.held)
        assert policy.weight == sum(oracle.held.values())


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["refer", "refer", "refer", "discard", "keep", "replace", "ahead"]), st.integers(0, 12)
        ),
        max_size=200,
    ),
    window=st.sampled_from([0.0, 0.3]),
    history=st.sampled_from([None, 0, 3]),
    adaptive=st.booleans(),
)
def test_sums_and_bounds_hold_whatever_is_done(
    steps: list[tuple[str, int]], window: float, history: int | None, adaptive: bool
) -> None:
    weights: dict[int, int] = {}
    policy: LruK[int, int] | Adaptive[int, int] = (
        Adaptive(12) if adaptive else LruK(12, window=window, history=history, correlated=2 if window else 0)
    )
    for number, (step, key) in enumerate(steps):
        gone: Sequence[int] = ()
        weight = 1 + (key + number) % 4
        if step == "refer":
            if policy.get(key) is None:
                gone = policy.put(key, number, weight)
                weights[key] = weight
        elif step == "discard":
            assert policy.discard(key) == (weights.pop(key, None) is not None)
        elif step == "keep":
            if isinstance(policy, LruK):
                policy.discard(key, forget=False)
                weights.pop(key, None)
        else:
            gone = policy.put(key, number, weight, 3 if step == "ahead" else 1)
            weights[key] = weight
        for name in gone:
            del weights[name]
        assert set(policy) == set(weights)
        assert policy.weight == sum(weights.values()) <= 12
        if isinstance(policy, LruK) and history is not None:
            assert policy.ghosts <= history


def test_a_key_loaded_ahead_is_not_the_first_to_go() -> None:
    for policy in (LruK[str, int](3), Adaptive[str, int](3)):
        policy.put("ahead", 1, references=3)
        for key in "abcdef":
            policy.put(key, 1)
        assert "ahead" in policy


def test_what_is_too_heavy_is_not_stored() -> None:
    for policy in (LruK[str, int](3), Adaptive[str, int](3)):
        policy.put("a", 1)
        assert policy.put("b", 1, 4) == ()
        assert policy.put("a", 1, 4) == ("a",)
        assert len(policy) == 0


def test_adaptive_on_traces_that_change_their_habits() -> None:
    """Made here, of parts that favour one and the other."""
    draw = random.Random(11)
    keys: list[int] = []
    for turn in range(10):
        if turn % 2:
            keys += two_pools(4000, turn)
        else:  # bursts: what was asked for just now comes again twice and never more
            for start in range(20_000 + turn * 4000, 20_000 + turn * 4000 + 1300, 50):
                keys += [*range(start, start + 50)] * 3
        keys += [draw.randrange(100) for _ in range(200)]
    for capacity in (60, 100, 300):
        better = max(replay(LruK(capacity, k=k), keys) for k in (1, 3))
        assert 100 * (better - replay(Adaptive(capacity), keys)) / len(keys) <= 0.5


def test_adaptive_follows_the_one_that_leads() -> None:
    policy: Adaptive[int, None] = Adaptive(100)
    replay(policy, two_pools(20_000, 3))
    assert policy.leader == "lru-k"
    replay(policy, [key for start in range(10**6, 10**6 + 4000, 50) for key in [*range(start, start + 50)] * 3])
    assert policy.leader == "lru"
