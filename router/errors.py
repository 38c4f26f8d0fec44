"""The router's errors.

RouterError                   MM1600
├── KServeError               MM1601   the bytes are no readable ModelInferRequest
├── GrpcMessageError          MM1602   the body is not one gRPC message we can open
├── PolicyError               MM1603   a SemanticPolicy can't be used; the last good one stays
│   └── EncoderMismatchError  MM1604   its vectors come from another encoder than the one that runs
└── NoPolicyError             MM1605   no SemanticPolicy covers the host

SocketError                   MM1606   a process of this package can't have its socket (a MachineError)

A policy error refuses the update that caused it; the other RouterErrors make a request pass unchanged.
"""

from __future__ import annotations

from modalmesh.base.errors import MachineError, ModalMeshError

__all__ = [
    "EncoderMismatchError",
    "GrpcMessageError",
    "KServeError",
    "NoPolicyError",
    "PolicyError",
    "RouterError",
    "SocketError",
]


class RouterError(ModalMeshError):
    """The router can't do what it was asked to."""

    code = "MM1600"


class KServeError(RouterError):
    """The bytes are no readable ModelInferRequest."""

    code = "MM1601"


class GrpcMessageError(RouterError):
    """The body is not exactly one gRPC message that can be opened."""

    code = "MM1602"


class PolicyError(RouterError):
    """A SemanticPolicy can't be used."""

    code = "MM1603"


class EncoderMismatchError(PolicyError):
    """A policy's vectors come from another encoder than the one that runs."""

    code = "MM1604"


class NoPolicyError(RouterError):
    """No SemanticPolicy covers the host."""

    code = "MM1605"


class SocketError(MachineError):
    """A process of this package can't have its socket."""

    code = "MM1606"
