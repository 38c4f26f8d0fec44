"""What scripts of events are written with: a stream of either variant, a clock, a snapshot, and small resources.

An event returns the responses that follow it, each written «type +sent -removed», heartbeats as «~name».
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from google.protobuf.any_pb2 import Any as AnyMessage

from xds.delta import DeltaStream
from xds.describe import describe_client
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.pb.envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from xds.pb.envoy.config.route.v3 import route_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.google.rpc import status_pb2
from xds.pb.xds import status_pb2 as status_message
from xds.pushes import Pushes, Response
from xds.snapshot import Resource, Snapshot
from xds.sotw import SotwStream
from xds.stream import AdsState, News
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE, short_name

POLICY = "type.googleapis.com/example.Policy"


class Script:
    """One delta stream, a clock that the test moves, and the snapshot of its group."""

    def __init__(self, *resources: Resource, snapshot: Snapshot | None = None, features: Iterable[str] = ()) -> None:
        self.pushes = Pushes()
        self.now = 100.0
        self.snapshot: Snapshot | None = Snapshot(resources) if snapshot is None else snapshot
        self.node = base_pb2.Node(id="n", client_features=features)
        self.reconnect()

    @classmethod
    def without_snapshot(cls) -> Self:
        script = cls()
        script.snapshot = None
        script.reconnect()
        return script

    def reconnect(self) -> None:
        """Open another stream against what the server has now."""
        self.stream: AdsState = DeltaStream(self.snapshot, self.pushes, self.now)
        self.last: dict[str, Response] = {}

    def ask(
        self,
        type_url: str,
        *subscribe: str,
        drop: Iterable[str] = (),
        held: dict[str, str] | None = None,
        nonce: str = "",
        error: str = "",
    ) -> list[str]:
        request = discovery_pb2.DeltaDiscoveryRequest(
            node=self.node,
            type_url=type_url,
            resource_names_subscribe=subscribe,
            resource_names_unsubscribe=drop,
            initial_resource_versions=held,
            response_nonce=nonce,
        )
        if error:
            request.error_detail.CopyFrom(status_pb2.Status(code=3, message=error))
        assert isinstance(self.stream, DeltaStream)
        return self.out(self.stream.on_request(request, self.now))

    def ack(self, type_url: str, *subscribe: str, drop: Iterable[str] = ()) -> list[str]:
        return self.ask(type_url, *subscribe, drop=drop, nonce=self.last[type_url].nonce)

    def nack(self, type_url: str, error: str = "no") -> list[str]:
        return self.ask(type_url, nonce=self.last[type_url].nonce, error=error)

    def change(self, *resources: Resource) -> list[str]:
        new = Snapshot(resources)
        changed = {} if self.snapshot is None else new.changed_since(self.snapshot)
        self.snapshot = new
        return self.out(self.stream.on_snapshot(new, News(changed), self.now))

    def wait(self, seconds: float) -> list[str]:
        self.now += seconds
        return self.out(self.stream.on_tick(self.now))

    def out(self, responses: list[Response]) -> list[str]:
        for response in responses:
            self.last[response.type_url] = response
        return [
            " ".join(
                [
                    short_name(response.type_url),
                    *(f"{'~' if response.heartbeat else '+'}{resource.name}" for resource in response.resources),
                    *(f"-{name}" for name in response.removed),
                ]
            )
            for response in responses
        ]

    def versions(self, type_url: str) -> dict[str, str]:
        assert self.snapshot is not None
        return {name: resource.version for name, resource in self.snapshot.of_type(type_url).items()}

    def described(self, type_url: str) -> status_message.Type:
        """What the status service would say of a type."""
        client = describe_client(self.stream, group="", encoding="", opened=0.0, waiting=None, wall_offset=0.0)
        (found,) = [item for item in client.types if item.type_url == type_url]
        return found

    def holds(self, type_url: str) -> set[str]:
        return self.stream.types[type_url].held(self.snapshot)


class SotwScript(Script):
    """The same with a state-of-the-world stream; a request names everything that is subscribed to."""

    def reconnect(self) -> None:
        self.stream = SotwStream(self.snapshot, self.pushes, self.now)
        self.last = {}
        self.names: dict[str, tuple[str, ...]] = {}
        self.version: dict[str, str] = {}

    def ask(  # type: ignore[override]
        self, type_url: str, *names: str, nonce: str = "", version: str = "", error: str = ""
    ) -> list[str]:
        self.names[type_url] = names
        request = discovery_pb2.DiscoveryRequest(
            node=self.node, type_url=type_url, resource_names=names, response_nonce=nonce, version_info=version
        )
        if error:
            request.error_detail.CopyFrom(status_pb2.Status(code=3, message=error))
        assert isinstance(self.stream, SotwStream)
        return self.out(self.stream.on_request(request, self.now))

    def ack(self, type_url: str, *names: str) -> list[str]:  # type: ignore[override]
        """Acknowledge; with names, subscribe to these from now on."""
        response = self.last[type_url]
        self.version[type_url] = response.version
        wanted = names or self.names[type_url]
        return self.ask(type_url, *wanted, nonce=response.nonce, version=response.version)

    def again(self, type_url: str, *names: str) -> list[str]:
        """Send another request after an ACK: the last nonce, other names."""
        return self.ask(type_url, *names, nonce=self.last[type_url].nonce, version=self.version[type_url])

    def nack(self, type_url: str, error: str = "no") -> list[str]:
        nonce, version = self.last[type_url].nonce, self.version.get(type_url, "")
        return self.ask(type_url, *self.names[type_url], nonce=nonce, version=version, error=error)


def policy(name: str, text: str = "1", *, aliases: Iterable[str] = (), ttl: float | None = None) -> Resource:
    return Resource.of(POLICY, name, AnyMessage(type_url=text), aliases=aliases, ttl=ttl)


def cluster(
    name: str, seconds: int = 1, *, service: str = "", kind: int = cluster_pb2.Cluster.EDS, file: str = ""
) -> Resource:
    message = cluster_pb2.Cluster(name=name, type=kind)  # type: ignore[arg-type]
    message.connect_timeout.seconds = seconds
    message.eds_cluster_config.service_name = service
    if file:
        message.eds_cluster_config.eds_config.path_config_source.path = file
    return Resource.of(CLUSTER, name, message)


def endpoints(name: str, weight: int = 0, *, ports: Iterable[int] = ()) -> Resource:
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    message.policy.overprovisioning_factor.value = weight
    for port in ports:
        address = message.endpoints.add().lb_endpoints.add().endpoint.address.socket_address
        address.address, address.port_value = "127.0.0.1", port
    return Resource.of(ENDPOINT, name, message)


def listener(name: str, *, route: str = "", prefix: str = "") -> Resource:
    message = listener_pb2.Listener(name=name, stat_prefix=prefix)
    if route:
        manager = http_connection_manager_pb2.HttpConnectionManager(
            rds=http_connection_manager_pb2.Rds(route_config_name=route)
        )
        item = listener_components_pb2.Filter(name="hcm")
        item.typed_config.Pack(manager)
        message.filter_chains.add().filters.append(item)
    return Resource.of(LISTENER, name, message)


def route(name: str, host: str = "a") -> Resource:
    message = route_pb2.RouteConfiguration(name=name)
    message.virtual_hosts.add(name=host, domains=["*"])
    return Resource.of(ROUTE, name, message)


def everything(script: type[Script] = Script) -> Script:
    """A client that holds cluster, endpoints, listener and route «old», all acknowledged."""
    made = script(cluster("old"), endpoints("old"), listener("l", route="r"), route("r", "old"), policy("p"))
    # Deliberately not in push order; listeners and clusters bring routes and endpoints once more.
    for url, names in ((POLICY, ["*"]), (ROUTE, ["r"]), (LISTENER, []), (ENDPOINT, ["old"]), (CLUSTER, [])):
        made.ask(url, *names)
        made.ack(url)
    made.ack(ENDPOINT)
    made.ack(ROUTE)
    return made
