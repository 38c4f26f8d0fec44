"""What a route does with requests: where they go, how often, and what changes on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from google.protobuf.any_pb2 import Any as AnyMessage

from controlplane.compile.names import cluster_name
from controlplane.compile.protobuf import duration
from controlplane.model import (
    Destination,
    HashOn,
    HeaderEdits,
    Mirror,
    Redirect,
    Retries,
    Rewrite,
    Rule,
    Service,
    Tier,
)
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.config.route.v3 import route_components_pb2
from xds.pb.envoy.type.v3 import percent_pb2

__all__ = ["PREVIOUS_HOSTS", "add_edits", "answer", "retry_policy", "send_to", "set_action"]

PREVIOUS_HOSTS: Final = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"

# Of an endpoint for a retry, until it is one that has not failed yet; with two endpoints, of which the failing one has
# less to do, each pick is wrong three times out of four.
_PICKS: Final = 32

_SET = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_ADD = base_pb2.HeaderValueOption.APPEND_IF_EXISTS_OR_ADD


def set_action(
    route: route_components_pb2.Route, rule: Rule, services: Mapping[str, Service], tier: Tier | None = None
) -> None:
    """Make a route send requests to the rule's destinations, and treat them as it says, else as their tier does."""
    action = route.route
    send_to(action, rule.destinations, tier)
    retries = rule.retries or (tier.retries if tier else None)
    if retries and retries.attempts:
        action.retry_policy.CopyFrom(retry_policy(retries))
    if tier and tier.high_priority:
        action.priority = base_pb2.HIGH
    if rule.rewrite:
        _rewrite(action, rule.rewrite)
    for mirror in rule.mirrors:
        _mirror(action, mirror, tier)
    for hash_on in dict.fromkeys(_hashes(rule.destinations, services)):
        _hash(action, hash_on)


def answer(route: route_components_pb2.Route, rule: Rule) -> bool:
    """Make a route answer at once if the rule says so; return whether it does."""
    if rule.redirect:
        _redirect(route.redirect, rule.redirect)
    elif rule.response:
        route.direct_response.status = rule.response.status
        if rule.response.body:
            route.direct_response.body.inline_string = rule.response.body
    return bool(rule.redirect or rule.response)


def send_to(action: route_components_pb2.RouteAction, destinations: Sequence[Destination], tier: Tier | None) -> None:
    """Set where requests go, each destination by its share."""
    if len(destinations) == 1 and destinations[0].headers == HeaderEdits():
        action.cluster = _cluster(destinations[0], tier)
        return
    for destination in destinations:
        item = action.weighted_clusters.clusters.add(name=_cluster(destination, tier))
        item.weight.value = destination.weight
        add_edits(item, destination.headers)


def _cluster(place: Destination | Mirror, tier: Tier | None) -> str:
    return cluster_name(place.service, place.subset, tier.name if tier else None)


def add_edits(
    message: route_components_pb2.Route | route_components_pb2.WeightedCluster.ClusterWeight, edits: HeaderEdits
) -> None:
    """Add what happens to headers."""
    message.request_headers_to_add.extend(_options(edits.set, edits.add))
    message.request_headers_to_remove.extend(edits.remove)
    message.response_headers_to_add.extend(_options(edits.response_set, edits.response_add))
    message.response_headers_to_remove.extend(edits.response_remove)


def _options(set_: Iterable[tuple[str, str]], add: Iterable[tuple[str, str]]) -> Iterator[base_pb2.HeaderValueOption]:
    for values, append in ((set_, _SET), (add, _ADD)):
        for name, value in values:
            # Envoy's command operators begin with «%»; documents mean the character.
            header = base_pb2.HeaderValue(key=name, value=value.replace("%", "%%"))
            yield base_pb2.HeaderValueOption(header=header, append_action=append, keep_empty_value=not value)


