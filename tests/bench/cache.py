"""What the cache costs, beside its peers, in interleaved runs.

    python -m tests.bench.cache [--quick] [--json FILE]

Peers: ``cachetools.LRUCache`` and ``cachebox.LRUCache`` for the policies, ``rbloom`` and ``pyprobables`` for the
filters. cachebox and rbloom are compiled, the cache is not. Needs the extras ``bench`` and ``quickstart``, and
redis-server.
"""

# ruff: noqa: S311  draws that are the same each time

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cachebox
import cachetools
import numpy as np
import rbloom
from PIL import Image
from probables import BloomFilter
from rich.console import Console
from rich.table import Table
from skimage import data as photographs

from router.cache.adaptive import HISTORY_FLOOR, Adaptive
from router.cache.bloom import COARSE, FINE, Bits
from router.cache.cache import AnswerCache
from router.cache.filters import Layer, LayeredFilter
from router.cache.fingerprint import fingerprint
from router.cache.key import KeyParts, answer_key
from router.cache.lruk import LruK
from router.cache.media import dhash, mfcc_means
from router.cache.model import Answer, CacheOptions, Hit, Miss, Request
from router.cache.policy import CachePolicy
from router.cache.shared import SharedTier

KEYS = 20_000
CAPACITY = 5_000
POLICY = CachePolicy()


