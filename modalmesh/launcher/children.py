"""What one child process is: how it is started, when it is ready, how it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Child", "ChildSpec", "Sink"]

Sink = Callable[[str, str], None]
"""Takes a child's name and one line it printed, without the line's end."""

# The kernel sends the child SIGTERM when the launcher dies, however it dies (prctl(2), PR_SET_PDEATHSIG): no process is
# left behind even after SIGKILL. setpriv is in Debian's essential util-linux.
_WITH_LAUNCHER = ("setpriv", "--pdeathsig", "TERM", "--")

_LONGEST_LINE = 64 * 1024
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child and how to know that it serves."""

    name: str
    argv: Sequence[str]
    ready: Callable[[], Awaitable[bool]]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """The whole environment; default: the launcher's."""
    ready_within: float = 30.0
    """Seconds."""
    stop_within: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    ended: Callable[[], object] | None = None
    """Called after each end of the process: removes what it leaves behind when it is killed."""


class Child:
    """One running instance of a ``ChildSpec``."""

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, output: asyncio.StreamReader, sink: Sink
    ) -> None:
        self.spec = spec
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._process = process
        self._output = output
        self._sink = sink
        self._reader = asyncio.create_task(self._relay(), name=f"output of {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec, sink: Sink) -> Child:
        """Start the process in a session of its own: Ctrl-C reaches the launcher alone.

        Raises:
            OSError: The program can't be started.
        """
        # A pipe of our own: asyncio's wait() would also wait for a grandchild that keeps asyncio's pipe open.
        reading, writing = os.pipe()
        output = asyncio.StreamReader(limit=_LONGEST_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", buffering=0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *_WITH_LAUNCHER,
                *spec.argv,
                env=spec.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        return cls(spec, process, output, sink)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait until the process has ended and its output is read; return its exit status (negative: a signal)."""
        status = await self._process.wait()
        self._kill_group()
        # What left the group (a daemon) may keep the pipe open.
        await asyncio.wait([self._reader], timeout=1.0)
        self._reader.cancel()
        if self.spec.ended:
            self.spec.ended()
        return status

    async def stop(self) -> None:
        """Ask the process to end, insist after ``stop_within`` seconds, and leave nothing of its process group."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), self.spec.stop_within)
            except TimeoutError:
                self._sink(self.spec.name, f"did not end within {self.spec.stop_within:g} s: killed")
                self._kill_group()
        await self.wait()

    def _kill_group(self) -> None:
        """Kill whatever is left of the child and its own children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _relay(self) -> None:
        while True:
            try:
                raw = await self._output.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                raw = end.partial
                if not raw:
                    return
            except asyncio.LimitOverrunError as overrun:
                raw = await self._output.readexactly(overrun.consumed)
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            self.last_lines.append(line)
            self._sink(self.spec.name, line)
