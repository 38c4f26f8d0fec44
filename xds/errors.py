"""Errors of the package, below ``XdsError``; each code keeps its meaning.

XdsError                     MM1400
├── DuplicateResourceError   MM1401   a snapshot or response names a resource twice
├── ListenError              MM1402   the server can't listen there
├── RefusedRequestError      MM1403   a client's request breaks the protocol; ends its stream
├── BadResponseError         MM1404   a server's response breaks the protocol
├── FetchError               MM1405   a one-shot fetch got no answer
├── UnreachableError         MM1406   the control plane isn't running, or doesn't answer
└── TlsError                 MM1407   a certificate, key or root can't be used
"""

from __future__ import annotations

from modalmesh.base.errors import XdsError

__all__ = [
    "BadResponseError",
    "DuplicateResourceError",
    "FetchError",
    "ListenError",
    "RefusedRequestError",
    "TlsError",
    "UnreachableError",
]


class DuplicateResourceError(XdsError):
    """A snapshot or a response names a resource twice."""

    code = "MM1401"


class ListenError(XdsError):
    """The server can't listen at the address."""

    code = "MM1402"


class RefusedRequestError(XdsError):
    """A request breaks the protocol or a limit; its stream ends.

    Args:
        what: What is wrong; the client reads it as grpc-message.
        grpc_status: Code from https://grpc.github.io/grpc/core/md_doc_statuscodes.html; default INVALID_ARGUMENT.
    """

    code = "MM1403"

    def __init__(self, what: str, *, grpc_status: int = 3, hint: str = "") -> None:
        super().__init__(what, hint=hint)
        self.grpc_status = grpc_status


class BadResponseError(XdsError):
    """A response breaks the protocol; it is answered with a NACK, or ends the stream if it can't be read at all."""

    code = "MM1404"


class FetchError(XdsError):
    """A one-shot fetch got no answer in time, or a refusal."""

    code = "MM1405"


class UnreachableError(XdsError):
    """The control plane isn't running, or doesn't answer."""

    code = "MM1406"


class TlsError(XdsError):
    """A certificate, key or root can't be used."""

    code = "MM1407"
