"""The incremental xDS protocol of one ADS stream, as a state machine without I/O.

Events go in (a decoded request, «the snapshot changed», «time passed»), responses come out. The rules are those of
Envoy's «xDS REST and gRPC protocol»; the names of its sections stand where a rule is carried out. What the document
leaves open, and how it is decided here:

- One response per type is in flight. What changes meanwhile gathers by name and is sent, in its latest form, after the
  ACK or NACK: a slow client costs memory for names, not for responses.
- No snapshot yet (the control plane is starting) is not an empty snapshot: nothing is answered until there is one,
  or clients that come back would be told to drop everything.
- The first wildcard request of a type is always answered, if need be with an empty response, since a fresh client waits
  for it (Envoy's init manager for up to 15 s). Only a request that carries initial_resource_versions, so comes from
  a client that has been served before, gets no answer when nothing differs. A client that comes back holding nothing
  can't be told from a fresh one and gets the empty response, which changes nothing.
- Listeners and routes wait for the ACK of clusters sent before them, since Envoy gives it when they are warm,
  but no longer than ``WARM_LIMIT``. Clusters and endpoints are removed when listeners and routes that could refer to
  them are acknowledged; a NACKed one may refer to them still.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from xds.errors import RefusedRequestError
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.google.rpc import status_pb2
from xds.pushes import Pushes, Response
from xds.snapshot import Snapshot
from xds.subscription import WILDCARD, Subscription
from xds.types import CLUSTER, LEGACY_WILDCARD, LISTENER, REMOVED_LAST, ROUTE, push_rank, short_name
from xds.warming import WAITS_FOR, awaited_names

__all__ = ["MAX_TYPES", "RESUME_GRACE", "WARM_LIMIT", "Answer", "DeltaStream"]

MAX_TYPES: Final = 64
"""Types that one stream may ask for."""

WARM_LIMIT: Final = 5.0
"""Seconds that listeners and routes wait for clusters. A cluster may warm for 15 s (Envoy's initial_fetch_timeout, or
a first health check); one that is stuck must not stop routes for good."""

RESUME_GRACE: Final = 1.0
"""Seconds after which a client that came back is told of removed clusters and endpoints. It asks for clusters before it
asks for routes, so at first there is no telling whether its routes refer to them."""

_MAX_ERROR: Final = 4096
"""Characters kept of a NACK's message."""

Answer: TypeAlias = Literal["ack", "nack"]

_REFERRERS: Final = (LISTENER, ROUTE)


