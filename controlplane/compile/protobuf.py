"""Small parts that compiled messages have in common.

Map fields need no care: resources are serialised deterministically, which sorts them, also inside packed messages.
"""

from __future__ import annotations

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from xds.pb.envoy.config.core.v3 import address_pb2, config_source_pb2

__all__ = ["ADS", "address", "duration", "packed"]

ADS = config_source_pb2.ConfigSource(
    ads=config_source_pb2.AggregatedConfigSource(), resource_api_version=config_source_pb2.V3
)
"""«The stream that this comes from.»"""


def address(host: str, port: int) -> address_pb2.Address:
    """Return a TCP address."""
    return address_pb2.Address(socket_address=address_pb2.SocketAddress(address=host, port_value=port))


def duration(milliseconds: int) -> Duration:
    """Return a span of time."""
    message = Duration()
    message.FromMilliseconds(milliseconds)
    return message


def packed(message: Message) -> AnyMessage:
    """Pack a message so that equal messages give equal bytes."""
    result = AnyMessage()
    result.Pack(message, deterministic=True)
    return result
