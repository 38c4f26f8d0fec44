"""Responses and their numbers: the same delta for many clients is one object, so that it is encoded once.

Why this exists: two clients can share bytes only if their responses have the same nonce. The nonce is the process's
push number: a distinct message gets the next number, and an equal one made soon after gets the same. A nonce must not
occur twice on one stream, so each stream says which number it used last, and gets a higher one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeAlias

from xds.snapshot import Resource

__all__ = ["Pushes", "Response"]

_REMEMBERED: Final = 512
"""Distinct messages that may be shared. A fan-out makes one per type and subscription; older ones are never asked for
again. Resources are shared with the snapshot, so an entry costs a few hundred bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One response, complete but not encoded; shared between streams, compared by identity.

    Attributes:
        type_url: Its type.
        number: The push number.
        version: The snapshot's version for the type (system_version_info: for people only).
        resources: Added or changed, by name.
        removed: Names, sorted.
    """

    type_url: str
    number: int
    version: str
    resources: tuple[Resource, ...]
    removed: tuple[str, ...]

    @property
    def nonce(self) -> str:
        """The push number as it travels."""
        return str(self.number)


_Key: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...], tuple[str, ...]]


class Pushes:
    """Numbers the distinct messages of one process."""

    def __init__(self) -> None:
        self._last = 0
        self._recent: OrderedDict[_Key, Response] = OrderedDict()

    def response(
        self, type_url: str, version: str, resources: tuple[Resource, ...], removed: tuple[str, ...], *, after: int
    ) -> Response:
        """Return the response with this content and a number above ``after``, the same object for equal content."""
        key = (type_url, version, tuple((resource.name, resource.version) for resource in resources), removed)
        known = self._recent.get(key)
        if known is not None and known.number > after:
            self._recent.move_to_end(key)
            return known
        self._last += 1
        response = Response(type_url, self._last, version, resources, removed)
        self._recent[key] = response
        self._recent.move_to_end(key)
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return response
