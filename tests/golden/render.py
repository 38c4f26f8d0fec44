"""Golden pairs: ``NAME.in.yaml`` holds documents, ``NAME.out.yaml`` what they compile into.

python -m tests.golden.render        writes every ``.out.yaml`` again; read the difference before you commit it
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import envoy_data_plane.envoy.extensions.filters.http.cors.v3
import envoy_data_plane.envoy.extensions.filters.http.fault.v3
import envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3  # noqa: F401 - known by name from now on
import yaml
from envoy_data_plane.google.protobuf import Any as TypedAny
from google.protobuf import descriptor_pool, json_format, message_factory, struct_pb2
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from controlplane.compile import Compiled, GatewayOptions, Options, compile_mesh
from controlplane.compile.clusters import ROUTER_CLUSTER
from controlplane.directory import Source
from controlplane.documents import parse
from controlplane.merge import merge
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.pb.envoy.config.route.v3 import route_pb2
from xds.types import CLUSTER, ENDPOINT, ROUTE

FOLDER = Path(__file__).parent
KINDS: dict[str, tuple[str, type[Message]]] = {
    "clusters": (CLUSTER, cluster_pb2.Cluster),
    "endpoints": (ENDPOINT, endpoint_pb2.ClusterLoadAssignment),
    "routes": (ROUTE, route_pb2.RouteConfiguration),
}

# Of nearly every cluster, so they would only hide what a pair is about.
USUAL: dict[str, Any] = {
    "connect_timeout": "1s",
    "circuit_breakers": {"thresholds": [{"max_retries": 256}]},
    "eds_cluster_config": {"eds_config": {"ads": {}, "resource_api_version": "V3"}},
    "typed_extension_protocol_options": {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {
                "http2_protocol_options": {
                    "initial_connection_window_size": 16777216,
                    "initial_stream_window_size": 1048576,
                }
            },
        }
    },
}


def names() -> list[str]:
    return sorted(path.name.removesuffix(".in.yaml") for path in FOLDER.glob("*.in.yaml"))


def compiled(name: str) -> Compiled:
    path = FOLDER / f"{name}.in.yaml"
    result = merge(Source(parse(path.read_bytes(), path.name), ()))
    assert result.mesh is not None, [str(problem) for problem in result.problems]
    gateway = GatewayOptions("127.0.0.1:10000", Path("/run/access.log"), 2500)
    return compile_mesh(result.mesh, None, Options(gateway, Path("/run/router.sock")))


def resources(result: Compiled, kind: str) -> Iterator[Message]:
    url, message = KINDS[kind]
    for name, resource in sorted(result.envoy.of_type(url).items()):
        if name != ROUTER_CLUSTER:
            yield message.FromString(resource.body)


def as_value(message: Message) -> Any:
    """JSON."""
    _unpackable(message)
    return json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))


def _unpackable(message: Message) -> None:
    """Turn packed messages that have no descriptor here into structs."""
    if isinstance(message, AnyMessage):
        name = message.type_url.rpartition("/")[2]
        try:
            message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))
        except KeyError:
            inner = TypedAny.parse(message.SerializeToString()).unpack()
            shown = struct_pb2.Struct()
            json_format.ParseDict({name: inner.to_dict() if inner else {}}, shown)
            message.Pack(shown)
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            for item in value.values():
                if isinstance(item, Message):
                    _unpackable(item)
        else:
            for item in value if field.is_repeated else (value,):
                _unpackable(item)


def render(name: str) -> str:
    result = compiled(name)
    found: dict[str, Any] = {kind: [as_value(message) for message in resources(result, kind)] for kind in KINDS}
    for cluster in found["clusters"]:
        for field, value in USUAL.items():
            if cluster.get(field) == value:
                del cluster[field]
    return yaml.safe_dump(found, sort_keys=True, width=120, allow_unicode=True)


if __name__ == "__main__":
    for each in names():
        (FOLDER / f"{each}.out.yaml").write_text(render(each))
