from __future__ import annotations

from router.telemetry import LogLimit


def test_one_line_in_an_interval_and_a_count_of_the_rest() -> None:
    limit = LogLimit(10)
    assert limit.pass_through("a", 0.0) == 0
    assert limit.pass_through("a", 1.0) is None
    assert limit.pass_through("b", 1.0) == 0
    assert limit.pass_through("a", 9.9) is None
    assert limit.pass_through("a", 10.0) == 2
    assert limit.pass_through("a", 10.1) is None
