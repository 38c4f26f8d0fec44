"""The rules of incremental xDS as scripts: an event, and the responses that must follow, written «type +sent -removed».

Rule numbers X1–X21 follow Envoy's «xDS REST and gRPC protocol» in its order; each test names the rule it holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from xds.delta import MAX_TYPES, RESUME_GRACE, WARM_LIMIT, DeltaStream
from xds.errors import RefusedRequestError
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.pb.envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from xds.pb.envoy.config.route.v3 import route_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.google.rpc import status_pb2
from xds.pushes import Pushes, Response
from xds.snapshot import Resource, Snapshot
from xds.subscription import MAX_NAMES
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE, short_name

POLICY = "type.googleapis.com/example.Policy"


class Script:
    """One stream, a clock that the test moves, and the snapshot of its group."""

    def __init__(self, *resources: Resource, snapshot: Snapshot | None = None) -> None:
        self.pushes = Pushes()
        self.now = 100.0
        self.snapshot: Snapshot | None = Snapshot(resources) if snapshot is None else snapshot
        self.last: dict[str, Response] = {}
        self.stream = DeltaStream(self.snapshot, self.pushes, self.now)

    @classmethod
    def without_snapshot(cls) -> Script:
        script = cls()
        script.snapshot = None
        script.stream = DeltaStream(None, script.pushes, script.now)
        return script

    def reconnect(self) -> None:
        """Open another stream against what the server has now."""
        self.stream = DeltaStream(self.snapshot, self.pushes, self.now)
        self.last = {}

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
            node=base_pb2.Node(id="n"),
            type_url=type_url,
            resource_names_subscribe=subscribe,
            resource_names_unsubscribe=drop,
            initial_resource_versions=held,
            response_nonce=nonce,
        )
        if error:
            request.error_detail.CopyFrom(status_pb2.Status(code=3, message=error))
        return self.out(self.stream.on_request(request, self.now))

    def ack(self, type_url: str, *subscribe: str, drop: Iterable[str] = ()) -> list[str]:
        return self.ask(type_url, *subscribe, drop=drop, nonce=self.last[type_url].nonce)

    def nack(self, type_url: str, error: str = "no") -> list[str]:
        return self.ask(type_url, nonce=self.last[type_url].nonce, error=error)

    def change(self, *resources: Resource) -> list[str]:
        new = Snapshot(resources)
        changed = {} if self.snapshot is None else new.changed_since(self.snapshot)
        self.snapshot = new
        return self.out(self.stream.on_snapshot(new, changed, self.now))

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
                    *(f"+{resource.name}" for resource in response.resources),
                    *(f"-{name}" for name in response.removed),
                ]
            )
            for response in responses
        ]

    def versions(self, type_url: str) -> dict[str, str]:
        assert self.snapshot is not None
        return {name: resource.version for name, resource in self.snapshot.of_type(type_url).items()}


def policy(name: str, text: str = "1") -> Resource:
    return Resource.of(POLICY, name, AnyMessage(type_url=text))


def cluster(name: str, seconds: int = 1, *, service: str = "", kind: int = cluster_pb2.Cluster.EDS) -> Resource:
    message = cluster_pb2.Cluster(name=name, type=kind)  # type: ignore[arg-type]
    message.connect_timeout.seconds = seconds
    message.eds_cluster_config.service_name = service
    return Resource.of(CLUSTER, name, message)


def endpoints(name: str, weight: int = 0) -> Resource:
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    message.policy.overprovisioning_factor.value = weight
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


def test_every_response_has_a_nonce_of_its_own_stream() -> None:  # X1, X16
    script = Script(policy("a"))
    seen: list[str] = []
    script.ask(POLICY, "*")
    for text in "23456":
        seen.append(script.last[POLICY].nonce)
        script.ack(POLICY)
        script.change(policy("a", text))
    assert all(seen)
    assert len(set(seen)) == len(seen)


def test_the_same_content_again_has_another_nonce_on_the_same_stream() -> None:  # X1
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    first = script.last[POLICY].nonce
    script.ack(POLICY)
    assert script.ask(POLICY, "a") == ["Policy +a"]
    assert script.last[POLICY].nonce != first


def test_streams_that_are_told_the_same_share_the_response() -> None:
    pushes, snapshot = Pushes(), Snapshot([policy("a")])
    request = discovery_pb2.DeltaDiscoveryRequest(
        node=base_pb2.Node(id="n"), type_url=POLICY, resource_names_subscribe=["*"]
    )
    first = DeltaStream(snapshot, pushes, 0.0).on_request(request, 0.0)
    second = DeltaStream(snapshot, pushes, 1.0).on_request(request, 1.0)
    assert first[0] is second[0]


def test_the_node_is_taken_from_the_first_request_and_kept() -> None:  # X2
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    later = discovery_pb2.DeltaDiscoveryRequest(type_url=CLUSTER)
    script.stream.on_request(later, script.now)
    assert script.stream.node.id == "n"


def test_a_first_request_without_a_node_is_refused() -> None:  # X2
    request = discovery_pb2.DeltaDiscoveryRequest(type_url=POLICY)
    with pytest.raises(RefusedRequestError, match="node is missing"):
        Script().stream.on_request(request, 0.0)


def test_a_request_without_a_type_is_refused() -> None:  # X21
    with pytest.raises(RefusedRequestError, match="type_url is missing"):
        Script().ask("")


def test_equal_versions_after_reconnecting_are_not_sent_but_new_subscriptions_are() -> None:  # X3, X15
    script = Script(endpoints("a"), endpoints("b"))
    held = {"a": script.versions(ENDPOINT)["a"]}
    assert script.ask(ENDPOINT, "a", "b", held=held) == ["EDS +b"]


def test_a_nack_is_known_by_its_error_alone() -> None:  # X4
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    # Subscribing to another name while acknowledging looks like an old version in the state-of-the-world protocol.
    assert script.ack(POLICY, "b") == ["Policy -b"]
    assert script.stream.types[POLICY].error == ""
    script.nack(POLICY, "bad b")
    assert script.stream.types[POLICY].error == "bad b"


def test_nothing_is_sent_without_a_change() -> None:  # X5
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    assert script.ack(POLICY) == []
    assert script.change(policy("a")) == []
    assert script.wait(3600) == []


def test_what_was_refused_is_not_sent_again_until_it_changes() -> None:  # X5
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "*")
    assert script.nack(POLICY, "bad") == []
    assert script.wait(3600) == []
    assert script.change(policy("a"), policy("b", "2")) == ["Policy +b"]
    assert script.stream.types[POLICY].error == "bad"
    script.ack(POLICY)
    assert script.stream.types[POLICY].error == ""


def test_going_back_to_what_was_in_force_before_a_nack_is_sent() -> None:
    script = Script(policy("a", "good"))
    script.ask(POLICY, "*")
    script.ack(POLICY)
    script.change(policy("a", "bad"))
    script.nack(POLICY)
    assert script.change(policy("a", "good")) == ["Policy +a"]


def test_the_newest_request_decides() -> None:  # X6
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "a")
    script.ask(POLICY, "b", drop=["a"])
    assert script.ack(POLICY) == ["Policy +b"]
    script.ack(POLICY)
    assert script.change(policy("a", "2"), policy("b")) == []


def test_a_stale_nonce_acknowledges_nothing_but_its_subscriptions_count() -> None:  # X7
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "a")
    old = script.last[POLICY].nonce
    script.ack(POLICY)
    script.change(policy("a", "2"), policy("b"))
    current = script.last[POLICY].nonce
    assert script.ask(POLICY, "b", nonce=old, error="too late") == []
    assert script.stream.types[POLICY].error == ""
    assert script.stream.types[POLICY].in_flight is not None
    assert script.ask(POLICY, nonce=current) == ["Policy +b"]


def test_a_newly_asked_name_is_sent_though_it_was_sent_unasked() -> None:  # X8
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    script.ack(POLICY)
    assert script.ask(POLICY, "a") == ["Policy +a"]


def test_an_empty_first_request_for_clusters_means_everything() -> None:  # X9
    script = Script(cluster("a"), cluster("b"))
    assert script.ask(CLUSTER) == ["CDS +a +b"]


def test_an_empty_first_request_for_endpoints_means_nothing() -> None:  # X9: «for Listener and Cluster»
    script = Script(endpoints("a"))
    assert script.ask(ENDPOINT) == []
    assert script.change(endpoints("a", 2)) == []


def test_the_four_steps_of_the_document() -> None:  # X9, the example in «How the client specifies what to return»
    script = Script(cluster("A"), cluster("B"))
    assert script.ask(CLUSTER) == ["CDS +A +B"]
    script.ack(CLUSTER)
    assert script.ask(CLUSTER, "A") == ["CDS +A"]
    script.ack(CLUSTER)
    assert script.change(cluster("A"), cluster("B", 2)) == ["CDS +B"]
    script.ack(CLUSTER)
    assert script.ask(CLUSTER, drop=["*"]) == []
    assert script.change(cluster("A", 2), cluster("B", 3)) == ["CDS +A"]
    script.ack(CLUSTER)
    assert script.ask(CLUSTER, drop=["A"]) == []
    assert script.change(cluster("A", 3), cluster("B", 4)) == []
    assert script.ask(CLUSTER) == []
    assert script.change(cluster("A", 4), cluster("B", 5)) == []


def test_the_wildcard_asked_for_later_brings_everything() -> None:  # X8, X9
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "a")
    script.ack(POLICY)
    assert script.ask(POLICY, "*") == ["Policy +a +b"]


def test_no_name_occurs_twice() -> None:  # X11
    script = Script(policy("a"))
    script.ask(POLICY, "a", "*", "a")
    names = [resource.name for resource in script.last[POLICY].resources]
    assert names == ["a"]


def test_a_name_that_does_not_exist_is_removed_and_sent_when_it_appears() -> None:  # X12
    script = Script(policy("other"))
    assert script.ask(POLICY, "a") == ["Policy -a"]
    script.ack(POLICY)
    assert script.change(policy("other"), policy("a")) == ["Policy +a"]


def test_a_resubscribed_name_is_sent_again() -> None:  # X13
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    script.ack(POLICY)
    assert script.ask(POLICY, "a") == ["Policy +a"]
    script.ack(POLICY)
    assert script.ask(POLICY, drop=["a"]) == []
    assert script.ask(POLICY, "a") == ["Policy +a"]


def test_unsubscribing_needs_no_answer_and_unknown_names_are_ignored() -> None:  # X14
    script = Script(policy("a"))
    script.ask(POLICY, "a")
    assert script.ack(POLICY, drop=["a", "never"]) == []
    assert script.change(policy("a", "2")) == []


def test_a_name_dropped_under_the_wildcard_is_answered() -> None:  # X14
    script = Script(policy("a"))
    script.ask(POLICY, "*", "a", "missing")
    script.ack(POLICY)
    assert script.ask(POLICY, drop=["a", "missing", "never"]) == ["Policy +a -missing"]
    script.ack(POLICY)
    assert script.change(policy("a", "2")) == ["Policy +a"]


def test_without_the_wildcard_the_client_holds_only_what_it_named() -> None:  # X9
    script = Script(policy("a"), policy("b"))
    script.ask(POLICY, "*", "a")
    script.ack(POLICY)
    script.ask(POLICY, drop=["*"])
    assert set(script.stream.types[POLICY].held) == {"a"}
    script.change(policy("a"))
    assert script.ask(POLICY, "*") == ["Policy +a"]


def test_coming_back_with_everything_equal_brings_nothing() -> None:  # X15
    script = Script(cluster("a"), endpoints("a"), listener("l"), route("r"), policy("p"))
    held = {url: script.versions(url) for url in (CLUSTER, ENDPOINT, LISTENER, ROUTE, POLICY)}
    script.reconnect()
    for url, names in ((CLUSTER, ["*"]), (ENDPOINT, ["a"]), (LISTENER, []), (ROUTE, ["r"]), (POLICY, ["*"])):
        assert script.ask(url, *names, held=held[url]) == []
    assert script.wait(3600) == []
    for url in held:
        state = script.stream.types[url]
        assert script.snapshot is not None
        assert state.acked_version == state.sent_version == script.snapshot.version(url) != ""


def test_coming_back_brings_what_changed_and_what_went() -> None:  # X15
    script = Script(policy("same"), policy("new"), policy("changed", "2"))
    held = {
        "same": policy("same").version,
        "changed": policy("changed", "1").version,
        "gone": policy("gone").version,
    }
    assert script.ask(POLICY, "*", held=held) == ["Policy +changed +new -gone"]


def test_versions_of_names_that_are_not_asked_for_are_ignored() -> None:  # X15
    script = Script(endpoints("a"))
    assert script.ask(ENDPOINT, "a", held={"a": endpoints("a").version, "stray": "0"}) == []


def test_a_fresh_client_of_an_empty_group_gets_an_empty_answer() -> None:
    script = Script()
    assert script.ask(CLUSTER) == ["CDS"]
    assert script.ack(CLUSTER) == []
    assert script.ask(POLICY, "*") == ["Policy"]


def test_before_there_is_a_snapshot_nothing_is_answered_or_removed() -> None:
    script = Script.without_snapshot()
    assert script.ask(POLICY, "*", held={"a": policy("a").version, "b": "old"}) == []
    assert script.ask(CLUSTER) == []
    assert script.ask(ENDPOINT, "x") == []
    assert script.wait(3600) == []
    assert script.change(policy("a"), policy("b")) == ["CDS", "EDS -x", "Policy +b"]


def test_an_aggregated_stream_keeps_types_apart() -> None:  # X21
    script = Script(policy("a"), cluster("a"))
    script.ask(POLICY, "*")
    assert script.ask(CLUSTER) == ["CDS +a"]
    assert script.ack(POLICY) == []
    assert script.stream.types[CLUSTER].in_flight is not None


def test_endpoints_of_a_changed_cluster_are_sent_again() -> None:  # X18
    script = Script(cluster("a"), cluster("b"), endpoints("a"), endpoints("b"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a", "b")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    assert script.change(cluster("a", 2), cluster("b"), endpoints("a"), endpoints("b")) == ["CDS +a", "EDS +a"]


def test_a_clusters_service_name_names_its_endpoints() -> None:  # X18
    script = Script(cluster("a", service="svc"), endpoints("svc"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "svc")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    assert script.change(cluster("a", 2, service="svc"), endpoints("svc")) == ["CDS +a", "EDS +svc"]


def test_only_clusters_with_endpoint_discovery_wait_for_endpoints() -> None:  # X18
    script = Script(cluster("a", kind=cluster_pb2.Cluster.STATIC), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    script.ack(CLUSTER)
    script.ack(ENDPOINT)
    assert script.change(cluster("a", 2, kind=cluster_pb2.Cluster.STATIC), endpoints("a")) == ["CDS +a"]


def test_endpoints_in_flight_are_sent_again_after_their_ack() -> None:  # X18
    script = Script(cluster("a"), endpoints("a"))
    script.ask(CLUSTER)
    script.ask(ENDPOINT, "a")
    script.ack(CLUSTER)
    assert script.change(cluster("a", 2), endpoints("a")) == ["CDS +a"]
    assert script.ack(ENDPOINT) == ["EDS +a"]


def test_endpoints_are_sent_again_when_their_cluster_changed_while_the_client_was_away() -> None:  # X15, X18
    script = Script(cluster("a", 2), cluster("b"), endpoints("a"), endpoints("b"))
    assert script.ask(CLUSTER, "*", held={"a": cluster("a").version, "b": cluster("b").version}) == ["CDS +a"]
    # The client says what it holds before it knows that the cluster has changed.
    assert script.ask(ENDPOINT, "a", "b", held=script.versions(ENDPOINT)) == ["EDS +a"]


def test_routes_of_a_changed_listener_are_sent_again() -> None:  # X18
    script = Script(listener("l", route="r"), route("r"))
    script.ask(LISTENER)
    script.ask(ROUTE, "r")
    script.ack(LISTENER)
    script.ack(ROUTE)
    assert script.change(listener("l", route="r", prefix="x"), route("r")) == ["LDS +l", "RDS +r"]


def everything() -> Script:
    """A client that holds cluster, endpoints, listener and route «old», all acknowledged."""
    script = Script(cluster("old"), endpoints("old"), listener("l", route="r"), route("r", "old"), policy("p"))
    # Deliberately not in push order; listeners and clusters bring routes and endpoints once more.
    for url, names in ((POLICY, ["*"]), (ROUTE, ["r"]), (LISTENER, []), (ENDPOINT, ["old"]), (CLUSTER, [])):
        script.ask(url, *names)
        script.ack(url)
    script.ack(ENDPOINT)
    script.ack(ROUTE)
    return script


def test_what_is_referred_to_goes_first_and_what_is_stale_goes_last() -> None:  # X19
    script = everything()
    script.ask(ENDPOINT, "new")
    script.ack(ENDPOINT)
    assert script.change(
        cluster("new"), endpoints("new"), listener("l", route="r", prefix="x"), route("r", "new"), policy("p", "2")
    ) == ["CDS +new", "EDS +new", "Policy +p"]
    # The cluster is acknowledged when it is warm: from then on routes may refer to it.
    script.ack(ENDPOINT)
    assert script.ack(CLUSTER) == ["LDS +l", "RDS +r"]
    assert script.ack(LISTENER) == []
    assert script.ack(ROUTE) == ["CDS -old", "EDS -old"]


def test_stale_clusters_stay_while_a_refused_route_may_refer_to_them() -> None:  # X19
    script = everything()
    assert script.change(listener("l", route="r"), route("r", "new"), policy("p")) == ["RDS +r"]
    assert script.nack(ROUTE) == []
    assert script.wait(60) == []
    assert script.change(listener("l", route="r"), route("r", "newer"), policy("p")) == ["RDS +r"]
    assert script.ack(ROUTE) == ["CDS -old", "EDS -old"]


def test_a_removal_that_was_taken_back_in_time_is_never_sent() -> None:
    script = everything()
    script.change(listener("l", route="r"), route("r", "new"), policy("p"))
    back = (cluster("old"), endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    assert script.change(*back) == []
    assert script.ack(ROUTE) == []


def test_without_listeners_and_routes_clusters_are_removed_at_once() -> None:
    script = Script(cluster("a"))
    script.ask(CLUSTER)
    script.ack(CLUSTER)
    assert script.change() == ["CDS -a"]


def test_a_cluster_that_does_not_get_warm_stops_routes_for_a_while_only() -> None:
    script = everything()
    new = (cluster("old", 2), endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    assert script.change(*new) == ["CDS +old", "EDS +old"]
    assert script.wait(WARM_LIMIT - 0.1) == []
    assert script.wait(0.1) == ["RDS +r"]


def test_a_refused_cluster_does_not_stop_routes() -> None:
    script = everything()
    new = (cluster("old", 2), endpoints("old"), listener("l", route="r"), route("r", "new"), policy("p"))
    script.change(*new)
    assert script.nack(CLUSTER) == ["RDS +r"]


def test_after_coming_back_stale_clusters_wait_for_routes_to_be_asked_for() -> None:  # X15, X19
    script = Script(cluster("new"), endpoints("new"), route("r", "new"))
    held = {"old": "1", "new": cluster("new").version}
    assert script.ask(CLUSTER, "*", held=held) == []
    assert script.ask(ROUTE, "r", held={"r": "1"}) == ["RDS +r"]
    assert script.ack(ROUTE) == []
    assert script.wait(RESUME_GRACE) == ["CDS -old"]


def test_changes_behind_a_response_in_flight_gather_and_the_latest_wins() -> None:
    script = Script(policy("a"), policy("b"), policy("c"))
    script.ask(POLICY, "*")
    assert script.change(policy("a", "2"), policy("b"), policy("c")) == []
    assert script.change(policy("a", "3"), policy("b", "2"), policy("c")) == []
    assert script.change(policy("a", "1"), policy("b", "3")) == []
    assert script.ack(POLICY) == ["Policy +b -c"]
    assert script.last[POLICY].resources[0] == policy("b", "3")


def test_a_nack_lets_gathered_changes_go() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    script.change(policy("a", "2"))
    assert script.nack(POLICY) == ["Policy +a"]


def test_a_response_without_answer_is_overdue() -> None:
    script = Script(policy("a"))
    script.ask(POLICY, "*")
    assert script.stream.overdue(script.now + 9.9, 10.0) is None
    assert script.stream.overdue(script.now + 10.0, 10.0) == POLICY
    script.ack(POLICY)
    assert script.stream.overdue(script.now + 99.0, 10.0) is None


def test_a_change_that_a_client_does_not_want_leaves_it_current() -> None:
    script = Script(endpoints("a"), endpoints("b"))
    script.ask(ENDPOINT, "a")
    script.ack(ENDPOINT)
    assert script.change(endpoints("a"), endpoints("b", 2)) == []
    assert script.snapshot is not None
    assert script.stream.types[ENDPOINT].acked_version == script.snapshot.version(ENDPOINT)


def test_names_and_types_are_bounded() -> None:
    script = Script()
    with pytest.raises(RefusedRequestError) as caught:
        script.ask(POLICY, *(str(number) for number in range(MAX_NAMES + 1)))
    assert caught.value.grpc_status == 8
    script = Script()
    for number in range(MAX_TYPES):
        script.ask(f"type.googleapis.com/example.T{number}", "*")
    with pytest.raises(RefusedRequestError):
        script.ask("type.googleapis.com/example.OneMore", "*")
