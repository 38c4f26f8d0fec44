"""Which resources a changed resource waits for until it takes effect.

Envoy «warms» a changed cluster until its endpoints are supplied, and a changed listener until its routes are, even
when those did not change (Envoy's xDS protocol, «Resource warming»): so they are sent again.
"""

from __future__ import annotations

import functools
from typing import Final

from google.protobuf.message import DecodeError

from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from xds.snapshot import Resource
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

__all__ = ["WAITS_FOR", "awaited_names"]

WAITS_FOR: Final = {CLUSTER: ENDPOINT, LISTENER: ROUTE}
"""Type → type of what it waits for."""


@functools.lru_cache(maxsize=4096)  # every stream asks for the same changed resources
def awaited_names(resource: Resource) -> tuple[str, ...]:
    """Return the names, of type ``WAITS_FOR[resource.type_url]``, that the resource waits for while it warms.

    A body that can't be parsed waits for nothing: the client will say what is wrong with it.
    """
    try:
        if resource.type_url == CLUSTER:
            return _endpoints(cluster_pb2.Cluster.FromString(resource.body))
        if resource.type_url == LISTENER:
            return _routes(listener_pb2.Listener.FromString(resource.body))
    except DecodeError:
        pass
    return ()


def _endpoints(cluster: cluster_pb2.Cluster) -> tuple[str, ...]:
    if cluster.type != cluster_pb2.Cluster.EDS:
        return ()
    return (cluster.eds_cluster_config.service_name or cluster.name,)


def _routes(listener: listener_pb2.Listener) -> tuple[str, ...]:
    names: list[str] = []
    for chain in (*listener.filter_chains, listener.default_filter_chain):
        for item in chain.filters:
            manager = http_connection_manager_pb2.HttpConnectionManager()
            if item.typed_config.Unpack(manager) and manager.HasField("rds"):
                names.append(manager.rds.route_config_name)
    return tuple(dict.fromkeys(names))
