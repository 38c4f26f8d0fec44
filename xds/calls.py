"""The calls that the server answers: ADS in its two variants, and health."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from modalmesh.base.errors import ModalMeshError
from modalmesh.base.logging import get_logger
from xds import health, metrics
from xds.delta import DeltaStream
from xds.errors import RefusedRequestError
from xds.frames import Encoded, Encoding
from xds.grpc_wire import DELTA_PATH, SOTW_PATH, Status, prefixed
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pushes import Response
from xds.rpc import Call, Link
from xds.snapshot import Snapshot
from xds.sotw import SotwStream
from xds.stream import AdsState, Answer, News
from xds.subscription import Subscription
from xds.types import short_name

__all__ = ["PATHS", "AdsCall", "call_of"]

_log = get_logger()

_REQUESTS_KEPT: Final = 64 * 1024
"""Longest SotW request that is remembered so that the next need not be parsed."""


class AdsCall(abc.ABC):
    """One ADS stream: the state machine, and how its responses are encoded.

    Attributes:
        opened: Seconds on the loop's clock.
        encoding: Of what is sent; known with the first request.
        group: Set with the first request.
        state: The protocol's state, likewise.
    """

    state: AdsState | None

    def __init__(self, link: Link, stream_id: int, offered: Encoding, now: float) -> None:
        self._link = link
        self._server = link.server
        self._stream_id = stream_id
        self.encoding = offered
        self.opened = now
        self.group = ""
        self.state = None
        self._client = ""

    def on_message(self, message: bytes, now: float) -> None:
        """Take one request message.

        Raises:
            RefusedRequestError: It can't be parsed, or breaks the protocol.
        """
        if self.state is None:
            self._first(message, now)
            return
        for subscription in self.state.types.values():
            response = subscription.in_flight
            if response is not None and self._is_plain_ack(message, subscription, response):
                self._count(response.type_url, "ack")
                self.send(self.state.on_ack(subscription, now))
                return
        type_url, answer, responses = self._take(message, now)
        if answer is not None:
            self._count(type_url, answer)
        self.send(responses)

    def on_end(self) -> None:
        """The client wants no more."""
        self._link.finish(self._stream_id, Status.OK)

    def on_snapshot(self, snapshot: Snapshot, news: News, now: float) -> None:
        """Tell the client what changed."""
        if self.state is not None:
            for response in self.state.on_snapshot(snapshot, news, now):
                encoded = self._encoded(response)
                self._link.push(self._stream_id, encoded.chunks, encoded.frame(self._stream_id))

    def tick(self, now: float) -> None:
        """Enforce time limits; send what waited long enough."""
        limits = self._server.limits
        if self.state is None:
            if now - self.opened >= limits.first_request:
                self._say("first_request", "no request came")
                self._link.finish(self._stream_id, Status.DEADLINE_EXCEEDED, "no request came")
            return
        if self.encoding == "zstd":
            patience = self._server.watchdog.patience(self._client)
            overdue = self.state.overdue(now, limits.ack_timeout * patience, limits.warming_timeout * patience)
            if overdue is not None:
                self._bite(overdue, now)
                return
        self.send(self.state.on_tick(now))

    def send(self, responses: list[Response]) -> None:
        """Queue responses."""
        for response in responses:
            self._link.queue(self._stream_id, self._encoded(response).chunks)

    def forgotten(self) -> None:
        """The call is over."""
        if self.state is not None:
            self._server.left(self)

    def abort(self) -> None:
        """End the client's connection: something of ours went wrong."""
        self._link.abort()

    def stop(self) -> None:
        """End the stream as «try again»."""
        self._link.finish(self._stream_id, Status.UNAVAILABLE, "the control plane is stopping")

    # --- for the variants

    @abc.abstractmethod
    def _begin(self, message: bytes, now: float) -> tuple[base_pb2.Node, Callable[[Snapshot | None], AdsState]]:
        """Parse the first request; return its node, and what makes the state."""

    @abc.abstractmethod
    def _take(self, message: bytes, now: float) -> tuple[str, Answer | None, list[Response]]:
        """Give a request to the state; return its type, what it answered, and the responses."""

    @abc.abstractmethod
    def _is_plain_ack(self, message: bytes, subscription: Subscription, response: Response) -> bool:
        """Whether the message says nothing but that the response is accepted; told without parsing."""

    # --- details

    def _encoded(self, response: Response) -> Encoded:
        encoded = self._server.frames.encoded(response, self.encoding)
        self._server.tally.sent(response.type_url, encoded.message_length, encoded.sent_length)
        return encoded

    def _first(self, message: bytes, now: float) -> None:
        server = self._server
        node, make = self._begin(message, now)
        try:
            group = server.group_of(node)
        except ModalMeshError as error:
            raise RefusedRequestError(f"the node fits no group: {error}") from error
        state = make(server.snapshot(group))
        self.state = state
        try:
            _, _, responses = self._take(message, now)
        except RefusedRequestError:
            self.state = None
            raise
        self.group = group
        self._client = f"{group}/{node.id}"
        if server.watchdog.wants_plain(self._client, now):
            self.encoding = "identity"
        self._link.begin(self._stream_id, self.encoding)
        server.joined(self)
        _log.info("xds client connected", node=node.id, group=group, encoding=self.encoding, form=state.form.value)
        self.send(responses)

    def _bite(self, type_url: str, now: float) -> None:
        """Reset a stream on which a response had no answer."""
        kind = short_name(type_url)
        self._say("ack_timeout", f"{kind} had no ACK")
        if self._server.watchdog.was_reset(self._client, type_url, now):
            metrics.PLAIN.inc()
            _log.warning(
                "xds client does not answer compressed responses; it gets plain ones", client=self._client, type=kind
            )
        self._link.reset(self._stream_id)

    def _count(self, type_url: str, answer: Answer) -> None:
        self._server.tally.answered(type_url, answer)
        self._server.watchdog.was_answered(self._client, type_url)
        if answer == "nack" and self.state is not None:
            _log.warning(
                "xds client refused a response; it keeps what it had",
                node=self.state.node.id,
                type=short_name(type_url),
                error=self.state.types[type_url].error,
            )

    def _say(self, reason: str, what: str) -> None:
        metrics.ENDED.labels(reason).inc()
        _log.warning("xds stream ended", reason=reason, client=self._client, what=what)


