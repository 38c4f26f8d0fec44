"""One load per key, however many ask: for asyncio and for threads.

- A load that fails wakes all who wait with its error, and is not remembered: the next one who asks loads again.
- A waiter that is cancelled, or whose deadline passes, takes nobody else with it: the load belongs to no waiter. Only
  when nobody waits any more is the load cancelled (asyncio; a thread can't be).
- A load itself has a time limit, after which all who wait get ``LoadTimeoutError``, and the key is free again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from router.cache.errors import LoadTimeoutError

__all__ = ["SingleFlight", "ThreadSingleFlight"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight(Generic[K, V]):
    """For the tasks of one event loop.

    Args:
        limit: Seconds that a load may take.
    """

    def __init__(self, *, limit: float = 60.0) -> None:
        self._limit = limit
        self._flights: dict[K, _Flight[V]] = {}
        self.joined = 0
        """Calls that were answered by another call's load."""

    def __len__(self) -> int:
        """Return how many loads are under way."""
        return len(self._flights)

    async def do(self, key: K, load: Callable[[], Awaitable[V]], *, timeout: float | None = None) -> V:  # noqa: ASYNC109
        """Return what ``load`` returns, called once for all who ask for the key meanwhile.

        Args:
            key: What is loaded.
            load: Called only if no load of the key is under way; runs in a task of its own.
            timeout: Seconds that this caller waits; the load goes on for the others.

        Raises:
            LoadTimeoutError: The caller's or the load's time is over.
            Exception: Whatever ``load`` raises, to all who wait.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.create_task(self._load(load)))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda _: self._landed(key, flight))
        else:
            self.joined += 1
        flight.waiters += 1
        try:
            done, _ = await asyncio.wait((flight.task,), timeout=timeout)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                # A newcomer must not join a load that is being cancelled.
                self._landed(key, flight)
                flight.task.cancel()
        if not done:
            raise LoadTimeoutError(f"no answer within {timeout} s")
        if flight.task.cancelled():  # the loop is shutting down, or the load cancelled itself
            raise LoadTimeoutError("the load was cancelled")
        return flight.task.result()

    async def _load(self, load: Callable[[], Awaitable[V]]) -> V:
        try:
            async with asyncio.timeout(self._limit) as scope:
                return await load()
        except TimeoutError:
            if scope.expired():
                raise LoadTimeoutError(f"the load took longer than {self._limit} s") from None
            raise

    def _landed(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # seen, also when every waiter has gone


class _ThreadFlight(Generic[V]):
    __slots__ = ("done", "error", "started", "value")

    def __init__(self, started: float) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.value: V | None = None
        self.started = started


class ThreadSingleFlight(Generic[K, V]):
    """For threads. The first caller's thread runs the load.

    Args:
        limit: Seconds after which a load that has not ended is given up: who waits gets an error, and the next one who
            asks loads again.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float], *, limit: float = 60.0) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._flights: dict[K, _ThreadFlight[V]] = {}
        self.joined = 0

    def do(self, key: K, load: Callable[[], V], *, timeout: float | None = None) -> V:
        """Return what ``load`` returns, called once for all threads that ask for the key meanwhile.

        Args:
            key: What is loaded.
            load: Called only if no load of the key is under way.
            timeout: Seconds to wait for another thread's load.

        Raises:
            LoadTimeoutError: The wait, or the load that was waited for, took too long.
            BaseException: Whatever ``load`` raises, to all who wait.
        """
        now = self._clock()
        with self._lock:
            flight = self._flights.get(key)
            if flight is None or now - flight.started > self._limit:
                mine = self._flights[key] = _ThreadFlight(now)
                flight = None
            else:
                self.joined += 1
        if flight is None:
            return self._run(key, mine, load)
        left = flight.started + self._limit - now
        if not flight.done.wait(left if timeout is None else min(timeout, left)):
            raise LoadTimeoutError(f"no answer within {left if timeout is None else min(timeout, left):.3g} s")
        if flight.error is not None:
            raise flight.error
        return flight.value  # type: ignore[return-value]

    def _run(self, key: K, flight: _ThreadFlight[V], load: Callable[[], V]) -> V:
        try:
            flight.value = load()
        except BaseException as error:
            flight.error = error
            raise
        else:
            return flight.value
        finally:
            with self._lock:
                if self._flights.get(key) is flight:
                    del self._flights[key]
            flight.done.set()
