"""The state-of-the-world variant of an ADS stream (``stream`` has what both share).

Listeners and clusters travel as complete state: what a response does not hold is deleted. Every other type travels in
parts, so that one changed endpoint costs one endpoint set; a removal of such a type can't be said, and follows from
what refers to it. Decided here, where the protocol leaves it open:

- The version of a complete response is that of its content, removals that wait for their time included: a client that
  comes back with the version of the whole snapshot, and asks for everything, holds everything.
- A name of a complete type that does not exist is answered at once, by leaving it out; one of another type is answered
  when it appears.
- Aliases are not in force: a response has no place for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Form, Response
from xds.snapshot import Resource, Snapshot, version_of_sum
from xds.stream import AdsState, Answer, Draft
from xds.subscription import WILDCARD, Subscription
from xds.types import COMPLETE_STATE, LEGACY_WILDCARD, REMOVED_LAST

__all__ = ["SotwStream"]

_FEATURES: Final = frozenset(
    {"xds.config.resource-in-sotw", "envoy.config.resource-in-sotw", "xds.config.supports-resource-ttl"}
)
"""Client features that stand for «takes a resource wrapped in a Resource, with its TTL»: the first is seen on the wire,
Envoy's documents spell the others."""


class SotwStream(AdsState):
    """One state-of-the-world ADS stream of one client."""

    form = Form.SOTW

    def on_request(self, request: discovery_pb2.DiscoveryRequest, now: float) -> list[Response]:
        """Take a request; return responses in the order in which they must be sent.

        Raises:
            RefusedRequestError: The request breaks the protocol or a limit; the stream must end.
        """
        first = not self._types
        self._admit(request.type_url, request.node if request.HasField("node") else None)
        if first and not _FEATURES.isdisjoint(self.node.client_features):
            self.form = Form.SOTW_WRAPPED
        subscription = self._types.get(request.type_url)
        if subscription is None:
            self._first(request, now)
            return self._flush(now)
        # A request with a stale nonce is superseded by one that will follow [Resource updates].
        if not _is_current(subscription, request.response_nonce):
            return []
        self._answer(subscription, self.answer_of(request), request.error_detail, now)
        names, wildcard = self._wanted(subscription, request)
        subscription.replace(names, self._snapshot, wildcard=wildcard)
        return self._flush(now)

    def answer_of(self, request: discovery_pb2.DiscoveryRequest) -> Answer | None:
        """Return what a request says about the response in flight, before it is taken.

        A NACK is a request with error_detail, nothing else; versions tell nothing [ACK and NACK].
        """
        subscription = self._types.get(request.type_url)
        if subscription is None or subscription.in_flight is None:
            return None
        if request.response_nonce != subscription.in_flight.nonce:
            return None
        return "nack" if request.HasField("error_detail") else "ack"

    def _first(self, request: discovery_pb2.DiscoveryRequest, now: float) -> None:
        subscription = Subscription(request.type_url)
        names, wildcard = self._wanted(subscription, request)
        subscription.begin(names, wildcard=wildcard, held={})
        self._begin(subscription, now)
        if self._holds_everything(subscription, request.version_info):
            subscription.told()
            subscription.sent_version = subscription.acked_version = request.version_info

    def _holds_everything(self, subscription: Subscription, version: str) -> bool:
        """Whether a client that comes back need not be sent the type again.

        Safe where no name is asked for: a name may be a new subscription, which must be answered [ACK and NACK].
        """
        if self._snapshot is None or subscription.names or not subscription.wildcard:
            return False
        return (
            subscription.type_url in COMPLETE_STATE and version == self._snapshot.version(subscription.type_url) != ""
        )

    def _wanted(
        self, subscription: Subscription, request: discovery_pb2.DiscoveryRequest
    ) -> tuple[frozenset[str], bool]:
        """Return names, and whether everything is asked for [How the client specifies what resources to return]."""
        asked = request.resource_names
        subscription.named = subscription.named or bool(asked)
        legacy = not subscription.named and request.type_url in LEGACY_WILDCARD
        wildcard = legacy or WILDCARD in asked
        return self._pushes.names(name for name in asked if name != WILDCARD), wildcard

    def _note_change(self, subscription: Subscription, changed: frozenset[str], old: Snapshot, new: Snapshot) -> None:
        if subscription.type_url in COMPLETE_STATE and subscription.type_url in REMOVED_LAST:
            subscription.note_gone(changed, old, new)

    def _draft(self, subscription: Subscription, snapshot: Snapshot, *, keep_back_removals: bool) -> Draft:
        if subscription.type_url in COMPLETE_STATE:
            return _complete(subscription, snapshot, self._names(subscription), keep_back_removals=keep_back_removals)
        if subscription.fresh:
            return _first_part(subscription, snapshot, self._names(subscription))
        # Only what is new for the client.
        resources = tuple(_news(subscription, snapshot))
        return Draft(bool(resources), resources, (), snapshot.version(subscription.type_url))

    def _names(self, subscription: Subscription) -> frozenset[str]:
        return self._pushes.names(subscription.names)

    def _says_what_is_missing(self) -> bool:
        return False

    def _knows_ttl(self) -> bool:
        return self.form is Form.SOTW_WRAPPED

    def _heartbeat(
        self, subscription: Subscription, snapshot: Snapshot, living: tuple[Resource, ...], now: float
    ) -> Response:
        if subscription.type_url not in COMPLETE_STATE:
            return super()._heartbeat(subscription, snapshot, living, now)
        # Complete state stays complete: what a response leaves out is deleted.
        draft = _complete(subscription, snapshot, self._names(subscription), keep_back_removals=True)
        response = self._pushes.response(
            self.form,
            subscription.type_url,
            draft.version,
            draft.resources,
            after=subscription.last_number,
            key=draft.key,
        )
        subscription.sent(response, now)
        return response


