"""Alias tables honour weights."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpf.balance import alias_table


def shares(weights: list[int]) -> list[Fraction]:
    """The probability of each index."""
    found = [Fraction(0)] * len(weights)
    columns = alias_table(weights)
    for threshold, own, other in columns:
        mine = Fraction(threshold + 1, 2**32)
        found[own] += mine / len(columns)
        found[other] += (1 - mine) / len(columns)
    return found


@given(st.lists(st.integers(0, 2**20), max_size=50))
def test_every_share_is_its_weight(weights: list[int]) -> None:
    total = sum(weights)
    columns = alias_table(weights)
    assert len(columns) == sum(1 for weight in weights if weight)
    for weight, share in zip(weights, shares(weights), strict=True):
        # A threshold is a multiple of 2^-32; an index stands in its own column and in others' of which each may round.
        assert not total or abs(share - Fraction(weight, total)) <= Fraction(1, 2**31)
        assert weight or share == 0


def test_one_backend_always_serves() -> None:
    assert alias_table([0, 7]) == [(0xFFFF_FFFF, 1, 1)]


def test_nobody() -> None:
    assert alias_table([]) == []
    assert alias_table([0, 0]) == []


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        alias_table([1, -1])
