"""Finds every place in a configuration that would let HTTP/1.1 in or out.

Envoy speaks HTTP/1.1 by default in more places than one expects (verified on 1.40): to clusters without explicit
options, in HTTP health checks even of HTTP/2 clusters, at listeners whose codec is AUTO, whatever their ALPN says. So
the whole message is walked, packed messages too; a packed message of a type that is not known here counts as a place,
since nobody has looked into it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar, cast

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

# Imported for their descriptors too: packed messages are looked up by name.
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import address_pb2, health_check_pb2
from xds.pb.envoy.extensions.access_loggers.file.v3 import file_pb2 as _file  # noqa: F401
from xds.pb.envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2 as _ext_proc  # noqa: F401
from xds.pb.envoy.extensions.filters.http.router.v3 import router_pb2 as _router  # noqa: F401
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from xds.pb.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.pb.envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2

__all__ = ["find_http1", "is_local"]

_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

_NO_PROTOCOL: Final = frozenset(
    {
        "envoy.extensions.compression.zstd.decompressor.v3.Zstd",
        "envoy.extensions.filters.http.cors.v3.Cors",
        "envoy.extensions.filters.http.cors.v3.CorsPolicy",
        "envoy.extensions.filters.http.decompressor.v3.Decompressor",
        "envoy.extensions.filters.http.fault.v3.HTTPFault",
        "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
        "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
    }
)
"""Types without descriptors here, known to have nothing to do with the choice of a protocol."""


def find_http1(message: Message) -> list[str]:
    """Return the places, each as a path and what is wrong there; none: HTTP/1.1 is nowhere possible."""
    return [f"{path or message.DESCRIPTOR.name}: {what}" for path, what in _walk(message, "")]


def is_local(address: address_pb2.Address) -> bool:
    """Return whether an address is a unix socket or on loopback: where the named exceptions (admin) may listen."""
    if address.HasField("pipe"):
        return True
    try:
        return ipaddress.ip_address(address.socket_address.address).is_loopback
    except ValueError:
        return False


_Place = tuple[str, str]


def _walk(message: Message, path: str) -> Iterator[_Place]:
    check = _CHECKS.get(message.DESCRIPTOR.full_name)
    if check is not None:
        yield from ((path, what) for what in check(message))
    if isinstance(message, AnyMessage):
        yield from _walk_packed(message, path)
        return
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        here = f"{path}.{field.name}" if path else field.name
        for key, item in _items(field, value):
            if isinstance(item, Message):
                yield from _walk(item, f"{here}{key}")


def _items(field: FieldDescriptor, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key}]", value[key]) for key in sorted(value))
    elif field.is_repeated:
        yield from ((f"[{index}]", item) for index, item in enumerate(cast("Iterable[object]", value)))
    else:
        yield "", value


def _walk_packed(message: AnyMessage, path: str) -> Iterator[_Place]:
    name = message.type_url.rpartition("/")[2]
    if not name or name in _NO_PROTOCOL:
        return
    try:
        kind = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))
        inner = kind.FromString(message.value)
    except (KeyError, DecodeError):
        yield path, f"{name} is not known here, so nobody has looked for HTTP/1.1 in it"
        return
    yield from _walk(inner, path)


def _http_connection_manager(manager: http_connection_manager_pb2.HttpConnectionManager) -> Iterator[str]:
    codec = http_connection_manager_pb2.HttpConnectionManager.CodecType
    if manager.codec_type not in (codec.HTTP2, codec.HTTP3):
        yield f"codec_type {codec.Name(manager.codec_type)} accepts HTTP/1.1"
    if manager.HasField("http_protocol_options"):
        yield "http_protocol_options are options of HTTP/1.1"
    for upgrade in manager.upgrade_configs:
        if not manager.http2_protocol_options.allow_connect:
            yield f"upgrade {upgrade.upgrade_type} without allow_connect is an HTTP/1.1 upgrade"


def _cluster(cluster: cluster_pb2.Cluster) -> Iterator[str]:
    if _HTTP_OPTIONS not in cluster.typed_extension_protocol_options:
        yield "no HttpProtocolOptions: Envoy speaks HTTP/1.1 to it"
    if cluster.HasField("http_protocol_options"):
        yield "http_protocol_options are options of HTTP/1.1"
    if cluster.protocol_selection == cluster_pb2.Cluster.USE_DOWNSTREAM_PROTOCOL:
        yield "protocol_selection USE_DOWNSTREAM_PROTOCOL allows HTTP/1.1"


def _http_protocol_options(options: http_protocol_options_pb2.HttpProtocolOptions) -> Iterator[str]:
    chosen = options.WhichOneof("upstream_protocol_options")
    if chosen != "explicit_http_config":
        yield f"{chosen or 'nothing'} is chosen instead of explicit_http_config"
        return
    protocol = options.explicit_http_config.WhichOneof("protocol_config")
    if protocol not in ("http2_protocol_options", "http3_protocol_options"):
        yield f"explicit_http_config has {protocol or 'nothing'} instead of HTTP/2 or HTTP/3"


def _health_check(check: health_check_pb2.HealthCheck) -> Iterator[str]:
    # CodecClientType is HTTP1 by default, on HTTP/2 clusters too.
    if check.HasField("http_health_check") and check.http_health_check.codec_client_type == 0:
        yield "http_health_check without codec_client_type HTTP2 asks over HTTP/1.1"


def _tls(context: tls_pb2.CommonTlsContext) -> Iterator[str]:
    for protocol in context.alpn_protocols:
        if protocol.startswith("http/1"):
            yield f"ALPN offers {protocol}"


M = TypeVar("M", bound=Message)


def _for(kind: type[M], check: Callable[[M], Iterator[str]]) -> tuple[str, Callable[[Message], Iterator[str]]]:
    def typed(message: Message) -> Iterator[str]:
        # A message may come from another descriptor pool's class; its bytes are the same.
        return check(message if isinstance(message, kind) else kind.FromString(message.SerializeToString()))

    return kind.DESCRIPTOR.full_name, typed


_CHECKS: Final = dict(
    (
        _for(http_connection_manager_pb2.HttpConnectionManager, _http_connection_manager),
        _for(cluster_pb2.Cluster, _cluster),
        _for(http_protocol_options_pb2.HttpProtocolOptions, _http_protocol_options),
        _for(health_check_pb2.HealthCheck, _health_check),
        _for(tls_pb2.CommonTlsContext, _tls),
    )
)