@dataclass
class Series:
    """Times of one thing, each of a slice or of one call."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list)
    value: float = 0.0

    @property
    def p50(self) -> float:
        return float(np.percentile(self.values, 50))

    def figures(self) -> dict[str, float | str]:
        low, middle, high = (float(np.percentile(self.values, share)) for share in (0, 50, 99))
        return {"unit": self.unit, "min": low, "p50": middle, "p99": high, "samples": len(self.values)}


def zipf(count: int, draw: random.Random) -> list[int]:
    weights = list(itertools.accumulate(1 / (rank + 1) ** 0.9 for rank in range(KEYS)))
    return [bisect_left(weights, draw.random() * weights[-1]) for _ in range(count)]


def through_put(cache: Any) -> Callable[[Sequence[int]], None]:
    def run(keys: Sequence[int]) -> None:
        get, put = cache.get, cache.put
        for key in keys:
            if get(key) is None:
                put(key, 1)

    return run


def through_items(cache: Any) -> Callable[[Sequence[int]], None]:
    def run(keys: Sequence[int]) -> None:
        get = cache.get
        for key in keys:
            if get(key) is None:
                cache[key] = 1

    return run


def nanoseconds(run: Callable[[Sequence[Any]], object], part: Sequence[Any]) -> float:
    """Return the time for each item of one slice."""
    began = time.perf_counter_ns()
    run(part)
    return (time.perf_counter_ns() - began) / len(part)


def policies(quick: bool) -> list[Series]:
    """Nanoseconds for each reference of a Zipf-like trace: a get, and a put if it missed."""
    trace = zipf(100_000, random.Random(1))
    hot = [key % (CAPACITY // 2) for key in trace]
    series: list[Series] = []
    for what, keys in (("mixed", trace), ("hits", hot)):
        makers: dict[str, Callable[[], Callable[[Sequence[int]], None]]] = {
            "cachetools LRU": lambda: through_items(cachetools.LRUCache(CAPACITY)),
            "LRU-3": lambda: through_put(LruK(CAPACITY, history=HISTORY_FLOOR)),
            "adaptive": lambda: through_put(Adaptive(CAPACITY)),
            "cachebox LRU": lambda: through_items(cachebox.LRUCache(CAPACITY)),
        }
        runs = {name: maker() for name, maker in makers.items()}
        found = {name: Series(f"{name}, {what}", "ns") for name in runs}
        for run in runs.values():
            run(keys)  # filled
        for start in range(0, 40_000 if quick else len(keys), 250):  # shorter than a turn of the scheduler
            part = keys[start : start + 250]
            for name, run in runs.items():
                found[name].values.append(nanoseconds(run, part))
        series += found.values()
    return series


def one_by_one(lookup: Callable[[bytes], object]) -> Callable[[Sequence[bytes]], None]:
    def run(part: Sequence[bytes]) -> None:
        for key in part:
            lookup(key)

    return run


def blooms(folder: Path, quick: bool) -> list[Series]:
    """Nanoseconds for each lookup of a fingerprint that is ready."""
    draw = random.Random(2)
    held = [draw.randbytes(16) for _ in range(100_000)]
    rounds = 100 if quick else 400
    series: list[Series] = []
    with LayeredFilter(folder) as layered:
        layered.mark_complete()
        for layer, geometry in ((Layer.COARSE, COARSE), (Layer.FINE, FINE)):
            layered.add_many(layer, held)
            bits = Bits(geometry, bytearray(geometry.size))
            bits.add_many(held)
            rate = 2.0**-geometry.hashes
            peer = rbloom.Bloom(int(geometry.bits * 0.6931471805599453 / geometry.hashes), rate)
            peer.update(held)
            slow = BloomFilter(est_elements=len(held), false_positive_rate=rate)
            for key in held[:2000]:
                slow.add(key)
            name = layer.name.lower()
            runs: dict[str, tuple[Callable[[Sequence[bytes]], object], int]] = {
                f"Bloom {name}, bits, hit": (one_by_one(bits.holds), 250),
                f"Bloom {name}, node's filter, hit": (one_by_one(partial(layered.maybe, layer)), 250),
                f"Bloom {name}, batch of 4096": (partial(layered.maybe_many, layer), 4096),
                "rbloom of that size, own hash, hit": (one_by_one(peer.__contains__), 250),
                f"pyprobables, {geometry.hashes} hashes, hit": (one_by_one(slow.check), 100),
            }
            found = {label: Series(f"{label} ({name})" if "loom of" in label else label, "ns") for label in runs}
            for turn in range(rounds):
                for label, (run, size) in runs.items():
                    start = turn * 997 % (1900 if "probables" in label else len(held) - size)
                    found[label].values.append(nanoseconds(run, held[start : start + size]))
            series += found.values()
    return series


def request_of(text: str) -> Request:
    parts = KeyParts(
        tenant="tenant",
        service="chat",
        api="openai/chat",
        model="model",
        version="7",
        messages=[{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": text}],
        parameters={"temperature": 0, "max_tokens": 100},
    )
    tags = (("service", "chat"), ("model", "model"), ("version", "model@7"))
    return Request(key=answer_key(parts), fingerprint=fingerprint(text), tenant="tenant", tags=tags)


async def decisions(folder: Path, quick: bool) -> list[Series]:
    """Microseconds from a request's text to hit or miss: fingerprint, key, filter, levels."""
    text = "How far away is the nearest star, and how long would it take to get there on foot? Please number {}."
    count = 4000 if quick else 20_000
    hit, level2, miss = (Series(f"text request, {what}", "µs") for what in ("L1 hit", "L2 hit", "never seen"))
    async with AnswerCache(folder, options=CacheOptions(memory_bytes=8 << 20, disk_bytes=64 << 20)) as cache:
        for number in range(500):
            request = request_of(text.format(number))
            cache.prewarm(request, Answer(b"x" * 500), POLICY, level="l1" if number < 250 else "l2")
            await asyncio.sleep(0.0005)
        await asyncio.sleep(0.5)
        for turn in range(count):
            for series, number in ((hit, turn % 250), (miss, 10_000 + turn)):
                prompt = text.format(number)
                began = time.perf_counter_ns()
                found = cache.lookup_local(request_of(prompt))
                series.values.append((time.perf_counter_ns() - began) / 1000)
                assert isinstance(found, Hit if series is hit else Miss)
            if turn < 250:
                prompt = text.format(250 + turn)
                began = time.perf_counter_ns()
                found = cache.lookup_local(request_of(prompt))
                level2.values.append((time.perf_counter_ns() - began) / 1000)
                assert isinstance(found, Hit)
    return [hit, level2, miss]


