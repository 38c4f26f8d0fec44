"""The snapshot store: what each group shall hold, checked and debounced; without I/O.

A change that is set is compared first (equal input causes nothing), gathered by group, checked when its time has come
(``consistency``), and handed out once for all clients. What is checked away is listed as a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xds.consistency import Checked, Fault, check
from xds.debounce import LONGEST, QUIET, Debounce
from xds.snapshot import Snapshot

__all__ = ["Change", "SnapshotStore"]


@dataclass(frozen=True, slots=True)
class Change:
    """What a group shall hold from now on.

    Attributes:
        group: The group.
        snapshot: What it shall hold.
        changed: Names that differ from before, by type; empty where there was nothing before.
        faults: What is wrong with what was set.
    """

    group: str
    snapshot: Snapshot
    changed: Mapping[str, frozenset[str]]
    faults: tuple[Fault, ...]


class SnapshotStore:
    """Holds the snapshots of one server.

    Groups are debounced each by itself: what is done step by step over several groups, each step when the one before is
    acknowledged, must not wait at every step.

    Args:
        quiet: Seconds (``debounce``).
        longest: Seconds.
    """

    def __init__(self, quiet: float = QUIET, longest: float = LONGEST) -> None:
        self._quiet = quiet
        self._longest = longest
        self._debounces: dict[str, Debounce] = {}
        self._checked: dict[str, Checked] = {}
        self._waiting: dict[str, Snapshot] = {}

    def set(self, group: str, snapshot: Snapshot, now: float) -> None:
        """Make this what a group shall hold, when its time has come; see ``due``."""
        if self.latest(group) == snapshot:
            return
        self._waiting[group] = snapshot
        self._debounces.setdefault(group, Debounce(self._quiet, self._longest)).note(now)

    @property
    def due(self) -> float | None:
        """When ``take`` is to be called, on the clock of ``set``; None: nothing waits."""
        return min((item.due for item in self._debounces.values() if item.due is not None), default=None)

    def take(self, now: float) -> list[Change]:
        """Return what is due, in the order in which the groups were set."""
        changes: list[Change] = []
        for group in list(self._waiting):
            debounce = self._debounces[group]
            if debounce.due is None or debounce.due > now:
                continue
            debounce.sent()
            before = self._checked.get(group)
            after = self._checked[group] = check(self._waiting.pop(group), before)
            if before is None:
                changes.append(Change(group, after.snapshot, {}, after.faults))
            elif after.snapshot != before.snapshot or after.faults != before.faults:
                changed = after.snapshot.changed_since(before.snapshot)
                changes.append(Change(group, after.snapshot, changed, after.faults))
        return changes

    def latest(self, group: str) -> Snapshot | None:
        """Return what was set last for a group, as it was given; None: nothing was."""
        waiting = self._waiting.get(group)
        if waiting is not None:
            return waiting
        checked = self._checked.get(group)
        return None if checked is None else checked.given

    def waiting(self, group: str) -> Snapshot | None:
        """Return what was set and waits for its time; None: nothing."""
        return self._waiting.get(group)

    def snapshot(self, group: str) -> Snapshot | None:
        """Return what a group holds; None: nothing was set yet."""
        checked = self._checked.get(group)
        return None if checked is None else checked.snapshot

    def faults(self) -> dict[str, tuple[Fault, ...]]:
        """Return what is wrong, by group."""
        return {group: checked.faults for group, checked in self._checked.items() if checked.faults}

    @property
    def types(self) -> frozenset[str]:
        """The types of which anything is served."""
        return frozenset(url for checked in self._checked.values() for url in checked.snapshot.type_urls)

    @property
    def empty(self) -> bool:
        """Whether nothing was ever handed out."""
        return not self._checked
