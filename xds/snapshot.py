"""Resources and snapshots: what a group of clients shall hold, as immutable values whose identity is their content."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from google.protobuf import any_pb2
from google.protobuf.message import Message

from xds.errors import DuplicateResourceError
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.types import push_rank, short_name
from xds.validation import problem_of
from xds.warming import awaited_names

__all__ = ["Resource", "Selection", "Snapshot", "content_version", "version_of_sum"]

_VERSION_BYTES: Final = 8
"""16 hexadecimal characters: longer version strings eat what compression saves, and 64 bits suffice for equality
between the few versions that a client compares."""

_MASK: Final = (1 << (8 * _VERSION_BYTES)) - 1

_NONE: Final[Mapping[str, Resource]] = MappingProxyType({})

_MAX_SELECTIONS: Final = 64
"""Distinct sets of names whose first answer is remembered, per snapshot."""


def content_version(data: bytes) -> str:
    """Return the version of these bytes: 16 hexadecimal characters."""
    return blake2b(data, digest_size=_VERSION_BYTES).hexdigest()


def version_of_sum(total: int) -> str:
    """Return the version of resources whose fingerprints add up to this."""
    return f"{total & _MASK:016x}"


@dataclass(frozen=True)
class Resource:
    """One named resource, serialised.

    Attributes:
        type_url: Its type.
        name: Unique within the type.
        body: The message, serialised deterministically.
        version: 16 hexadecimal characters that stand for everything else.
        aliases: Other names under which clients may ask for it; not in force for state-of-the-world clients.
        ttl: Seconds after which a client drops it unless it hears of it again; None: it stays.
    """

    type_url: str
    name: str
    body: bytes = field(compare=False)
    version: str
    aliases: tuple[str, ...] = ()
    ttl: float | None = None

    @classmethod
    def of(
        cls, type_url: str, name: str, message: Message, *, aliases: Iterable[str] = (), ttl: float | None = None
    ) -> Resource:
        """Serialise a message; equal messages give equal bytes, so map fields are sorted."""
        body = message.SerializeToString(deterministic=True)
        others = tuple(sorted(set(aliases)))
        extra = repr((others, ttl)).encode() if others or ttl is not None else b""
        return cls(type_url, name, body, content_version(body + extra), others, ttl)

    @functools.cached_property
    def wire(self) -> bytes:
        """The resource as a field of a serialised DeltaDiscoveryResponse (tag, length, Resource): made once."""
        entry = self._entry()
        entry.aliases.extend(self.aliases)
        entry.resource.CopyFrom(self._any)
        return discovery_pb2.DeltaDiscoveryResponse(resources=[entry]).SerializeToString()

    @functools.cached_property
    def heartbeat(self) -> bytes:
        """The same without its body: «still valid», for resources with a TTL."""
        return discovery_pb2.DeltaDiscoveryResponse(resources=[self._entry()]).SerializeToString()

    @functools.cached_property
    def sotw_wire(self) -> bytes:
        """The resource as a field of a serialised DiscoveryResponse."""
        return discovery_pb2.DiscoveryResponse(resources=[self._any]).SerializeToString()

    @functools.cached_property
    def sotw_wrapped(self) -> bytes:
        """The same in a Resource that carries its TTL, for clients that understand that."""
        entry = self._entry()
        entry.resource.CopyFrom(self._any)
        return _wrapped(entry)

    def sotw_heartbeat(self, version: str) -> bytes:
        """The same without its body; Envoy wants the version of the type here, not that of the resource."""
        entry = self._entry()
        entry.version = version
        return _wrapped(entry)

    @functools.cached_property
    def fingerprint(self) -> int:
        """What name and version add to the version of a set of resources."""
        # Lengths keep ("a", "bc") and ("ab", "c") apart.
        data = _part(self.name) + _part(self.version)
        return int.from_bytes(blake2b(data, digest_size=_VERSION_BYTES).digest(), "big")

    @functools.cached_property
    def awaits(self) -> tuple[str, ...]:
        """Names that the resource waits for while a client warms it (``warming``)."""
        return awaited_names(self.type_url, self.body)

    @functools.cached_property
    def problem(self) -> str:
        """Why no client would take it; "" if nothing is known to be wrong."""
        return problem_of(self.type_url, self.name, self.body)

    @property
    def _any(self) -> any_pb2.Any:
        return any_pb2.Any(type_url=self.type_url, value=self.body)

    def _entry(self) -> discovery_pb2.Resource:
        entry = discovery_pb2.Resource(name=self.name, version=self.version)
        if self.ttl is not None:
            entry.ttl.FromMilliseconds(round(self.ttl * 1000))
        return entry


@dataclass(frozen=True, slots=True)
class Selection:
    """Resources of one type that a client which holds nothing asks for.

    Attributes:
        resources: In the order of their names.
        missing: Names that do not exist, sorted.
        total: Sum of the resources' fingerprints.
        key: Equal for equal content, between selections of one snapshot.
    """

    resources: tuple[Resource, ...]
    missing: tuple[str, ...]
    total: int
    key: object


class Snapshot:
    """Everything that one group of clients shall hold; immutable; equal when the content is equal.

    Args:
        resources: In any order.

    Raises:
        DuplicateResourceError: Two resources of one type have the same name.
    """

    __slots__ = ("__weakref__", "_aliases", "_derived", "_rich", "_selections", "_totals", "_ttls", "_types")
    # _rich: types that may hold a resource with aliases or a TTL. Most hold none, and looking would take a while.

    def __init__(self, resources: Iterable[Resource] = ()) -> None:
        types: dict[str, dict[str, Resource]] = {}
        for resource in resources:
            named = types.setdefault(resource.type_url, {})
            if resource.name in named:
                kind = short_name(resource.type_url)
                raise DuplicateResourceError(f"two {kind} resources are named {resource.name!r}")
            named[resource.name] = resource
        totals = {url: sum(item.fingerprint for item in named.values()) & _MASK for url, named in types.items()}
        rich = frozenset(url for url, named in types.items() if any(_is_rich(item) for item in named.values()))
        self._set({url: MappingProxyType(named) for url, named in types.items()}, totals, rich)

    def _set(
        self, types: Mapping[str, Mapping[str, Resource]], totals: Mapping[str, int], rich: frozenset[str]
    ) -> None:
        order = sorted((url for url, named in types.items() if named), key=push_rank)
        self._types = {url: types[url] for url in order}
        self._totals = {url: totals[url] for url in order}
        self._rich = rich
        self._selections: dict[tuple[str, bool, frozenset[str]], Selection] = {}
        self._aliases: dict[str, Mapping[str, str]] = {}
        self._ttls: dict[str, tuple[Resource, ...]] = {}
        self._derived: tuple[weakref.ref[Snapshot], Mapping[str, frozenset[str]]] | None = None

    def updated(self, changed: Iterable[Resource] = (), removed: Iterable[tuple[str, str]] = ()) -> Snapshot:
        """Return a snapshot with some resources added or replaced, and some (type and name) gone.

        The work is proportional to the change, but for a copy of each changed type's table; so is that of
        ``changed_since(self)`` on the result.
        """
        types: dict[str, dict[str, Resource]] = {}
        totals = dict(self._totals)
        names: dict[str, set[str]] = {}
        rich = set(self._rich)

        def replace(url: str, name: str, new: Resource | None) -> None:
            if url not in types:
                types[url] = dict(self.of_type(url))
            old = types[url].pop(name, None)
            if new is not None:
                types[url][name] = new
                if _is_rich(new):
                    rich.add(url)
            was, becomes = (old.fingerprint if old else 0), (new.fingerprint if new else 0)
            totals[url] = (totals.get(url, 0) - was + becomes) & _MASK
            if was != becomes:
                names.setdefault(url, set()).add(name)

        for resource in changed:
            replace(resource.type_url, resource.name, resource)
        for url, name in removed:
            replace(url, name, None)
        made = Snapshot.__new__(Snapshot)
        proxies = {url: MappingProxyType(named) for url, named in types.items()}
        made._set({**self._types, **proxies}, totals, frozenset(rich))
        # What was changed twice may be as it was.
        differing = {
            url: frozenset(
                name for name in touched if _differ(made.of_type(url).get(name), self.of_type(url).get(name))
            )
            for url, touched in names.items()
        }
        made._derived = (
            weakref.ref(self),
            {url: differing[url] for url in sorted(differing, key=push_rank) if differing[url]},
        )
        return made

    @property
    def type_urls(self) -> tuple[str, ...]:
        """The types it holds, in push order."""
        return tuple(self._types)

    def of_type(self, type_url: str) -> Mapping[str, Resource]:
        """Return the resources of a type by name; empty if there are none."""
        return self._types.get(type_url, _NONE)

    def total(self, type_url: str) -> int:
        """Return the sum of the fingerprints of a type's resources."""
        return self._totals.get(type_url, 0)

    def version(self, type_url: str) -> str:
        """Return 16 hexadecimal characters that stand for names and versions of a type's resources; "" if none."""
        return version_of_sum(self._totals[type_url]) if type_url in self._totals else ""

    def select(self, type_url: str, names: frozenset[str], *, wildcard: bool) -> Selection:
        """Return what a client that holds nothing is sent; remembered, since a fleet asks for the same."""
        key = (type_url, wildcard, names)
        known = self._selections.get(key)
        if known is None:
            known = self._select(type_url, names, wildcard=wildcard)
            if len(self._selections) >= _MAX_SELECTIONS:
                self._selections.clear()
            self._selections[key] = known
        return known

    def _select(self, type_url: str, names: frozenset[str], *, wildcard: bool) -> Selection:
        there = self.of_type(type_url)
        found = {self.canonical(type_url, name) for name in names}
        wanted = sorted(there if wildcard else found & there.keys())
        resources = tuple(there[name] for name in wanted)
        total = self.total(type_url) if wildcard else sum(item.fingerprint for item in resources) & _MASK
        missing = tuple(sorted(name for name in names if self.canonical(type_url, name) not in there))
        return Selection(resources, missing, total, (wildcard, names))

    def aliases(self, type_url: str) -> Mapping[str, str]:
        """Return alias → name of the resource, for a type; where two resources claim one, the first name has it."""
        if type_url not in self._rich:
            return {}
        known = self._aliases.get(type_url)
        if known is None:
            there = self.of_type(type_url)
            known = self._aliases[type_url] = {
                alias: name for name in sorted(there, reverse=True) for alias in there[name].aliases
            }
        return known

    def canonical(self, type_url: str, name: str) -> str:
        """Return the name of the resource that is meant by a name or alias; a name that is neither stays."""
        if name in self.of_type(type_url):
            return name
        return self.aliases(type_url).get(name, name)

    @property
    def lives_shortly(self) -> bool:
        """Whether some resource has a TTL."""
        return any(self.with_ttl(url) for url in self._rich)

    def with_ttl(self, type_url: str) -> tuple[Resource, ...]:
        """Return the resources of a type that have a TTL, by name."""
        if type_url not in self._rich:
            return ()
        known = self._ttls.get(type_url)
        if known is None:
            there = self.of_type(type_url)
            known = self._ttls[type_url] = tuple(there[name] for name in sorted(there) if there[name].ttl is not None)
        return known

    def changed_since(self, old: Snapshot) -> Mapping[str, frozenset[str]]:
        """Return the names that were added, changed or removed, by type; types without a change are left out.

        Computed once per change and shared by all streams, so that a stream's work is proportional to the change.
        """
        if self._derived is not None and self._derived[0]() is old:
            return self._derived[1]
        changed: dict[str, frozenset[str]] = {}
        for url in sorted({*self._types, *old._types}, key=push_rank):
            new_ones, old_ones = self.of_type(url), old.of_type(url)
            if self.version(url) == old.version(url):
                continue
            changed[url] = frozenset(
                name for name in new_ones.keys() | old_ones.keys() if _differ(new_ones.get(name), old_ones.get(name))
            )
        return changed

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return self._totals == other._totals

    def __hash__(self) -> int:
        return hash(tuple(self._totals.items()))

    def __repr__(self) -> str:
        counts = ", ".join(f"{short_name(url)}: {len(named)}" for url, named in self._types.items())
        return f"Snapshot({counts})"


def _wrapped(entry: discovery_pb2.Resource) -> bytes:
    packed = any_pb2.Any()
    packed.Pack(entry)
    return discovery_pb2.DiscoveryResponse(resources=[packed]).SerializeToString()


def _is_rich(resource: Resource) -> bool:
    return bool(resource.aliases) or resource.ttl is not None


def _differ(one: Resource | None, other: Resource | None) -> bool:
    return one is not other and one != other


def _part(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "big") + data