class DeltaCall(AdsCall):
    """A delta stream."""

    state: DeltaStream | None

    def _begin(self, message: bytes, now: float) -> tuple[base_pb2.Node, Callable[[Snapshot | None], AdsState]]:
        return _delta_request(message).node, lambda snapshot: DeltaStream(snapshot, self._server.pushes, now)

    def _take(self, message: bytes, now: float) -> tuple[str, Answer | None, list[Response]]:
        assert self.state is not None  # noqa: S101 — made by the first request
        request = _delta_request(message)
        return request.type_url, self.state.answer_of(request), self.state.on_request(request, now)

    def _is_plain_ack(self, message: bytes, subscription: Subscription, response: Response) -> bool:
        return message == response.delta_ack


class SotwCall(AdsCall):
    """A state-of-the-world stream."""

    state: SotwStream | None

    def _begin(self, message: bytes, now: float) -> tuple[base_pb2.Node, Callable[[Snapshot | None], AdsState]]:
        return _sotw_request(message).node, lambda snapshot: SotwStream(snapshot, self._server.pushes, now)

    def _take(self, message: bytes, now: float) -> tuple[str, Answer | None, list[Response]]:
        assert self.state is not None  # noqa: S101 — made by the first request
        request = _sotw_request(message)
        answer = self.state.answer_of(request)
        responses = self.state.on_request(request, now)
        subscription = self.state.types[request.type_url]
        # The next ACK will have the same between its version and its nonce, unless the subscription changes.
        middle = _between(message, request) if answer == "ack" else None
        subscription.request = self._server.pushes.request(middle) if middle is not None else None
        return request.type_url, answer, responses

    def _is_plain_ack(self, message: bytes, subscription: Subscription, response: Response) -> bool:
        middle = subscription.request
        if middle is None:
            return False
        head, tail = response.sotw_ack
        return (
            len(message) == len(head) + len(middle) + len(tail)
            and message.startswith(head)
            and message.endswith(tail)
            and message[len(head) : len(message) - len(tail)] == middle
        )


