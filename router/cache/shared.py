"""The shared tier: answers in Redis or Valkey (6.2 or later), common to all nodes.

What is in it, all under one hash tag::

    mm:{NAMESPACE}:a:KEY·LAYER·FINGERPRINT    an answer (entry.py), or a tombstone: 16 random bytes and «T»
    mm:{NAMESPACE}:m:LAYER·FINGERPRINT        a member of a closed set
    mm:{NAMESPACE}:t:KIND:NAME                how often a tag (service, model version) was purged
    mm:{NAMESPACE}:s                          the stream of additions: field f = LAYER·FINGERPRINT
    mm:{NAMESPACE}:e                          a random id: another one means that the data are others

A name carries the fingerprint, so that a node can fill its filter by SCAN without reading a value. An addition is
written to the stream before the value is (one script, so nothing comes between). A value is stored only if what was
seen when its computation began is still there: after a purge in between there is a tombstone, and the late answer is
refused. ``watch.py`` follows stream and invalidations.

The server must keep keys without expiry when memory is short (``maxmemory-policy`` ``noeviction`` or ``volatile-*``):
if it dropped a tag's counter, answers purged by that tag would be good again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    UnixDomainSocketConnection,
)

from modalmesh.base.settings import split_address
from router.cache.breaker import Breaker
from router.cache.entry import STAMP_BYTES, Entry, pack, unpack
from router.cache.errors import EntryError, SharedTierError, TierDownError
from router.cache.filters import Layer

__all__ = ["FAILURES", "Head", "Names", "SharedTier", "StoreResult"]

FAILURES = (redis.exceptions.RedisError, OSError, TimeoutError)
"""What a broken or slow server raises."""

# A head is a packed entry up to the header length (entry.py); here only stamp and tag sum are read from it.
_HEAD_BYTES = 70
_TAG_SUM_AT = 58
_TOMBSTONE = b"T"

# Longer than any load may take: a load that began before a purge must meet the tombstone when it ends.
_TOMBSTONE_MS = 120_000
STREAM_LENGTH = 100_000

_STORE = """
local have = redis.call('GETRANGE', KEYS[1], 0, 15)
if ARGV[1] ~= '*' and have ~= ARGV[1] then
  return 0
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'f', ARGV[4])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Head:
    """What is needed to know whether a copy is still good."""

    stamp: bytes
    tag_sum: int
    is_tombstone: bool


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store."""

    stored: bool
    """False: the key was purged, or stored by somebody else, since the computation began."""


class Names:
    """The names of keys in the server."""

    def __init__(self, namespace: str) -> None:
        base = f"mm:{{{namespace}}}:".encode()
        self.answers = base + b"a:"
        self.members = base + b"m:"
        self.tags = base + b"t:"
        self.stream = base + b"s"
        self.epoch = base + b"e"

    def answer(self, key: bytes, layer: Layer, fingerprint: bytes) -> bytes:
        """Return an answer's name."""
        return self.answers + key + bytes((layer,)) + fingerprint

    def member(self, layer: Layer, fingerprint: bytes) -> bytes:
        """Return the name of a member of a closed set."""
        return self.members + bytes((layer,)) + fingerprint

    def tag(self, kind: str, name: str) -> bytes:
        """Return a tag's name."""
        return self.tags + f"{kind}:{name}".encode()

    def key_of(self, name: bytes) -> bytes | None:
        """Return the key of an answer's name, None if it is no such name."""
        return name[len(self.answers) : -17] if name.startswith(self.answers) else None

    def filtered(self, name: bytes) -> tuple[Layer, bytes] | None:
        """Return layer and fingerprint of an answer's or member's name."""
        if not name.startswith((self.answers, self.members)) or len(name) < len(self.members) + 17:
            return None
        return Layer(name[-17] & 1), name[-16:]


