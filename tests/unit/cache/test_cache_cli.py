from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.cache.cache import AnswerCache
from router.cache.errors import TraceError
from router.cache.model import Answer, CacheOptions, Hit, Miss
from router.cache.policy import CachePolicy
from router.cache.shared import SharedTier
from router.cache.traces import read_trace
from tests.unit.cache.conftest import TRACES, RedisServer, request_for


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "modalmesh.cli", "cache", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
        check=False,
    )


def test_simulate_as_json_with_a_chart(tmp_path: Path) -> None:
    for ending in ("svg", "png"):
        chart = tmp_path / f"chart.{ending}"
        done = run(
            *("simulate", str(TRACES / "cpp.trace.gz"), "-c", "50", "-c", "200", "-o", "json", "--chart", str(chart))
        )
        assert done.returncode == 0, done.stderr
        rows = {(row["policy"], row["capacity"]): row["hits"] for row in json.loads(done.stdout)["rows"]}
        assert rows["LRU", 50] == 838
        assert rows["LRU-2", 200] == 7656
        assert rows["LRU-3", 50] == 3432
        assert rows["best possible", 200] / 9047 == pytest.approx(0.86, abs=0.001)
        assert ("adaptive", 50) in rows
        data = chart.read_bytes()
        assert data.startswith(b"\x89PNG" if ending == "png" else b"<svg")
    assert b"adaptive</text>" in (tmp_path / "chart.svg").read_bytes()


def test_simulate_prints_a_table_and_chooses_sizes(tmp_path: Path) -> None:
    trace = tmp_path / "mine.txt"
    trace.write_text("\n".join(f"picture {number % 40}" for number in range(400)))
    done = run("simulate", str(trace), "--text-keys")
    assert done.returncode == 0, done.stderr
    assert "400 references to 40 keys" in done.stdout
    assert "90.0" in done.stdout
    assert "360" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("simulate", "/nowhere"), "MM1803", "No such file"),
        (("simulate", "{empty}"), "MM1803", "holds no key"),
        (("simulate", "{cut}"), "MM1803", "can't be read"),
        (("simulate", "{empty}", "--chart", "x.pdf"), "MM1100", "neither .svg nor .png"),
        (("stats",), "MM1804", "there is no cache"),
        (("purge", "all"), "MM1804", "there is no cache"),
        (("purge", "key", "abc"), "MM1100", "is no key"),
        (("purge", "version", "m"), "MM1100", "MODEL@VERSION"),
        (("purge", "service"), "MM1100", "which"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, arguments: tuple[str, ...], code: str, says: str) -> None:
    (tmp_path / "empty").write_text("*\n\n*\n")
    (tmp_path / "cut").write_bytes(gzip.compress(b"1\n2\n" * 1000)[:20])
    names = {"empty": str(tmp_path / "empty"), "cut": str(tmp_path / "cut")}
    done = run(*(part.format(**names) for part in arguments), MODALMESH_CACHE__DIRECTORY=str(tmp_path / "none"))
    assert done.returncode in {1, 2}
    assert code in done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_lines_without_a_number_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("*\n7\n 8 extra\nx9\n\n12\n")
    assert list(read_trace(path)) == [7, 8, 12]
    assert list(read_trace(path, text_keys=True)) == [0, 1, 2, 3, 4]
    path.write_text("x\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "--text-keys" in caught.value.hint


def test_stats_and_purge_on_a_cache_that_is_in_use(tmp_path: Path, redis_server: RedisServer) -> None:
    folder = tmp_path / "cache"
    environment = {"MODALMESH_CACHE__DIRECTORY": str(folder), "MODALMESH_CACHE__SHARED": redis_server.address}

    async def use() -> None:
        options = CacheOptions(memory_bytes=1 << 20, disk_bytes=4096 << 20)
        async with AnswerCache(folder, options=options, shared=SharedTier(redis_server.address)) as cache:
            for text in ("a", "b"):
                miss = await cache.lookup(request_for(text))
                assert isinstance(miss, Miss)
                cache.store(miss, Answer(b"x"), CachePolicy())
            await asyncio.sleep(0.3)
            done = await asyncio.to_thread(run, "stats", "-o", "json", **environment)
            assert done.returncode == 0, done.stderr
            figures = json.loads(done.stdout)
            assert figures["disk"]["entries"] == 2
            assert figures["coarse filter"]["complete"] is True
            assert figures["coarse filter"]["keys"] == 2
            assert figures["shared"]["eviction_policy"] == "volatile-lru"
            assert "fine filter keys" in (await asyncio.to_thread(run, "stats", **environment)).stdout

            assert isinstance(await cache.lookup(request_for("a")), Hit)
            done = await asyncio.to_thread(run, "purge", "key", request_for("a").key.hex(), **environment)
            assert done.returncode == 0, done.stderr
            assert isinstance(await cache.lookup(request_for("a")), Miss)
            assert isinstance(await cache.lookup(request_for("b")), Hit)
            done = await asyncio.to_thread(run, "purge", "version", "m@1", "-o", "json", **environment)
            assert json.loads(done.stdout) == {"node": True, "shared": True}
            assert isinstance(await cache.lookup(request_for("b")), Miss)
            redis_server.kill()
            done = await asyncio.to_thread(run, "purge", "all", **environment)
            assert done.returncode == 1
            assert "does not answer" in done.stdout

    asyncio.run(use())
