"""Keeps children running: starts them in order, restarts one that dies with growing pauses, stops them in reverse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modalmesh.base.errors import MachineError
from modalmesh.launcher.children import Child, ChildSpec, Sink

__all__ = ["Backoff", "ChildError", "Supervisor"]

_POLL = 0.05


class ChildError(MachineError):
    """A process of the mesh did not come up."""

    code = "MM1301"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before a restart: doubled each time up to ``longest``, forgotten after ``forgiven`` seconds of health."""

    first: float = 0.5
    longest: float = 30.0
    forgiven: float = 60.0

    def pause(self, failures: int) -> float:
        """Return the pause before the restart that follows ``failures`` failures in a row (1 or more)."""
        return min(self.first * 2.0 ** min(failures - 1, 16), self.longest)


class Supervisor:
    """Owns the children of one mesh.

    Args:
        sink: Gets every line that children print, and what the supervisor says (under the name ``mesh``).
        backoff: Pauses between restarts.
    """

    def __init__(self, sink: Sink, *, backoff: Backoff | None = None) -> None:
        self._sink = sink
        self._backoff = backoff or Backoff()
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._order: list[str] = []

    def pid(self, name: str) -> int:
        """Return the process id of a running child."""
        return self._children[name].pid

    async def start(self, specs: Sequence[ChildSpec], ready: Callable[[str, float], None] | None = None) -> None:
        """Start all children at once and return when each is ready.

        Args:
            specs: In the order in which they depend on each other; they are stopped in reverse.
            ready: Told each child's name and the seconds it took.

        Raises:
            ChildError: One ended before it was ready or took too long; the others are left to ``stop``.
        """
        self._order = [spec.name for spec in specs]
        try:
            async with asyncio.TaskGroup() as group:
                for spec in specs:
                    group.create_task(self._bring_up(spec, ready))
        except ExceptionGroup as failures:
            # The others were cancelled because of the first.
            raise failures.exceptions[0] from None

    async def _bring_up(self, spec: ChildSpec, ready: Callable[[str, float], None] | None) -> None:
        started = asyncio.get_running_loop().time()
        child = await self._spawn(spec)
        ended = asyncio.create_task(child.wait())
        try:
            async with asyncio.timeout(spec.ready_within):
                while not await spec.ready():
                    if ended.done():
                        raise ChildError(
                            f"{spec.name} ended with status {ended.result()} before it was ready: {_last(child)}",
                            hint="its own message says why",
                        )
                    await asyncio.sleep(_POLL)
        except TimeoutError as error:
            raise ChildError(
                f"{spec.name} was not ready within {spec.ready_within:.0f} s: {_last(child)}",
                hint="try again, or start it by hand to see more",
            ) from error
        finally:
            ended.cancel()
        if ready:
            ready(spec.name, asyncio.get_running_loop().time() - started)
        self._watchers[spec.name] = asyncio.create_task(self._watch(spec), name=f"watch {spec.name}")

    async def _spawn(self, spec: ChildSpec) -> Child:
        try:
            child = await Child.start(spec, self._sink)
        except OSError as error:
            raise ChildError(f"{spec.name} can't be started: {error}") from error
        self._children[spec.name] = child
        return child

    async def _watch(self, spec: ChildSpec) -> None:
        """Restart ``spec`` whenever it ends."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            since = loop.time()
            child = self._children[spec.name]
            status = await child.wait()
            failures = 1 if loop.time() - since > self._backoff.forgiven else failures + 1
            pause = self._backoff.pause(failures)
            self._sink("mesh", f"{spec.name} ended with status {status}: started again in {pause:g} s")
            await asyncio.sleep(pause)
            try:
                await self._spawn(spec)
            except ChildError as error:
                self._sink("mesh", str(error))

    async def stop(self) -> None:
        """Stop every child, the last one first; no process is left."""
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        self._watchers.clear()
        for name in reversed(self._order):
            child = self._children.pop(name, None)
            if child:
                await child.stop()


def _last(child: Child) -> str:
    lines = [line for line in child.last_lines if line.strip()]
    return lines[-1] if lines else "it printed nothing"
