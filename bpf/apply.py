"""Changes carried out on the maps, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bpf.datapath import Datapath
from bpf.errors import BpfError, MapFullError
from bpf.sync import Change, Ledger

__all__ = ["Failure", "Outcome", "carry_out"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A change that didn't come about; what it is about takes the plain way, or the one it had."""

    subject: str
    map: str
    full: bool
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of some changes.

    Attributes:
        freed: Slots that nobody uses any more.
    """

    failures: tuple[Failure, ...]
    freed: frozenset[int]


def carry_out(datapath: Datapath, ledger: Ledger, changes: Iterable[Change]) -> Outcome:
    """Carry out changes in order; one that fails keeps none of the others back."""
    failures: list[Failure] = []
    freed: set[int] = set()
    for change in changes:
        failure = _one(datapath, ledger, change)
        if failure is not None:
            failures.append(failure)
        else:
            freed |= change.freed
    return Outcome(tuple(failures), frozenset(freed))


def _one(datapath: Datapath, ledger: Ledger, change: Change) -> Failure | None:
    for index, step in enumerate(change.steps):
        try:
            datapath.take(step)
        except BpfError as error:
            if index <= change.commit:
                for back in change.undo:
                    datapath.take(back)
                    ledger.apply(back)
            elif step.map in ledger.contents:
                ledger.contents[step.map] = datapath.content(step.map)
            return Failure(change.subject, step.map, isinstance(error, MapFullError), str(error))
        ledger.apply(step)
    ledger.done(change)
    return None
