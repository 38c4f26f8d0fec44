"""One thread that works, and the bounded line before it.

Why: a model's runtime wants one caller at a time, and whoever waits without a limit waits for nothing, since callers
have deadlines. Work whose caller is gone leaves the line at once, so that giving up also frees its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["CallerGone", "Full", "Gone", "Worker"]

T = TypeVar("T")

Gone = Callable[[], bool]
"""Tells, from the working thread, whether the result is still wanted."""


class Full(Exception):  # noqa: N818  a state, not a mistake
    """The line is full."""


class CallerGone(Exception):  # noqa: N818
    """Work stopped, or did not begin, because nobody waits for its result."""


class _Job(Generic[T]):
    def __init__(self, work: Callable[[Gone], T], size: int, deadline: float | None) -> None:
        self.work = work
        self.size = size
        self.deadline = deadline
        self.gone = False
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class Worker(Generic[T]):
    """Runs one piece of work at a time, in the order of arrival.

    Args:
        limit: Pieces that may wait.
        max_bytes: Sum of their sizes.
        thread_name: For debuggers.
    """

    def __init__(self, *, limit: int, max_bytes: int, thread_name: str) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._line: dict[_Job[T], None] = {}  # ordered, and any one can leave at once
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def waiting(self) -> int:
        """Pieces in the line; the one being worked on is not."""
        return len(self._line)

    async def do(self, work: Callable[[Gone], T], *, size: int, deadline: float | None) -> T:
        """Return the result of ``work``, which runs in the thread.

        Args:
            work: Called once or never; it may ask whether it is still wanted.
            size: Bytes it keeps alive while it waits.
            deadline: The loop's time after which nobody wants the result; None: never.

        Raises:
            Full: There is no room; nothing was kept.
            CallerGone: The deadline passed while it waited.
        """
        if len(self._line) >= self._limit or self._bytes + size > self._max_bytes:
            raise Full
        job = _Job(work, size, deadline)
        self._line[job] = None
        self._bytes += size
        self._arrived.set()
        try:
            return await job.result
        finally:
            job.gone = True
            self._leave(job)

    async def close(self) -> None:
        """Let the piece being worked on end; the others get ``CancelledError``."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for job in self._line:
            job.result.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    def _leave(self, job: _Job[T]) -> None:
        if job in self._line:
            del self._line[job]
            self._bytes -= job.size

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            if not self._line:
                self._arrived.clear()
                continue
            job = next(iter(self._line))
            self._leave(job)
            await self._work(loop, job)

    async def _work(self, loop: asyncio.AbstractEventLoop, job: _Job[T]) -> None:
        if job.deadline is not None and loop.time() >= job.deadline:
            job.result.set_exception(CallerGone())
            return
        try:
            result = await loop.run_in_executor(self._thread, job.work, lambda: job.gone)
        except asyncio.CancelledError:
            job.gone = True
            job.result.cancel()
            raise
        except BaseException as error:
            if not job.result.done():
                job.result.set_exception(error)
        else:
            if not job.result.done():
                job.result.set_result(result)
