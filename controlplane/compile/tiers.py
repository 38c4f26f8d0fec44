"""How requests of different tiers are kept apart.

Where a host has tiers, every match becomes one for each tier, with the level matched exactly, and one for the rest,
which is the default tier's; each tier has clusters of its own. So nothing of a tier (limits, connections, ejected
endpoints) is shared with another, and a level that there is not is never taken for one that there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from controlplane.compile.matches import route_match
from controlplane.model import LEVEL_HEADER, Match, Mesh, Rule, TextMatch, Tier
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.config.route.v3 import route_components_pb2

__all__ = ["HOPS_HEADER", "TierCluster", "count_pass", "guards", "tier_clusters", "variants"]

HOPS_HEADER: Final = "x-modalmesh-hops"
"""Each pass through a gateway adds one token, with a comma before it."""

_LOOP_STATUS: Final = 508


@dataclass(frozen=True, slots=True, order=True)
class TierCluster:
    """What a cluster is for."""

    service: str
    subset: str
    tier: str


def variants(mesh: Mesh, match: Match) -> Iterator[tuple[Tier, Match]]:
    """Return a match with each tier that its requests may have, in the order in which they are to be tried."""
    level = dict(match.headers).get(LEVEL_HEADER)
    if level is not None:
        yield mesh.tier(level.text), match
        return
    for tier in mesh.tiers:
        yield tier, replace(match, headers=tuple(sorted((*match.headers, (LEVEL_HEADER, TextMatch(tier.name))))))
    yield mesh.tier(mesh.default_tier), match


def tier_clusters(mesh: Mesh) -> list[TierCluster]:
    """Return the clusters that tiers need beside those of all services, sorted."""
    return sorted(
        {
            TierCluster(place.service, place.subset or "", tier)
            for route in mesh.routes
            if any(mesh.has_tiers(host, route) for host in route.hosts)
            for rule in route.rules
            for tier in _tiers(mesh, rule)
            for place in rule.places
        }
    )


def _tiers(mesh: Mesh, rule: Rule) -> set[str]:
    return {tier.name for match in rule.matches for tier, _ in variants(mesh, match)}


def count_pass(route: route_components_pb2.Route, tier: Tier) -> None:
    """Make a route add the tier's name to the passes that a request has behind it.

    To the value, not as another header of the same name: Envoy may match each of those by itself. Before the first pass
    there is none, which leaves an empty token (or «-»), so n passes are n + 1 tokens.
    """
    option = route.request_headers_to_add.add(append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
    option.header.key = HOPS_HEADER
    option.header.value = f"%REQ({HOPS_HEADER})%,{tier.name}"


def guards(mesh: Mesh) -> Iterator[route_components_pb2.Route]:
    """Return routes that stop requests which have passed a gateway as often as their tier may: they go in circles."""
    for tier in mesh.tiers:
        yield _guard(tier, Match(headers=((LEVEL_HEADER, TextMatch(tier.name)),)))
    known = tuple((LEVEL_HEADER, TextMatch(tier.name)) for tier in mesh.tiers)
    yield _guard(mesh.tier(mesh.default_tier), Match(without=known))


def _guard(tier: Tier, match: Match) -> route_components_pb2.Route:

    passes = TextMatch(f"([^,]*,){{{tier.max_hops}}}.*", regex=True)
    message = route_match(replace(match, headers=(*match.headers, (HOPS_HEADER, passes))))
    route = route_components_pb2.Route(name=f"modalmesh.hops.{tier.name}", match=message)
    route.direct_response.status = _LOOP_STATUS
    said = f"more than {tier.max_hops} passes through the gateway, the limit of tier {tier.name}"
    route.direct_response.body.inline_string = said
    return route
