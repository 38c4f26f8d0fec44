"""No two requests that could be answered differently share a key."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cache.errors import AnswerKeyError
from router.cache.fingerprint import fingerprint
from router.cache.key import KeyParts, answer_key, approximate_key, media_digest

BASE = KeyParts(
    tenant="a",
    service="chat",
    api="openai/chat",
    model="m",
    version="1",
    messages=[{"role": "user", "content": "Is it safe to take 5 mg of warfarin?"}],
    parameters={"temperature": 0, "max_tokens": 10},
)


def say(text: str) -> KeyParts:
    return replace(BASE, messages=[{"role": "user", "content": text}])


PICTURES = [media_digest(b"first"), media_digest(b"second")]

ADVERSARIAL = [
    BASE,
    # Negation, number, unit, name, case, spacing, letters that look alike.
    say("Is it not safe to take 5 mg of warfarin?"),
    say("Is it unsafe to take 5 mg of warfarin?"),
    say("Is it safe to take 50 mg of warfarin?"),
    say("Is it safe to take 5.0 mg of warfarin?"),
    say("Is it safe to take 5 g of warfarin?"),
    say("Is it safe to take 5 µg of warfarin?"),
    say("Is it safe to take 5 μg of warfarin?"),
    say("Is it safe to take 5 mg of aspirin?"),
    say("is it safe to take 5 mg of warfarin?"),
    say("Is it safe to take 5  mg of warfarin?"),
    say("Is it safe to take 5 mg of warfarin? "),
    say("Is it safe to take ５ mg of warfarin?"),
    say("Is it safe to take 5 mg of wаrfarin?"),
    # The same words in other places.
    replace(BASE, messages=[{"role": "system", "content": "Is it safe to take 5 mg of warfarin?"}]),
    replace(BASE, messages=["Is it safe to take 5 mg of warfarin?"]),
    replace(BASE, messages=[{"role": "user", "content": "Hello"}, *BASE.messages]),  # type: ignore[misc]
    replace(BASE, messages=[*BASE.messages, {"role": "user", "content": "Hello"}]),  # type: ignore[misc]
    replace(BASE, messages=[{"role": "user", "content": "Is it safe", "name": " to take 5 mg of warfarin?"}]),
    # Who asks whom, and how.
    replace(BASE, tenant="b"),
    replace(BASE, tenant="", service="achat"),
    replace(BASE, tenant="ac", service="hat"),
    replace(BASE, service="chat2"),
    replace(BASE, api="openai/completions"),
    replace(BASE, model="m2"),
    replace(BASE, model="m1", version=""),
    replace(BASE, version="2"),
    replace(BASE, parameters={"temperature": 0.1, "max_tokens": 10}),
    replace(BASE, parameters={"temperature": 0.0, "max_tokens": 10}),
    replace(BASE, parameters={"temperature": False, "max_tokens": 10}),
    replace(BASE, parameters={"temperature": "0", "max_tokens": 10}),
    replace(BASE, parameters={"temperature": None, "max_tokens": 10}),
    replace(BASE, parameters={"temperature": 0, "max_tokens": 100}),
    replace(BASE, parameters={"temperature": 0}),
    replace(BASE, parameters={}),
    replace(BASE, tools=[{"name": "search"}]),
    replace(BASE, tools=[{"name": "search2"}]),
    replace(BASE, tools=[{"name": "a"}, {"name": "b"}]),
    replace(BASE, tools=[{"name": "b"}, {"name": "a"}]),
    # Pictures and their order.
    replace(BASE, media=PICTURES),
    replace(BASE, media=PICTURES[::-1]),
    replace(BASE, media=PICTURES[:1]),
    replace(BASE, media=[PICTURES[0], PICTURES[0]]),
    replace(BASE, media=[media_digest(b"first ")]),
]


def test_adversarial_requests_never_share_a_key() -> None:
    keys = [answer_key(parts) for parts in ADVERSARIAL]
    assert all(len(key) == 32 for key in keys)
    for (one, first), (two, second) in itertools.combinations(enumerate(keys), 2):
        assert first != second, (ADVERSARIAL[one], ADVERSARIAL[two])


def test_the_order_of_names_does_not_count() -> None:
    turned = replace(BASE, parameters={"max_tokens": 10, "temperature": 0})
    assert answer_key(turned) == answer_key(BASE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text('ab"\\,:[]{}', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


def strict(value: object) -> object:
    """The value with its types: Python takes 1, 1.0 and True for equal."""
    if isinstance(value, list):
        return ("list", tuple(strict(item) for item in value))
    if isinstance(value, dict):
        return ("dict", tuple(sorted((name, strict(item)) for name, item in value.items())))
    return (type(value).__name__, repr(value))


@given(JSON, JSON)
def test_keys_are_equal_only_if_messages_are(one: object, two: object) -> None:
    first, second = (replace(BASE, messages=value) for value in (one, two))  # type: ignore[arg-type]
    assert (answer_key(first) == answer_key(second)) == (strict(one) == strict(two))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1, 2}, object()])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(AnswerKeyError):
        answer_key(replace(BASE, messages=[value]))  # type: ignore[list-item]


def test_nesting_without_end_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(AnswerKeyError):
        answer_key(replace(BASE, messages=deep))  # type: ignore[arg-type]


def test_only_a_route_that_says_so_shares_answers_between_like_requests() -> None:
    print_of = fingerprint("hello")
    assert approximate_key(say("Hello"), print_of) == approximate_key(say("HELLO"), print_of)
    assert approximate_key(say("Hello"), print_of) != approximate_key(replace(say("Hello"), tenant="b"), print_of)
    assert approximate_key(say("Hello"), print_of) != answer_key(say("Hello"))
