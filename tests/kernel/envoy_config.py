"""Static configuration for an Envoy that only passes bytes or HTTP/2 requests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def envoy_config(listeners: list[dict[str, Any]], clusters: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Clusters by name; those whose name begins with «h2» are spoken to by HTTP/2."""
    return {
        "static_resources": {
            "listeners": listeners,
            "clusters": [_cluster(name, *where) for name, where in clusters.items()],
        }
    }


def _cluster(name: str, host: str, port: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket_address(host, port)}}]}],
        },
    }
    if name.startswith("h2"):
        made["typed_extension_protocol_options"] = {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        }
    return made


def _listener(host: str, port: int, network_filter: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(port),
        "address": _socket_address(host, port),
        "filter_chains": [{"filters": [network_filter]}],
    }


def tcp_listener(host: str, port: int, cluster: str) -> dict[str, Any]:
    return _listener(
        host,
        port,
        {
            "name": "tcp",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                "stat_prefix": cluster,
                "cluster": cluster,
            },
        },
    )


def h2_listener(host: str, port: int, cluster: str) -> dict[str, Any]:
    manager = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": cluster}}]
    return _listener(
        host,
        port,
        {
            "name": "http",
            "typed_config": {
                "@type": manager,
                "stat_prefix": cluster,
                "codec_type": "HTTP2",
                "http_filters": [
                    {
                        "name": "router",
                        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
                    }
                ],
                "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
            },
        },
    )
