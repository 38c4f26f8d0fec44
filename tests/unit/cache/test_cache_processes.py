"""Three processes, two nodes, a Redis that is killed and restarted under load: no read is older than the bound."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.cache.conftest import RedisServer

STALE = 1.0

WORKER = """
import asyncio, json, sys, time
from pathlib import Path
from router.cache.cache import AnswerCache
from router.cache.model import Answer, CacheOptions, Hit
from router.cache.policy import CachePolicy
from router.cache.shared import SharedTier
from tests.unit.cache.conftest import request_for

folder, address, role, stale, seconds = sys.argv[1:]
writes, stale, seconds = role == "writer", float(stale), float(seconds)
policy = CachePolicy(ttl_s=100)
KEYS = 4

async def main():
    options = CacheOptions(memory_bytes=1 << 20, disk_bytes=1 << 20, max_stale_s=stale)
    reads, acknowledged, failures, hits, unconfirmed = [], [], [], 0, 0
    async with AnswerCache(Path(folder), options=options, shared=SharedTier(address)) as cache:
        print("up", flush=True)
        end = time.monotonic() + seconds
        version = 0
        while time.monotonic() < end:
            for number in range(KEYS):
                began = time.monotonic()
                try:
                    found = await cache.lookup(request_for(f"key {number}"))
                except Exception as error:
                    failures.append(repr(error))
                    continue
                if isinstance(found, Hit):
                    hits += 1
                    reads.append((began, number, int(found.entry.body)))
                    unconfirmed += not cache.tracker.connected
            if writes:
                version += 1
                number = version % KEYS
                report = await cache.write(request_for(f"key {number}"), Answer(str(version).encode()), policy)
                if report.shared:
                    acknowledged.append((time.monotonic(), number, version))
            await asyncio.sleep(0.01)
        result = dict(reads=reads, acknowledged=acknowledged, failures=failures, hits=hits,
                      unconfirmed=unconfirmed, sessions=cache.tracker.sessions)
    print(json.dumps(result), flush=True)

asyncio.run(main())
"""


def test_no_read_is_older_than_the_bound(short_dir: Path, redis_server: RedisServer, root: Path) -> None:
    workers = []
    for folder, role in (("one", "reader"), ("one", "writer"), ("two", "reader")):
        arguments = [str(short_dir / folder), redis_server.address, role, str(STALE), "7"]
        workers.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, text=True, cwd=root, bufsize=1
            )
        )
    try:
        for worker in workers:
            assert worker.stdout
            assert worker.stdout.readline() == "up\n"
        time.sleep(1.5)
        redis_server.kill()
        time.sleep(1.7)
        redis_server.start()
        time.sleep(1)
        redis_server.freeze()
        time.sleep(0.8)
        redis_server.thaw()
        results = [json.loads(worker.communicate(timeout=60)[0].splitlines()[-1]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    acknowledged = results[1]["acknowledged"]
    assert len(acknowledged) > 50
    for result in results:
        assert result["failures"] == []
        assert result["hits"] > 100
        assert result["sessions"] >= 2
        for began, number, version in result["reads"]:
            due = [newer for at, which, newer in acknowledged if which == number and at <= began - STALE]
            assert not due or version >= max(due)
    # The writer's node served what nobody could confirm, for a while: the bound was put to the test.
    assert sum(result["unconfirmed"] for result in results) > 0
