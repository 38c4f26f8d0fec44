"""One node without a shared tier: floods, closed sets, prewarming, restarts, purges."""

# ruff: noqa: S311  draws that are the same each time

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.cache.cache import AnswerCache
from router.cache.errors import MissBudgetError
from router.cache.filters import Layer
from router.cache.fingerprint import fingerprint
from router.cache.model import Answer, CacheOptions, Hit, Miss
from router.cache.policy import CachePolicy
from tests.unit.cache.conftest import request_for

POLICY = CachePolicy(ttl_s=100)


@asynccontextmanager
async def node(folder: Path, **changes: object) -> AsyncIterator[AnswerCache]:
    sizes: dict[str, object] = {"memory_bytes": 1 << 20, "disk_bytes": 4 << 20} | changes
    async with AnswerCache(folder, options=CacheOptions(**sizes)) as cache:  # type: ignore[arg-type]
        yield cache


async def answer() -> Answer:
    await asyncio.sleep(0.001)
    return Answer(b"answer", b"header")


async def written(cache: AnswerCache) -> None:
    """Wait until the writer has written what it was given."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    cache._writes.put(lambda: loop.call_soon_threadsafe(done.set))
    await done.wait()


async def test_twice_before_it_is_in_memory(tmp_path: Path) -> None:
    async with node(tmp_path) as cache:
        levels = []
        for _ in range(4):
            found = await cache.get_or_load(request_for("x"), answer, POLICY)
            levels.append(found.level if isinstance(found, Hit) else "loaded")
            await written(cache)
        assert levels == ["loaded", "l2", "l1", "l1"]
        hit = await cache.lookup(request_for("x"))
        assert isinstance(hit, Hit)
        assert (hit.entry.body, hit.entry.header) == (b"answer", b"header")
        assert hit.age_ms >= 0


async def test_without_a_disk_the_second_answer_is_kept(tmp_path: Path) -> None:
    async with node(tmp_path, disk_bytes=0) as cache:
        levels = []
        for _ in range(4):
            found = await cache.get_or_load(request_for("x"), answer, POLICY)
            levels.append(found.level if isinstance(found, Hit) else "loaded")
        assert levels == ["loaded", "loaded", "l1", "l1"]


async def test_a_thousand_ask_and_one_loads(tmp_path: Path) -> None:
    async with node(tmp_path) as cache:
        loads = 0

        async def load() -> Answer:
            nonlocal loads
            loads += 1
            await asyncio.sleep(0.05)
            return Answer(b"x")

        await asyncio.gather(*(cache.get_or_load(request_for("x"), load, POLICY) for _ in range(1000)))
        assert loads == 1


async def test_it_is_there_after_a_restart_and_a_lost_filter(tmp_path: Path) -> None:
    async with node(tmp_path) as cache:
        for number in range(50):
            await cache.get_or_load(request_for(f"x{number}"), answer, POLICY)
        await written(cache)
    async with node(tmp_path) as cache:
        assert isinstance(await cache.lookup(request_for("x1")), Hit)
        assert not cache.filter.maybe(Layer.COARSE, fingerprint("never"))
    for file in (tmp_path / "filter").glob("generation-*"):
        file.unlink()
    async with node(tmp_path) as cache:
        for number in range(50):
            assert isinstance(await cache.lookup(request_for(f"x{number}")), Hit)
        assert not cache.filter.maybe(Layer.COARSE, fingerprint("never"))


async def test_purges_reach_disk_and_memory_and_what_is_being_computed(tmp_path: Path) -> None:
    async with node(tmp_path) as cache:
        for text in ("a", "b"):
            for _ in range(3):
                await cache.get_or_load(request_for(text), answer, POLICY)
                await written(cache)
        await cache.purge_key(request_for("a"))
        assert isinstance(await cache.lookup(request_for("a")), Miss)
        assert isinstance(await cache.lookup(request_for("b")), Hit)
        late = await cache.lookup(request_for("c"))
        await cache.purge_tag("model", "m")
        assert isinstance(late, Miss)
        assert not cache.store(late, Answer(b"late"), POLICY)
        assert isinstance(await cache.lookup(request_for("b")), Miss)
        again = await cache.lookup(request_for("b"))
        assert isinstance(again, Miss)
        assert cache.store(again, Answer(b"new"), POLICY)
        assert isinstance(await cache.lookup(request_for("b")), Hit)
        await cache.purge_all()
        assert isinstance(await cache.lookup(request_for("b")), Miss)
    async with node(tmp_path) as cache:
        assert isinstance(await cache.lookup(request_for("b")), Miss)


async def test_a_new_version_is_another_answer(tmp_path: Path) -> None:
    async with node(tmp_path) as cache:
        miss = await cache.lookup(request_for("x", version="1"))
        assert isinstance(miss, Miss)
        cache.store(miss, Answer(b"of one"), POLICY)
        await written(cache)
        assert isinstance(await cache.lookup(request_for("x", version="1")), Hit)
        assert isinstance(await cache.lookup(request_for("x", version="2")), Miss)
        assert isinstance(await cache.lookup(request_for("x", tenant="other")), Miss)


async def test_two_processes_of_a_node_see_each_others_answers_and_purges(tmp_path: Path) -> None:
    # LMDB allows one handle a process, so the other «process» has no disk of its own here.
    async with node(tmp_path) as one, node(tmp_path, disk_bytes=0) as two:
        for _ in range(3):
            await two.get_or_load(request_for("x"), answer, POLICY)
        assert isinstance(await two.lookup(request_for("x")), Hit)
        assert one.filter.maybe(Layer.COARSE, fingerprint("x"))
        await one.purge_tag("service", "s")
        assert isinstance(await two.lookup(request_for("x")), Miss)


async def test_answers_expire(tmp_path: Path) -> None:
    async with node(tmp_path) as cache:
        miss = await cache.lookup(request_for("x"))
        assert isinstance(miss, Miss)
        cache.store(miss, Answer(b"x"), CachePolicy(ttl_s=0.05, ttl_jitter=0))
        await written(cache)
        await asyncio.sleep(0.08)
        assert isinstance(await cache.lookup(request_for("x")), Miss)


async def test_prewarmed_answers_are_found_and_kept(tmp_path: Path) -> None:
    async with node(tmp_path, memory_bytes=20_000) as cache:
        assert cache.prewarm(request_for("hot"), Answer(b"x"), POLICY, level="l1")
        assert cache.prewarm(request_for("warm"), Answer(b"y"), POLICY)
        await written(cache)
        for number in range(100):
            for _ in range(2):
                await cache.get_or_load(request_for(f"other {number}"), answer, POLICY)
        hot, warm = [await cache.lookup(request_for(text)) for text in ("hot", "warm")]
        assert isinstance(hot, Hit)
        assert isinstance(warm, Hit)
        assert (hot.level, warm.level) == ("l1", "l2")


async def test_a_flood_of_unknown_ids_reaches_no_backend(tmp_path: Path) -> None:
    async with node(tmp_path) as cache:
        cache.set_members("model", [f"m{number}" for number in range(1000)])
        draw = random.Random(1)
        calls = wrong = 0
        for _ in range(20_000):
            known = draw.random() < 0.1
            name = f"m{draw.randrange(1000)}" if known else f"unknown {draw.random()}"
            exists = await cache.may_exist("model", name)
            calls += exists and not known
            wrong += known and not exists
        assert (calls, wrong) == (0, 0)


async def flood(folder: Path, share: float) -> tuple[float, int, int]:
    """Hit ratio of the hot set, calls to the backend, and calls that the budget allows."""
    rate, burst, requests, hot_keys = 50.0, 300, 12_000, 100
    async with node(folder, disk_bytes=0, misses_per_second=rate, miss_burst=burst) as cache:
        draw = random.Random(5)
        hot = [request_for(f"hot {number}") for number in range(hot_keys)]
        for request in hot * 2:  # asked for before the flood comes
            cache.prewarm(request, Answer(b"x" * 2000), POLICY, level="l1")
        loop = asyncio.get_running_loop()
        began = loop.time()
        calls = hits = asked = 0

        async def load() -> Answer:
            nonlocal calls
            calls += 1
            return Answer(b"y" * 2000)

        for number in range(requests):
            if draw.random() < share:
                request = request_for(f"new {number}")
            else:
                request = hot[min(int(draw.expovariate(1 / 20)), hot_keys - 1)]
                asked += 1
                hits += isinstance(await cache.lookup(request), Hit)
                continue
            with contextlib.suppress(MissBudgetError):
                await cache.get_or_load(request, load, POLICY)
        return hits / asked, calls, int(burst + rate * (loop.time() - began)) + 1


async def test_a_flood_of_new_prompts_stays_within_the_budget_and_spares_the_hot_set(tmp_path: Path) -> None:
    calm, _, _ = await flood(tmp_path / "calm", 0.0)
    ratio, calls, allowed = await flood(tmp_path / "flood", 0.9)
    assert 0 < calls <= allowed
    assert abs(ratio - calm) <= 0.01


async def test_a_full_filter_is_built_anew_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.cache.cache._MAINTENANCE_S", 0.05)
    async with node(tmp_path, highest_rate=0.001) as cache:
        for _ in range(2):
            await cache.get_or_load(request_for("kept"), answer, POLICY)
        await written(cache)
        before = cache.filter.generation
        draw = random.Random(1)
        cache.filter.add_many(Layer.COARSE, [draw.randbytes(16) for _ in range(400_000)])
        for _ in range(400):
            if cache.filter.generation != before:
                break
            await asyncio.sleep(0.02)
        assert cache.filter.generation == before + 1
        assert isinstance(await cache.lookup(request_for("kept")), Hit)
        assert cache.states()[0].keys < 10


async def test_a_writer_that_can_not_keep_up_drops_and_goes_on(tmp_path: Path) -> None:
    import threading

    async with node(tmp_path) as cache:
        gate = threading.Event()
        cache._writes.put(lambda: gate.wait(20))
        cache._writes.put(lambda: 1 / 0)  # whatever happens, the thread goes on
        for number in range(400):
            await cache.get_or_load(request_for(f"x{number}"), answer, POLICY)
        gate.set()
        for _ in range(200):
            if cache._writes.empty():
                break
            await asyncio.sleep(0.02)
        await written(cache)
        assert cache.disk
        assert 100 < cache.disk.state().entries <= 256
