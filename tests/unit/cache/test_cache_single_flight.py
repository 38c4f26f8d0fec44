from __future__ import annotations

import asyncio
import threading
import time

import pytest

from router.cache.errors import LoadTimeoutError
from router.cache.single_flight import SingleFlight, ThreadSingleFlight


async def test_a_thousand_tasks_are_one_load() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    loads = 0

    async def load() -> int:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0.02)
        return 7

    answers = await asyncio.gather(*(flights.do("key", load) for _ in range(1000)))
    assert answers == [7] * 1000
    assert loads == 1
    assert flights.joined == 999
    assert len(flights) == 0


async def test_a_failure_wakes_all_and_is_not_remembered() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    loads = 0

    async def load() -> int:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0.01)
        if loads == 1:
            raise KeyError("broken")
        return 7

    answers = await asyncio.gather(*(flights.do("key", load) for _ in range(100)), return_exceptions=True)
    assert all(isinstance(answer, KeyError) for answer in answers)
    assert loads == 1
    assert await flights.do("key", load) == 7


@pytest.mark.parametrize("who", [0, 50])
async def test_a_waiter_that_is_cancelled_cancels_nobody_else(who: int) -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    loads = 0

    async def load() -> int:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0.03)
        return 7

    tasks = [asyncio.create_task(flights.do("key", load)) for _ in range(100)]
    await asyncio.sleep(0.005)
    tasks[who].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[who], asyncio.CancelledError)
    assert [answer for index, answer in enumerate(answers) if index != who] == [7] * 99
    assert loads == 1


async def test_a_load_that_nobody_waits_for_is_cancelled_and_not_joined() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    ended: list[str] = []

    async def load() -> int:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 7

    async def quick() -> int:
        return 8

    task = asyncio.create_task(flights.do("key", load))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await flights.do("key", quick) == 8
    await asyncio.sleep(0)
    assert ended == ["cancelled"]


async def test_deadlines_of_waiter_and_load() -> None:
    flights: SingleFlight[str, int] = SingleFlight(limit=0.1)
    loads = 0

    async def load() -> int:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0.05 if loads == 1 else 10)
        return 7

    patient = asyncio.create_task(flights.do("key", load))
    await asyncio.sleep(0)
    with pytest.raises(LoadTimeoutError):
        await flights.do("key", load, timeout=0.005)
    assert await patient == 7
    with pytest.raises(LoadTimeoutError, match="the load took longer"):
        await flights.do("key", load)
    assert len(flights) == 0


async def test_a_time_limit_of_the_loads_own_is_its_error() -> None:
    flights: SingleFlight[str, int] = SingleFlight()

    async def load() -> int:
        raise TimeoutError("the backend's")

    with pytest.raises(TimeoutError, match="the backend's"):
        await flights.do("key", load)


def test_a_thousand_threads_are_one_load() -> None:
    flights: ThreadSingleFlight[str, int] = ThreadSingleFlight(time.monotonic)
    loads: list[int] = []
    answers: list[int] = []
    begin = threading.Barrier(1000)

    def load() -> int:
        loads.append(1)
        deadline = time.monotonic() + 20
        while flights.joined < 999 and time.monotonic() < deadline:
            time.sleep(0.01)
        return 7

    def ask() -> None:
        begin.wait(30)
        answers.append(flights.do("key", load, timeout=30))

    threads = [threading.Thread(target=ask) for _ in range(1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [7] * 1000
    assert len(loads) == 1


def test_threads_share_an_error_and_a_stuck_load_is_given_up() -> None:
    now = [0.0]
    flights: ThreadSingleFlight[str, int] = ThreadSingleFlight(lambda: now[0], limit=5.0)
    begun, release = threading.Event(), threading.Event()

    def broken() -> int:
        begun.set()
        release.wait(20)
        raise KeyError("broken")

    errors: list[BaseException] = []

    def ask() -> None:
        try:
            flights.do("key", broken)
        except KeyError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    threads[0].start()
    begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + 20
    while flights.joined < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(LoadTimeoutError):
        flights.do("key", broken, timeout=0.01)
    now[0] = 6.0
    assert flights.do("key", lambda: 8) == 8  # the first load is stuck for longer than its limit
    release.set()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 5
    assert flights.do("key", lambda: 9) == 9
