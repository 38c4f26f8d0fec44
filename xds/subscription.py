"""What one stream wants of one type, what it holds, and what it has still to be told.

Why apart from the stream: this is bookkeeping on names; the stream decides when something may be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from xds.errors import RefusedRequestError
from xds.pushes import Response
from xds.snapshot import Resource, Snapshot

__all__ = ["MAX_NAMES", "WILDCARD", "Draft", "Subscription"]

WILDCARD: Final = "*"

MAX_NAMES: Final = 65_536
"""Names that one stream may subscribe to, per type: what a stream remembers is bounded."""

_RESOURCE_EXHAUSTED: Final = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """What the next response would hold; ``kept_back`` names removals whose time has not come."""

    resources: tuple[Resource, ...]
    removed: tuple[str, ...]
    kept_back: frozenset[str]


@dataclass(slots=True)
class Subscription:
    """State of one type on one stream.

    Attributes:
        wildcard: Subscribed to everything.
        names: Subscribed to by name.
        held: Name → version that the client holds or is about to.
        dirty: Names that may differ from what the client holds.
        forced: Names that must be told even when they are equal, or don't exist.
        must_answer: Even an empty response must be sent: a fresh client waits for it.
        in_flight: The response that has neither ACK nor NACK yet; there is at most one, and changes gather behind it.
        last_number: Push number of the last response.
        waiting_since: Since when the type has been kept waiting for clusters to warm, or None.
    """

    wildcard: bool = False
    names: set[str] = field(default_factory=set)
    held: dict[str, str] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    forced: set[str] = field(default_factory=set)
    must_answer: bool = False
    in_flight: Response | None = None
    last_number: int = 0
    waiting_since: float | None = None
    sent_version: str = ""
    acked_version: str = ""
    error: str = ""
    since: float = 0.0

    @property
    def pending(self) -> bool:
        """Something may have to be sent."""
        return bool(self.dirty or self.forced or self.must_answer)

    @property
    def unsettled(self) -> bool:
        """The client has not taken everything that it was, or will be, told."""
        return bool(self.in_flight or self.pending or self.error)

    def begin(self, names: Iterable[str], *, wildcard: bool, initial_versions: Mapping[str, str]) -> None:
        """Take the first request of the type on this stream.

        ``initial_versions`` are what the client still holds from an earlier stream; equal ones are not sent again.
        """
        self.wildcard = wildcard
        self._add(names)
        self.held = {name: version for name, version in initial_versions.items() if wildcard or name in self.names}
        self.forced = self.names - self.held.keys()
        self.dirty = set(self.held)
        # A fresh client waits for a first answer, even an empty one; one that comes back must not be told anything
        # that it knows.
        self.must_answer = wildcard and not initial_versions

    def subscribe(self, names: Iterable[str], snapshot: Snapshot | None, type_url: str) -> None:
        """Take a later subscription: each name is sent whatever the client holds; ``*`` means every resource."""
        named = list(names)
        if WILDCARD in named:
            self.wildcard = True
            self.must_answer = True
            if snapshot is not None:
                self.forced |= snapshot.of_type(type_url).keys()
        asked = [name for name in named if name != WILDCARD]
        self._add(asked)
        self.forced.update(asked)

    def unsubscribe(self, names: Iterable[str]) -> None:
        """Forget names; unknown ones are ignored.

        A name dropped while the wildcard goes on must be answered: as the wildcard has it, or as removed.
        """
        named = list(names)
        if WILDCARD in named and self.wildcard:
            self.wildcard = False
            self.must_answer = False
            self.held = {name: version for name, version in self.held.items() if name in self.names}
            self.dirty &= self.names
            self.forced &= self.names
        for name in named:
            if name not in self.names:
                continue
            self.names.discard(name)
            if self.wildcard:
                self.forced.add(name)
            else:
                self.held.pop(name, None)
                self.dirty.discard(name)
                self.forced.discard(name)

    def note_change(self, names: frozenset[str]) -> None:
        """Remember names that changed in the snapshot, as far as they are wanted."""
        self.dirty |= names if self.wildcard else names & self.names

    def note_everything(self, snapshot: Snapshot, type_url: str) -> None:
        """Compare everything wanted with a snapshot seen for the first time."""
        there = snapshot.of_type(type_url).keys()
        self.dirty |= there if self.wildcard else there & self.names

    def note_awaited(self, names: Set[str]) -> None:
        """Remember resources that others wait for; a client that has not asked for them will ask."""
        self.forced |= names & (self.names | self.held.keys())

    def draft(self, there: Mapping[str, Resource], *, keep_back_removals: bool) -> Draft:
        """Return what there is to tell now."""
        resources: list[Resource] = []
        removed: list[str] = []
        kept_back: set[str] = set()
        for name in sorted(self.dirty | self.forced):
            resource = there.get(name)
            if resource is not None:
                if name in self.forced or self.held.get(name) != resource.version:
                    resources.append(resource)
            elif name in self.forced:
                removed.append(name)
            elif name in self.held:
                if keep_back_removals:
                    kept_back.add(name)
                else:
                    removed.append(name)
        return Draft(tuple(resources), tuple(removed), frozenset(kept_back))

    def sent(self, response: Response, kept_back: frozenset[str], now: float) -> None:
        """Book a response: the client holds it from here on, until something says otherwise."""
        for resource in response.resources:
            self.held[resource.name] = resource.version
        for name in response.removed:
            self.held.pop(name, None)
        self.in_flight = response
        self.last_number = response.number
        self.sent_version = response.version
        self.since = now
        self.told(kept_back)

    def told(self, kept_back: frozenset[str]) -> None:
        """Nothing is left to tell but removals that are kept back."""
        self.dirty = set(kept_back)
        self.forced = set()
        self.must_answer = False
        self.waiting_since = None

    def answered(self, error: str | None, now: float) -> None:
        """Book ACK (None) or NACK of the response in flight. After a NACK the same is not sent again."""
        if self.in_flight is None:
            return
        if error is None:
            self.acked_version = self.in_flight.version
            self.error = ""
        else:
            self.error = error
        self.in_flight = None
        self.since = now

    def _add(self, names: Iterable[str]) -> None:
        self.names.update(names)
        if len(self.names) > MAX_NAMES:
            raise RefusedRequestError(
                f"more than {MAX_NAMES} names are subscribed to", grpc_status=_RESOURCE_EXHAUSTED, hint="use «*»"
            )
