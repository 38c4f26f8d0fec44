"""Several nodes and a real Redis: what one writes or purges all see; what nobody can confirm expires."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.cache.cache import AnswerCache
from router.cache.errors import SharedTierError, TierDownError
from router.cache.filters import Layer
from router.cache.fingerprint import fingerprint
from router.cache.model import Answer, CacheOptions, Hit, Miss
from router.cache.policy import CachePolicy
from router.cache.shared import SharedTier
from tests.unit.cache.conftest import RedisServer, request_for

POLICY = CachePolicy(ttl_s=100)


@asynccontextmanager
async def node(
    folder: Path, server: RedisServer, *, stale: float = 10.0, disk: int = 1 << 20
) -> AsyncIterator[AnswerCache]:
    shared = SharedTier(server.address, timeout=0.25)
    options = CacheOptions(memory_bytes=1 << 20, disk_bytes=disk, max_stale_s=stale)
    folder.mkdir(exist_ok=True)
    async with asyncio.timeout(40), AnswerCache(folder, options=options, shared=shared) as cache:
        await until(lambda: both_up(cache))
        yield cache


def both_up(cache: AnswerCache) -> bool:
    assert cache.tracker
    assert cache.follower
    return cache.tracker.connected and cache.follower.current


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


async def look(cache: AnswerCache, text: str) -> bytes | None:
    found = await cache.lookup(request_for(text))
    return found.entry.body if isinstance(found, Hit) else None


async def learn(cache: AnswerCache, text: str, body: bytes) -> None:
    """Ask, miss, compute, store, and wait until the shared tier has it."""
    found = await cache.lookup(request_for(text))
    assert isinstance(found, Miss)
    assert cache.store(found, Answer(body), POLICY)
    assert cache.shared
    request = request_for(text)
    for _ in range(400):
        if (await cache.shared.get(request.key, request.layer, request.fingerprint))[0]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never stored")


async def test_an_answer_of_one_node_is_served_by_all(short_dir: Path, redis_server: RedisServer) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        await learn(a, "hello", b"world" * 1000)
        await until(lambda: b.filter.maybe(Layer.COARSE, fingerprint("hello")))
        found = await b.lookup(request_for("hello"))
        assert isinstance(found, Hit)
        assert (found.entry.body, found.level) == (b"world" * 1000, "shared")
        assert await look(a, "hello") == b"world" * 1000
        levels = []
        for _ in range(3):
            await asyncio.sleep(0.05)
            again = await b.lookup(request_for("hello"))
            assert isinstance(again, Hit)
            levels.append(again.level)
        assert levels[-1] == "l1"


async def test_a_write_and_a_purge_are_seen_by_all(short_dir: Path, redis_server: RedisServer) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        await learn(a, "x", b"one")
        await until(lambda: b.filter.maybe(Layer.COARSE, fingerprint("x")))
        for _ in range(3):
            assert await look(b, "x") == b"one"
        for turn in range(20):
            body = f"turn {turn}".encode()
            assert (await a.write(request_for("x"), Answer(body), POLICY)).shared
            await seen(b, "x", body)
            assert await look(a, "x") == body
        assert (await b.purge_key(request_for("x"))).shared
        await seen(a, "x", None)
        assert await look(b, "x") is None


async def seen(cache: AnswerCache, text: str, body: bytes | None) -> None:
    for _ in range(1000):
        if await look(cache, text) == body:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{body!r} is never seen")


@pytest.mark.parametrize("tag", [("service", "s"), ("model", "m"), ("version", "m@1"), ("all", "")])
async def test_purging_by_tag(short_dir: Path, redis_server: RedisServer, tag: tuple[str, str]) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        await learn(a, "x", b"old")
        await until(lambda: b.filter.maybe(Layer.COARSE, fingerprint("x")))
        assert await look(b, "x") == b"old"
        await b.purge_tag("service", "other")
        assert await look(b, "x") == b"old"
        computing = await a.lookup(request_for("late"))
        await b.purge_tag(*tag)
        assert await look(b, "x") is None
        await seen(a, "x", None)
        assert isinstance(computing, Miss)
        assert not a.store(computing, Answer(b"computed before the purge"), POLICY)
        found = await a.lookup(request_for("x"))
        assert isinstance(found, Miss)
        assert a.store(found, Answer(b"new"), POLICY)
        await seen(b, "x", b"new")


async def test_an_answer_that_was_being_computed_when_it_was_purged_is_not_stored(
    short_dir: Path, redis_server: RedisServer
) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        await learn(a, "x", b"old")
        await a.purge_key(request_for("x"))
        await asyncio.sleep(0.1)  # B has heard of it
        found = await b.lookup(request_for("x"))
        assert isinstance(found, Miss)
        # B does not hear of the second purge before it stores: as if the message were still on its way.
        assert b.tracker
        while not b._tasks[0].done():
            b._tasks[0].cancel()
            await asyncio.sleep(0.02)
        await a.purge_key(request_for("x"))
        assert b.store(found, Answer(b"late"), POLICY)
        await until(b._stores.empty)
        await asyncio.sleep(0.1)
        assert a.shared
        request = request_for("x")
        assert (await a.shared.get(request.key, request.layer, request.fingerprint))[0] is None


async def test_when_nobody_can_confirm_answers_expire_and_nothing_fails(
    short_dir: Path, redis_server: RedisServer
) -> None:
    async with node(short_dir / "a", redis_server, stale=1.0) as a:
        await learn(a, "x", b"answer")
        for _ in range(3):
            assert await look(a, "x") == b"answer"
        redis_server.freeze()
        try:
            frozen = time.monotonic()
            assert await look(a, "x") == b"answer"
            assert a.tracker
            await until(lambda: not a.tracker.connected)  # type: ignore[union-attr]
            while await look(a, "x") is not None:
                # The last heartbeat may be 0.2 s older than the freeze; the rest is this test's own slowness.
                assert time.monotonic() - frozen < 8
                await asyncio.sleep(0.02)
            assert time.monotonic() - frozen > 0.7
            for number in range(5):
                assert isinstance(await a.lookup(request_for(f"new {number}")), Miss)
            assert a.shared
            assert a.shared.breaker.opened
            miss = await a.lookup(request_for("local"))
            assert isinstance(miss, Miss)
            assert a.store(miss, Answer(b"still stored here"), POLICY)
        finally:
            redis_server.thaw()
        await until(lambda: both_up(a))
        await seen(a, "x", b"answer")


async def test_a_server_that_lost_its_data(short_dir: Path, redis_server: RedisServer) -> None:
    async with node(short_dir / "a", redis_server) as a:
        await learn(a, "x", b"answer")
        for _ in range(3):
            assert await look(a, "x") == b"answer"
            await asyncio.sleep(0.02)
        redis_server.kill()
        assert a.tracker
        await until(lambda: not a.tracker.connected)  # type: ignore[union-attr]
        redis_server.start()
        await until(lambda: both_up(a))
        assert await look(a, "x") is None  # nobody can say that it was not purged meanwhile
        assert a.follower
        assert a.follower.walks == 2
        await learn(a, "x", b"again")
        assert await look(a, "x") == b"again"


async def test_a_purge_while_the_server_is_away_is_made_up_for(short_dir: Path, redis_server: RedisServer) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        await learn(a, "x", b"old")
        redis_server.freeze()
        report = await a.purge_key(request_for("x"))
        assert not report.shared
        assert await look(a, "x") is None
        redis_server.thaw()
        await until(lambda: both_up(a))
        assert await look(a, "x") is None
        await until(lambda: not a._pending_purges)
        await seen(b, "x", None)


async def test_a_closed_set_never_denies_what_there_is(short_dir: Path, redis_server: RedisServer) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        assert b.follower
        for number in range(200):
            assert await a.add_member("media", str(number), ttl_s=100)
            assert await b.may_exist("media", str(number))
        denied = await asyncio.gather(*(b.may_exist("media", f"unknown {number}") for number in range(500)))
        assert not any(denied)
        assert not await b.may_exist("session", "1")
        redis_server.freeze()
        try:
            await until(lambda: not b.follower.current)  # type: ignore[union-attr]
            assert await b.may_exist("media", "unknown 1")
        finally:
            redis_server.thaw()
        await until(lambda: both_up(b))
        assert not await b.may_exist("media", "unknown 1")
    async with node(short_dir / "late", redis_server) as late:
        assert all([await late.may_exist("media", str(number)) for number in range(200)])
        assert not await late.may_exist("media", "unknown 1")


async def test_a_node_that_lost_the_stream_says_maybe_and_walks(
    short_dir: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cache.shared.STREAM_LENGTH", 100)
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        assert b.follower
        following = b._tasks[1]
        while not following.done():
            following.cancel()
            await asyncio.sleep(0.05)
        assert not b.follower.current
        for number in range(500):
            await a.add_member("media", str(number), ttl_s=100)
        assert a.shared
        length = await a.shared.client.xlen(a.shared.names.stream)
        assert length < 400  # the entries that B has not read are gone
        assert await b.may_exist("media", "0")
        assert await b.may_exist("media", "unknown")
        walks = b.follower.walks
        b._tasks[1] = asyncio.create_task(b.follower.run())
        await until(lambda: both_up(b))
        assert b.follower.walks == walks + 1
        assert all([await b.may_exist("media", str(number)) for number in range(500)])
        assert not await b.may_exist("media", "unknown")


async def test_a_new_generation_knows_what_all_levels_hold(short_dir: Path, redis_server: RedisServer) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        await learn(a, "mine", b"1")
        await learn(b, "theirs", b"2")
        await a.add_member("media", "m", ttl_s=100)
        a.prewarm(request_for("memory only"), Answer(b"3"), POLICY, level="l1")
        await until(lambda: a.filter.maybe(Layer.COARSE, fingerprint("theirs")))
        a.filter.add(Layer.COARSE, fingerprint("gone"))
        before = a.filter.generation
        a._saturated = True
        assert await a.rotate()
        assert a.filter.generation == before + 1
        for text in ("mine", "theirs", "memory only"):
            assert a.filter.maybe(Layer.COARSE, fingerprint(text))
        assert not a.filter.maybe(Layer.COARSE, fingerprint("gone"))
        assert await a.may_exist("media", "m")
        assert not await a.rotate()  # not again at once


async def test_purging_a_key_whose_request_is_not_at_hand(short_dir: Path, redis_server: RedisServer) -> None:
    async with node(short_dir / "a", redis_server) as a, node(short_dir / "b", redis_server) as b:
        await learn(a, "x", b"old")
        await until(lambda: b.filter.maybe(Layer.COARSE, fingerprint("x")))
        assert await look(b, "x") == b"old"
        await a.purge_key_everywhere(request_for("x").key)
        await seen(b, "x", None)


async def test_a_server_that_is_not_there(short_dir: Path) -> None:
    tier = SharedTier(f"unix:{short_dir}/none.sock")
    for _ in range(5):
        with pytest.raises(TierDownError):
            await tier.get(bytes(32), Layer.COARSE, bytes(16))
    assert tier.breaker.is_open
    assert await tier.eviction_policy() == ""
    await tier.close()


async def test_a_server_that_refuses(short_dir: Path, redis_server: RedisServer) -> None:
    tier = SharedTier(redis_server.address)
    await tier.client.set(tier.names.tag("service", "s"), "no number")
    with pytest.raises(SharedTierError, match="refused"):
        await tier.purge_tag("service", "s")
    assert not tier.breaker.is_open
    assert await tier.eviction_policy() == "volatile-lru"
    await tier.close()