class SharedTier:
    """The commands. Every one has a time limit, and passes the breaker.

    Args:
        address: ``host:port`` or ``unix:PATH``.
        namespace: Several meshes may share a server.
        timeout: Seconds for connecting and for each command.
        connections: At most so many at once.
        password: If the server wants one.
        username: Likewise.
    """

    def __init__(
        self,
        address: str,
        *,
        namespace: str = "default",
        timeout: float = 0.25,
        connections: int = 8,
        password: str | None = None,
        username: str | None = None,
    ) -> None:
        self.names = Names(namespace)
        self.breaker = Breaker()
        self.timeout = timeout
        host, port = split_address(address)
        self._where: dict[str, Any] = {
            "username": username,
            "password": password,
            "socket_connect_timeout": timeout,
            "socket_timeout": timeout,
        }
        self._connection: type[AbstractConnection]
        if port:
            self._connection = Connection
            self._where |= {"host": host, "port": port}
        else:
            self._connection = UnixDomainSocketConnection
            self._where |= {"path": host}
        # No retries inside: the breaker decides when to ask again, and a request has no time for them.
        pool = BlockingConnectionPool(
            connection_class=self._connection,
            max_connections=connections,
            timeout=timeout,
            retry=None,
            **self._where,
        )
        self.client = redis.asyncio.Redis(connection_pool=pool)
        self.remembers_tags = False
        """Whether tag counters may be remembered: while a tracker hears of their changes."""
        self._tags: dict[bytes, int] = {}
        self._tags_state = 0

    def connection(self, **options: Any) -> AbstractConnection:
        """Return a connection of its own, not connected yet."""
        return self._connection(**(self._where | {"retry": None} | options))

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()
        await self.client.connection_pool.disconnect()

    async def get(self, key: bytes, layer: Layer, fingerprint: bytes) -> tuple[Entry | None, bytes]:
        """Return the answer, and the stamp that a store must find: of the answer, of a tombstone, or nothing.

        Raises:
            SharedTierError: No answer from the server.
        """
        data = await self.ask(lambda: self.client.get(self.names.answer(key, layer, fingerprint)))
        if data is None:
            return None, b""
        stamp = data[:STAMP_BYTES]
        if len(data) == STAMP_BYTES + 1:
            return None, stamp
        try:
            return unpack(data), stamp
        except EntryError:
            return None, stamp

    async def head(self, key: bytes, layer: Layer, fingerprint: bytes) -> Head | None:
        """Return what tells whether a copy is still good, None if the tier holds nothing.

        Raises:
            SharedTierError: No answer from the server.
        """
        name = self.names.answer(key, layer, fingerprint)
        data = await self.ask(lambda: self.client.getrange(name, 0, _HEAD_BYTES - 1))
        if not data:
            return None
        tag_sum = int.from_bytes(data[_TAG_SUM_AT : _TAG_SUM_AT + 8], "little")
        return Head(data[:STAMP_BYTES], tag_sum, is_tombstone=len(data) < _HEAD_BYTES)

    async def store(self, key: bytes, entry: Entry, *, seen: bytes | None, ttl_ms: int) -> StoreResult:
        """Store an answer for all nodes.

        Args:
            key: 32 bytes.
            entry: With the tag sum of ``tag_sum``, taken before it was computed.
            seen: The stamp that ``get`` returned before it was computed; None: whatever is there is replaced.
            ttl_ms: Its life.

        Raises:
            SharedTierError: No answer from the server.
        """
        name = self.names.answer(key, entry.layer, entry.fingerprint)
        expected = b"*" if seen is None else seen
        payload = bytes((entry.layer,)) + entry.fingerprint
        arguments = (expected, pack(entry), max(1, ttl_ms), payload, STREAM_LENGTH)
        stored = await self.ask(lambda: self.client.eval(_STORE, 2, name, self.names.stream, *arguments))
        return StoreResult(stored=bool(stored))

    async def add_member(self, layer: Layer, fingerprint: bytes, ttl_ms: int) -> None:
        """Make a member of a closed set known to all nodes; when it returns, no node says «no» any more.

        Raises:
            SharedTierError: No answer from the server.
        """
        name = self.names.member(layer, fingerprint)
        arguments = (b"*", b"", max(1, ttl_ms), bytes((layer,)) + fingerprint, STREAM_LENGTH)
        await self.ask(lambda: self.client.eval(_STORE, 2, name, self.names.stream, *arguments))

    async def purge_key(self, key: bytes, layer: Layer, fingerprint: bytes, tombstone: bytes) -> None:
        """Remove an answer everywhere, also one that is being computed.

        Args:
            key: 32 bytes.
            layer: Of its fingerprint.
            fingerprint: Of the request.
            tombstone: 16 random bytes.

        Raises:
            SharedTierError: No answer from the server.
        """
        name = self.names.answer(key, layer, fingerprint)
        await self.ask(lambda: self.client.set(name, tombstone + _TOMBSTONE, px=_TOMBSTONE_MS))

    async def purge_names(self, key: bytes, tombstone: bytes) -> int:
        """Remove an answer whose fingerprint is not known, by walking the names; return how many there were.

        Raises:
            SharedTierError: No answer from the server.
        """
        special = b"\\*?[]^-"
        escaped = b"".join(b"\\" + bytes((byte,)) if byte in special else bytes((byte,)) for byte in key)
        cursor, found = 0, 0
        while True:
            cursor, names = await self.ask(
                partial(self.client.scan, cursor, match=self.names.answers + escaped + b"*", count=1000)
            )
            for name in names:
                await self.ask(partial(self.client.set, name, tombstone + _TOMBSTONE, px=_TOMBSTONE_MS))
            found += len(names)
            if not int(cursor):
                return found

    async def purge_tag(self, kind: str, name: str) -> None:
        """Make all answers with a tag worthless everywhere, also those that are being computed.

        Raises:
            SharedTierError: No answer from the server.
        """
        await self.ask(lambda: self.client.incr(self.names.tag(kind, name)))
        self._tags.pop(self.names.tag(kind, name), None)

    async def tag_sum(self, tags: Iterable[tuple[str, str]]) -> int:
        """Return the sum of the tags' purge counters; remembered until the server says that one has changed.

        Raises:
            SharedTierError: No answer from the server.
        """
        names = [self.names.tag(kind, name) for kind, name in tags]
        missing = [name for name in names if name not in self._tags]
        if missing:
            state = self._tags_state
            values = await self.ask(lambda: self.client.mget(missing))
            found = {name: int(value or 0) for name, value in zip(missing, values, strict=True)}
            if state == self._tags_state and self.remembers_tags:  # else one may have changed since it was read
                if len(self._tags) > 100_000:
                    self._tags.clear()
                self._tags |= found
            return sum(found[name] if name in found else self._tags.get(name, 0) for name in names)
        return sum(self._tags[name] for name in names)

    def known_tag_sum(self, tags: Iterable[tuple[str, str]]) -> int | None:
        """Return ``tag_sum`` if all counters are remembered, without asking."""
        try:
            return sum(self._tags[self.names.tag(kind, name)] for kind, name in tags)
        except KeyError:
            return None

    def forget_tags(self, name: bytes | None = None) -> None:
        """Forget a tag's counter, or all: the server said that it changed, or may have without our hearing of it."""
        self._tags_state += 1
        if name is None:
            self._tags.clear()
        else:
            self._tags.pop(name, None)

    async def ping(self) -> float:
        """Return the seconds of a round trip.

        Raises:
            SharedTierError: No answer from the server.
        """
        began = time.monotonic()
        await self.ask(self.client.ping)
        return time.monotonic() - began

    async def eviction_policy(self) -> str:
        """Return the server's ``maxmemory-policy``, empty if it does not tell."""
        try:
            answer = await self.ask(lambda: self.client.config_get("maxmemory-policy"))
        except SharedTierError:
            return ""
        return str({_text(name): _text(value) for name, value in answer.items()}.get("maxmemory-policy", ""))

    async def ask(self, command: Callable[[], Awaitable[Any] | Any]) -> Any:
        """Run one command of ``client`` behind the breaker.

        Raises:
            TierDownError: The server does not answer, or is not asked for a while.
            SharedTierError: It refused.
        """
        if not self.breaker.may_pass(time.monotonic()):
            raise TierDownError("the shared tier is not asked for a while, after it failed")
        try:
            result = await cast("Awaitable[Any]", command())
        except redis.exceptions.ResponseError as error:
            self.breaker.succeeded()  # it is there, and says no
            raise SharedTierError(f"the shared tier refused: {error}") from error
        except FAILURES as error:
            self.breaker.failed(time.monotonic())
            raise TierDownError(f"the shared tier does not answer: {error or type(error).__name__}") from error
        self.breaker.succeeded()
        return result


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
