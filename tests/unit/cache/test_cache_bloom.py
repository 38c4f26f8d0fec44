# ruff: noqa: S311  draws that are the same each time

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from router.cache.bloom import COARSE, FINE, Bits, Geometry, positions
from router.cache.fingerprint import fingerprint


def test_the_sizes_are_d2s() -> None:
    assert (COARSE.size, COARSE.hashes) == (1 << 20, 3)
    assert (FINE.size, FINE.hashes) == (4 << 20, 7)


def random_fingerprints(count: int, seed: int) -> list[bytes]:
    data = np.random.default_rng(seed).bytes(16 * count)
    return [data[place : place + 16] for place in range(0, len(data), 16)]


@pytest.mark.parametrize(
    ("geometry", "rates"),
    [(COARSE, (0.0005, 0.002, 0.01, 0.05, 0.2)), (FINE, (0.0002, 0.0005, 0.001, 0.002, 0.005))],
    ids=["coarse", "fine"],
)
def test_false_positives_are_what_theory_says_at_five_fills(geometry: Geometry, rates: tuple[float, ...]) -> None:
    """(1 − e^(−kn/m))^k within three standard deviations of so many tries."""
    tries = 200_000
    strangers = random_fingerprints(tries, 99)
    bits = Bits(geometry, bytearray(geometry.size))
    held = 0
    for turn, keys in enumerate(geometry.keys_at(rate) for rate in rates):
        bits.add_many(random_fingerprints(keys - held, turn))
        held = keys
        expected = geometry.rate(keys)
        found = int(bits.holds_many(strangers).sum())
        assert abs(found - tries * expected) <= 3 * (tries * expected * (1 - expected)) ** 0.5
        assert bits.fill() ** geometry.hashes == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("geometry", [COARSE, FINE], ids=["coarse", "fine"])
def test_fingerprints_of_like_requests_spread_as_well(geometry: Geometry) -> None:
    """FNV-1a stirs its last bytes little; what differs only there must spread all the same."""
    tries = 20_000
    small = Geometry(17, geometry.hashes)
    shapes: list[Callable[[int], bytes]] = [
        lambda n: fingerprint(f"request {n}"),
        lambda n: fingerprint("same", images=[n]),
        lambda n: fingerprint("same", audio=[[0.5] * 12 + [n / 1000]]),
    ]
    for shape in shapes:
        keys = small.keys_at(0.05)
        bits = Bits(small, bytearray(small.size))
        bits.add_many([shape(n) for n in range(keys)])
        expected = bits.fill() ** small.hashes
        found = int(bits.holds_many([shape(n) for n in range(keys, keys + tries)]).sum())
        assert abs(found - tries * expected) <= 4 * (tries * expected * (1 - expected)) ** 0.5
        assert expected == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("geometry", [COARSE, FINE], ids=["coarse", "fine"])
def test_one_by_one_and_many_at_once_are_the_same(geometry: Geometry) -> None:
    members, strangers = random_fingerprints(500, 1), random_fingerprints(500, 2)
    one, many = (Bits(geometry, bytearray(geometry.size)) for _ in range(2))
    for member in members:
        one.add(member)
    many.add_many(members)
    assert one.fill() == many.fill()
    for bits in (one, many):
        assert all(bits.holds(member) for member in members)
        assert bits.holds_many(members).all()
        assert [bits.holds(each) for each in strangers] == bits.holds_many(strangers).tolist()
    assert len(set(positions(members[0], geometry))) == geometry.hashes


def test_the_positions_never_change() -> None:
    """A filter file outlives the program that wrote it."""
    known = bytes(range(16))
    assert positions(known, COARSE) == [7909824, 2189176, 4857136]
    assert positions(known, FINE) == [31639304, 7217792, 16350712, 25483632, 1062120, 10195040, 19327960]


def test_a_wrong_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="1048576"):
        Bits(COARSE, bytearray(10))


def test_random_keys_are_found() -> None:
    draw = random.Random(5)
    bits = Bits(Geometry(12, 4), bytearray(512))
    for _ in range(2000):
        key = draw.randbytes(16)
        bits.add(key)
        assert bits.holds(key)
