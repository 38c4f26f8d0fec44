"""Tiers: which documents are refused, and what is left of the built-in table."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from controlplane.compile.routes import compile_routes
from controlplane.compile.tiers import tier_clusters
from controlplane.merge import Merged
from controlplane.model import LEVEL_HEADER, Mesh
from xds.pb.envoy.config.route.v3 import route_components_pb2

SERVICES = """
services:
  - name: one
    endpoints: [{host: 10.0.0.1, port: 80, tags: [qos=realtime]}, {host: 10.0.0.2, port: 80}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: one}
spec:
  host: one
  subsets: [{name: qos-realtime, labels: {qos: realtime}}]
"""


def route(http: str) -> str:
    return f"""apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: r}}
spec:
  hosts: [a.example]
  http:
    - {http}
"""


def policy(spec: str) -> str:
    return f"""apiVersion: modalmesh.io/v1alpha1
kind: QosPolicy
metadata: {{name: q}}
spec:
  {spec}
"""


def to(subset: str = "") -> str:
    return f"route: [{{destination: {{host: one{', subset: ' + subset if subset else ''}}}}}]"


def level(match: str) -> str:
    return f"match: [{{headers: {{{LEVEL_HEADER}: {match}}}}}]"


@pytest.mark.parametrize(
    ("document", "code", "line", "says"),
    [
        (route(f"{level('{exact: gold}')}\n      {to()}"), "MM1211", 7, "tier 'gold' has no policy"),
        (route(f"{level('{prefix: real}')}\n      {to()}"), "MM1203", 7, "otherwise than by «exact»"),
        (route(f"{level('{}')}\n      {to()}"), "MM1203", 7, "otherwise than by «exact»"),
        (route(to("qos-realtime")), "MM1216", 7, "requests of other tiers than 'realtime' would reach"),
        (route(f"{level('{exact: elastic}')}\n      {to('qos-realtime')}"), "MM1216", 7, "subset 'qos-realtime'"),
        (
            route(f"{to()}\n      mirror: {{host: one, subset: qos-realtime}}"),
            "MM1216",
            7,
            "requests of other tiers",
        ),
        (policy("defaultTier: gold"), "MM1204", 5, "there is no tier 'gold'"),
        (policy("tiers: {gold: {maxHops: 2}}"), "MM1203", 5, "has no «latencyBudget»"),
        (policy("tiers: {realtime: {maxHops: 17}}"), "MM1203", 5, "less than or equal to 16"),
        (policy("tiers: {realtime: {latencyBudget: 0s}}"), "MM1203", 5, "between 1 ms"),
        (policy("tiers: {realtime: {onFailure: {retry: {}}}}"), "MM1203", 5, "did you mean retries?"),
    ],
)
def test_what_is_refused(merged: Callable[..., Merged], document: str, code: str, line: int, says: str) -> None:
    (problem,) = merged(SERVICES, document).problems
    assert (problem.code, str(problem.where)) == (code, f"b.yaml:{line}")
    assert says in problem.what + problem.hint


def test_tiers_have_one_policy(merged: Callable[..., Merged]) -> None:
    one = policy("tiers: {realtime: {maxHops: 2}}")
    found = merged(SERVICES, one, one.replace("{name: q}", "{name: r}"))
    assert [problem.what for problem in found.problems] == ["tier 'realtime' is already at b.yaml:5"]


def test_what_is_left_out_stays_built_in(mesh: Callable[..., Mesh]) -> None:
    found = mesh(SERVICES, policy("tiers: {realtime: {latencyBudget: 40ms, onFailure: {retries: {attempts: 1}}}}"))
    tier = found.tier("realtime")
    assert (tier.budget_ms, tier.max_hops, tier.high_priority) == (40, 2, True)
    assert tier.retries is not None
    assert [item.name for item in found.tiers] == ["best-effort", "elastic", "realtime"]
    # The table of the specification.
    table = [(item.name, item.budget_ms, item.max_hops) for item in mesh(SERVICES).tiers]
    assert table == [("best-effort", 5000, 8), ("elastic", 300, 4), ("realtime", 50, 2)]
    assert [bool(item.retries) for item in mesh(SERVICES).tiers] == [True, True, False]


def reached(virtual_host: route_components_pb2.VirtualHost, levels: list[str | None]) -> dict[str | None, str]:
    """Level → the cluster of the first route that a request for «/» with it fits."""
    found: dict[str | None, str] = {}
    for wanted in levels:
        for item in virtual_host.routes:
            headers = {header.name: header for header in item.match.headers}
            exact = headers.get(LEVEL_HEADER)
            if set(headers) - {LEVEL_HEADER} or item.match.WhichOneof("path_specifier") != "prefix":
                continue
            if exact is None or exact.string_match.exact == wanted:
                found[wanted] = item.route.cluster
                break
    return found


def test_every_level_reaches_its_own_cluster_and_no_other(mesh: Callable[..., Mesh]) -> None:
    found = mesh(SERVICES, route(to()), policy("hosts: [a.example]"))
    (virtual_host,) = compile_routes(found).virtual_hosts
    assert reached(virtual_host, ["realtime", "elastic", "best-effort", "gold", None]) == {
        "realtime": "one@realtime",
        "elastic": "one@elastic",
        "best-effort": "one@best-effort",
        "gold": "one@elastic",
        None: "one@elastic",
    }


@pytest.mark.parametrize("levels", list(itertools.permutations(["realtime", "elastic"])))
def test_the_order_of_rules_does_not_mix_tiers(mesh: Callable[..., Mesh], levels: tuple[str, ...]) -> None:
    rules = "\n    - ".join(f"{level(f'{{exact: {name}}}')}\n      {to()}" for name in levels)
    found = mesh(SERVICES, route(rules))
    (virtual_host,) = compile_routes(found).virtual_hosts
    assert reached(virtual_host, ["realtime", "elastic", "gold", None]) == {
        "realtime": "one@realtime",
        "elastic": "one@elastic",
    }
    assert [(item.service, item.tier) for item in tier_clusters(found)] == [("one", "elastic"), ("one", "realtime")]


def test_hosts_without_tiers_have_none(mesh: Callable[..., Mesh]) -> None:
    found = mesh(SERVICES, route(to()), policy("hosts: [b.example]"))
    assert tier_clusters(found) == []
    assert len(compile_routes(found).virtual_hosts[0].routes) == 1