class HealthCall:
    """``grpc.health.v1.Health``: Check answers once, Watch whenever it changes."""

    def __init__(self, link: Link, stream_id: int, now: float, *, watch: bool) -> None:
        self._link = link
        self._stream_id = stream_id
        self._opened = now
        self._watch = watch
        self._service: str | None = None
        self._last: health.Serving | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def on_message(self, message: bytes, now: float) -> None:
        """Take the request."""
        del now
        if self._service is not None:
            return
        self._service = health.decode_request(message)
        if not self._watch and self._service not in health.SERVICES:
            self._link.finish(self._stream_id, Status.NOT_FOUND, "no such service")
            return
        self._link.begin(self._stream_id, "identity")
        self._tell()
        if self._watch:
            self._unsubscribe = self._link.server.watch_health(self._changed)
        else:
            self._link.finish(self._stream_id, Status.OK)

    def on_end(self) -> None:
        """The client has asked; Watch goes on until it resets the call."""
        if self._service is None:
            self._link.finish(self._stream_id, Status.INVALID_ARGUMENT, "no request came")

    def tick(self, now: float) -> None:
        """Give up on a client that asks nothing."""
        if self._service is None and now - self._opened >= self._link.server.limits.first_request:
            self._link.finish(self._stream_id, Status.DEADLINE_EXCEEDED, "no request came")

    def forgotten(self) -> None:
        """The call is over."""
        self._unsubscribe()

    def _changed(self) -> None:
        self._tell()
        self._link.write()

    def _tell(self) -> None:
        status = health.Serving.SERVING if self._link.server.serving else health.Serving.NOT_SERVING
        if self._service not in health.SERVICES:
            status = health.Serving.SERVICE_UNKNOWN
        if status is not self._last:
            self._last = status
            self._link.queue(self._stream_id, (prefixed(health.encode_response(status)),))


PATHS: Final = (DELTA_PATH, SOTW_PATH, health.CHECK_PATH, health.WATCH_PATH)


def call_of(path: str, link: Link, stream_id: int, offered: Encoding, now: float) -> Call:
    """Return what answers a call of one of ``PATHS``."""
    if path == DELTA_PATH:
        return DeltaCall(link, stream_id, offered, now)
    if path == SOTW_PATH:
        return SotwCall(link, stream_id, offered, now)
    return HealthCall(link, stream_id, now, watch=path == health.WATCH_PATH)


def _delta_request(message: bytes) -> discovery_pb2.DeltaDiscoveryRequest:
    try:
        return discovery_pb2.DeltaDiscoveryRequest.FromString(message)
    except DecodeError as error:
        raise RefusedRequestError("a message is not a DeltaDiscoveryRequest") from error


def _sotw_request(message: bytes) -> discovery_pb2.DiscoveryRequest:
    try:
        return discovery_pb2.DiscoveryRequest.FromString(message)
    except DecodeError as error:
        raise RefusedRequestError("a message is not a DiscoveryRequest") from error


def _between(message: bytes, request: discovery_pb2.DiscoveryRequest) -> bytes | None:
    """Return what stands between version and nonce, if they stand first and last and nothing else may vary."""
    if len(message) > _REQUESTS_KEPT or request.HasField("error_detail"):
        return None
    head = discovery_pb2.DiscoveryRequest(version_info=request.version_info).SerializeToString()
    tail = discovery_pb2.DiscoveryRequest(response_nonce=request.response_nonce).SerializeToString()
    if not message.startswith(head) or not message.endswith(tail):
        return None
    middle = message[len(head) : len(message) - len(tail)]
    try:
        rest = discovery_pb2.DiscoveryRequest.FromString(middle)
    except DecodeError:
        return None
    expected = discovery_pb2.DiscoveryRequest()
    expected.CopyFrom(request)
    expected.ClearField("version_info")
    expected.ClearField("response_nonce")
    return middle if rest == expected else None
