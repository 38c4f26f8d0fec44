"""A «no» is never wrong: across restart, kill -9, another boot, damage, two processes, and new generations."""

# ruff: noqa: S311  draws that are the same each time

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from router.cache.errors import CacheFilesError
from router.cache.filters import Layer, LayeredFilter


def keys(count: int, seed: int = 1) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(16) for _ in range(count)]


def test_it_says_maybe_until_it_is_complete(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as layered:
        assert layered.maybe(Layer.COARSE, bytes(16))
        assert layered.maybe_many(Layer.COARSE, keys(3)) == [True] * 3
        layered.mark_complete()
        assert not layered.maybe(Layer.COARSE, bytes(16))
        layered.add(Layer.COARSE, bytes(16))
        assert layered.maybe(Layer.COARSE, bytes(16))
        assert not layered.maybe(Layer.FINE, bytes(16))
        layered.mark_incomplete()
        assert layered.maybe(Layer.FINE, bytes(16))


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    members = keys(500)
    with LayeredFilter(tmp_path) as layered:
        layered.mark_complete()
        layered.add_many(Layer.FINE, members)
    # Another boot: it was closed in order, so it is taken.
    with LayeredFilter(tmp_path, boot="x" * 36) as layered:
        assert layered.complete
        assert all(layered.maybe_many(Layer.FINE, members))
        assert not any(layered.maybe_many(Layer.FINE, keys(500, 2)))


def test_damage_and_another_boot_empty_it(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as layered:
        layered.mark_complete()
    path = next(tmp_path.glob("generation-*"))
    with path.open("r+b") as file:
        file.seek(12345)
        file.write(b"\x01")
    unclosed = LayeredFilter(tmp_path)
    assert not unclosed.complete
    unclosed.mark_complete()
    os.close(unclosed._user)  # the machine stops: nobody closes it
    with LayeredFilter(tmp_path, boot="y" * 36) as later:
        assert not later.complete


@pytest.mark.parametrize("name", ["control", "generation"])
@pytest.mark.parametrize("size", [0, 100])
def test_files_that_are_cut_short_empty_it(tmp_path: Path, name: str, size: int) -> None:
    with LayeredFilter(tmp_path) as layered:
        layered.mark_complete()
    os.truncate(next(tmp_path.glob(f"{name}*")), size)
    with LayeredFilter(tmp_path) as layered:
        assert not layered.complete
        layered.add(Layer.COARSE, bytes(16))


def test_a_directory_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFilesError, match="can't be used"):
        LayeredFilter(tmp_path / "file" / "filter")


def test_fill_and_rate(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as layered:
        layered.add_many(Layer.COARSE, keys(20_000))
        coarse, fine = layered.states()
        assert coarse.keys == pytest.approx(20_000, rel=0.01)
        assert coarse.rate == pytest.approx(coarse.fill**3)
        assert (fine.keys, fine.rate, fine.layer) == (0, 0.0, "fine")


WRITER = """
import sys
from pathlib import Path
from router.cache.filters import Layer, LayeredFilter
layered = LayeredFilter(Path(sys.argv[1]))
seed = int(sys.argv[2])
import random
draw = random.Random(seed)
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    key = draw.randbytes(16)
    layered.add(Layer.COARSE, key)
    print(key.hex(), flush=True)   # the store: it gets the key after the filter
sys.stdin.read()
"""


def writer(folder: Path, seed: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(seed), str(count)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as layered:
        layered.mark_complete()
    for turn in range(5):
        process = writer(tmp_path, turn, 10**9)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        stored = [bytes.fromhex(process.stdout.readline()) for _ in range(200 + 37 * turn)]
        os.kill(process.pid, signal.SIGKILL)
        stored += [bytes.fromhex(line) for line in process.stdout.read().splitlines() if len(line) == 32]
        process.wait(10)
        with LayeredFilter(tmp_path) as layered:
            assert layered.complete
            assert all(layered.maybe_many(Layer.COARSE, stored))
            assert layered.states()[0].fill < 0.2


def test_two_processes_lose_no_bit_of_each_other(tmp_path: Path) -> None:
    """Both set bits in the same bytes at the same time."""
    with LayeredFilter(tmp_path) as layered:
        layered.mark_complete()
        processes = [writer(tmp_path, seed, 4000) for seed in (1, 2)]
        stored: list[bytes] = []
        for process in processes:
            assert process.stdout
            process.stdout.readline()
            stored += [bytes.fromhex(process.stdout.readline()) for _ in range(4000)]
        assert len(set(stored)) == 8000
        assert all(layered.maybe_many(Layer.COARSE, stored))
        for process in processes:
            process.communicate(timeout=20)


def test_adding_waits_for_the_nodes_lock(tmp_path: Path) -> None:
    """What the test above can only find by luck: a bit set between another process's read and its write."""
    with LayeredFilter(tmp_path) as layered:
        layered.mark_complete()
        other = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        adding = threading.Thread(target=layered.add, args=(Layer.COARSE, bytes(16)))
        adding.start()
        adding.join(0.3)
        assert adding.is_alive()
        assert not layered.maybe(Layer.COARSE, bytes(16))  # looking up takes no lock
        os.close(other)
        adding.join(20)
        assert layered.maybe(Layer.COARSE, bytes(16))


def test_threads_lose_no_bit_of_each_other(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as layered:
        layered.mark_complete()
        lots = [keys(1500, seed) for seed in range(4)]

        def add_all(lot: list[bytes]) -> None:
            for key in lot:
                layered.add(Layer.FINE, key)

        threads = [threading.Thread(target=add_all, args=(lot,)) for lot in lots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(layered.maybe_many(Layer.FINE, [key for lot in lots for key in lot]))


def test_a_new_generation_takes_over_only_when_all_have_copied(tmp_path: Path) -> None:
    kept, gone, during = keys(300, 1), keys(300, 2), keys(300, 3)
    with LayeredFilter(tmp_path) as one, LayeredFilter(tmp_path) as two:
        one.mark_complete()
        one.add_many(Layer.COARSE, kept + gone)
        with one.rotating() as mine, two.rotating() as its:
            assert mine
            assert not its
            assert one.begin_generation() == one.building
            assert two.owes_a_copy
            two.add_many(Layer.COARSE, during[:150])
            one.add_many(Layer.COARSE, during[150:])
            one.copy_into_next(Layer.COARSE, kept[:100])
            one.copied(one.building)
            assert not one.finish_generation()  # two has yet to copy what it holds
            two.copy_into_next(Layer.COARSE, kept[100:])
            assert all(two.maybe_many(Layer.COARSE, kept + gone + during))
            two.copied(two.building)
            assert one.finish_generation()
        for layered in (one, two):
            assert layered.complete
            assert all(layered.maybe_many(Layer.COARSE, kept + during))
            assert not any(layered.maybe_many(Layer.COARSE, gone))
            assert layered.maybe(Layer.COARSE, kept[0])
        two.add(Layer.COARSE, gone[0])
        assert one.maybe(Layer.COARSE, gone[0])
        assert len(list(tmp_path.glob("generation-*"))) == 1


def test_a_generation_that_a_dead_process_began_is_gone_on_with(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as one:
        one.mark_complete()
        two = LayeredFilter(tmp_path)
        two.begin_generation()
        os.close(two._user)  # dies
        assert one.building
        assert one.owes_a_copy
        one.copied(one.building)
        one.begin_generation()
        assert one.finish_generation()
        assert one.building == 0


def test_dying_between_the_two_words_loses_nothing(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as one:
        one.mark_complete()
        number = one.begin_generation()
        one.copied(number)
        one.finish_generation()
        one._words[1] = number  # as it stands if the process dies before it says that none is being built
        one.add(Layer.COARSE, bytes(16))
        assert one.building == 0
        assert not one.finish_generation()
        assert one.maybe(Layer.COARSE, bytes(16))


def test_the_token_tells_that_a_generation_was_begun(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as one:
        before = one.token
        one.begin_generation()
        assert one.token != before


def test_who_comes_while_a_generation_is_built_holds_nothing_to_copy(tmp_path: Path) -> None:
    with LayeredFilter(tmp_path) as one:
        one.begin_generation()
        with LayeredFilter(tmp_path) as two:
            assert not two.owes_a_copy
            two.add(Layer.COARSE, bytes(16))
            one.copied(one.building)
            assert one.finish_generation()
        one.mark_complete()
        assert one.maybe(Layer.COARSE, bytes(16))


def test_killed_while_it_is_made(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from router.cache.filters import LayeredFilter\n"
        f"LayeredFilter(Path({str(tmp_path)!r})).mark_complete()\n"
    )
    for delay in (0.05, 0.12, 0.18, 0.25):
        process = subprocess.Popen([sys.executable, "-c", code])
        time.sleep(delay)
        process.kill()
        process.wait(10)
        with LayeredFilter(tmp_path) as layered:
            layered.add(Layer.FINE, bytes(16))
            assert layered.maybe(Layer.FINE, bytes(16))
