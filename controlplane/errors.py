"""What can be wrong with documents, one code per kind of mistake.

    DocumentError             MM1200
    ├── UnreadableError       MM1201   the file or the YAML in it can't be read
    ├── KindError             MM1202   not a kind, or not a version of one, that is read here
    ├── FieldError            MM1203   a field is missing, unknown, or has no valid value
    ├── UnknownNameError      MM1204   a name refers to nothing
    ├── ConflictError         MM1205   two places claim the same thing
    ├── EmptySourceError      MM1206   there is nothing to serve
    ├── Http1Error            MM1207   what was compiled would allow HTTP/1.1
    ├── EmptySubsetError      MM1210   the labels of a subset are on no endpoint
    ├── UnknownTierError      MM1211   a rule is for a tier that has no policy
    ├── ClaimedMatchError     MM1212   an earlier rule takes every request that this one is for
    ├── DelegateCycleError    MM1214   VirtualServices delegate to each other in a circle
    ├── DelegateError         MM1215   a VirtualService can't be delegated to in this way
    ├── TierLeakError         MM1216   requests of one tier would reach another tier's subset
    ├── FallbackCycleError    MM1217   services fall back on each other in a circle
    ├── CallCycleError        MM1218   services that requests of tiers come to call each other in a circle
    └── HopsError             MM1219   a request may hop more often than its tier allows

Functions that check documents return these as values, all of them, so that one run shows every mistake.
"""

from __future__ import annotations

from modalmesh.base.errors import DocumentError

__all__ = [
    "CallCycleError",
    "ClaimedMatchError",
    "ConflictError",
    "DelegateCycleError",
    "DelegateError",
    "EmptySourceError",
    "EmptySubsetError",
    "FallbackCycleError",
    "FieldError",
    "HopsError",
    "Http1Error",
    "KindError",
    "TierLeakError",
    "UnknownNameError",
    "UnknownTierError",
    "UnreadableError",
]


class UnreadableError(DocumentError):
    """The file, or the YAML in it, can't be read."""

    code = "MM1201"


class KindError(DocumentError):
    """Not a kind, or not a version of one, that is read here."""

    code = "MM1202"


class FieldError(DocumentError):
    """A field is missing, unknown, or has no valid value."""

    code = "MM1203"


class UnknownNameError(DocumentError):
    """A name refers to nothing."""

    code = "MM1204"


class ConflictError(DocumentError):
    """Two places claim the same thing."""

    code = "MM1205"


class EmptySourceError(DocumentError):
    """There is nothing to serve."""

    code = "MM1206"


class Http1Error(DocumentError):
    """What was compiled would allow HTTP/1.1; it is not published."""

    code = "MM1207"


class EmptySubsetError(DocumentError):
    """The labels of a subset are on no endpoint."""

    code = "MM1210"


class ClaimedMatchError(DocumentError):
    """An earlier rule takes every request that this one is for."""

    code = "MM1212"


class DelegateCycleError(DocumentError):
    """VirtualServices delegate to each other in a circle."""

    code = "MM1214"


class DelegateError(DocumentError):
    """A VirtualService can't be delegated to in this way."""

    code = "MM1215"


class UnknownTierError(DocumentError):
    """A rule is for a tier that has no policy."""

    code = "MM1211"


class TierLeakError(DocumentError):
    """Requests of one tier would reach another tier's subset."""

    code = "MM1216"


class FallbackCycleError(DocumentError):
    """Services fall back on each other in a circle."""

    code = "MM1217"


class CallCycleError(DocumentError):
    """Services that requests of tiers come to call each other in a circle."""

    code = "MM1218"


class HopsError(DocumentError):
    """A request may hop more often than its tier allows."""

    code = "MM1219"