class DeltaStream:
    """One ADS stream of one client.

    Args:
        snapshot: What the client's group holds now; None: nothing is known yet.
        pushes: The process's push numbers.
        now: Seconds on the caller's clock, here and in every event; never decreasing.
    """

    def __init__(self, snapshot: Snapshot | None, pushes: Pushes, now: float) -> None:
        self.node = base_pb2.Node()
        self._snapshot = snapshot
        self._pushes = pushes
        self._opened = now
        self._resumed = False
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

    def on_request(self, request: discovery_pb2.DeltaDiscoveryRequest, now: float) -> list[Response]:
        """Take a request; return responses in the order in which they must be sent.

        Raises:
            RefusedRequestError: The request breaks the protocol or a limit; the stream must end.
        """
        # «type_url» is always set on an aggregated stream [Aggregated Discovery Service].
        if not request.type_url:
            raise RefusedRequestError("type_url is missing; an aggregated stream needs it in every request")
        # The node is guaranteed in the first request only [Basic Protocol Overview].
        if not self._types:
            if not request.HasField("node"):
                raise RefusedRequestError("node is missing in the first request of the stream")
            self.node.CopyFrom(request.node)
        subscription = self._types.get(request.type_url)
        if subscription is None:
            self._begin(request, now)
        else:
            answer = self.answer_of(request)
            if answer is not None:
                self._answer(subscription, answer, request.error_detail, now)
            subscription.subscribe(request.resource_names_subscribe, self._snapshot, request.type_url)
            subscription.unsubscribe(request.resource_names_unsubscribe)
        return self._flush(now)

    def answer_of(self, request: discovery_pb2.DeltaDiscoveryRequest) -> Answer | None:
        """Return what a request says about the response in flight, before it is taken.

        A NACK is a request with error_detail, nothing else [ACK and NACK]. The nonce pairs; a stale one pairs with
        nothing, and the request's subscriptions count all the same [Incremental xDS].
        """
        subscription = self._types.get(request.type_url)
        if subscription is None or subscription.in_flight is None:
            return None
        if request.response_nonce != subscription.in_flight.nonce:
            return None
        return "nack" if request.HasField("error_detail") else "ack"

    def on_snapshot(self, snapshot: Snapshot, changed: Mapping[str, frozenset[str]], now: float) -> list[Response]:
        """Take a new snapshot; ``changed`` is ``snapshot.changed_since(the one before)``, unused if there was none."""
        first = self._snapshot is None
        self._snapshot = snapshot
        if first:
            for type_url, subscription in self._types.items():
                subscription.note_everything(snapshot, type_url)
        else:
            for type_url, names in changed.items():
                if type_url in self._types:
                    self._types[type_url].note_change(names)
        return self._flush(now)

    def on_tick(self, now: float) -> list[Response]:
        """Let time pass: what waited long enough is returned."""
        if any(subscription.pending for subscription in self._types.values()):
            return self._flush(now)
        return []

    def overdue(self, now: float, limit: float) -> str | None:
        """Return the type whose response has had no ACK or NACK for ``limit`` seconds, if any."""
        for type_url, subscription in self._types.items():
            if subscription.in_flight is not None and now - subscription.since >= limit:
                return type_url
        return None

    def _begin(self, request: discovery_pb2.DeltaDiscoveryRequest, now: float) -> None:
        if len(self._types) >= MAX_TYPES:
            raise RefusedRequestError(f"more than {MAX_TYPES} types are asked for on one stream", grpc_status=8)
        subscription = Subscription(since=now)
        asked = set(request.resource_names_subscribe)
        legacy = not asked and request.type_url in LEGACY_WILDCARD
        subscription.begin(
            asked - {WILDCARD},
            wildcard=WILDCARD in asked or legacy,
            initial_versions=request.initial_resource_versions,
        )
        subscription.unsubscribe(request.resource_names_unsubscribe)
        subscription.note_awaited(self._awaited.pop(request.type_url, set()))
        if self._snapshot is not None:
            subscription.note_everything(self._snapshot, request.type_url)
        self._resumed = self._resumed or bool(request.initial_resource_versions)
        self._types[request.type_url] = subscription
        self._types = {url: self._types[url] for url in sorted(self._types, key=push_rank)}

    @staticmethod
    def _answer(
        subscription: Subscription,
        answer: Answer,
        error: status_pb2.Status,
        now: float,
    ) -> None:
        if answer == "nack":
            message = error.message or f"refused with code {error.code}"
            subscription.answered(message[:_MAX_ERROR], now)
        else:
            subscription.answered(None, now)

    def _flush(self, now: float) -> list[Response]:
        """Return what may be sent now, in push order, clusters and endpoints removed last [Eventual consistency]."""
        if self._snapshot is None:
            return []
        responses: list[Response] = []
        for type_url, subscription in self._types.items():
            if not self._waits_for_clusters(type_url, subscription, now):
                self._send(type_url, subscription, responses, now, keep_back_removals=type_url in REMOVED_LAST)
        if not self._may_be_referred_to(now):
            for type_url in REMOVED_LAST:
                if type_url in self._types:
                    self._send(type_url, self._types[type_url], responses, now, keep_back_removals=False)
        return responses

    def _send(
        self,
        type_url: str,
        subscription: Subscription,
        responses: list[Response],
        now: float,
        *,
        keep_back_removals: bool,
    ) -> None:
        if subscription.in_flight is not None or self._snapshot is None:
            return
        version = self._snapshot.version(type_url)
        if subscription.pending:
            draft = subscription.draft(self._snapshot.of_type(type_url), keep_back_removals=keep_back_removals)
            if draft.resources or draft.removed or subscription.must_answer:
                response = self._pushes.response(
                    type_url, version, draft.resources, draft.removed, after=subscription.last_number
                )
                subscription.sent(response, draft.kept_back, now)
                self._note_awaited(response)
                responses.append(response)
                return
            subscription.told(draft.kept_back)
        if not subscription.unsettled and (subscription.held or subscription.last_number):
            # What changed is nothing that this client wants: it is as current as the snapshot.
            subscription.sent_version = subscription.acked_version = version

    def _note_awaited(self, response: Response) -> None:
        """Send along what changed resources warm with, even if that is unchanged [Resource warming]."""
        type_url = WAITS_FOR.get(response.type_url)
        if type_url is None:
            return
        names = {name for resource in response.resources for name in awaited_names(resource)}
        if type_url in self._types:
            self._types[type_url].note_awaited(names)
        else:
            self._awaited.setdefault(type_url, set()).update(names)

    def _waits_for_clusters(self, type_url: str, subscription: Subscription, now: float) -> bool:
        clusters = self._types.get(CLUSTER)
        if type_url not in _REFERRERS or clusters is None or clusters.in_flight is None or not subscription.pending:
            return False
        if subscription.waiting_since is None:
            subscription.waiting_since = now
        return now - subscription.waiting_since < WARM_LIMIT

    def _may_be_referred_to(self, now: float) -> bool:
        if self._resumed and now - self._opened < RESUME_GRACE:
            return True
        return any(url in self._types and self._types[url].unsettled for url in _REFERRERS)

    def __repr__(self) -> str:
        return f"DeltaStream({self.node.id!r}, {[short_name(url) for url in self._types]})"
