"""From weights to a table that the kernel can pick from in constant time.

Why alias tables (Walker 1977, built as in Vose 1991) and not repeated slots: the shares are exact to 2^-32, and a
service with n backends needs n slots whatever its weights are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpf.layout import ALWAYS

__all__ = ["Column", "alias_table"]


class Column(NamedTuple):
    """One column: ``own`` if a random 32-bit number is at most ``threshold``, else ``other`` (indices of weights)."""

    threshold: int
    own: int
    other: int


def alias_table(weights: Sequence[int]) -> list[Column]:
    """Return one column for each weight above zero; a column picked uniformly honours the weights.

    Args:
        weights: Non-negative; zero means «takes nothing».

    Raises:
        ValueError: A weight is negative.
    """
    if any(weight < 0 for weight in weights):
        raise ValueError("weights must not be negative")
    members = [index for index, weight in enumerate(weights) if weight]
    count, total = len(members), sum(weights)
    # In units of total: every column holds `total`, the weights together hold count * total. Integers: no drift.
    height = {index: weights[index] * count for index in members}
    small = [index for index in members if height[index] < total]
    large = [index for index in members if height[index] >= total]
    columns = []
    while small and large:
        own, other = small.pop(), large[-1]
        columns.append(Column(max(0, round(height[own] / total * 2**32) - 1), own, other))
        height[other] -= total - height[own]
        if height[other] < total:
            small.append(large.pop())
    columns += [Column(ALWAYS, index, index) for index in small + large]
    return columns
