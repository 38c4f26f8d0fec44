"""The cache's errors.

CacheError               MM1800
├── FingerprintError     MM1801   a picture or sound can't be fingerprinted
├── AnswerKeyError       MM1802   a request has parts that no exact key can be made of
├── TraceError           MM1803   a trace can't be read; carries file and line
├── CacheFilesError      MM1804   the cache's directory can't be used
├── SharedTierError      MM1805   the shared tier did not do what it was asked
│   └── TierDownError    MM1806   … because it can't be reached, or the breaker is open
├── LoadTimeoutError     MM1807   an answer did not come before the deadline
├── EntryError           MM1808   stored bytes are no entry
└── MissBudgetError      MM1809   a tenant has sent more never-seen requests than its budget allows

Only the last fails a request; the shells count the others and go on without the cache.
"""

from __future__ import annotations

from modalmesh.base.errors import ModalMeshError

__all__ = [
    "AnswerKeyError",
    "CacheError",
    "CacheFilesError",
    "EntryError",
    "FingerprintError",
    "LoadTimeoutError",
    "MissBudgetError",
    "SharedTierError",
    "TierDownError",
    "TraceError",
]


class CacheError(ModalMeshError):
    """The cache can't do what it was asked to."""

    code = "MM1800"


class FingerprintError(CacheError):
    """A picture or sound can't be fingerprinted."""

    code = "MM1801"


class AnswerKeyError(CacheError):
    """A request has parts that no exact key can be made of."""

    code = "MM1802"


class TraceError(CacheError):
    """A trace can't be read."""

    code = "MM1803"


class CacheFilesError(CacheError):
    """The cache's directory can't be used."""

    code = "MM1804"


class SharedTierError(CacheError):
    """The shared tier did not do what it was asked."""

    code = "MM1805"


class TierDownError(SharedTierError):
    """The shared tier can't be reached, or the breaker is open."""

    code = "MM1806"


class LoadTimeoutError(CacheError):
    """An answer did not come before the deadline."""

    code = "MM1807"


class EntryError(CacheError):
    """Stored bytes are no entry."""

    code = "MM1808"


class MissBudgetError(CacheError):
    """A tenant has sent more never-seen requests than its budget allows.

    Args:
        retry_after: Seconds after which it is worth trying again.
    """

    code = "MM1809"

    def __init__(self, retry_after: float) -> None:
        super().__init__("too many requests that were never seen before", hint=f"try again in {retry_after:.1f} s")
        self.retry_after = retry_after
