"""What the merging of all kinds shares: the problems found so far, and which names are taken."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from controlplane.errors import ConflictError, UnknownNameError
from controlplane.model import Service
from modalmesh.base.errors import DocumentError, Where

__all__ = ["Claims", "Context"]

T = TypeVar("T")


@dataclass(slots=True)
class Claims(Generic[T]):
    """Names that may be given once, and what they were given to.

    Attributes:
        what: What the names are names of, for messages.
    """

    what: str
    problems: list[DocumentError]
    taken: dict[str, tuple[T, Where]] = field(default_factory=dict)

    def claim(self, name: str, value: T, where: Where) -> None:
        """Take a name; note a problem if it is taken."""
        if name not in self.taken:
            self.taken[name] = (value, where)
            return
        what = f"{self.what} {name!r} is already at {self.taken[name][1]}"
        self.problems.append(ConflictError(what, hint="keep one of them", where=where))

    def in_order(self) -> tuple[T, ...]:
        """Return what the names were given to, sorted by name."""
        return tuple(self.taken[name][0] for name in sorted(self.taken))


@dataclass(slots=True)
class Context:
    """One merge.

    Attributes:
        problems: Grows.
        partial: A document could not be read: names that it may have given are missing, which is not reported as well.
        services: What service discovery has, complete before any other kind is looked at.
    """

    problems: list[DocumentError]
    partial: bool
    services: Mapping[str, Service] = field(default_factory=dict)

    def note(self, problem: DocumentError) -> None:
        """Add a problem."""
        self.problems.append(problem)

    def check_service(self, name: str, where: Where) -> Service | None:
        """Return the service of a name, which may be written as in Kubernetes; note a problem if there is none."""
        found = self.services.get(name) or self.services.get(_short(name))
        if found is None and not self.partial:
            near = difflib.get_close_matches(name, self.services, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "name one of service-discovery.yaml, or add it there"
            self.note(UnknownNameError(f"there is no service {name!r}", hint=hint, where=where))
        return found


def _short(name: str) -> str:
    """Return the name of a service in Kubernetes, written in full: ``NAME.NAMESPACE.svc.cluster.local``."""
    short, _, rest = name.partition(".")
    return short if rest.endswith("svc.cluster.local") else name
