from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from controlplane.compile import Options, compile_mesh
from controlplane.compile.clusters import compile_clusters
from controlplane.compile.listeners import compile_gateway
from controlplane.directory import read
from controlplane.errors import Http1Error
from controlplane.lint import find_http1, is_local
from controlplane.merge import merge
from controlplane.model import Endpoint, Mesh, Service
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import address_pb2, health_check_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm
from xds.pb.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.pb.envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2

OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def cluster() -> cluster_pb2.Cluster:
    service = Service("a", (Endpoint("h", 1),), protocol="grpc")
    found, _ = compile_clusters(Mesh((service,), (), ()), router_socket=Path("/s"))
    return found


def with_options(change: Callable[[http_protocol_options_pb2.HttpProtocolOptions], object]) -> cluster_pb2.Cluster:
    found = cluster()
    options = http_protocol_options_pb2.HttpProtocolOptions()
    change(options)
    found.typed_extension_protocol_options[OPTIONS].Pack(options)
    return found


def listener(**fields: object) -> listener_pb2.Listener:
    manager = hcm.HttpConnectionManager(**{"codec_type": hcm.HttpConnectionManager.HTTP2, **fields})  # type: ignore[arg-type]
    found = listener_pb2.Listener(name="l")
    found.filter_chains.add().filters.add(name="x").typed_config.Pack(manager)
    return found


def changed_cluster(**fields: object) -> cluster_pb2.Cluster:
    found = cluster()
    found.MergeFrom(cluster_pb2.Cluster(**fields))  # type: ignore[arg-type]
    return found


def test_what_the_quickstart_compiles_to_is_free_of_http1(quickstart: Path, options: Options) -> None:
    mesh = merge(read(quickstart)).mesh
    assert mesh is not None
    compile_mesh(mesh, None, options)  # checks itself
    assert find_http1(compile_gateway(options.gateway)) == []
    assert find_http1(cluster()) == []


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (cluster_pb2.Cluster(name="a"), "no HttpProtocolOptions"),
        (with_options(lambda o: None), "nothing is chosen"),
        (with_options(lambda o: o.auto_config.SetInParent()), "auto_config"),
        (with_options(lambda o: o.use_downstream_protocol_config.SetInParent()), "use_downstream_protocol_config"),
        (with_options(lambda o: o.explicit_http_config.SetInParent()), "has nothing instead"),
        (with_options(lambda o: o.explicit_http_config.http_protocol_options.SetInParent()), "http_protocol_options"),
        (changed_cluster(http_protocol_options={}), "options of HTTP/1.1"),
        (changed_cluster(protocol_selection="USE_DOWNSTREAM_PROTOCOL"), "USE_DOWNSTREAM_PROTOCOL"),
        (
            changed_cluster(health_checks=[health_check_pb2.HealthCheck(http_health_check={"path": "/"})]),
            "health_checks[1]: http_health_check without",
        ),
        (listener(codec_type=hcm.HttpConnectionManager.AUTO), "codec_type AUTO"),
        (listener(codec_type=hcm.HttpConnectionManager.HTTP1), "codec_type HTTP1"),
        (listener(http_protocol_options={"accept_http_10": True}), "options of HTTP/1.1"),
        (listener(upgrade_configs=[{"upgrade_type": "websocket"}]), "upgrade websocket"),
        (
            tls_pb2.DownstreamTlsContext(common_tls_context={"alpn_protocols": ["h2", "http/1.1"]}),
            "ALPN offers http/1.1",
        ),
    ],
)
def test_each_way_of_letting_http1_in_is_found(message: Message, says: str) -> None:
    (place,) = find_http1(message)
    assert says in place


@pytest.mark.parametrize(
    "message",
    [
        with_options(lambda o: o.explicit_http_config.http3_protocol_options.SetInParent()),
        changed_cluster(health_checks=[{"http_health_check": {"path": "/", "codec_client_type": "HTTP2"}}]),
        changed_cluster(health_checks=[{"tcp_health_check": {}}]),
        listener(codec_type=hcm.HttpConnectionManager.HTTP3),
        listener(upgrade_configs=[{"upgrade_type": "websocket"}], http2_protocol_options={"allow_connect": True}),
    ],
)
def test_what_is_http2_or_http3_is_let_through(message: Message) -> None:
    assert find_http1(message) == []


def test_the_place_is_named() -> None:
    (place,) = find_http1(listener(codec_type=hcm.HttpConnectionManager.AUTO))
    assert place.startswith("filter_chains[0].filters[0].typed_config: ")


@pytest.mark.parametrize(
    "type_url", ["type.googleapis.com/unheard.Of", "type.googleapis.com/envoy.config.cluster.v3.Cluster"]
)
def test_what_nobody_has_looked_into_counts(type_url: str) -> None:
    found = listener_pb2.Listener()
    found.filter_chains.add().filters.add().typed_config.CopyFrom(AnyMessage(type_url=type_url, value=b"\xff"))
    (place,) = find_http1(found)
    assert "is not known here" in place


def test_nothing_is_published_that_allows_http1(
    quickstart: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = merge(read(quickstart)).mesh
    assert mesh is not None
    monkeypatch.setattr("controlplane.compile.compile_gateway", lambda _: listener(codec_type=0))
    with pytest.raises(Http1Error, match="codec_type AUTO"):
        compile_mesh(mesh, None, options)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ({"pipe": {"path": "/a"}}, True),
        ({"socket_address": {"address": "127.1.2.3", "port_value": 1}}, True),
        ({"socket_address": {"address": "::1", "port_value": 1}}, True),
        ({"socket_address": {"address": "10.0.0.1", "port_value": 1}}, False),
        ({"socket_address": {"address": "localhost", "port_value": 1}}, False),
        ({}, False),
    ],
)
def test_exceptions_listen_on_this_machine_only(address: dict[str, object], local: bool) -> None:
    assert is_local(address_pb2.Address(**address)) is local  # type: ignore[arg-type]
