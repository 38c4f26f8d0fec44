"""The gRPC health service's two messages, by hand: one string, one number.

Why not its generated module: ``grpcio-health-checking`` registers the same symbols, and the two could not be loaded in
one process. Protocol: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import enum
from typing import Final

from xds.errors import RefusedRequestError

__all__ = ["CHECK_PATH", "SERVICES", "WATCH_PATH", "Serving", "decode_request", "encode_response"]

CHECK_PATH: Final = "/grpc.health.v1.Health/Check"
WATCH_PATH: Final = "/grpc.health.v1.Health/Watch"

SERVICES: Final = frozenset({"", "envoy.service.discovery.v3.AggregatedDiscoveryService"})
"""What can be asked about; "" means the server as a whole."""

_SHORT: Final = 0x80


class Serving(enum.IntEnum):
    """HealthCheckResponse.ServingStatus."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def decode_request(message: bytes) -> str:
    """Return the service that a HealthCheckRequest asks about.

    Raises:
        RefusedRequestError: It is not one, or has other fields.
    """
    if not message:
        return ""
    # Field 1, length-delimited; a length below 128 is one byte. No service of ours has a longer name.
    if len(message) < 2 or message[0] != 0x0A or message[1] >= _SHORT or len(message) != 2 + message[1]:
        raise RefusedRequestError("a message is not a HealthCheckRequest for a service of this server")
    return message[2:].decode("utf-8", "replace")


def encode_response(status: Serving) -> bytes:
    """Return a serialised HealthCheckResponse."""
    return bytes((0x08, status))
