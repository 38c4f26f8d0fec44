"""What an Envoy is started with: everything else reaches it over xDS.

The control plane compresses with zstd, which Envoy's xDS client can't read. So the client connects to a listener of the
same Envoy, on a unix socket, whose decompressor filter unpacks what comes back from the control plane. An Envoy that is
to look as usual asks the control plane itself, and gets plain bytes (setting ``envoy.xds``).

Static clusters and listeners of a bootstrap are named ``modalmesh-…``; documents can't use such names.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.compression.zstd.decompressor.v3 import Zstd
from envoy_data_plane.envoy.extensions.filters.http.decompressor.v3 import Decompressor
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any, Struct

from controlplane.compile import authored
from controlplane.errors import Http1Error
from controlplane.kinds.base import ip
from controlplane.lint import find_http1, is_local
from modalmesh.base.settings import Settings, Xds, split_address
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import address_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2

__all__ = ["as_json", "build", "check", "write"]

_CONTROL_PLANE = "modalmesh-controlplane"
_XDS = "modalmesh-xds"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

# Workers, and with them the listener that xDS passes through, start only when CDS and LDS have answered or this has
# passed: by default 15 s each.
_INITIAL_FETCH_TIMEOUT = timedelta(milliseconds=50)

# A control plane that is back is found within seconds; Envoy's own limit is 30 s.
_RETRY = core.RetryPolicy(
    retry_back_off=core.BackoffStrategy(base_interval=timedelta(milliseconds=200), max_interval=timedelta(seconds=5))
)

# Without a limit one client can use up all file descriptors.
_MOST_CONNECTIONS = 10_000


def build(settings: Settings) -> bootstrap.Bootstrap:
    """Return the bootstrap that the settings ask for.

    Raises:
        Http1Error: Something in it would allow HTTP/1.1 beyond the named exception, the admin interface on a unix
            socket; a mistake in this module.
    """
    loopback = f"unix:{settings.envoy_xds_socket}"
    compressed = settings.envoy.xds == "zstd"
    # Without a listener that carries xDS, workers can wait for it: ready means configured.
    fetch_timeout = _INITIAL_FETCH_TIMEOUT if compressed else None
    message = bootstrap.Bootstrap(
        node=core.Node(id=settings.envoy.node_id, cluster="modalmesh", metadata=Struct.from_dict({"role": "envoy"})),
        admin=bootstrap.Admin(
            address=authored.address(f"unix:{settings.envoy_admin_socket}"), ignore_global_conn_limit=True
        ),
        dynamic_resources=bootstrap.BootstrapDynamicResources(
            ads_config=core.ApiConfigSource(
                api_type=core.ApiConfigSourceApiType.DELTA_GRPC,
                transport_api_version=core.ApiVersion.V3,
                # A node is 61 kB: it lists every extension.
                set_node_on_first_message_only=True,
                grpc_services=[
                    core.GrpcService(
                        envoy_grpc=core.GrpcServiceEnvoyGrpc(
                            cluster_name=_XDS if compressed else _CONTROL_PLANE, retry_policy=_RETRY
                        )
                    )
                ],
            ),
            cds_config=authored.ads(fetch_timeout),
            lds_config=authored.ads(fetch_timeout),
        ),
        static_resources=bootstrap.BootstrapStaticResources(
            clusters=[
                *([_cluster(_XDS, loopback)] if compressed else []),
                # A control plane that vanished without closing its connection is noticed within 40 s.
                _cluster(
                    _CONTROL_PLANE,
                    settings.xds.listen,
                    keepalive=core.KeepaliveSettings(interval=timedelta(seconds=30), timeout=timedelta(seconds=10)),
                    transport=_tls(settings.xds),
                ),
            ],
            listeners=[_decompressing(loopback)] if compressed else [],
        ),
        overload_manager=OverloadManager(resource_monitors=[_connection_limit()]),
        layered_runtime=_runtime(),
    )
    check(message)
    return message


def as_json(message: bootstrap.Bootstrap) -> str:
    """Return a bootstrap as Envoy reads it from a file."""
    return json.dumps(message.to_dict(), indent=2, ensure_ascii=False) + "\n"


def _tls(xds: Xds) -> core.TransportSocket | None:
    """Return how to reach a control plane that speaks TLS; its certificate must name the host."""
    if xds.ca is None:
        return None
    host, _ = split_address(xds.listen)
    kind = tls.SubjectAltNameMatcherSanType.DNS if ip(host) is None else tls.SubjectAltNameMatcherSanType.IP_ADDRESS
    common = tls.CommonTlsContext(
        alpn_protocols=["h2"],
        validation_context=tls.CertificateValidationContext(
            trusted_ca=_file(xds.ca),
            match_typed_subject_alt_names=[tls.SubjectAltNameMatcher(san_type=kind, matcher=StringMatcher(exact=host))],
        ),
    )
    if xds.client_certificate is not None and xds.client_key is not None:
        common.tls_certificates = [
            tls.TlsCertificate(certificate_chain=_file(xds.client_certificate), private_key=_file(xds.client_key))
        ]
    return core.TransportSocket(
        name="envoy.transport_sockets.tls", typed_config=Any.pack(tls.UpstreamTlsContext(common_tls_context=common))
    )


def _file(path: Path) -> core.DataSource:
    return core.DataSource(filename=str(path.absolute()))


def _cluster(
    name: str,
    address: str,
    keepalive: core.KeepaliveSettings | None = None,
    transport: core.TransportSocket | None = None,
) -> cluster.Cluster:
    host, port = split_address(address)
    options = HttpProtocolOptions(
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions(connection_keepalive=keepalive)
        )
    )
    named = port and ip(host) is None
    target = endpoint.Endpoint(address=authored.address(address))
    return cluster.Cluster(
        name=name,
        type=cluster.ClusterDiscoveryType.STRICT_DNS if named else cluster.ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=1),
        typed_extension_protocol_options={_HTTP_OPTIONS: Any.pack(options)},
        transport_socket=transport,
        load_assignment=endpoint.ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=[endpoint.LbEndpoint(endpoint=target)])],
        ),
    )


def _decompressing(address: str) -> Listener:
    """Return the listener between Envoy's xDS client and the control plane; its streams live as long as Envoy."""
    never = timedelta(0)
    everything = route.Route(
        match=route.RouteMatch(prefix="/"),
        route=route.RouteAction(cluster=_CONTROL_PLANE, timeout=never, idle_timeout=never),
    )
    decompressor = Decompressor(
        decompressor_library=core.TypedExtensionConfig(name="zstd", typed_config=Any.pack(Zstd()))
    )
    chain = authored.filter_chain(
        _XDS,
        filters=[authored.http_filter("envoy.filters.http.decompressor", decompressor)],
        routes=route.RouteConfiguration(
            name=_XDS, virtual_hosts=[route.VirtualHost(name=_XDS, domains=["*"], routes=[everything])]
        ),
        http2=core.Http2ProtocolOptions(),
        stream_idle_timeout=never,
    )
    return Listener(name=_XDS, address=authored.address(address), filter_chains=[chain], ignore_global_conn_limit=True)