def retry_policy(retries: Retries) -> route_components_pb2.RetryPolicy:
    """Return when to try again; not at an endpoint that has just failed, as long as there is another."""
    reasons = (*retries.on, *(("retriable-status-codes",) if retries.statuses else ()))
    policy = route_components_pb2.RetryPolicy(
        retry_on=",".join(dict.fromkeys(reasons)),
        num_retries={"value": retries.attempts},
        retriable_status_codes=retries.statuses,
        host_selection_retry_max_attempts=_PICKS,
    )
    policy.retry_host_predicate.add(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=AnyMessage(type_url=f"type.googleapis.com/{PREVIOUS_HOSTS}"),
    )
    if retries.per_try_ms is not None:
        policy.per_try_timeout.CopyFrom(duration(retries.per_try_ms))
    if retries.base_ms is not None:
        policy.retry_back_off.base_interval.CopyFrom(duration(retries.base_ms))
        # Envoy's default.
        policy.retry_back_off.max_interval.CopyFrom(duration(retries.max_ms or 10 * retries.base_ms))
    return policy


def _rewrite(action: route_components_pb2.RouteAction, rewrite: Rewrite) -> None:
    if rewrite.path is not None:
        action.prefix_rewrite = rewrite.path
    if rewrite.full_path is not None:
        action.regex_rewrite.pattern.regex = "^/.*$"
        action.regex_rewrite.substitution = rewrite.full_path.replace("\\", "\\\\")
    if rewrite.pattern is not None:
        action.regex_rewrite.pattern.regex = rewrite.pattern
        action.regex_rewrite.substitution = rewrite.substitution
    if rewrite.authority is not None:
        action.host_rewrite_literal = rewrite.authority


def _mirror(action: route_components_pb2.RouteAction, mirror: Mirror, tier: Tier | None) -> None:
    policy = action.request_mirror_policies.add(cluster=_cluster(mirror, tier))
    # The name that backends are asked for stays: they may choose by it.
    policy.disable_shadow_host_suffix_append = True
    if mirror.millionths < 1_000_000:
        fraction = policy.runtime_fraction.default_value
        fraction.numerator, fraction.denominator = mirror.millionths, percent_pb2.FractionalPercent.MILLION


def _hashes(destinations: Iterable[Destination], services: Mapping[str, Service]) -> Iterator[HashOn]:
    for destination in destinations:
        service = services[destination.service]
        subset = service.subset(destination.subset) if destination.subset else None
        balancer = (subset.policy if subset else service.policy).load_balancer
        if balancer and balancer.hash_on:
            yield balancer.hash_on


def _hash(action: route_components_pb2.RouteAction, hash_on: HashOn) -> None:
    policy = action.hash_policy.add()
    if hash_on.kind == "header":
        policy.header.header_name = hash_on.name
    elif hash_on.kind == "query":
        policy.query_parameter.name = hash_on.name
    elif hash_on.kind == "source":
        policy.connection_properties.source_ip = True
    else:
        policy.cookie.name, policy.cookie.path = hash_on.name, hash_on.path
        if hash_on.ttl_ms is not None:
            policy.cookie.ttl.CopyFrom(duration(hash_on.ttl_ms))


_CODES = {
    301: route_components_pb2.RedirectAction.MOVED_PERMANENTLY,
    302: route_components_pb2.RedirectAction.FOUND,
    303: route_components_pb2.RedirectAction.SEE_OTHER,
    307: route_components_pb2.RedirectAction.TEMPORARY_REDIRECT,
    308: route_components_pb2.RedirectAction.PERMANENT_REDIRECT,
}


def _redirect(message: route_components_pb2.RedirectAction, redirect: Redirect) -> None:
    message.response_code = _CODES[redirect.code]
    if redirect.path is not None:
        message.path_redirect = redirect.path
    if redirect.prefix is not None:
        message.prefix_rewrite = redirect.prefix
    if redirect.authority is not None:
        message.host_redirect = redirect.authority
    if redirect.scheme is not None:
        message.scheme_redirect = redirect.scheme
    if redirect.port is not None:
        message.port_redirect = redirect.port
