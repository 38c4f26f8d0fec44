"""What is computed from counters."""

from __future__ import annotations

from bpf.counters import quantile


def test_quantiles_are_upper_bounds_of_buckets() -> None:
    buckets = [0, 0, 0, 90, 9, 0, 1]
    assert quantile(buckets, 0.5) == 16
    assert quantile(buckets, 0.9) == 16
    assert quantile(buckets, 0.99) == 32
    assert quantile(buckets, 1.0) == 128


def test_no_samples() -> None:
    assert quantile([0] * 24, 0.5) is None
