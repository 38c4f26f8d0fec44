"""What both variants of an ADS stream share: types, order, warming, heartbeats, and what is overdue; without I/O.

Events go in (a decoded request, «the snapshot changed», «time passed»), responses come out. The rules are those of
Envoy's «xDS REST and gRPC protocol»; the names of its sections stand where a rule is carried out. What the document
leaves open, and how it is decided here:

- One response per type is in flight. What changes meanwhile gathers by name and is sent, in its latest form, after the
  ACK or NACK: a slow client costs memory for names, not for responses.
- No snapshot yet (the control plane is starting) is not an empty snapshot: nothing is answered until there is one,
  or clients that come back would be told to drop everything.
- Listeners and routes wait for the ACK of clusters sent before them, since Envoy gives it when they are warm,
  but no longer than ``WARM_LIMIT``. Clusters and endpoints are removed when listeners and routes that could refer to
  them are acknowledged; a NACKed one may refer to them still.
- Resources with a TTL are confirmed together, each type at half of its shortest TTL.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from xds.errors import RefusedRequestError
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.google.rpc import status_pb2
from xds.pushes import Form, Pushes, Response
from xds.snapshot import Resource, Snapshot
from xds.subscription import Subscription
from xds.types import CLUSTER, LISTENER, REMOVED_LAST, ROUTE, push_rank, short_name
from xds.warming import WAITS_FOR

__all__ = ["MAX_TYPES", "WARM_LIMIT", "AdsState", "Answer", "Draft", "News"]

MAX_TYPES: Final = 64
"""Types that one stream may ask for."""

WARM_LIMIT: Final = 5.0
"""Seconds that listeners and routes wait for clusters. A cluster may warm for 15 s (Envoy's initial_fetch_timeout, or
a first health check); one that is stuck must not stop routes for good."""

_MAX_ERROR: Final = 4096
"""Characters kept of a NACK's message."""

_RESOURCE_EXHAUSTED: Final = 8

Answer: TypeAlias = Literal["ack", "nack"]

_REFERRERS: Final = (LISTENER, ROUTE)

_ENTANGLED: Final = (*WAITS_FOR, *_REFERRERS)
"""Types whose changes bring or wait for those of others."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What the next response of a type would hold.

    Attributes:
        needed: There is something to say.
        resources: To be sent.
        removed: Names to be sent.
        version: Of the response.
        kept_back: Names of removals whose time has not come.
        changed: The resources that are news for the client, where ``resources`` repeats others.
        key: Stands for the resources, where that is cheaper than comparing them.
    """

    needed: bool
    resources: tuple[Resource, ...]
    removed: tuple[str, ...]
    version: str
    kept_back: tuple[str, ...] = ()
    changed: Iterable[Resource] | None = None
    key: Hashable = None


class News:
    """What a new snapshot changes, shared by all streams of a group.

    Most clients of a fleet ask for the same and hold the same, so what one is told, all are: it is remembered here.

    Args:
        changed: Names by type: ``snapshot.changed_since(the one before)``; unused where there was none.
    """

    __slots__ = ("changed", "told", "type_url")

    def __init__(self, changed: Mapping[str, frozenset[str]]) -> None:
        self.changed = changed
        # The one type that changed, if its news need nothing of other types and nothing of them waits.
        self.type_url = next(iter(changed)) if len(changed) == 1 and changed.keys().isdisjoint(_ENTANGLED) else ""
        self.told: dict[Hashable, list[Response]] = {}


