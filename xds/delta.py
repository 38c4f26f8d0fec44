"""The incremental variant of an ADS stream (``stream`` has what both share).

Decided here, where the protocol leaves it open: the first wildcard request of a type is always answered, if need be
with an empty response, since a fresh client waits for it (Envoy's init manager for up to 15 s). Only a request that
carries initial_resource_versions, so comes from a client that has been served before, gets no answer when nothing
differs. A client that comes back holding nothing can't be told from a fresh one and gets the empty response, which
changes nothing.
"""

from __future__ import annotations

from typing import Final

from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Form, Pushes, Response
from xds.snapshot import Resource, Snapshot
from xds.stream import AdsState, Answer, Draft
from xds.subscription import WILDCARD, Subscription
from xds.types import LEGACY_WILDCARD

__all__ = ["RESUME_GRACE", "DeltaStream"]

RESUME_GRACE: Final = 1.0
"""Seconds after which a client that came back is told of removed clusters and endpoints. It asks for clusters before it
asks for routes, so at first there is no telling whether its routes refer to them."""


class DeltaStream(AdsState):
    """One delta ADS stream of one client."""

    form = Form.DELTA

    def __init__(self, snapshot: Snapshot | None, pushes: Pushes, now: float) -> None:
        super().__init__(snapshot, pushes, now)
        self._resumed = False

    def on_request(self, request: discovery_pb2.DeltaDiscoveryRequest, now: float) -> list[Response]:
        """Take a request; return responses in the order in which they must be sent.

        Raises:
            RefusedRequestError: The request breaks the protocol or a limit; the stream must end.
        """
        self._admit(request.type_url, request.node if request.HasField("node") else None)
        subscription = self._types.get(request.type_url)
        if subscription is None:
            self._first(request, now)
        else:
            self._answer(subscription, self.answer_of(request), request.error_detail, now)
            subscription.subscribe(request.resource_names_subscribe, self._snapshot)
            subscription.unsubscribe(request.resource_names_unsubscribe, self._snapshot)
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

    def _first(self, request: discovery_pb2.DeltaDiscoveryRequest, now: float) -> None:
        asked = request.resource_names_subscribe
        legacy = not asked and request.type_url in LEGACY_WILDCARD
        subscription = Subscription(request.type_url)
        subscription.begin(
            self._pushes.names(name for name in asked if name != WILDCARD),
            wildcard=legacy or WILDCARD in asked,
            held=request.initial_resource_versions,
        )
        subscription.unsubscribe(request.resource_names_unsubscribe, self._snapshot)
        self._resumed = self._resumed or bool(request.initial_resource_versions)
        self._begin(subscription, now)

    def _draft(self, subscription: Subscription, snapshot: Snapshot, *, keep_back_removals: bool) -> Draft:
        url = subscription.type_url
        version = snapshot.version(url)
        if subscription.fresh:
            names = self._pushes.names(subscription.names)
            chosen = snapshot.select(url, names, wildcard=subscription.wildcard)
            needed = bool(chosen.resources or chosen.missing) or subscription.must_answer
            return Draft(needed, chosen.resources, chosen.missing, version, key=chosen.key)
        there, forced, stale = snapshot.of_type(url), subscription.forced, subscription.stale
        resources: list[Resource] = []
        removed: list[str] = []
        kept_back: list[str] = []
        for name in sorted({*stale, *forced} if forced else stale):
            # What was an alias, or nothing, when it was asked for may be a resource's name or alias by now.
            resource = there.get(name) or there.get(snapshot.canonical(url, name))
            if resource is not None:
                if name in forced or stale[name] != resource.version:
                    resources.append(resource)
            elif name in forced:
                removed.append(name)
            elif stale[name] is not None:
                (kept_back if keep_back_removals else removed).append(name)
        needed = bool(resources or removed) or subscription.must_answer
        return Draft(needed, _each_once(resources), tuple(removed), version, tuple(kept_back))

    def _note_change(self, subscription: Subscription, changed: frozenset[str], old: Snapshot, new: Snapshot) -> None:
        """Nothing: removals are named when their time has come."""

    def _says_what_is_missing(self) -> bool:
        return True

    def _may_be_referred_to(self, now: float) -> bool:
        if self._resumed and now - self._opened < RESUME_GRACE:
            return True
        return super()._may_be_referred_to(now)


def _each_once(resources: list[Resource]) -> tuple[Resource, ...]:
    """A name and an alias may mean the same; a name twice in one response is an error (X11)."""
    return tuple({resource.name: resource for resource in resources}.values())
