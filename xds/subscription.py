"""What one stream wants of one type, and where what it holds may differ from the snapshot.

Why only differences: a settled client costs a few hundred bytes whatever the size of the mesh, and a change costs work
for what changed. Of a name that is wanted and not listed as stale the client holds what the snapshot has.

Why apart from the stream: this is bookkeeping on names; the stream decides when something may be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from xds.errors import RefusedRequestError
from xds.pushes import Response
from xds.snapshot import Resource, Snapshot

__all__ = ["MAX_NAMES", "WILDCARD", "Subscription"]

WILDCARD: Final = "*"

MAX_NAMES: Final = 65_536
"""Names that one stream may subscribe to, per type: what a stream remembers is bounded."""

_RESOURCE_EXHAUSTED: Final = 8

_NOBODY: Final[frozenset[str]] = frozenset()


@dataclass(slots=True)
class Subscription:
    """State of one type on one stream.

    Attributes:
        type_url: The type.
        wildcard: Subscribed to everything.
        names: Subscribed to by name, as the client wrote them (aliases too); a frozenset is shared with other streams.
        named: Some request on this stream gave a name (X9).
        fresh: The client holds nothing yet; everything wanted is told at once.
        stale: Name → version that the client holds (None: nothing), where that may differ from the snapshot.
        forced: Names that must be told even when they are equal, or don't exist.
        gone: Removed resources that complete responses repeat until their removal is due.
        must_answer: Even an empty response must be sent: a fresh client waits for it.
        in_flight: The response that has neither ACK nor NACK yet; there is at most one, and changes gather behind it.
        last_number: Push number of the last response.
        waiting_since: Since when the type has been kept waiting for clusters to warm, or None.
        sent_version: Version of the last response.
        acked_version: Version of the last response that was acknowledged.
        error: Of the last NACK, until something is acknowledged.
        since: When the last response was sent or answered.
        armed: From when the watchdog counts.
        beat_at: When resources with a TTL must be confirmed, or None.
        request: The request without version and nonce, where that is all that varies (state of the world).
    """

    type_url: str
    wildcard: bool = False
    names: Set[str] = _NOBODY
    named: bool = False
    fresh: bool = True
    stale: dict[str, str | None] = field(default_factory=dict)
    forced: set[str] = field(default_factory=set)
    gone: dict[str, Resource] = field(default_factory=dict)
    must_answer: bool = False
    in_flight: Response | None = None
    last_number: int = 0
    waiting_since: float | None = None
    sent_version: str = ""
    acked_version: str = ""
    error: str = ""
    since: float = 0.0
    armed: float = 0.0
    beat_at: float | None = None
    request: bytes | None = None

    @property
    def pending(self) -> bool:
        """Something may have to be sent."""
        return self.fresh or bool(self.stale) or bool(self.forced) or self.must_answer

    @property
    def settled(self) -> bool:
        """The client holds what it wants, and has said so or refused it."""
        return not (self.in_flight is not None or self.stale or self.forced or self.fresh or self.must_answer)

    @property
    def unsettled(self) -> bool:
        """The client has not taken everything that it was, or will be, told."""
        return self.in_flight is not None or self.pending or bool(self.error)

    def held(self, snapshot: Snapshot | None) -> set[str]:
        """Return the names that the client holds, or is about to."""
        if self.fresh or snapshot is None:
            return {name for name, version in self.stale.items() if version is not None}
        there = snapshot.of_type(self.type_url)
        wanted = set(there) if self.wildcard else self._wanted(there, snapshot)
        for name, version in self.stale.items():
            (wanted.discard if version is None else wanted.add)(name)
        return wanted

    # --- subscribing

    def begin(self, names: frozenset[str], *, wildcard: bool, held: Mapping[str, str]) -> None:
        """Take the first request of the type on this stream.

        ``held`` are versions of what the client still holds from an earlier stream; equal ones are not sent again.
        """
        _bound(len(names))
        self.names = names
        self.wildcard = wildcard
        self.named = bool(names)
        if held:
            self.fresh = False
            self.stale = {name: version for name, version in held.items() if wildcard or name in names}
            self.forced = set(names) - self.stale.keys()
        # A fresh client waits for a first answer, even an empty one; one that comes back must not be told anything
        # that it knows.
        self.must_answer = wildcard and not held

    def subscribe(self, names: Iterable[str], snapshot: Snapshot | None) -> None:
        """Take a later subscription: each name is sent whatever the client holds; ``*`` means every resource."""
        named = list(names)
        if not named:
            return
        if WILDCARD in named:
            self.wildcard = True
            self.must_answer = True
            if snapshot is not None:
                self.forced |= snapshot.of_type(self.type_url).keys()
        asked = [name for name in named if name != WILDCARD]
        if asked:
            own = self._own_names()
            own.update(asked)
            _bound(len(own))
            self.forced.update(asked if snapshot is None else (snapshot.canonical(self.type_url, n) for n in asked))

    def unsubscribe(self, names: Iterable[str], snapshot: Snapshot | None) -> None:
        """Forget names; unknown ones are ignored.

        A name dropped while the wildcard goes on must be answered: as the wildcard has it, or as removed.
        """
        named = list(names)
        if WILDCARD in named and self.wildcard:
            self.wildcard = False
            self.must_answer = False
            self._forget_unwanted(snapshot)
        for name in named:
            if name not in self.names:
                continue
            self._own_names().discard(name)
            resource = name if snapshot is None else snapshot.canonical(self.type_url, name)
            if self.wildcard:
                self.forced.add(resource)
            elif not self._wants(resource, snapshot):
                self.stale.pop(resource, None)
                self.forced.discard(resource)

    def replace(self, names: frozenset[str], snapshot: Snapshot | None, *, wildcard: bool) -> None:
        """Take a state-of-the-world subscription, which replaces the one before; what is new in it is sent (X8)."""
        if names == self.names and wildcard == self.wildcard:
            return
        _bound(len(names))
        new = names - self.names
        began = wildcard and not self.wildcard
        self.names, self.wildcard = names, wildcard
        self.forced |= new
        if began:
            self.must_answer = True
            if snapshot is not None:
                self.forced |= snapshot.of_type(self.type_url).keys()
        if not wildcard:
            self.must_answer = False
            self._forget_unwanted(snapshot)

    # --- changes

    def note_change(self, changed: frozenset[str], old: Snapshot, new: Snapshot) -> bool:
        """Remember names that changed in the snapshot, as far as they are wanted; return whether any is."""
        if self.fresh:
            return True
        if self.wildcard:
            wanted: Iterable[str] = changed
        else:
            wanted = changed & self.names
            for aliases in (old.aliases(self.type_url), new.aliases(self.type_url)):
                if aliases:
                    wanted = {*wanted, *(aliases[name] for name in aliases.keys() & self.names)} & changed
        before = old.of_type(self.type_url)
        for name in wanted:
            if name not in self.stale:
                was = before.get(name)
                self.stale[name] = was.version if was is not None else None
        return bool(wanted)

    def note_gone(self, changed: frozenset[str], old: Snapshot, new: Snapshot) -> None:
        """Keep resources that went, so that complete responses can repeat them until they may go."""
        before, after = old.of_type(self.type_url), new.of_type(self.type_url)
        for name in changed:
            if name in after:
                self.gone.pop(name, None)
            elif name in before and self.stale.get(name) is not None:
                self.gone[name] = before[name]

    def note_everything(self, snapshot: Snapshot) -> None:
        """Compare everything wanted with a snapshot seen for the first time."""
        if self.fresh:
            return
        there = snapshot.of_type(self.type_url)
        for name in there if self.wildcard else self._wanted(there, snapshot):
            self.stale.setdefault(name, None)

    def note_awaited(self, names: Set[str], snapshot: Snapshot | None) -> None:
        """Remember resources that others wait for; a client that has not asked for them will ask."""
        if not self.fresh:
            there = snapshot.of_type(self.type_url) if snapshot is not None and self.wildcard else {}
            self.forced.update(name for name in names if name in self.names or name in there or name in self.stale)

    # --- responses

    def sent(self, response: Response, now: float) -> None:
        """Book a response: the client holds what it says from here on, until something says otherwise."""
        self.in_flight = response
        self.last_number = response.number
        self.sent_version = response.version
        self.since = self.armed = now

    def told(self, kept_back: Iterable[str] = ()) -> None:
        """Nothing is left to tell but removals that are kept back."""
        self.stale = {name: self.stale[name] for name in kept_back}
        self.gone = {name: self.gone[name] for name in self.stale if name in self.gone}
        self.forced.clear()
        self.fresh = False
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

    def _wants(self, name: str, snapshot: Snapshot | None) -> bool:
        if self.wildcard or name in self.names:
            return True
        resource = snapshot.of_type(self.type_url).get(name) if snapshot is not None else None
        return resource is not None and any(alias in self.names for alias in resource.aliases)

    def _wanted(self, there: Mapping[str, Resource], snapshot: Snapshot) -> set[str]:
        found = set(there.keys() & self.names)
        aliases = snapshot.aliases(self.type_url)
        if aliases:
            found.update(aliases[name] for name in aliases.keys() & self.names)
        return found

    def _forget_unwanted(self, snapshot: Snapshot | None) -> None:
        self.stale = {name: version for name, version in self.stale.items() if self._wants(name, snapshot)}
        self.forced = {name for name in self.forced if self._wants(name, snapshot)}
        self.gone = {name: resource for name, resource in self.gone.items() if name in self.stale}

    def _own_names(self) -> set[str]:
        """Return the names as a set that may be changed, which the shared one must not be."""
        self.named = True
        if not isinstance(self.names, set):
            self.names = set(self.names)
        return self.names


def _bound(count: int) -> None:
    if count > MAX_NAMES:
        raise RefusedRequestError(
            f"more than {MAX_NAMES} names are subscribed to", grpc_status=_RESOURCE_EXHAUSTED, hint="use «*»"
        )