class AdsState(abc.ABC):
    """One ADS stream of one client.

    Args:
        snapshot: What the client's group holds now; None: nothing is known yet.
        pushes: The process's push numbers.
        now: Seconds on the caller's clock, here and in every event; never decreasing.
    """

    form: Form = Form.DELTA

    def __init__(self, snapshot: Snapshot | None, pushes: Pushes, now: float) -> None:
        self.node = base_pb2.Node()
        self._snapshot = snapshot
        self._pushes = pushes
        self._opened = now
        self._types: dict[str, Subscription] = {}
        # By type, as long as that is not asked for. A client that comes back says what it holds of each type before it
        # knows that what waits for it has changed.
        self._awaited: dict[str, set[str]] = {}

    @property
    def types(self) -> Mapping[str, Subscription]:
        """State by type, in push order; to be read only."""
        return self._types

    @property
    def snapshot(self) -> Snapshot | None:
        """What the client shall hold."""
        return self._snapshot

    def on_ack(self, subscription: Subscription, now: float) -> list[Response]:
        """Take the plain ACK of the response in flight: it says nothing else, so it need not be parsed."""
        subscription.answered(None, now)
        return self._flush(now)

    def on_snapshot(self, snapshot: Snapshot, news: News, now: float) -> list[Response]:
        """Take a new snapshot, and what it changes."""
        old, self._snapshot = self._snapshot, snapshot
        if old is None:
            for subscription in self._types.values():
                subscription.note_everything(snapshot)
            return self._flush(now)
        if news.type_url:
            only = self._types.get(news.type_url)
            if only is None:
                return []
            if only.settled and only.beat_at is None:
                return self._as_told(only, old, snapshot, news, now)
        return self._take(old, snapshot, news.changed, now)

    def _as_told(
        self, subscription: Subscription, old: Snapshot, new: Snapshot, news: News, now: float
    ) -> list[Response]:
        """Tell a client that holds everything what another one in its place was told."""
        key = (self.form, subscription.wildcard, subscription.names if not subscription.wildcard else None)
        if not subscription.wildcard and not isinstance(subscription.names, frozenset):
            return self._take(old, new, news.changed, now)
        told = news.told.get(key)
        if told is not None:
            if not told:
                return told
            if told[0].number > subscription.last_number:
                subscription.sent(told[0], now)
                return told
        responses = self._take(old, new, news.changed, now)
        # Whether a removal may be told depends on the client's other types.
        if not subscription.pending and not any(item.removed for item in responses):
            news.told[key] = responses
        return responses

    def _take(self, old: Snapshot, new: Snapshot, changed: Mapping[str, frozenset[str]], now: float) -> list[Response]:
        touched = False
        for type_url, names in changed.items():
            wanted = self._types.get(type_url)
            if wanted is not None and wanted.note_change(names, old, new):
                self._note_change(wanted, names, old, new)
                touched = True
        return self._flush(now) if touched else []

    def on_tick(self, now: float) -> list[Response]:
        """Let time pass: what waited long enough is returned."""
        responses: list[Response] = []
        if any(subscription.pending for subscription in self._types.values()):
            responses = self._flush(now)
        if self._snapshot is not None and self._snapshot.lives_shortly and self._knows_ttl():
            for subscription in self._types.values():
                if subscription.in_flight is None and not subscription.fresh:
                    responses += self._beat(subscription, self._snapshot, now)
        return responses

    def overdue(self, now: float, limit: float, warming_limit: float) -> str | None:
        """Return the type whose response has had no ACK or NACK for too long, if any.

        Args:
            now: Seconds.
            limit: Seconds.
            warming_limit: Seconds, for types that a client acknowledges when they are warm. It does not run while the
                client waits for resources that the server has yet to send.
        """
        for type_url, subscription in self._types.items():
            if subscription.in_flight is None:
                continue
            if type_url in WAITS_FOR and self._waits_for_server(subscription):
                subscription.armed = now
                continue
            if now - subscription.armed >= (warming_limit if type_url in WAITS_FOR else limit):
                return type_url
        return None

    # --- for the variants

    @abc.abstractmethod
    def _draft(self, subscription: Subscription, snapshot: Snapshot, *, keep_back_removals: bool) -> Draft:
        """Return what there is to tell of a type now."""

    @abc.abstractmethod
    def _says_what_is_missing(self) -> bool:
        """Whether a client is told that a name does not exist."""

    @abc.abstractmethod
    def _note_change(self, subscription: Subscription, changed: frozenset[str], old: Snapshot, new: Snapshot) -> None:
        """Take note of a change that is wanted, beyond what every variant does."""

    def _may_be_referred_to(self, now: float) -> bool:
        """Whether a listener or route of the client may refer to clusters that are gone."""
        del now
        return any(url in self._types and self._types[url].unsettled for url in _REFERRERS)

    def _admit(self, type_url: str, node: base_pb2.Node | None) -> None:
        """Check what every request must have.

        Raises:
            RefusedRequestError: It does not.
        """
        # «type_url» is always set on an aggregated stream [Aggregated Discovery Service].
        if not type_url:
            raise RefusedRequestError("type_url is missing; an aggregated stream needs it in every request")
        # The node is guaranteed in the first request only [Basic Protocol Overview].
        if not self._types:
            if node is None:
                raise RefusedRequestError("node is missing in the first request of the stream")
            self.node.CopyFrom(node)

    def _begin(self, subscription: Subscription, now: float) -> None:
        if len(self._types) >= MAX_TYPES:
            raise RefusedRequestError(
                f"more than {MAX_TYPES} types are asked for on one stream", grpc_status=_RESOURCE_EXHAUSTED
            )
        type_url = subscription.type_url
        subscription.since = subscription.armed = now
        if self._snapshot is not None:
            subscription.note_everything(self._snapshot)
        subscription.note_awaited(self._awaited.pop(type_url, set()), self._snapshot)
        self._types[type_url] = subscription
        self._types = {url: self._types[url] for url in sorted(self._types, key=push_rank)}

    @staticmethod
    def _answer(subscription: Subscription, answer: Answer | None, error: status_pb2.Status, now: float) -> None:
        if answer == "nack":
            message = error.message or f"refused with code {error.code}"
            subscription.answered(message[:_MAX_ERROR], now)
        elif answer == "ack":
            subscription.answered(None, now)

    def _flush(self, now: float) -> list[Response]:
        """Return what may be sent now, in push order, clusters and endpoints removed last [Eventual consistency]."""
        snapshot = self._snapshot
        if snapshot is None:
            return []
        responses: list[Response] = []
        for type_url, subscription in self._types.items():
            if subscription.in_flight is not None or not subscription.pending:
                continue
            if type_url not in _REFERRERS or not self._waits_for_clusters(subscription, now):
                self._send(subscription, snapshot, responses, now, keep_back_removals=type_url in REMOVED_LAST)
        for type_url in REMOVED_LAST:
            late = self._types.get(type_url)
            if late is None or late.in_flight is not None or not late.pending:
                continue
            if not self._may_be_referred_to(now):
                self._send(late, snapshot, responses, now, keep_back_removals=False)
        return responses

    def _send(
        self,
        subscription: Subscription,
        snapshot: Snapshot,
        responses: list[Response],
        now: float,
        *,
        keep_back_removals: bool,
    ) -> None:
        draft = self._draft(subscription, snapshot, keep_back_removals=keep_back_removals)
        subscription.told(draft.kept_back)
        if not draft.needed:
            return
        response = self._pushes.response(
            self.form,
            subscription.type_url,
            draft.version,
            draft.resources,
            draft.removed,
            after=subscription.last_number,
            key=draft.key,
        )
        subscription.sent(response, now)
        self._set_beat(subscription, snapshot, now)
        self._note_awaited(response, draft)
        responses.append(response)

    def _note_awaited(self, response: Response, draft: Draft) -> None:
        """Send along what changed resources warm with, even if that is unchanged [Resource warming]."""
        type_url = WAITS_FOR.get(response.type_url)
        if type_url is None:
            return
        if draft.changed is None:
            names: set[str] | frozenset[str] = response.awaits
        else:
            names = {name for resource in draft.changed for name in resource.awaits}
        if not names:
            return
        if type_url in self._types:
            self._types[type_url].note_awaited(names, self._snapshot)
        else:
            self._awaited.setdefault(type_url, set()).update(names)

    def _waits_for_clusters(self, subscription: Subscription, now: float) -> bool:
        clusters = self._types.get(CLUSTER)
        if clusters is None or clusters.in_flight is None:
            return False
        if subscription.waiting_since is None:
            subscription.waiting_since = now
        return now - subscription.waiting_since < WARM_LIMIT

    def _waits_for_server(self, subscription: Subscription) -> bool:
        """Whether a response can't be acknowledged before the server sends something else."""
        awaited = self._types.get(WAITS_FOR[subscription.type_url])
        if awaited is None or subscription.in_flight is None:
            return False
        names = subscription.in_flight.awaits
        if not names:
            return False
        if awaited.fresh:  # not answered yet: there is no snapshot, or it waits for clusters
            return True
        if any(name in names for name in (*awaited.stale, *awaited.forced)):
            return True
        if self._says_what_is_missing() or self._snapshot is None:
            return False
        there = self._snapshot.of_type(awaited.type_url)
        return any(name not in there for name in names if name in awaited.names)

    def _set_beat(self, subscription: Subscription, snapshot: Snapshot, now: float) -> None:
        living = snapshot.with_ttl(subscription.type_url) if self._knows_ttl() else ()
        shortest = min((resource.ttl for resource in living if resource.ttl is not None), default=None)
        subscription.beat_at = None if shortest is None else now + shortest / 2

    def _knows_ttl(self) -> bool:
        return True

    def _beat(self, subscription: Subscription, snapshot: Snapshot, now: float) -> list[Response]:
        """Confirm resources that have a TTL, as long as the client holds them [Resource TTL]."""
        if subscription.beat_at is None:  # it came back holding them
            self._set_beat(subscription, snapshot, now)
        if subscription.beat_at is None or now < subscription.beat_at:
            return []
        held = subscription.held(snapshot)
        living = tuple(
            resource
            for resource in snapshot.with_ttl(subscription.type_url)
            if resource.name in held and resource.name not in subscription.stale
        )
        self._set_beat(subscription, snapshot, now)
        return [self._heartbeat(subscription, snapshot, living, now)] if living else []

    def _heartbeat(
        self, subscription: Subscription, snapshot: Snapshot, living: tuple[Resource, ...], now: float
    ) -> Response:
        response = self._pushes.response(
            self.form,
            subscription.type_url,
            snapshot.version(subscription.type_url),
            living,
            after=subscription.last_number,
            heartbeat=True,
        )
        subscription.sent(response, now)
        return response

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.node.id!r}, {[short_name(url) for url in self._types]})"
