"""Responses and their numbers: the same news for many clients is one object, so that it is encoded once.

Why this exists: two clients can share bytes only if their responses have the same nonce. The nonce is the process's
push number: a distinct message gets the next number, and an equal one made soon after gets the same. A nonce must not
occur twice on one stream, so each stream says which number it used last, and gets a higher one.
"""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final, TypeVar

from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.snapshot import Resource

__all__ = ["Form", "Pushes", "Response"]

_REMEMBERED: Final = 512
"""Distinct messages that may be shared. A fan-out makes one per type and subscription; older ones are never asked for
again. Resources are shared with the snapshot, so an entry costs a few hundred bytes."""

_SHARED: Final = 256
"""Distinct sets of names, and requests, that are kept once; a fleet's clients subscribe to a few."""

_Shared = TypeVar("_Shared", bound=Hashable)


class Form(enum.Enum):
    """How a response is written."""

    DELTA = "delta"
    SOTW = "sotw"
    SOTW_WRAPPED = "sotw-wrapped"
    """State of the world for clients that take resources inside a ``Resource``, with their TTL."""


class Response:
    """One response, complete but not encoded; shared between streams, compared by identity.

    Attributes:
        form: Of which protocol.
        type_url: Its type.
        number: The push number.
        version: Of the type (delta: for people only).
        resources: Added or changed; in a complete state-of-the-world response, all.
        removed: Names, sorted; delta only.
        heartbeat: The resources travel without their bodies.
    """

    def __init__(
        self,
        form: Form,
        type_url: str,
        number: int,
        version: str,
        resources: tuple[Resource, ...],
        *,
        removed: tuple[str, ...] = (),
        heartbeat: bool = False,
    ) -> None:
        self.form = form
        self.type_url = type_url
        self.number = number
        self.version = version
        self.resources = resources
        self.removed = removed
        self.heartbeat = heartbeat

    @property
    def nonce(self) -> str:
        """The push number as it travels."""
        return str(self.number)

    @functools.cached_property
    def awaits(self) -> frozenset[str]:
        """Names that its resources wait for while a client warms them."""
        return frozenset(name for resource in self.resources for name in resource.awaits)

    @functools.cached_property
    def delta_ack(self) -> bytes:
        """The plain ACK of a delta client, byte for byte: recognised without being parsed."""
        return discovery_pb2.DeltaDiscoveryRequest(
            type_url=self.type_url, response_nonce=self.nonce
        ).SerializeToString()

    @functools.cached_property
    def sotw_ack(self) -> tuple[bytes, bytes]:
        """Beginning and end of a state-of-the-world client's ACK; what is between them is what it subscribes to."""
        return (
            discovery_pb2.DiscoveryRequest(version_info=self.version).SerializeToString(),
            discovery_pb2.DiscoveryRequest(response_nonce=self.nonce).SerializeToString(),
        )

    def __repr__(self) -> str:
        return f"Response({self.form.value} {self.type_url} {self.nonce})"


class Pushes:
    """Numbers the distinct messages of one process, and keeps what its streams share."""

    def __init__(self) -> None:
        self._last = 0
        self._recent: OrderedDict[Hashable, Response] = OrderedDict()
        self._names: OrderedDict[frozenset[str], frozenset[str]] = OrderedDict()
        self._requests: OrderedDict[bytes, bytes] = OrderedDict()

    def response(
        self,
        form: Form,
        type_url: str,
        version: str,
        resources: tuple[Resource, ...],
        removed: tuple[str, ...] = (),
        *,
        after: int,
        key: Hashable = None,
        heartbeat: bool = False,
    ) -> Response:
        """Return the response with this content and a number above ``after``, the same object for equal content.

        ``key`` stands for the resources where it is cheaper to compare than names and versions are.
        """
        if key is None:
            key = tuple((resource.name, resource.version) for resource in resources)
        whole = (form, type_url, version, key, removed, heartbeat)
        known = self._recent.get(whole)
        if known is not None and known.number > after:
            return known
        self._last += 1
        response = Response(form, type_url, self._last, version, resources, removed=removed, heartbeat=heartbeat)
        self._recent[whole] = response
        self._recent.move_to_end(whole)
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return response

    def names(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names as a set; equal sets are one object, whoever asks for them."""
        return _once(self._names, frozenset(names))

    def request(self, data: bytes) -> bytes:
        """Return the bytes of a request that others may send too; equal ones are one object."""
        return _once(self._requests, data)


def _once(table: OrderedDict[_Shared, _Shared], value: _Shared) -> _Shared:
    known = table.setdefault(value, value)
    if len(table) > _SHARED:
        table.popitem(last=False)
    return known
