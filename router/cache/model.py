"""What goes into the cache and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from router.cache.coherence import mark_of
from router.cache.entry import Entry
from router.cache.filters import Layer
from router.cache.penetration import GO_ON, Charge

__all__ = ["ALL", "Answer", "CacheOptions", "Hit", "Miss", "PurgeReport", "Request"]

ALL = ("all", "")
"""The tag that every answer has."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes and limits."""

    memory_bytes: int = 256 << 20
    disk_bytes: int = 4 << 30
    """0: no L2."""
    max_stale_s: float = 10.0
    """How long an answer is served that nobody can confirm: the longest that a partition can make a node lie."""
    misses_per_second: float = 0.0
    """Never-seen requests a second for each tenant; 0: no limit."""
    miss_burst: int = 200
    highest_rate: float = 0.01
    """Estimated false-positive rate at which a filter is built anew."""
    load_limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """What the cache must know of a request."""

    key: bytes
    """``key.answer_key``: 32 bytes."""
    fingerprint: bytes
    """``fingerprint.fingerprint``: 16 bytes, a function of what the key is made of."""
    tenant: str = "default"
    layer: Layer = Layer.COARSE
    tags: tuple[tuple[str, str], ...] = ()
    """What it can be purged by, e.g. ``(("service", "a"), ("model", "resnet"), ("version", "resnet@3"))``."""
    marks: tuple[int, ...] = field(default=(), compare=False)

    def marked(self) -> Request:
        """Return the request with its purge marks worked out."""
        if self.marks:
            return self
        tags = tuple(mark_of(kind, name.encode()) for kind, name in self.all_tags)
        return replace(self, marks=(mark_of("key", self.key), *tags))

    @property
    def all_tags(self) -> tuple[tuple[str, str], ...]:
        """The tags, with the one that every answer has."""
        return (ALL, *self.tags)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a backend said."""

    body: bytes
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class Hit:
    """An answer from the cache."""

    entry: Entry
    level: str
    """``l1``, ``l2`` or ``shared``."""
    age_ms: int


@dataclass(frozen=True, slots=True)
class Miss:
    """No answer. Hand it to ``store`` with the one that the backend gives."""

    request: Request
    marks_sum: int
    """Before the lookup: if it has changed by the time the answer comes, the answer is not stored."""
    began_ns: int
    """When the lookup began: the answer is known to be good as of then."""
    seen: bytes = b""
    """What the shared tier held: a stamp, or nothing."""
    tag_sum: int = 0
    tag_sum_known: bool = False
    asked_before: bool = False
    never_seen: bool = False
    """The filter said «no»."""
    charge: Charge = GO_ON
    """A never-seen request whose tenant has used its budget up must not go on."""


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge has reached."""

    node: bool = True
    shared: bool = True
    """False: the shared tier does not answer; it is told as soon as it does, and until then other nodes may serve
    what was purged, at most as long as they can't hear of changes either (``max_stale_s``)."""