def _connection_limit() -> ResourceMonitor:
    return ResourceMonitor(
        name="envoy.resource_monitors.global_downstream_max_connections",
        typed_config=Any.pack(DownstreamConnectionsConfig(max_active_downstream_connections=_MOST_CONNECTIONS)),
    )


def _runtime() -> bootstrap.LayeredRuntime:
    """Return the runtime switches.

    Many similar resources compress by more than 100 to 1, which Envoy's protection against compression bombs drops in
    silence. What is decompressed comes from the control plane, which could send anything anyway.
    """
    off = Struct.from_dict({"envoy.reloadable_features.enable_compression_bomb_protection": False})
    return bootstrap.LayeredRuntime(layers=[bootstrap.RuntimeLayer(name="modalmesh", static_layer=off)])


def check(message: bootstrap.Bootstrap) -> None:
    """Make sure that a bootstrap allows HTTP/1.1 nowhere but at its admin interface, and that one on this machine only.

    Raises:
        Http1Error: Names the first place.
    """
    static = message.static_resources or bootstrap.BootstrapStaticResources()
    places = [
        *(
            f"{c.name}: {place}"
            for c in static.clusters
            for place in find_http1(cluster_pb2.Cluster.FromString(bytes(c)))
        ),
        *(
            f"{item.name}: {place}"
            for item in static.listeners
            for place in find_http1(listener_pb2.Listener.FromString(bytes(item)))
        ),
    ]
    admin = message.admin.address if message.admin else None
    if admin and not is_local(address_pb2.Address.FromString(bytes(admin))):
        places.append("admin: speaks HTTP/1.1 and is not on a unix socket or loopback")
    if places:
        raise Http1Error(f"bootstrap: {places[0]}", hint="this is a mistake in ModalMesh; please report it")


def write(settings: Settings, path: Path) -> None:
    """Write the bootstrap to a file, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(as_json(build(settings)), encoding="utf-8")
    temporary.replace(path)
