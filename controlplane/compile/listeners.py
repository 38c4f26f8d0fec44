"""The gateway's listener: where requests come in, which filters they pass, what is logged of each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import Rds
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation
from envoy_data_plane.google.protobuf import Any, Struct

from controlplane.compile import authored
from controlplane.compile.clusters import ROUTER_CLUSTER
from controlplane.compile.filters import route_filters
from controlplane.compile.routes import CLUSTER_HEADER, EXT_PROC, ROUTE_CONFIGURATION, STREAM_IDLE_TIMEOUT_MS
from xds.pb.envoy.config.listener.v3 import listener_pb2

__all__ = ["ACCESS_LOG_FIELDS", "GATEWAY_LISTENER", "GatewayOptions", "compile_gateway"]

GATEWAY_LISTENER = "modalmesh-gateway"

METADATA_NAMESPACE = "modalmesh"
"""Where the router puts what it decided."""

ACCESS_LOG_FIELDS = {
    "time": "%START_TIME(%Y-%m-%dT%H:%M:%S.%6fZ)%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    # Without the query, in which people put what must not be logged.
    "path": "%PATH(NQ)%",
    "authority": "%REQ(:AUTHORITY)%",
    "protocol": "%PROTOCOL%",
    "response_code": "%RESPONSE_CODE%",
    "response_code_details": "%RESPONSE_CODE_DETAILS%",
    "response_flags": "%RESPONSE_FLAGS%",
    "grpc_status": "%GRPC_STATUS(SNAKE_STRING)%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    # From the last byte of the request to the first sent on: with a buffered body, what the router took.
    "router_us": "%COMMON_DURATION(DS_RX_END:US_TX_BEG:us)%",
    "backend_us": "%COMMON_DURATION(US_TX_BEG:US_RX_END:us)%",
    "decision": f"%DYNAMIC_METADATA({METADATA_NAMESPACE})%",
    "route": "%ROUTE_NAME%",
    "upstream_cluster": "%UPSTREAM_CLUSTER%",
    "upstream_host": "%UPSTREAM_HOST%",
}
"""Field → Envoy's command operator. What does not apply to a request is null."""

# A router that is there answers at once: with its decision, or by asking for the time that the encoder may take. «At
# once» includes taking the body over: twenty pictures of 12 MiB at the same time keep it busy for more than a second.
_ROUTER_MESSAGE_TIMEOUT = timedelta(seconds=3)

# A picture of 1 MiB comes in without waiting; a larger body waits for WINDOW_UPDATE, one per window.
_STREAM_WINDOW = 1 << 20
_CONNECTION_WINDOW = 16 << 20
_CONCURRENT_STREAMS = 1024


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What the settings say about the gateway.

    Attributes:
        listen: ``host:port`` or ``unix:PATH``.
        access_log: File to which a JSON object is written per request.
        router_wait_ms: How long the router may ask Envoy to wait.
    """

    listen: str
    access_log: Path
    router_wait_ms: int


@functools.lru_cache(maxsize=4)
def compile_gateway(options: GatewayOptions) -> listener_pb2.Listener:
    """Return the listener; equal options give the same message, made once."""
    chain = authored.filter_chain(
        "gateway",
        # Routes turn it on (compile/routes.py).
        filters=[
            *route_filters(),
            authored.http_filter(EXT_PROC, _external_processor(options.router_wait_ms), disabled=True),
        ],
        early_mutations=[_without_forged_choice()],
        routes=Rds(config_source=authored.ads(), route_config_name=ROUTE_CONFIGURATION),
        http2=core.Http2ProtocolOptions(
            max_concurrent_streams=_CONCURRENT_STREAMS,
            initial_stream_window_size=_STREAM_WINDOW,
            initial_connection_window_size=_CONNECTION_WINDOW,
        ),
        stream_idle_timeout=timedelta(milliseconds=STREAM_IDLE_TIMEOUT_MS),
        access_log=[_access_log(options.access_log)],
        edge=True,
    )
    listener = Listener(name=GATEWAY_LISTENER, address=authored.address(options.listen), filter_chains=[chain])
    return listener_pb2.Listener.FromString(bytes(listener))


def _without_forged_choice() -> core.TypedExtensionConfig:
    """Remove the header by which the router chooses from what clients send.

    Early, before a route is looked for: a filter would remove it too late, when the route that the client asked for is
    already picked, and a router that is down does not have it picked again.
    """
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(HeaderMutation(mutations=[Mutation(remove=CLUSTER_HEADER)])),
    )


def _external_processor(router_wait_ms: int) -> ext_proc.ExternalProcessor:
    """Show request headers and the whole request body; the response passes unseen.

    BUFFERED because it fails open and honours time limits; the streamed modes do neither once a chunk has been sent.
    """
    header = ext_proc.ProcessingModeHeaderSendMode
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=ROUTER_CLUSTER)),
        failure_mode_allow=True,
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=header.SEND,
            request_body_mode=ext_proc.ProcessingModeBodySendMode.BUFFERED,
            request_trailer_mode=header.SKIP,
            response_header_mode=header.SKIP,
            response_body_mode=ext_proc.ProcessingModeBodySendMode.NONE,
            response_trailer_mode=header.SKIP,
        ),
        message_timeout=_ROUTER_MESSAGE_TIMEOUT,
        max_message_timeout=timedelta(milliseconds=router_wait_ms),
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[METADATA_NAMESPACE])
        ),
    )


def _access_log(path: Path) -> AccessLog:
    fields = Struct.from_dict(dict(sorted(ACCESS_LOG_FIELDS.items())))
    config = FileAccessLog(path=str(path), log_format=core.SubstitutionFormatString(json_format=fields))
    return AccessLog(name="envoy.access_loggers.file", typed_config=Any.pack(config))
