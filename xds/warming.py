"""Which resources a changed resource waits for until it takes effect.

Envoy «warms» a changed cluster until its endpoints are supplied, and a changed listener until its routes are, even
when those did not change (Envoy's xDS protocol, «Resource warming»): so they are sent again.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import config_source_pb2
from xds.pb.envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

__all__ = ["WAITS_FOR", "awaited_names"]

WAITS_FOR: Final = {CLUSTER: ENDPOINT, LISTENER: ROUTE}
"""Type → type of what it waits for."""


def awaited_names(type_url: str, body: bytes) -> tuple[str, ...]:
    """Return the names, of type ``WAITS_FOR[type_url]``, that a resource waits for while it warms.

    A body that can't be parsed waits for nothing: it is refused elsewhere, or the client will say what is wrong.
    """
    try:
        if type_url == CLUSTER:
            return _endpoints(cluster_pb2.Cluster.FromString(body))
        if type_url == LISTENER:
            return _routes(listener_pb2.Listener.FromString(body))
    except DecodeError:
        pass
    return ()


def _endpoints(cluster: cluster_pb2.Cluster) -> tuple[str, ...]:
    if cluster.type != cluster_pb2.Cluster.EDS or not _comes_from_us(cluster.eds_cluster_config.eds_config):
        return ()
    return (cluster.eds_cluster_config.service_name or cluster.name,)


def _routes(listener: listener_pb2.Listener) -> tuple[str, ...]:
    names: list[str] = []
    managers = [item.typed_config for chain in _chains(listener) for item in chain.filters]
    if listener.HasField("api_listener"):
        managers.append(listener.api_listener.api_listener)
    for packed in managers:
        manager = http_connection_manager_pb2.HttpConnectionManager()
        if packed.Unpack(manager) and manager.HasField("rds") and _comes_from_us(manager.rds.config_source):
            names.append(manager.rds.route_config_name)
    return tuple(dict.fromkeys(names))


def _chains(listener: listener_pb2.Listener) -> list[listener_components_pb2.FilterChain]:
    return [*listener.filter_chains, listener.default_filter_chain]


def _comes_from_us(source: config_source_pb2.ConfigSource) -> bool:
    """Whether it is fetched on the stream that its referrer came on; files and other servers are not our affair."""
    return source.WhichOneof("config_source_specifier") in (None, "ads", "self")
