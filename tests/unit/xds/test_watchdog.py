from __future__ import annotations

from xds.types import CLUSTER, ENDPOINT
from xds.watchdog import RESETS, Watchdog


def test_patience_doubles_with_each_reset_in_a_row() -> None:
    watchdog = Watchdog()
    seen = []
    for number in range(RESETS):
        seen.append(watchdog.patience("a"))
        assert watchdog.was_reset("a", ENDPOINT, 0.0) == (number == RESETS - 1)
    assert seen == [1.0, 2.0, 4.0]
    assert watchdog.patience("b") == 1.0


def test_an_answer_of_the_same_type_ends_the_row() -> None:
    watchdog = Watchdog()
    watchdog.was_reset("a", ENDPOINT, 0.0)
    watchdog.was_answered("a", CLUSTER)  # the rest of what is sent again on a new stream
    assert watchdog.patience("a") == 2.0
    watchdog.was_answered("a", ENDPOINT)
    assert watchdog.patience("a") == 1.0


def test_after_three_in_a_row_a_client_gets_plain_bytes_for_an_hour() -> None:
    watchdog = Watchdog()
    assert not watchdog.wants_plain("a", 0.0)
    for _ in range(RESETS):
        watchdog.was_reset("a", ENDPOINT, 10.0)
    assert watchdog.wants_plain("a", 11.0)
    watchdog.was_answered("a", ENDPOINT)  # plain bytes are answered: no sign that compressed ones would be
    assert watchdog.wants_plain("a", 3600.0)
    assert not watchdog.wants_plain("b", 11.0)
    assert not watchdog.wants_plain("a", 3611.0)
    assert watchdog.patience("a") == 1.0


def test_what_is_remembered_is_bounded() -> None:
    watchdog = Watchdog()
    for number in range(5000):
        watchdog.was_reset(str(number), ENDPOINT, 0.0)
    assert len(watchdog._troubles) <= 4096