def _is_current(subscription: Subscription, nonce: str) -> bool:
    """Whether a request answers the last response, or could not know of any."""
    if not nonce:
        return subscription.in_flight is None
    return nonce == str(subscription.last_number)


def _complete(
    subscription: Subscription, snapshot: Snapshot, names: frozenset[str], *, keep_back_removals: bool
) -> Draft:
    """Return the whole of what is asked for, with what must not go yet."""
    url = subscription.type_url
    there = snapshot.of_type(url)
    chosen = snapshot.select(url, names, wildcard=subscription.wildcard)
    kept = {name: item for name, item in subscription.gone.items() if name not in there} if keep_back_removals else {}
    total = chosen.total + sum(item.fingerprint for item in kept.values())
    version = version_of_sum(total)
    resources = (*chosen.resources, *(kept[name] for name in sorted(kept))) if kept else chosen.resources
    needed = subscription.must_answer or bool(subscription.forced) or version != subscription.sent_version
    changed: Iterable[Resource] = chosen.resources if subscription.fresh else _news(subscription, snapshot)
    return Draft(needed, resources, (), version, tuple(kept), changed, (chosen.key, tuple(sorted(kept))))


def _first_part(subscription: Subscription, snapshot: Snapshot, names: frozenset[str]) -> Draft:
    chosen = snapshot.select(subscription.type_url, names, wildcard=subscription.wildcard)
    version = snapshot.version(subscription.type_url)
    return Draft(bool(chosen.resources), chosen.resources, (), version, key=chosen.key)


def _news(subscription: Subscription, snapshot: Snapshot) -> list[Resource]:
    there, forced, stale = snapshot.of_type(subscription.type_url), subscription.forced, subscription.stale
    return [
        there[name]
        for name in sorted({*stale, *forced} if forced else stale)
        if name in there and (name in forced or stale[name] != there[name].version)
    ]
