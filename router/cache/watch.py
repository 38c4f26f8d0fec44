"""What a node hears from the shared tier: which copies are no longer good, and which keys exist.

Two connections of their own, each with a task that lives as long as the cache:

- ``Tracker``: ``CLIENT TRACKING ON BCAST``. The server says which answers and tags have changed. A PING every 200 ms
  comes back in the same stream, so its answer proves that everything that changed before it was asked has been heard:
  that moment is ``confirmed_ns``. When the connection breaks, nothing is known of what changes until it is back:
  copies made before the new session began must be asked for again, and if there is nobody to ask they expire.
- ``Follower``: reads the stream of additions into the filter. It is ``current`` while it has read, within the last
  second, everything there was. If it may have missed an entry (trimmed, or the server lost its data) it walks all
  names by SCAN first. While it is not current, a «no» of the filter says nothing of the shared tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import redis.exceptions
from redis.asyncio.connection import AbstractConnection

from modalmesh.base.logging import get_logger
from router.cache.errors import SharedTierError
from router.cache.filters import Layer, LayeredFilter
from router.cache.shared import FAILURES, Names, SharedTier

__all__ = ["Follower", "Tracker"]

_log = get_logger()
_PUSH: Final = object()

HEARTBEAT = 0.2
# Three heartbeats without an answer: the connection is taken for dead.
_SILENCE = 3 * HEARTBEAT
_BATCH = 1000
_BLOCK_MS = 200
_CURRENT_NS = 1_000_000_000
_LONGEST_PAUSE = 2.0


async def _pause(failures: int) -> None:
    await asyncio.sleep(min(_LONGEST_PAUSE, 0.05 * 2 ** min(failures, 8)))


async def _drop(connection: AbstractConnection | None) -> None:
    if connection is not None:
        with contextlib.suppress(Exception):
            await connection.disconnect(nowait=True)


class Tracker:
    """Hears of changes.

    Args:
        tier: The shared tier.
        changed: Called with the names of answers that have changed; None: all may have.
        tag_changed: Called with the name of a tag that was purged.
    """

    def __init__(
        self,
        tier: SharedTier,
        *,
        changed: Callable[[Sequence[bytes] | None], None],
        tag_changed: Callable[[bytes], None],
    ) -> None:
        self._tier = tier
        self._names: Names = tier.names
        self._changed = changed
        self._tag_changed = tag_changed
        self._pings: list[int] = []
        self.since_ns = 0
        """When the session began; copies confirmed before that must be asked for again. 0: there was none yet."""
        self.confirmed_ns = 0
        """Everything that changed before this moment has been heard."""
        self.connected = False
        self.sessions = 0

    async def run(self) -> None:
        """Keep a session up, until cancelled."""
        failures = 0
        while True:
            connection = None
            try:
                # The time limit of a read is ours: a push may be long in coming.
                connection = self._tier.connection(protocol=3, socket_timeout=None)
                async with asyncio.timeout(self._tier.timeout * 2):
                    await self._begin(connection)
                failures = 0
                await self._listen(connection)
            except asyncio.CancelledError:
                raise
            except FAILURES as error:
                if self.connected:
                    _log.warning("cache invalidations are not heard", error=str(error) or type(error).__name__)
            except Exception as error:  # a task that ends would stop all hearing, silently
                _log.exception("cache tracker failed", error=str(error))
            finally:
                self.connected = self._tier.remembers_tags = False
                self._tier.forget_tags()
                await _drop(connection)
            failures += 1
            await _pause(failures)

    async def _begin(self, connection: AbstractConnection) -> None:
        await connection.connect()  # type: ignore[no-untyped-call]
        parser: Any = connection._parser  # the library offers pushes nowhere else
        parser.set_invalidation_push_handler(self._heard)
        parser.set_pubsub_push_handler(self._ignore)
        names = self._names
        began = time.monotonic_ns()
        await connection.send_command(
            "CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", names.answers, "PREFIX", names.tags
        )
        while await connection.read_response(push_request=True) is _PUSH:
            pass
        self._pings.clear()
        self._tier.forget_tags()
        self._tier.remembers_tags = True
        # Taken before the command was sent: a change after it is heard.
        self.since_ns = self.confirmed_ns = began
        self.connected = True
        self.sessions += 1

    async def _listen(self, connection: AbstractConnection) -> None:
        beat = asyncio.create_task(self._beat(connection))
        try:
            while True:
                async with asyncio.timeout(_SILENCE):
                    answer = await connection.read_response(push_request=True)
                if answer is not _PUSH and self._pings:
                    self.confirmed_ns = self._pings.pop(0)
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError, *FAILURES):
                await beat

    async def _beat(self, connection: AbstractConnection) -> None:
        while True:
            self._pings.append(time.monotonic_ns())
            await connection.send_command("PING")
            await asyncio.sleep(HEARTBEAT)

    async def _heard(self, message: Sequence[Any]) -> object:
        names = message[1]
        if names is None:  # FLUSHALL, or the server's table overflowed
            self._tier.forget_tags()
            self._changed(None)
            return _PUSH
        answers = []
        for name in names:
            if name.startswith(self._names.tags):
                self._tier.forget_tags(name)
                self._tag_changed(name)
            else:
                answers.append(name)
        if answers:
            self._changed(answers)
        return _PUSH

    async def _ignore(self, message: object) -> object:
        del message
        return _PUSH


class Follower:
    """Reads additions into the filter.

    Args:
        tier: The shared tier.
        layered: The node's filter.
    """

    def __init__(self, tier: SharedTier, layered: LayeredFilter) -> None:
        self._tier = tier
        self._filter = layered
        self._last = b""
        self._epoch = b""
        self._read = 0  # entries added to the stream, ever, up to the last one read
        self._caught_up_ns = 0
        self._barrier: asyncio.Task[bool] | None = None
        self._waiting: asyncio.Task[bool] | None = None
        self._moved = asyncio.Event()
        self.lag_ms = 0.0
        """How long the newest entry read had been in the stream."""
        self.added = 0
        self.walks = 0
        """How often all names had to be walked."""

    @property
    def current(self) -> bool:
        """Whether a «no» of the filter counts for the shared tier too."""
        return self._caught_up_ns != 0 and time.monotonic_ns() - self._caught_up_ns <= _CURRENT_NS

    async def run(self) -> None:
        """Follow, until cancelled."""
        failures = 0
        while True:
            connection = None
            try:
                connection = self._tier.connection(protocol=2, socket_timeout=_BLOCK_MS / 1000 + 1)
                await connection.connect()  # type: ignore[no-untyped-call]
                if await self._lost(connection):
                    self._caught_up_ns = 0
                    self._last, self._epoch, self._read = await self._walk(connection)
                failures = 0
                while True:
                    await self._step(connection)
            except asyncio.CancelledError:
                raise
            except FAILURES as error:
                if failures == 0:
                    _log.warning("cache additions are not followed", error=str(error) or type(error).__name__)
            except Exception as error:  # a task that ends would leave the filter behind for ever, silently
                self._last = b""
                _log.exception("cache follower failed", error=str(error))
            finally:
                self._caught_up_ns = 0
                await _drop(connection)
            failures += 1
            await _pause(failures)

    async def catch_up(self, *, timeout: float) -> bool:  # noqa: ASYNC109
        """Return true once the filter holds every addition that was made before this call; false: it can't be known.

        Calls that come together share one question to the server.
        """
        # A question that was asked before this call proves nothing for it: share the next one.
        if self._barrier is None or self._barrier.done():
            task = self._barrier = asyncio.create_task(self._catch_up())
        elif self._waiting is None or self._waiting.done():
            first = self._barrier

            async def after() -> bool:
                await asyncio.wait((first,))
                self._barrier = asyncio.create_task(self._catch_up())
                self._waiting = None
                return await self._barrier

            task = self._waiting = asyncio.create_task(after())
        else:
            task = self._waiting
        done, _ = await asyncio.wait((task,), timeout=timeout)
        return bool(done) and not task.cancelled() and task.result()

    async def _catch_up(self) -> bool:
        if not self.current:
            return False
        try:
            newest = await self._tier.ask(lambda: self._tier.client.xrevrange(self._tier.names.stream, count=1))
        except SharedTierError:
            return False
        if not newest:
            return self.current
        target = _number(newest[0][0])
        deadline = time.monotonic() + self._tier.timeout
        while _number(self._last) < target:
            self._moved.clear()
            left = deadline - time.monotonic()
            if left <= 0 or not self.current:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._moved.wait()
        return self.current

    async def _step(self, connection: AbstractConnection) -> None:
        stream = self._tier.names.stream
        answer = await _command(connection, "XREAD", "COUNT", _BATCH, "BLOCK", _BLOCK_MS, "STREAMS", stream, self._last)
        now = time.monotonic_ns()
        if not answer:
            self._caught_up_ns = now
            return
        entries = answer[0][1]
        by_layer: dict[Layer, list[bytes]] = {layer: [] for layer in Layer}
        for _, fields in entries:
            payload = bytes(fields[1])
            if len(payload) == 17:
                by_layer[Layer(payload[0] & 1)].append(payload[1:])
        for layer, fingerprints in by_layer.items():
            self._filter.add_many(layer, fingerprints)
        before, self._last = self._last, bytes(entries[-1][0])
        self._read += len(entries)
        self.added += len(entries)
        self.lag_ms = max(0.0, time.time() * 1000 - _number(self._last)[0])
        if len(entries) < _BATCH:
            self._caught_up_ns = now
        elif await self._trimmed(connection, before):
            raise redis.exceptions.ConnectionError("the stream of additions was trimmed before it was read")
        self._moved.set()

    async def _lost(self, connection: AbstractConnection) -> bool:
        """Return whether an addition may have been missed."""
        epoch = bytes(await _command(connection, "GET", self._tier.names.epoch) or b"")
        if not self._last or not epoch or epoch != self._epoch:
            return True
        # Fewer additions than we have read: the server came back with older data.
        if int((await self._info(connection)).get(b"entries-added", self._read)) < self._read:
            return True
        return await self._trimmed(connection, self._last)

    async def _trimmed(self, connection: AbstractConnection, last: bytes) -> bool:
        info = await self._info(connection)
        first = info.get(b"first-entry")
        if not first or _number(first[0]) <= _number(last):
            return False
        added = info.get(b"entries-added")  # Redis 7 and later
        return added is None or int(added) - int(info[b"length"]) > self._read

    async def _walk(self, connection: AbstractConnection) -> tuple[bytes, bytes, int]:
        """Take all names into the filter; return where the stream stood when the walk began, epoch and count."""
        names = self._tier.names
        # Whoever comes first draws the id; it lasts as long as the data do.
        await _command(connection, "SET", names.epoch, f"{time.time_ns():x}", "NX")
        epoch = bytes(await _command(connection, "GET", names.epoch) or b"")
        info = await self._info(connection)
        last = bytes(info.get(b"last-generated-id", b"0-0"))
        read = int(info.get(b"entries-added", info.get(b"length", 0)))
        for kind in (names.answers, names.members):
            pattern = kind.replace(b"[", b"\\[").replace(b"*", b"\\*").replace(b"?", b"\\?") + b"*"
            cursor = b"0"
            while True:
                cursor, found = await _command(connection, "SCAN", cursor, "MATCH", pattern, "COUNT", _BATCH)
                by_layer: dict[Layer, list[bytes]] = {layer: [] for layer in Layer}
                for name in found:
                    if filtered := names.filtered(bytes(name)):
                        by_layer[filtered[0]].append(filtered[1])
                for layer, fingerprints in by_layer.items():
                    self._filter.add_many(layer, fingerprints)
                if bytes(cursor) == b"0":
                    break
        self.walks += 1
        return last, epoch, read

    async def _info(self, connection: AbstractConnection) -> dict[bytes, Any]:
        try:
            flat = await _command(connection, "XINFO", "STREAM", self._tier.names.stream)
        except redis.exceptions.ResponseError:  # there is none yet
            return {}
        if isinstance(flat, dict):
            return flat
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def walk_again(self) -> None:
        """Take all names into the filter once more: into both generations, while a new one is being built.

        Raises:
            SharedTierError: The server does not answer.
        """
        connection = self._tier.connection(protocol=2, socket_timeout=5.0)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await self._walk(connection)
        except FAILURES as error:
            raise SharedTierError(f"the shared tier can't be walked: {error}") from error
        finally:
            await _drop(connection)


async def _command(connection: AbstractConnection, *words: Any) -> Any:
    await connection.send_command(*words)
    return await connection.read_response()


def _number(identifier: bytes | str) -> tuple[int, int]:
    text = identifier.decode() if isinstance(identifier, bytes) else identifier
    milliseconds, _, sequence = text.partition("-")
    return int(milliseconds or 0), int(sequence or 0)
