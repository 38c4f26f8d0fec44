"""What of a snapshot can be served: a resource at fault is taken out alone, with its reason.

Two kinds of fault: a resource that no client would take (``validation``), and one that waits for something that is not
there: a cluster for its endpoints, a listener for its routes. Envoy would keep such a cluster warming for 15 s, and
with it the acknowledgement of every other change. In place of what is at fault goes what was served under the same
name, if that was whole; else nothing, and requests for that service alone fail.

A route that names a cluster which does not exist is no fault: Envoy answers its requests with 503 and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from xds.snapshot import Resource, Snapshot
from xds.types import short_name
from xds.warming import WAITS_FOR

__all__ = ["Checked", "Fault", "check"]


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """Why a resource is not served as it was given.

    Attributes:
        type_url: The resource's type.
        name: Its name.
        reason: One line.
        replaced: What was served before under its name is still served.
    """

    type_url: str
    name: str
    reason: str
    replaced: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """A snapshot as it was given, and as it can be served (the same object if nothing is wrong)."""

    given: Snapshot
    snapshot: Snapshot
    faults: tuple[Fault, ...] = ()


def check(given: Snapshot, before: Checked | None) -> Checked:
    """Return what of a snapshot can be served.

    Args:
        given: What shall be served.
        before: What is being served. Where nothing is wrong with it, the work is proportional to the change.
    """
    if before is not None and not before.faults:
        changed = given.changed_since(before.given)
        if not any(_suspects(given, changed)):
            return Checked(given, given)
    served = before.snapshot if before is not None else Snapshot()
    table = {url: dict(given.of_type(url)) for url in given.type_urls}
    faults = [
        *_replace_all(table, served, _invalid(given)),
        *_replace_all(table, served, _unfulfilled(given, table)),
    ]
    if not faults:
        return Checked(given, given)
    resources = Snapshot(resource for named in table.values() for resource in named.values())
    return Checked(given, resources, tuple(sorted(faults)))


def _suspects(given: Snapshot, changed: Mapping[str, frozenset[str]]) -> Iterator[bool]:
    """Yield for each change whether it may have made something wrong."""
    for url, names in changed.items():
        there = given.of_type(url)
        for name in names:
            resource = there.get(name)
            if resource is None:
                # Something may wait for what went.
                yield url in WAITS_FOR.values()
            else:
                yield bool(resource.problem) or bool(_missing(resource, given.of_type(WAITS_FOR.get(url, ""))))


def _invalid(given: Snapshot) -> Iterator[tuple[Resource, str]]:
    for url in given.type_urls:
        for resource in given.of_type(url).values():
            if resource.problem:
                yield resource, resource.problem


def _unfulfilled(given: Snapshot, table: Mapping[str, Mapping[str, Resource]]) -> Iterator[tuple[Resource, str]]:
    for url, target in WAITS_FOR.items():
        for name, resource in given.of_type(url).items():
            if table[url].get(name) is resource:
                missing = _missing(resource, table.get(target, {}))
                if missing:
                    yield resource, f"waits for {short_name(target)} {missing!r}, which is not there"


def _missing(resource: Resource, there: Mapping[str, Resource]) -> str:
    """Return the first name that a resource waits for in vain; "" if it waits for nothing in vain."""
    if resource.type_url not in WAITS_FOR:
        return ""
    return next((name for name in resource.awaits if name not in there), "")


def _replace_all(
    table: dict[str, dict[str, Resource]], served: Snapshot, wrong: Iterable[tuple[Resource, str]]
) -> list[Fault]:
    """Put in place of each wrong resource what was served, with what that waits for."""
    faults: list[Fault] = []
    for resource, reason in list(wrong):
        url, name = resource.type_url, resource.name
        old = served.of_type(url).get(name)
        replaced = old is not None and _restore(table, served, old)
        if not replaced:
            del table[url][name]
        faults.append(Fault(url, name, reason, replaced))
    return faults


def _restore(table: dict[str, dict[str, Resource]], served: Snapshot, old: Resource) -> bool:
    target = WAITS_FOR.get(old.type_url, "")
    awaited = {name: served.of_type(target).get(name) for name in old.awaits}
    for name, resource in awaited.items():
        if resource is None:
            return False
        table.setdefault(target, {}).setdefault(name, resource)
    table[old.type_url][old.name] = old
    return True