def media(quick: bool) -> list[Series]:
    """Milliseconds for a 1080p JPEG and for 30 s of sound."""
    picture = Image.fromarray(photographs.astronaut()).resize((1920, 1080), Image.Resampling.BICUBIC)
    noisy = np.asarray(picture).astype(np.int16) + np.random.default_rng(1).integers(-4, 5, (1080, 1920, 3))
    target = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(target, "JPEG", quality=85)
    encoded = target.getvalue()
    sound = np.random.default_rng(2).standard_normal(480_000) / 8
    mfcc_means(sound[:1000])
    jpeg = Series(f"fingerprint of a 1080p JPEG ({len(encoded) // 1000} kB)", "ms")
    full = Series("the same by a full decode", "ms")
    mfcc = Series("MFCC means of 30 s", "ms")
    for _ in range(15 if quick else 60):
        began = time.perf_counter_ns()
        fingerprint("what is this?", images=[dhash(encoded)])
        jpeg.values.append((time.perf_counter_ns() - began) / 1e6)
        began = time.perf_counter_ns()
        with Image.open(io.BytesIO(encoded)) as image:
            image.convert("L").resize((9, 8), Image.Resampling.LANCZOS)
        full.values.append((time.perf_counter_ns() - began) / 1e6)
        began = time.perf_counter_ns()
        mfcc_means(sound)
        mfcc.values.append((time.perf_counter_ns() - began) / 1e6)
    return [jpeg, full, mfcc]


async def shared(folder: Path, quick: bool) -> list[Series]:
    """Milliseconds until a write on one node is what another one answers with, Redis on a unix socket."""
    socket = folder / "redis.sock"
    server = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "redis-server", "--port", "0", "--unixsocket", str(socket), "--save", ""],
        stdout=subprocess.DEVNULL,
        cwd=folder,
    )
    seen, get = Series("a write seen by another node", "ms"), Series("hit in the shared tier", "µs")
    try:
        for _ in range(200):
            if socket.exists():
                break
            await asyncio.sleep(0.02)
        options = CacheOptions(memory_bytes=8 << 20, disk_bytes=8 << 20)
        async with (
            AnswerCache(folder / "a", options=options, shared=SharedTier(f"unix:{socket}")) as a,
            AnswerCache(folder / "b", options=options, shared=SharedTier(f"unix:{socket}")) as b,
        ):
            await asyncio.sleep(0.6)
            request = request_of("the one")
            for number in range(200 if quick else 1000):
                body = str(number).encode()
                began = time.perf_counter_ns()
                await a.write(request, Answer(body), POLICY)
                while True:
                    found = await b.lookup(request)
                    if isinstance(found, Hit) and found.entry.body == body:
                        break
                    await asyncio.sleep(0)
                seen.values.append((time.perf_counter_ns() - began) / 1e6)
            assert b.shared
            for _ in range(200 if quick else 1000):
                began = time.perf_counter_ns()
                await b.shared.get(request.key, request.layer, request.fingerprint)
                get.values.append((time.perf_counter_ns() - began) / 1000)
    finally:
        server.terminate()
        server.wait(10)
    return [seen, get]


async def floods(folder: Path, quick: bool) -> dict[str, float]:
    """Backend calls and the hot set's hit ratio while nine of ten requests ask for what was never seen."""
    count = 20_000 if quick else 100_000
    draw = random.Random(3)
    figures: dict[str, float] = {}
    async with AnswerCache(folder / "closed", options=CacheOptions(disk_bytes=0)) as cache:
        cache.set_members("media", [f"id {number}" for number in range(10_000)])
        calls = 0
        for _ in range(count):
            known = draw.random() < 0.1
            name = f"id {draw.randrange(10_000)}" if known else f"stranger {draw.random()}"
            calls += await cache.may_exist("media", name) and not known
        figures["closed set: backend calls for unknown ids"] = calls
    ratios = []
    for share in (0.0, 0.9):
        rate, burst = 100.0, 500
        options = CacheOptions(memory_bytes=2 << 20, disk_bytes=16 << 20, misses_per_second=rate, miss_burst=burst)
        async with AnswerCache(folder / f"new {share}", options=options) as cache:
            hot = [request_of(f"hot {number}") for number in range(200)]
            for request in hot:
                cache.prewarm(request, Answer(b"x" * 2000), POLICY, level="l1")
            calls = hits = asked = 0
            began = time.monotonic()
            for number in range(count):
                is_new = draw.random() < share
                request = request_of(f"new {number}") if is_new else hot[min(int(draw.expovariate(1 / 40)), 199)]
                found = cache.lookup_local(request)
                if not is_new:
                    asked += 1
                    hits += isinstance(found, Hit)
                elif isinstance(found, Miss) and found.charge.allowed:
                    calls += 1
                    cache.store(found, Answer(b"y" * 2000), POLICY)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            budget = burst + rate * (time.monotonic() - began) + 1
        ratios.append(hits / asked)
        if share:
            figures["new prompts: backend calls"] = calls
            figures["new prompts: backend calls the budget allows"] = round(budget, 1)
    figures["hot set's hit ratio without the flood, %"] = round(100 * ratios[0], 3)
    figures["hot set's hit ratio in the flood, %"] = round(100 * ratios[1], 3)
    return figures


