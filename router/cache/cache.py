"""The levels put together: one object a process.

A lookup asks, in this order: filter, L1, L2, shared tier. An answer is stored filter first. What makes a copy good:

- its purge marks are as they were before it was computed (``coherence``), and
- with a shared tier, this node has heard of every change since it was last confirmed (``watch.Tracker``).

A copy that is not known to be good is confirmed by asking the shared tier for its stamp, 70 bytes. If the tier does not
answer, a copy whose marks are unchanged is served until ``max_stale`` after it was last confirmed, and then no more:
a partition makes answers expire, it does not make them lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from modalmesh.base.logging import get_logger
from router.cache import telemetry
from router.cache.coherence import Marks, mark_of
from router.cache.disk import DiskLevel
from router.cache.entry import Entry, pack
from router.cache.errors import CacheError, MissBudgetError, SharedTierError
from router.cache.filters import FilterState, Layer, LayeredFilter, boot_id
from router.cache.fingerprint import TextPolicy, fingerprint
from router.cache.memory import Held, MemoryLevel
from router.cache.model import ALL, Answer, CacheOptions, Hit, Miss, PurgeReport, Request
from router.cache.penetration import Doorkeeper, MissBudget
from router.cache.policy import CachePolicy
from router.cache.shared import SharedTier
from router.cache.single_flight import SingleFlight
from router.cache.watch import Follower, Tracker

__all__ = ["AnswerCache"]

_log = get_logger()

_QUEUE = 256
_AS_IT_IS = TextPolicy(nfkc=False, casefold=False, collapse_spaces=False)
_PENDING_PURGES = 10_000
_MAINTENANCE_S = 1.0
# A cancellation that meets the client library's own time limit can be taken for it and be lost (seen with 3.11.2).
_CANCELS = 25
_ROTATION_PAUSE_S = 60.0


class AnswerCache:
    """The cache of one process.

    Args:
        directory: The node's; all its processes share it.
        options: Sizes and limits.
        shared: The shared tier, if there is one.
    """

    def __init__(
        self, directory: Path, *, options: CacheOptions | None = None, shared: SharedTier | None = None
    ) -> None:
        self.options = options or CacheOptions()
        boot = boot_id()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.filter = LayeredFilter(directory / "filter", boot=boot)
        self.marks = Marks(directory / "marks", boot=boot)
        self.memory = MemoryLevel(self.options.memory_bytes)
        self.disk: DiskLevel | None = None
        if self.options.disk_bytes:
            self.disk = DiskLevel(directory, self.options.disk_bytes, incarnation=self.marks.incarnation, boot=boot)
        self.shared = shared
        self.tracker: Tracker | None = None
        self.follower: Follower | None = None
        if shared:
            self.tracker = Tracker(shared, changed=self._changed, tag_changed=self._tag_changed)
            self.follower = Follower(shared, self.filter)
        self.budget = MissBudget(self.options.misses_per_second, self.options.miss_burst)
        self.doorkeeper = Doorkeeper()
        self.flights: SingleFlight[bytes, Hit | Answer] = SingleFlight(limit=self.options.load_limit_s)
        self.closed_sets: dict[str, frozenset[str]] = {}
        self._stale_ns = int(self.options.max_stale_s * 1e9)
        self._pending_purges: dict[tuple[str, ...], Callable[[], Awaitable[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stores: asyncio.Queue[tuple[Miss, Entry, int]] = asyncio.Queue(_QUEUE)
        self._writes: queue.Queue[Callable[[], object] | None] = queue.Queue(_QUEUE)
        self._writer = threading.Thread(target=self._write, name="cache-writer", daemon=True)
        self._writer.start()
        self._saturated = False
        self._rotate_from = 0.0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Complete the filter from what L2 holds, and begin to follow the shared tier."""
        await asyncio.to_thread(self.complete_filter)
        if self.tracker and self.follower:
            self._tasks += [
                asyncio.create_task(self.tracker.run()),
                asyncio.create_task(self.follower.run()),
                asyncio.create_task(self._store_shared()),
            ]
        self._tasks.append(asyncio.create_task(self._maintain()))

    async def close(self) -> None:
        """Stop, and leave the files in order."""
        pending = set(self._tasks)
        self._tasks.clear()
        for _ in range(_CANCELS):
            if not pending:
                break
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.2)
        if self.shared:
            await self.shared.close()
        await asyncio.to_thread(self.close_files)

    def close_files(self) -> None:
        """Write what waits to be written, and close the files: what ``close`` does where there is no event loop."""
        self._writes.put(None)
        self._writer.join(timeout=10)
        if self.disk:
            self.disk.close()
        self.marks.close()
        self.filter.close()

    def complete_filter(self) -> None:
        """Make the filter's «no» count: walk L2 if the filter does not know it yet (it was lost, or is new)."""
        if self.filter.complete:
            return
        with self.filter.rotating() as mine:
            if mine and not self.filter.complete:
                for layer, batch in self._disk_batches():
                    self.filter.add_many(layer, batch)
                self.filter.mark_complete()

    # Looking up.

    def lookup_local(self, request: Request) -> Hit | Miss | None:
        """Return what this node can say by itself without waiting, None if the shared tier must be asked.

        Args:
            request: With its marks (``marked``), or without.
        """
        request = request.marked()
        now_ms, now_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
        marks_sum = self.marks.sum(request.marks)
        if not self.filter.maybe(request.layer, request.fingerprint):
            if self.follower and not self.follower.current:
                return None
            return self._never_seen(request, marks_sum, now_ns)
        held = self.memory.get(request.key, now_ms)
        if held is not None:
            if self._is_good(held, marks_sum, now_ns):
                return self._hit(held, "l1", now_ms)
            if not self.shared:
                self.memory.discard(request.key)
        if self.disk:
            held = self.disk.get(request.key, now_ms)
            if held is not None and self._is_good(held, marks_sum, now_ns):
                if self.doorkeeper.asked_before(request.key):
                    self.memory.put(request.key, held)
                return self._hit(held, "l2", now_ms)
        if self.shared:
            return None
        telemetry.LOOKUPS.labels("miss").inc()
        return Miss(request, marks_sum, now_ns, asked_before=self.doorkeeper.asked_before(request.key))

    async def lookup(self, request: Request) -> Hit | Miss:
        """Return an answer that is known to be good, or none. Never fails because of the cache."""
        request = request.marked()
        shared = self.shared
        found = self.lookup_local(request)
        if found is None and shared is not None:
            return await self._lookup_with(shared, request)
        assert found is not None  # noqa: S101  it says None only where there is a shared tier
        if shared and isinstance(found, Miss) and not found.tag_sum_known and found.charge.allowed:
            # Needed to store the answer, and must be taken before it is computed. Remembered for the next time.
            with contextlib.suppress(SharedTierError):
                return replace(found, tag_sum=await shared.tag_sum(request.all_tags), tag_sum_known=True)
        return found

    async def _lookup_with(self, shared: SharedTier, request: Request) -> Hit | Miss:
        began_ns = time.monotonic_ns()
        marks_sum = self.marks.sum(request.marks)
        if self._is_being_purged(request):
            telemetry.LOOKUPS.labels("miss").inc()
            return Miss(request, marks_sum, began_ns)
        asked_before = self.doorkeeper.asked_before(request.key)
        try:
            return await self._lookup_shared(shared, request, marks_sum, began_ns, asked_before=asked_before)
        except SharedTierError:
            if hit := self._within_bound(request, marks_sum):
                return hit
        if not self.filter.maybe(request.layer, request.fingerprint):
            # The tier may hold it, but does not give it: the backend must be protected all the same.
            return self._never_seen(request, marks_sum, began_ns)
        telemetry.LOOKUPS.labels("miss").inc()
        return Miss(request, marks_sum, began_ns, asked_before=asked_before)

    def _is_being_purged(self, request: Request) -> bool:
        """Whether the shared tier has yet to be told of a purge: what it holds is not to be believed."""
        pending = self._pending_purges
        return bool(pending) and (
            ("key", request.key.hex()) in pending or any(("tag", *tag) in pending for tag in request.all_tags)
        )

    async def _lookup_shared(
        self, shared: SharedTier, request: Request, marks_sum: int, began_ns: int, *, asked_before: bool
    ) -> Hit | Miss:
        tag_sum = await shared.tag_sum(request.all_tags)
        now_ms = time.time_ns() // 1_000_000
        held, level = self.memory.get(request.key, now_ms), "l1"
        if held is None and self.disk:
            held, level = self.disk.get(request.key, now_ms), "l2"
        if held is not None:
            head = await shared.head(request.key, request.layer, request.fingerprint)
            if head and not head.is_tombstone and head.stamp == held.entry.stamp and head.tag_sum == tag_sum:
                held.marks_sum, held.confirmed_ns = marks_sum, began_ns
                if level == "l2":
                    self._keep(request, held, asked_before=asked_before, on_disk=True)
                return self._hit(held, level, now_ms)
            self.memory.discard(request.key)
        entry, seen = await shared.get(request.key, request.layer, request.fingerprint)
        if entry is not None and entry.tag_sum == tag_sum and entry.expires_ms > now_ms:
            held = Held(entry, marks_sum, began_ns)
            self._keep(request, held, asked_before=asked_before, on_disk=True)
            return self._hit(held, "shared", now_ms)
        telemetry.LOOKUPS.labels("miss").inc()
        return Miss(request, marks_sum, began_ns, seen, tag_sum, tag_sum_known=True, asked_before=asked_before)

    def _never_seen(self, request: Request, marks_sum: int, began_ns: int) -> Miss:
        telemetry.LOOKUPS.labels("never_seen").inc()
        charge = self.budget.charge(request.tenant, time.monotonic())
        telemetry.BUDGET.labels("charged" if charge.allowed else "refused").inc()
        tag_sum = self.shared.known_tag_sum(request.all_tags) if self.shared else 0
        return Miss(
            request,
            marks_sum,
            began_ns,
            tag_sum=tag_sum or 0,
            tag_sum_known=tag_sum is not None,
            asked_before=self.doorkeeper.asked_before(request.key),
            never_seen=True,
            charge=charge,
        )

    def _is_good(self, held: Held, marks_sum: int, now_ns: int) -> bool:
        if held.marks_sum != marks_sum:
            return False
        tracker = self.tracker
        if tracker is None:
            return True
        # An open session has heard of every change since it began, except those of the last moments.
        return (
            tracker.connected
            and held.confirmed_ns >= tracker.since_ns
            and now_ns - max(held.confirmed_ns, tracker.confirmed_ns) <= self._stale_ns
        )

    def _within_bound(self, request: Request, marks_sum: int) -> Hit | None:
        """Return a copy that nobody can confirm, while the bound allows it."""
        now_ms, now_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
        held, level = self.memory.get(request.key, now_ms), "l1"
        if held is None and self.disk:
            held, level = self.disk.get(request.key, now_ms), "l2"
        if held is None or held.marks_sum != marks_sum or self.tracker is None:
            return None
        confirmed = held.confirmed_ns
        if confirmed >= self.tracker.since_ns:  # the session that broke had still confirmed it
            confirmed = max(confirmed, self.tracker.confirmed_ns)
        return self._hit(held, level, now_ms) if now_ns - confirmed <= self._stale_ns else None

    def _hit(self, held: Held, level: str, now_ms: int) -> Hit:
        telemetry.LOOKUPS.labels(level).inc()
        return Hit(held.entry, level, max(0, now_ms - held.entry.stored_ms))

    # Storing.

    def store(self, miss: Miss, answer: Answer, policy: CachePolicy) -> bool:
        """Store a complete, successful answer; return whether it was taken. Does not wait.

        Args:
            miss: What ``lookup`` returned before the answer was asked for.
            answer: The backend's.
            policy: The route's, for the life.
        """
        request = miss.request
        if self.marks.sum(request.marks) != miss.marks_sum:
            telemetry.STORES.labels("node", "purged").inc()
            return False
        keeps = miss.asked_before or self.disk is not None or self.shared is not None
        if not keeps:
            telemetry.STORES.labels("node", "first").inc()
            return False
        entry = self._entry(request, answer, policy).with_tag_sum(miss.tag_sum)
        held = Held(entry, miss.marks_sum, miss.began_ns)
        self._keep(request, held, asked_before=miss.asked_before, on_disk=True)
        if self.shared:
            try:
                self._stores.put_nowait((miss, entry, policy.ttl_ms(request.key)))
            except asyncio.QueueFull:
                telemetry.STORES.labels("shared", "queue_full").inc()
        return True

    async def write(self, request: Request, answer: Answer, policy: CachePolicy) -> PurgeReport:
        """Put an answer in place of whatever is there, for all nodes; returns when the shared tier has it."""
        request = request.marked()
        report = PurgeReport()
        # The sum is taken after our own mark and before the write: whatever is heard from then on, our own echo
        # too, makes this node ask.
        self.marks.purge(request.marks[:1])
        marks_sum, began_ns = self.marks.sum(request.marks), time.monotonic_ns()
        entry = self._entry(request, answer, policy)
        if self.shared:
            self._add(request)
            try:
                entry = entry.with_tag_sum(await self.shared.tag_sum(request.all_tags))
                await self.shared.store(request.key, entry, seen=None, ttl_ms=policy.ttl_ms(request.key))
            except SharedTierError:
                report = PurgeReport(shared=False)
                self._purge_later(("key", request.key.hex()), self._key_purge(request))
        self._keep(request, Held(entry, marks_sum, began_ns), asked_before=True, on_disk=True)
        return report

    async def get_or_load(
        self,
        request: Request,
        load: Callable[[], Awaitable[Answer]],
        policy: CachePolicy,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Hit | Answer:
        """Return an answer from the cache, or load it once for all who ask for it now.

        Raises:
            LoadTimeoutError: It did not come in time.
            MissBudgetError: It was never seen, and the tenant's budget is used up.
            Exception: Whatever ``load`` raises.
        """
        found = await self.lookup(request)
        if isinstance(found, Hit):
            return found
        if not found.charge.allowed:
            raise MissBudgetError(found.charge.retry_after)

        async def load_and_store() -> Hit | Answer:
            answer = await load()
            self.store(found, answer, policy)
            return answer

        return await self.flights.do(request.key, load_and_store, timeout=timeout)

    def prewarm(self, request: Request, answer: Answer, policy: CachePolicy, *, level: str = "l2") -> bool:
        """Put an answer in ahead of its first use, with a history, so that it is not the first to go.

        Args:
            request: Whose answer it is.
            answer: The answer.
            policy: For its life.
            level: ``l1`` or ``l2``.
        """
        request = request.marked()
        held = Held(self._entry(request, answer, policy), self.marks.sum(request.marks), time.monotonic_ns())
        if level == "l1":
            self._add(request)
            return self.memory.put(request.key, held, references=3)
        self._keep(request, held, asked_before=False, on_disk=True)
        return self.disk is not None

    def _entry(self, request: Request, answer: Answer, policy: CachePolicy) -> Entry:
        now_ms = time.time_ns() // 1_000_000
        return Entry(
            body=answer.body,
            header=answer.header,
            fingerprint=request.fingerprint,
            layer=request.layer,
            stamp=os.urandom(16),
            stored_ms=now_ms,
            expires_ms=now_ms + policy.ttl_ms(request.key),
        )

    def _add(self, request: Request) -> tuple[int, int]:
        """Add to the filter; return its token, to be looked at again after storing."""
        token = self.filter.token
        self.filter.add(request.layer, request.fingerprint)
        return token

    def _keep(self, request: Request, held: Held, *, asked_before: bool, on_disk: bool) -> None:
        """Keep an answer: in L1 if it was asked for twice, in L2 behind a queue; in the filter before either."""
        token = self._add(request)
        if asked_before:
            kept = self.memory.put(request.key, held)
            telemetry.STORES.labels("l1", "stored" if kept else "too_large").inc()
            if self.filter.token != token:
                self.filter.add(request.layer, request.fingerprint)
        disk = self.disk
        if disk is None or not on_disk:
            return

        def write() -> None:
            packed = pack(held.entry)
            stored = disk.put(request.key, packed, marks_sum=held.marks_sum, confirmed_ns=held.confirmed_ns)
            if self.filter.token != token:
                self.filter.add(request.layer, request.fingerprint)
            telemetry.STORES.labels("l2", "stored" if stored else "dropped").inc()

        self._enqueue(write)

    def _enqueue(self, write: Callable[[], object]) -> None:
        try:
            self._writes.put_nowait(write)
        except queue.Full:
            telemetry.STORES.labels("l2", "queue_full").inc()

    def _write(self) -> None:
        while (write := self._writes.get()) is not None:
            try:
                write()
            except Exception as error:  # the thread must go on: a cache that stops storing is seen by nobody
                telemetry.STORES.labels("l2", "failed").inc()
                _log.warning("cache write failed", error=str(error))

    async def _store_shared(self) -> None:
        assert self.shared is not None  # noqa: S101  started only then
        while True:
            miss, entry, ttl_ms = await self._stores.get()
            request = miss.request
            try:
                if not miss.tag_sum_known:
                    # A counter read now may be that of a purge that the answer is older than.
                    telemetry.STORES.labels("shared", "tags_unknown").inc()
                    continue
                done = await self.shared.store(request.key, entry, seen=miss.seen, ttl_ms=ttl_ms)
            except SharedTierError:
                telemetry.STORES.labels("shared", "down").inc()
                continue
            if not done.stored:
                # Somebody purged it, or stored another answer first: ours must not be served here alone.
                self.memory.discard(request.key)
                self.marks.purge(request.marks[:1])
            telemetry.STORES.labels("shared", "stored" if done.stored else "refused").inc()

    # Purging.

    async def purge_all(self) -> PurgeReport:
        """Make everything worthless everywhere, also what is being computed."""
        self.memory.clear()
        if self.disk:
            self._enqueue(self.disk.clear)
        return await self.purge_tag(*ALL)

    async def purge_key_everywhere(self, key: bytes) -> PurgeReport:
        """Remove one answer whose request is not at hand; walks the names in the shared tier."""
        self.marks.purge([mark_of("key", key)])
        self.memory.discard(key)
        if self.disk:
            self._enqueue(lambda: self.disk and self.disk.delete([key]))
        shared = self.shared

        async def purge() -> None:
            if shared:
                await shared.purge_names(key, os.urandom(16))

        return await self._purge_shared(("key", key.hex()), purge)

    async def purge_key(self, request: Request) -> PurgeReport:
        """Remove one answer everywhere, also one that is being computed."""
        request = request.marked()
        self.marks.purge(request.marks[:1])
        self.memory.discard(request.key)
        if self.disk:
            self._enqueue(lambda: self.disk and self.disk.delete([request.key]))
        return await self._purge_shared(("key", request.key.hex()), self._key_purge(request))

    async def purge_tag(self, kind: str, name: str) -> PurgeReport:
        """Make all answers with a tag worthless everywhere, also those that are being computed."""
        self.marks.purge([mark_of(kind, name.encode())])
        shared = self.shared

        async def purge() -> None:
            if shared:
                await shared.purge_tag(kind, name)

        return await self._purge_shared(("tag", kind, name), purge)

    def _key_purge(self, request: Request) -> Callable[[], Awaitable[None]]:
        async def purge() -> None:
            if self.shared:
                await self.shared.purge_key(request.key, request.layer, request.fingerprint, os.urandom(16))

        return purge

    async def _purge_shared(self, what: tuple[str, ...], purge: Callable[[], Awaitable[None]]) -> PurgeReport:
        if not self.shared:
            return PurgeReport()
        try:
            await purge()
        except SharedTierError:
            self._purge_later(what, purge)
            return PurgeReport(shared=False)
        self._pending_purges.pop(what, None)
        return PurgeReport()

    def _purge_later(self, what: tuple[str, ...], purge: Callable[[], Awaitable[None]]) -> None:
        if len(self._pending_purges) >= _PENDING_PURGES and what not in self._pending_purges:
            _log.error("a purge is lost to the shared tier: too many wait", purges=len(self._pending_purges))
            return
        self._pending_purges[what] = purge

    def _changed(self, names: Sequence[bytes] | None) -> None:
        """The shared tier's answers have changed: what this node holds of them must be confirmed."""
        if names is None:
            self.marks.purge_all()
            return
        assert self.shared is not None  # noqa: S101  called by its tracker
        keys = [key for name in names if (key := self.shared.names.key_of(name))]
        self.marks.purge([mark_of("key", key) for key in keys])

    def _tag_changed(self, name: bytes) -> None:
        assert self.shared is not None  # noqa: S101  called by its tracker
        kind, _, value = name[len(self.shared.names.tags) :].partition(b":")
        self.marks.purge([mark_of(kind.decode("utf-8", "replace"), value)])

    # Closed sets.

    def set_members(self, kind: str, names: Iterable[str]) -> None:
        """Say what a closed set holds whose members this process knows: models, versions, adapters."""
        self.closed_sets[kind] = frozenset(names)

    async def add_member(self, kind: str, name: str, *, ttl_s: float) -> bool:
        """Add to a closed set that all nodes share (media ids, sessions), before anybody is told the name.

        Returns:
            False: The shared tier does not answer; other nodes answer «maybe» as long as they can't hear of it.
        """
        member = _member(kind, name)
        self.filter.add(Layer.FINE, member)
        if not self.shared:
            return True
        try:
            await self.shared.add_member(Layer.FINE, member, int(ttl_s * 1000))
        except SharedTierError:
            return False
        return True

    async def may_exist(self, kind: str, name: str) -> bool:
        """Return False only if a closed set does not hold the name: answer NOT_FOUND without a backend.

        For a set that ``set_members`` gave, exact. For one that nodes share, false only after the filter has caught up
        with everything that was added before this call; true if that can't be known.
        """
        if kind in self.closed_sets:
            return name in self.closed_sets[kind]
        member = _member(kind, name)
        if self.filter.maybe(Layer.FINE, member):
            return True
        if self.follower is None or self.shared is None:
            return True  # nobody has said that this process knows the set
        if not await self.follower.catch_up(timeout=self.shared.timeout):
            return True
        return self.filter.maybe(Layer.FINE, member)

    # Upkeep.

    def states(self) -> list[FilterState]:
        """Return how full the filter is."""
        return self.filter.states()

    def upkeep(self) -> None:
        """What has to be done once a second, in a thread: copies for a new generation, sweeping, figures."""
        if self.filter.owes_a_copy:
            number = self.filter.building
            for layer in Layer:
                own = [entry.fingerprint for entry in self.memory.entries() if entry.layer is layer]
                self.filter.copy_into_next(layer, own)
            self.filter.copied(number)
        if self.disk:
            self.disk.sweep(time.time_ns() // 1_000_000)
            disk = self.disk.state()
            telemetry.LEVELS.labels("l2", "entries").set(disk.entries)
            telemetry.LEVELS.labels("l2", "bytes").set(disk.bytes)
        telemetry.LEVELS.labels("l1", "entries").set(len(self.memory))
        telemetry.LEVELS.labels("l1", "bytes").set(self.memory.weight)
        states = self.states()
        saturated = any(state.rate > self.options.highest_rate for state in states)
        for state in states:
            for what, value in (("fill", state.fill), ("rate", state.rate), ("keys", state.keys)):
                telemetry.FILTER.labels(state.layer, what).set(value)
            telemetry.FILTER.labels(state.layer, "saturated").set(state.rate > self.options.highest_rate)
        if saturated and not self._saturated:
            _log.warning("a cache filter is full and is built anew", rates=[round(state.rate, 5) for state in states])
        self._saturated = saturated

    async def rotate(self) -> bool:
        """Build a new generation of the filter if one is due or begun; return whether one was put in force."""
        now = time.monotonic()
        if not (self.filter.building or (self._saturated and now >= self._rotate_from)):
            return False
        if self.follower and not self.follower.current:
            return False  # what the shared tier holds can't be copied now; a full filter is slow, not wrong
        with self.filter.rotating() as mine:
            if not mine:
                return False
            self.filter.begin_generation()
            await asyncio.to_thread(self._copy_disk)
            if self.follower:
                try:
                    await self.follower.walk_again()
                except SharedTierError:
                    return False
            await asyncio.to_thread(self.upkeep)
            # A filter that is too small for what the stores hold is full again at once: not in an endless loop.
            self._rotate_from = time.monotonic() + max(_ROTATION_PAUSE_S, 20 * (time.monotonic() - now))
            return self.filter.finish_generation()

    def _copy_disk(self) -> None:
        for layer, batch in self._disk_batches():
            self.filter.copy_into_next(layer, batch)

    def _disk_batches(self) -> Iterable[tuple[Layer, list[bytes]]]:
        if not self.disk:
            return
        batches: dict[Layer, list[bytes]] = {layer: [] for layer in Layer}
        for layer, member in self.disk.fingerprints():
            batches[layer].append(member)
            if len(batches[layer]) == 4096:
                yield layer, batches[layer]
                batches[layer] = []
        yield from batches.items()

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(_MAINTENANCE_S)
            try:
                await asyncio.to_thread(self.upkeep)
                await self.rotate()
                await self._shared_upkeep()
            except (CacheError, OSError, ValueError) as error:
                _log.warning("cache upkeep failed", error=str(error))

    async def _shared_upkeep(self) -> None:
        if not (self.shared and self.tracker and self.follower):
            return
        for what, purge in list(self._pending_purges.items()):
            with contextlib.suppress(SharedTierError):
                await purge()
                self._pending_purges.pop(what, None)
        telemetry.SHARED.labels("connected").set(self.tracker.connected)
        telemetry.SHARED.labels("current").set(self.follower.current)
        telemetry.SHARED.labels("lag_ms").set(self.follower.lag_ms)
        telemetry.SHARED.labels("breaker_open").set(self.shared.breaker.is_open)
        telemetry.SHARED.labels("pending_purges").set(len(self._pending_purges))


def _member(kind: str, name: str) -> bytes:
    """Return what stands for a member in the filter; the lengths keep two members from being one."""
    return fingerprint(f"member {len(kind)} {kind} {len(name)} {name}", policy=_AS_IT_IS)
