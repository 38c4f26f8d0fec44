"""Entries, purge marks, memory and disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cache.coherence import Marks, mark_of
from router.cache.disk import DiskLevel
from router.cache.entry import Entry, pack, unpack
from router.cache.errors import EntryError
from router.cache.filters import Layer
from router.cache.memory import Held, MemoryLevel

BOOT = "b" * 36
ENTRY = Entry(
    body=b"answer",
    header=b"200",
    fingerprint=bytes(range(16)),
    layer=Layer.FINE,
    stamp=b"s" * 16,
    stored_ms=5,
    expires_ms=10**15,
)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@given(
    st.binary(max_size=3000),
    st.binary(max_size=50),
    st.sampled_from(Layer),
    st.integers(0, 2**63),
    st.integers(0, 2**64 - 1),
)
def test_entries_come_back(body: bytes, header: bytes, layer: Layer, time: int, tag_sum: int) -> None:
    entry = replace(ENTRY, body=body * 3, header=header, layer=layer, stored_ms=time, tag_sum=tag_sum)
    assert unpack(pack(entry)) == entry


def test_large_bodies_are_compressed_if_that_helps() -> None:
    assert len(pack(replace(ENTRY, body=b"the same again " * 1000))) < 500
    noise = os.urandom(5000)
    assert len(pack(replace(ENTRY, body=noise))) < 5100


@settings(max_examples=60)
@given(st.data())
def test_damaged_entries_are_refused(data: st.DataObject) -> None:
    packed = bytearray(pack(replace(ENTRY, body=b"abc" * 700)))
    place = data.draw(st.integers(16, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(EntryError):
        unpack(packed)
    with pytest.raises(EntryError):
        unpack(packed[:place])


def test_marks_are_seen_by_all_and_stay(tmp_path: Path) -> None:
    one, two = Marks(tmp_path / "marks", boot=BOOT), Marks(tmp_path / "marks", boot=BOOT)
    marks = [mark_of("key", b"a"), mark_of("service", b"b")]
    before = one.sum(marks)
    two.purge(marks[1:])
    assert one.sum(marks) == before + 1
    one.close()
    two.close()
    three = Marks(tmp_path / "marks", boot="c" * 36)
    assert three.incarnation == one.incarnation
    assert three.sum(marks) == before + 1
    three.purge_all()
    assert three.sum(marks) == before + 3


def test_marks_that_may_be_lost_begin_a_new_incarnation(tmp_path: Path) -> None:
    one = Marks(tmp_path / "marks", boot=BOOT)
    os.close(one._users)  # the machine stops
    assert Marks(tmp_path / "marks", boot="c" * 36).incarnation != one.incarnation


def test_marks_survive_a_killed_process(tmp_path: Path) -> None:
    one = Marks(tmp_path / "marks", boot=BOOT)
    one.purge([5])
    os.close(one._users)
    again = Marks(tmp_path / "marks", boot=BOOT)
    assert (again.incarnation, again.sum([5])) == (one.incarnation, 1)


def test_memory_expires_and_bounds() -> None:
    level = MemoryLevel(10 * ENTRY.weight)
    for number in range(20):
        assert level.put(key(number), Held(ENTRY, 0, 0))
    assert len(level) == 10
    assert level.evicted == 10
    assert level.weight <= level.capacity
    old = Held(replace(ENTRY, expires_ms=100), 0, 0)
    level.put(key(99), old)
    assert level.get(key(99), 99) is old
    assert level.get(key(99), 100) is None
    assert level.expired == 1
    assert not level.put(key(98), Held(replace(ENTRY, body=bytes(10**6)), 0, 0))
    level.clear()
    assert len(level) == 0


def test_memory_under_threads() -> None:
    level = MemoryLevel(50 * ENTRY.weight)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(1500):
                number = (turn * 7919 + seed * 31) % 120
                if level.get(key(number), 0) is None:
                    level.put(key(number), Held(ENTRY, number, 0))
                if turn % 50 == seed:
                    level.discard(key(number))
                    level.entries()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(level) <= 50
    assert level.weight == len(level) * ENTRY.weight


def open_disk(path: Path, capacity: int = 1 << 20, incarnation: int = 1, boot: str = BOOT) -> DiskLevel:
    return DiskLevel(path, capacity, incarnation=incarnation, boot=boot)


def test_disk_keeps_expires_and_forgets(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    assert disk.put(key(1), pack(ENTRY), marks_sum=7, confirmed_ns=9)
    assert disk.get(key(1), 0) == Held(ENTRY, 7, 9)
    assert disk.get(key(2), 0) is None
    assert disk.get(key(1), 10**15) is None
    assert list(disk.fingerprints()) == [(Layer.FINE, ENTRY.fingerprint)]
    disk.close()

    disk = open_disk(tmp_path, boot="c" * 36)
    assert disk.get(key(1), 0) == Held(ENTRY, 7, 0)  # another boot's clock says nothing
    assert disk.delete([key(1), key(5)]) == 1
    assert disk.state().entries == disk.state().bytes == 0
    disk.put(key(1), pack(ENTRY), marks_sum=0, confirmed_ns=0)
    disk.put(key(2), pack(replace(ENTRY, expires_ms=50)), marks_sum=0, confirmed_ns=0)
    assert disk.sweep(60) == 1
    assert disk.get(key(1), 60)
    disk.clear()
    assert disk.state().entries == 0
    disk.put(key(1), pack(ENTRY), marks_sum=0, confirmed_ns=0)
    disk.close()

    disk = open_disk(tmp_path, incarnation=2)
    assert disk.get(key(1), 0) is None
    assert len(list(tmp_path.glob("answers-*"))) == 1
    disk.close()


def test_disk_is_bounded_and_spares_what_was_asked_for(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, capacity=100_000)
    packed = pack(replace(ENTRY, body=os.urandom(900)))
    for number in range(60):
        assert disk.put(key(number), packed, marks_sum=0, confirmed_ns=0)
    disk.get(key(0), 0)
    for number in range(60, 200):
        assert disk.put(key(number), packed, marks_sum=0, confirmed_ns=0)
        disk.get(key(0), 0)
        assert disk.state().bytes <= 100_000
    assert disk.get(key(0), 0)
    assert disk.get(key(1), 0) is None
    assert disk.get(key(199), 0)
    assert not disk.put(key(9), pack(replace(ENTRY, body=os.urandom(200_000))), marks_sum=0, confirmed_ns=0)
    assert disk.dropped == 1
    disk.close()


def test_disk_goes_on_when_its_map_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.cache.disk._MAP_FACTOR", 1)
    monkeypatch.setattr("router.cache.disk._MAP_EXTRA", 64 * 1024)
    disk = open_disk(tmp_path, capacity=1 << 20)
    stored = sum(
        disk.put(key(number), pack(replace(ENTRY, body=os.urandom(9000))), marks_sum=0, confirmed_ns=0)
        for number in range(400)
    )
    assert stored > 350
    assert disk.get(key(399), 0)
    disk.close()


WRITER = """
import sys
from pathlib import Path
from router.cache.disk import DiskLevel
from router.cache.entry import Entry, pack
from router.cache.filters import Layer
disk = DiskLevel(Path(sys.argv[1]), 1 << 20, incarnation=1, boot="b" * 36)
start = int(sys.argv[2])
print("ready", flush=True)
number = start
while True:
    body = number.to_bytes(8, "big") * (1 + number % 700)
    zero = bytes(16)
    entry = Entry(body, b"", fingerprint=zero, layer=Layer.COARSE, stamp=zero, stored_ms=0, expires_ms=10**15)
    disk.put(number.to_bytes(32, "big"), pack(entry), marks_sum=0, confirmed_ns=0)
    print(number, flush=True)
    number += 1
"""


def test_disk_after_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    start = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        last = start
        for _ in range(150):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = [int(line) for line in process.stdout.read().splitlines()[:-1]]
        process.wait(10)
        last = max([last, *rest])
        disk = open_disk(tmp_path)
        whole = 0
        for number in range(last + 2):
            held = disk.get(key(number), 0)
            if held:
                whole += 1
                assert held.entry.body == number.to_bytes(8, "big") * (1 + number % 700)
        assert disk.get(key(last), 0)
        assert whole == disk.state().entries
        assert disk.put(key(10**6), pack(ENTRY), marks_sum=0, confirmed_ns=0)
        disk.delete([key(10**6)])
        disk.close()
        start = last + 1


def test_two_processes_share_a_disk(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    disk = open_disk(tmp_path)
    for _ in range(50):
        number = int(process.stdout.readline())
        held = disk.get(key(number), 0)
        assert held
        assert held.entry.body.startswith(number.to_bytes(8, "big"))
        assert disk.put(key(10**7 + number), pack(ENTRY), marks_sum=0, confirmed_ns=0)
    process.kill()
    process.wait(10)
    process.stdout.close()
    assert disk.get(key(10**7), 0)
    disk.close()