def targets(series: Iterable[Series], figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    by_name = {one.name: one.p50 for one in series}
    p99 = {one.name: float(np.percentile(one.values, 99)) for one in series}
    base = {what: by_name[f"cachetools LRU, {what}"] for what in ("mixed", "hits")}
    jpeg = next(name for name in by_name if name.startswith("fingerprint of a 1080p"))
    rows: dict[str, tuple[float, str, float]] = {}
    for what in ("mixed", "hits"):
        rows[f"LRU-3 / cachetools, {what}"] = (by_name[f"LRU-3, {what}"] / base[what], "<=", 2)
        rows[f"adaptive / cachetools, {what}"] = (by_name[f"adaptive, {what}"] / base[what], "<=", 4)
    rows |= {
        "Bloom coarse, µs": (by_name["Bloom coarse, node's filter, hit"] / 1000, "<=", 1.2),
        "Bloom fine, µs": (by_name["Bloom fine, node's filter, hit"] / 1000, "<=", 2.0),
        "Bloom coarse in batches, µs": (by_name["Bloom coarse, batch of 4096"] / 1000, "<=", 0.3),
        "Bloom fine in batches, µs": (by_name["Bloom fine, batch of 4096"] / 1000, "<=", 0.3),
        "text request, hit, µs": (by_name["text request, L1 hit"], "<=", 60),
        "text request, never seen, µs": (by_name["text request, never seen"], "<=", 60),
        "1080p JPEG, ms": (by_name[jpeg], "<=", 6),
        "write seen by another node, p99, ms": (p99["a write seen by another node"], "<=", 10),
        "closed set: backend calls": (figures["closed set: backend calls for unknown ids"], "<=", 0),
        "new prompts: backend calls": (
            figures["new prompts: backend calls"],
            "<=",
            figures["new prompts: backend calls the budget allows"],
        ),
        "hot set loses, points": (
            figures["hot set's hit ratio without the flood, %"] - figures["hot set's hit ratio in the flood, %"],
            "<=",
            1,
        ),
    }
    return {
        name: {"measured": round(value, 4), "op": op, "value": limit, "met": bool(value <= limit)}
        for name, (value, op, limit) in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="mm-", dir="/tmp") as name:
        folder = Path(name)
        series = policies(options.quick) + blooms(folder / "filter", options.quick) + media(options.quick)
        series += asyncio.run(decisions(folder / "decisions", options.quick))
        series += asyncio.run(shared(folder, options.quick))
        figures = asyncio.run(floods(folder, options.quick))
    reached = targets(series, figures)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }
    console = Console()
    table = Table(title=f"load {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after; {os.cpu_count()} cores")
    for column in ("what", "min", "p50", "p99", "unit"):
        table.add_column(column, justify="left" if column in {"what", "unit"} else "right")
    for one in series:
        values = one.figures()
        table.add_row(one.name, *(f"{values[part]:.4g}" for part in ("min", "p50", "p99")), one.unit)
    for label, value in figures.items():
        table.add_row(label, "", f"{value:g}", "", "")
    console.print(table)
    goals = Table(title="Targets (p50 unless said)")
    for column in ("target", "measured", "", "limit", ""):
        goals.add_column(column)
    for label, row in reached.items():
        goals.add_row(
            label, f"{row['measured']:.4g}", row["op"], f"{row['value']:.4g}", "✓" if row["met"] else "missed"
        )
    console.print(goals)
    if options.json:
        document = {
            "machine": machine,
            "figures": {one.name: one.figures() for one in series} | figures,
            "targets": reached,
        }
        options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
