"""Children are started, watched, restarted with growing pauses, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modalmesh.launcher.children import ChildSpec
from modalmesh.launcher.supervisor import Backoff, ChildError, Supervisor


class Lines:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.seen.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for who, line in self.seen if who == name]


def shell(name: str, script: str, ready: Path, **more: float) -> ChildSpec:
    async def is_ready() -> bool:
        return ready.exists()

    return ChildSpec(name=name, argv=("/bin/sh", "-c", script), ready=is_ready, **more)  # type: ignore[arg-type]


async def eventually(condition: object, within: float = 5.0) -> None:
    deadline = time.monotonic() + within
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_output_is_relayed_line_by_line_and_long_or_broken_lines_do_no_harm(tmp_path: Path) -> None:
    lines = Lines()
    supervisor = Supervisor(lines)
    script = f"printf 'one\\ntwo\\377\\n'; head -c 200000 /dev/zero | tr '\\0' x; echo; touch {tmp_path}/up; sleep 60"
    await supervisor.start([shell("child", script, tmp_path / "up")])
    await eventually(lambda: sum(map(len, lines.of("child"))) >= 200_000)
    await supervisor.stop()
    assert lines.of("child")[:2] == ["one", "two\ufffd"]


async def test_a_child_that_dies_is_started_again_and_said_so(tmp_path: Path) -> None:
    lines = Lines()
    supervisor = Supervisor(lines, backoff=Backoff(first=0.05))
    await supervisor.start([shell("child", f"echo started; touch {tmp_path}/up; exec sleep 60", tmp_path / "up")])
    first = supervisor.pid("child")
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: supervisor.pid("child") != first)
    assert alive(supervisor.pid("child"))
    assert any("ended with status -9" in line and "started again in 0.05 s" in line for line in lines.of("mesh"))
    await supervisor.stop()


async def test_stop_ends_children_and_grandchildren_even_those_that_ignore_sigterm(tmp_path: Path) -> None:
    supervisor = Supervisor(Lines())
    script = f"trap '' TERM; sleep 61 & echo $! > {tmp_path}/pid; touch {tmp_path}/up; while :; do sleep 1; done"
    await supervisor.start([shell("stubborn", script, tmp_path / "up", stop_within=0.3)])
    child, grandchild = supervisor.pid("stubborn"), int((tmp_path / "pid").read_text())
    await supervisor.stop()
    await eventually(lambda: not alive(child) and not alive(grandchild))


async def test_a_child_that_ends_before_it_is_ready_fails_the_start_with_its_last_words(tmp_path: Path) -> None:
    supervisor = Supervisor(Lines())
    with pytest.raises(ChildError, match=r"broken ended with status 3 before it was ready: no such thing"):
        await supervisor.start(
            [
                shell("fine", f"touch {tmp_path}/up; exec sleep 60", tmp_path / "up"),
                shell("broken", "echo no such thing; exit 3", tmp_path / "never"),
            ]
        )
    fine = supervisor.pid("fine")
    await supervisor.stop()
    assert not alive(fine)


async def test_a_child_that_is_never_ready_fails_the_start(tmp_path: Path) -> None:
    supervisor = Supervisor(Lines())
    with pytest.raises(ChildError, match=r"slow was not ready within 0 s: it printed nothing"):
        await supervisor.start([shell("slow", "exec sleep 60", tmp_path / "never", ready_within=0.2)])
    await supervisor.stop()


async def test_a_missing_program_fails_the_start() -> None:
    async def never() -> bool:
        return False

    supervisor = Supervisor(Lines())
    with pytest.raises(ChildError, match="ended with status"):
        await supervisor.start([ChildSpec(name="ghost", argv=("/nonexistent/program",), ready=never)])
    await supervisor.stop()


async def test_what_a_killed_child_leaves_is_removed_after_each_end(tmp_path: Path) -> None:
    ends: list[int] = []

    async def ready() -> bool:
        return True

    spec = ChildSpec(name="child", argv=("sleep", "60"), ready=ready, ended=lambda: ends.append(1))
    supervisor = Supervisor(Lines(), backoff=Backoff(first=0.05))
    await supervisor.start([spec])
    os.kill(supervisor.pid("child"), signal.SIGKILL)
    await eventually(lambda: len(ends) == 1)
    await supervisor.stop()
    assert len(ends) >= 1


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first=0.5, longest=30.0)
    assert [backoff.pause(n) for n in (1, 2, 3, 4, 8, 1000)] == [0.5, 1.0, 2.0, 4.0, 30.0, 30.0]


def test_children_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, pathlib
from modalmesh.launcher.children import Child, ChildSpec
async def main():
    async def ready(): return True
    child = await Child.start(ChildSpec(name="c", argv=("sleep", "60"), ready=ready), lambda *_: None)
    pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
    await asyncio.sleep(60)
asyncio.run(main())
"""
    launcher = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)  # setpriv has become sleep by then
    child = int((tmp_path / "pid").read_text())
    launcher.kill()
    launcher.wait()
    while alive(child):
        assert time.monotonic() < deadline, "the child outlived its launcher"
        time.sleep(0.05)
