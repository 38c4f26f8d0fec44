"""Resources and snapshots: what a group of clients shall hold, as immutable values whose identity is their content."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from google.protobuf import any_pb2
from google.protobuf.message import Message

from xds.errors import DuplicateResourceError
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.types import push_rank, short_name

__all__ = ["Resource", "Snapshot", "content_version"]

_VERSION_BYTES: Final = 8
"""16 hexadecimal characters: longer version strings eat what compression saves, and 64 bits suffice for equality
between the few versions that a client compares."""

_NONE: Final[Mapping[str, Resource]] = MappingProxyType({})


def content_version(data: bytes) -> str:
    """Return the version of these bytes: 16 hexadecimal characters."""
    return blake2b(data, digest_size=_VERSION_BYTES).hexdigest()


@dataclass(frozen=True)
class Resource:
    """One named resource, serialised.

    Attributes:
        type_url: Its type.
        name: Unique within the type.
        body: The message, serialised deterministically.
        version: 16 hexadecimal characters, from the body.
    """

    type_url: str
    name: str
    body: bytes
    version: str

    @classmethod
    def of(cls, type_url: str, name: str, message: Message) -> Resource:
        """Serialise a message; equal messages give equal bytes, so map fields are sorted."""
        body = message.SerializeToString(deterministic=True)
        return cls(type_url, name, body, content_version(body))

    @functools.cached_property
    def wire(self) -> bytes:
        """The resource as a field of a serialised DeltaDiscoveryResponse (tag, length, Resource): made once."""
        entry = discovery_pb2.Resource(
            name=self.name, version=self.version, resource=any_pb2.Any(type_url=self.type_url, value=self.body)
        )
        return discovery_pb2.DeltaDiscoveryResponse(resources=[entry]).SerializeToString()


class Snapshot:
    """Everything that one group of clients shall hold; immutable; equal when the content is equal.

    Args:
        resources: In any order.

    Raises:
        DuplicateResourceError: Two resources of one type have the same name.
    """

    __slots__ = ("_types", "_versions")

    def __init__(self, resources: Iterable[Resource] = ()) -> None:
        types: dict[str, dict[str, Resource]] = {}
        for resource in resources:
            named = types.setdefault(resource.type_url, {})
            if resource.name in named:
                kind = short_name(resource.type_url)
                raise DuplicateResourceError(f"two {kind} resources are named {resource.name!r}")
            named[resource.name] = resource
        self._types = {url: MappingProxyType(types[url]) for url in sorted(types, key=push_rank)}
        self._versions = {url: _version_of(named) for url, named in self._types.items()}

    @property
    def type_urls(self) -> tuple[str, ...]:
        """The types it holds, in push order."""
        return tuple(self._types)

    def of_type(self, type_url: str) -> Mapping[str, Resource]:
        """Return the resources of a type by name; empty if there are none."""
        return self._types.get(type_url, _NONE)

    def version(self, type_url: str) -> str:
        """Return 16 hexadecimal characters that stand for names and versions of a type's resources; "" if none."""
        return self._versions.get(type_url, "")

    def changed_since(self, old: Snapshot) -> Mapping[str, frozenset[str]]:
        """Return the names that were added, changed or removed, by type; types without a change are left out.

        Computed once per change and shared by all streams, so that a stream's work is proportional to the change.
        """
        changed: dict[str, frozenset[str]] = {}
        for url in sorted({*self._types, *old._types}, key=push_rank):
            new_ones, old_ones = self.of_type(url), old.of_type(url)
            if self.version(url) == old.version(url):
                continue
            changed[url] = frozenset(
                name
                for name in new_ones.keys() | old_ones.keys()
                if name not in new_ones or name not in old_ones or new_ones[name].version != old_ones[name].version
            )
        return changed

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return self._types == other._types

    def __hash__(self) -> int:
        return hash(tuple(self._versions.items()))

    def __repr__(self) -> str:
        counts = ", ".join(f"{short_name(url)}: {len(named)}" for url, named in self._types.items())
        return f"Snapshot({counts})"


def _version_of(named: Mapping[str, Resource]) -> str:
    # Lengths keep ("a", "bc") and ("ab", "c") apart.
    return content_version(b"".join(_part(name) + _part(named[name].version) for name in sorted(named)))


def _part(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "big") + data
