"""Parts of what is authored with ``envoy_data_plane`` (listeners, filters, bootstraps).

Why that library there: its messages are typed and refuse unknown fields, and know every extension of Envoy 1.40. It is
some hundred times slower than protobuf, so what changes often (clusters, endpoints, routes) is not made with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import betterproto2
from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.google.protobuf import Any

from modalmesh.base.settings import split_address

__all__ = ["address", "ads", "filter_chain", "http_filter"]


def address(text: str) -> core.Address:
    """Return the address that ``host:port`` or ``unix:PATH`` stands for."""
    host, port = split_address(text)
    if not port:
        return core.Address(pipe=core.Pipe(path=host))
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def ads(initial_fetch_timeout: timedelta | None = None) -> core.ConfigSource:
    """Return «from the ADS stream»."""
    return core.ConfigSource(
        ads=core.AggregatedConfigSource(),
        resource_api_version=core.ApiVersion.V3,
        initial_fetch_timeout=initial_fetch_timeout,
    )


def http_filter(name: str, config: betterproto2.Message, *, disabled: bool = False) -> hcm.HttpFilter:
    """Return an HTTP filter."""
    return hcm.HttpFilter(name=name, typed_config=Any.pack(config), disabled=disabled)


def filter_chain(
    name: str,
    *,
    filters: Sequence[hcm.HttpFilter],
    routes: hcm.Rds | RouteConfiguration,
    http2: core.Http2ProtocolOptions,
    stream_idle_timeout: timedelta,
    early_mutations: Sequence[core.TypedExtensionConfig] = (),
    access_log: Sequence[AccessLog] = (),
    edge: bool = False,
) -> listener.FilterChain:
    """Return a chain that speaks HTTP/2 and nothing else; the router filter is added at the end.

    Args:
        name: In statistics.
        filters: In the order in which a request passes them.
        routes: By name over xDS, or inline.
        http2: Windows and limits.
        stream_idle_timeout: Of a stream on which nothing happens; 0: none.
        early_mutations: Of headers, before a route is looked for.
        access_log: Where requests are logged.
        edge: Clients are not trusted: their address is the connection's, headers that steer Envoy are removed, paths
            are normalised before they are matched.
    """
    manager = hcm.HttpConnectionManager(
        stat_prefix=name,
        # With AUTO an HTTP/1.1 client would be served, whatever ALPN says.
        codec_type=hcm.HttpConnectionManagerCodecType.HTTP2,
        http2_protocol_options=http2,
        rds=routes if isinstance(routes, hcm.Rds) else None,
        route_config=routes if isinstance(routes, RouteConfiguration) else None,
        http_filters=[*filters, http_filter("envoy.filters.http.router", Router())],
        stream_idle_timeout=stream_idle_timeout,
        request_headers_timeout=timedelta(seconds=10),
        early_header_mutation_extensions=list(early_mutations),
        access_log=list(access_log),
        use_remote_address=True if edge else None,
        normalize_path=True if edge else None,
        merge_slashes=edge,
    )
    name_of_filter = "envoy.filters.network.http_connection_manager"
    return listener.FilterChain(filters=[listener.Filter(name=name_of_filter, typed_config=Any.pack(manager))])
