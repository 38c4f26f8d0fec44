from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.directory import read
from controlplane.merge import Merged, merge
from controlplane.model import Destination, Endpoint, Match, Mesh, TextMatch, overlap

Merge = Callable[..., Merged]
Build = Callable[..., Mesh]

SERVICES = """
services:
  - name: one
    endpoints: [{host: 10.0.0.1, port: 80}]
  - name: two
    endpoints: [{host: 10.0.0.2, port: 80}]
"""


def route(http: str, hosts: str = "[a.example]") -> str:
    return (
        "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: r}\n"
        f"spec:\n  hosts: {hosts}\n  http:\n    - {http}\n"
    )


def semantic(services: str, rest: str = "hosts: ['*']") -> str:
    return (
        "apiVersion: modalmesh.io/v1alpha1\nkind: SemanticRoute\nmetadata: {name: s}\n"
        f"spec:\n  {rest}\n  services:\n    - {services}\n"
    )


TO_ONE = "route: [{destination: {host: one}}]"
ONE = "{service: one, model: m, modalities: [text], description: d}"


def lines(result: Merged) -> list[tuple[str, int, str]]:
    return [
        (problem.where.file, problem.where.line, problem.what)
        for problem in result.problems
        if problem.where is not None
    ]


def test_the_fixture_of_the_specification_loads_as_it_is(mesh: Build) -> None:
    found = mesh("""
        services:
          - name: multimodal-encoder
            endpoints:
              - host: encoder-vit-prod-01
                port: 8001
                weight: 3
              - host: encoder-vit-prod-02
                port: 8001
                weight: 5
          - name: fusion-router
            endpoints:
              - host: router-fusion-canary
                port: 8080
                tags: [canary, v2.3]
    """)
    fusion, encoder = found.services
    assert fusion.endpoints == (Endpoint("router-fusion-canary", 8080, 1, (("canary", "true"), ("v2.3", "true"))),)
    assert encoder.endpoints == (Endpoint("encoder-vit-prod-01", 8001, 3), Endpoint("encoder-vit-prod-02", 8001, 5))


def test_the_quickstart_is_valid(quickstart: Path) -> None:
    result = merge(read(quickstart))
    assert result.problems == ()
    assert result.mesh is not None
    assert len(result.mesh.services) == 9
    assert {service.protocol for service in result.mesh.services} == {"grpc"}


def test_tags_are_labels_and_the_protocol_is_one_of_them(mesh: Build) -> None:
    (service,) = mesh(
        "services: [{name: a, endpoints: [{host: '::1', port: 1, tags: [protocol=grpc, b, a=x=y]}]}]"
    ).services
    assert service.endpoints[0].labels == (("a", "x=y"), ("b", "true"), ("protocol", "grpc"))
    assert service.protocol == "grpc"


def test_the_order_of_documents_and_files_makes_no_difference(mesh: Build) -> None:
    rule = route(TO_ONE)
    first, second = SERVICES.replace("name: two", "name: three"), SERVICES.replace("name: one", "name: one2")
    assert mesh(first, second, rule) == mesh(rule, second, first) == mesh(f"{second}\n---\n{rule}\n---\n{first}")


def test_a_rule_without_match_takes_everything(mesh: Build) -> None:
    (found,) = mesh(SERVICES, route(TO_ONE, hosts="[B.Example, a.example]")).routes
    assert found.hosts == ("a.example", "b.example")
    (rule,) = found.rules
    assert (rule.name, rule.matches, rule.timeout_ms) == ("0", (Match(),), None)
    assert rule.destinations == (Destination("one"),)


def test_matches_weights_and_timeouts(mesh: Build) -> None:
    http = """name: x
      match:
        - uri: {prefix: /a}
          method: {exact: POST}
          authority: {prefix: a}
          headers: {x-b: {exact: "1"}, x-a: {}}
      timeout: 1m1.5s
      route:
        - {destination: {host: one, port: {number: 80}}, weight: 3}
        - {destination: {host: two}, weight: 0}"""
    (rule,) = mesh(SERVICES, route(http)).routes[0].rules
    assert rule.timeout_ms == 61_500
    assert rule.destinations == (Destination("one", 3),)
    assert rule.matches == (
        Match(
            TextMatch("/a", prefix=True),
            (
                (":authority", TextMatch("a", prefix=True)),
                (":method", TextMatch("POST")),
                ("x-a", TextMatch("", prefix=True)),
                ("x-b", TextMatch("1")),
            ),
        ),
    )


def test_thresholds_that_are_not_given_are_the_default_ones(mesh: Build) -> None:
    (found,) = mesh(SERVICES, route(TO_ONE), semantic(ONE, "thresholds: {text: 0.5}")).semantic_routes
    assert found.thresholds == (("image", 0.1), ("text", 0.5))
    assert (found.hosts, found.model, found.top_k) == (("*",), "auto", 3)


@pytest.mark.parametrize(
    ("services", "line", "says"),
    [
        ("a: 1", 1, "has no kind"),
        ("services: []\nextra: 1", 2, "field extra is not supported"),
        ("services:\n- name: a\n  endpoints: []", 3, "at least 1 item"),
        ("services:\n- name: a\n  endpoints: [{host: h, port: 1}]\n  calls: [b]", 4, "there is no service 'b'"),
        ("services:\n- {name: a, endpoints: [{host: h, port: 0}]}", 2, "greater than or equal to 1"),
        ("services:\n- {name: a, endpoints: [{host: h, port: true}]}", 2, "valid integer"),
        ("services:\n- {name: a, endpoints: [{host: h, port: 1, weight: 0}]}", 2, "greater than or equal to 1"),
        ("services:\n- {name: a, endpoints: [{host: '[::1]', port: 1}]}", 2, "neither an IP address nor a DNS name"),
        ("services:\n- {name: a, endpoints: [{host: 10.0.0.256, port: 1}]}", 2, "neither an IP address nor a DNS name"),
        ("services:\n- {name: a, endpoints: [{host: 'fe80::1%eth0', port: 1}]}", 2, "neither an IP address"),
        ("services:\n- {name: modalmesh-x, endpoints: [{host: h, port: 1}]}", 2, "kept for the mesh's own"),
        ("services:\n- {name: a/b, endpoints: [{host: h, port: 1}]}", 2, "is not a name"),
        ("services:\n- name: a\n  endpoints: [{host: h, port: 1, tags: [a=1, a=2]}]", 3, "two values"),
        ("services:\n- name: a\n  endpoints: [{host: h, port: 1, tags: [protocol=http1]}]", 3, "protocol=http1 is not"),
        (
            "services:\n- name: a\n  endpoints:\n  - {host: h, port: 1}\n  - {host: h, port: 1}",
            5,
            "'h:1' is already at",
        ),
        (
            "services:\n- name: a\n  endpoints:\n  - {host: h, port: 1}\n  - {host: i, port: 1, tags: [protocol=grpc]}",
            5,
            "but h2c at the first",
        ),
        (
            "services:\n- {name: a, endpoints: [{host: h, port: 1}]}\n- {name: a, endpoints: [{host: h, port: 1}]}",
            3,
            "service 'a' is already at a.yaml:2",
        ),
    ],
)
def test_services_that_are_refused(merged: Merge, services: str, line: int, says: str) -> None:
    ((file, found, what),) = lines(merged(services))
    assert (file, found) == ("a.yaml", line)
    assert says in what


@pytest.mark.parametrize(
    ("document", "line", "says"),
    [
        (route("route: [{destination: {host: onee}}]"), 7, "there is no service 'onee'"),
        (route("route: [{destination: {host: one, subset: v1}}]"), 7, "there is no subset 'v1' of 'one'"),
        (route("route: [{destination: {host: one, port: {number: 81}}}]"), 7, "port 81 is not the port"),
        (route(f"{TO_ONE}\n      retries: {{}}"), 8, "retries.attempts is missing"),
        (route(f"{TO_ONE}\n      statPrefix: x"), 8, "field spec.http[0].statPrefix is not supported"),
        (route(f"{TO_ONE}\n      timeout: 5"), 8, "valid string"),
        (route(f"{TO_ONE}\n      timeout: 5 s"), 8, "not a duration"),
        (route(f"{TO_ONE}\n      timeout: 0.1ms"), 8, "between 1 ms and 1 h"),
        (route(f"{TO_ONE}\n      match: [{{uri: {{prefix: a}}}}]"), 8, "a path begins with"),
        (route(f"{TO_ONE}\n      match: [{{uri: {{exact: /a, prefix: /b}}}}]"), 8, "more than one of"),
        (route(f"{TO_ONE}\n      match: [{{method: {{}}}}]"), 8, "needs «exact», «prefix» or «regex»"),
        (route(f"{TO_ONE}\n      match: [{{uri: {{regex: (a}}}}]"), 8, "no regular expression of RE2: missing )"),
        (
            route(f"{TO_ONE}\n      match: [{{uri: {{regex: 'a{{97}}'}}}}]"),
            8,
            "of 101 instructions",
        ),
        (route(f"{TO_ONE}\n      match: [{{uri: {{regex: '(?=a)'}}}}]"), 8, "no regular expression of RE2"),
        (route(f"{TO_ONE}\n      match: [{{headers: {{X-A: {{}}}}}}]"), 8, "header in lower case"),
        (route(f"{TO_ONE}\n      match: [{{headers: {{x-modalmesh-cluster: {{}}}}}}]"), 8, "is the mesh's own header"),
        (route("route: [{destination: {host: one}, weight: 1}, {destination: {host: two}}]"), 7, "has no weight"),
        (route("route: [{destination: {host: one}, weight: 0}]"), 7, "all weights are 0"),
        (
            route("route: [{destination: {host: one}, weight: 1}, {destination: {host: one}, weight: 1}]"),
            7,
            "destination 'one' is already at",
        ),
        (
            route(f"{TO_ONE}\n      name: x\n      match: [{{port: 1}}]\n    - name: x\n      {TO_ONE}"),
            10,
            "rule 'x' is already at",
        ),
        (route(f"{TO_ONE}\n    - {TO_ONE}"), 8, "rule '1' is for the same requests as rule '0' at b.yaml:7"),
        (route(f"{TO_ONE}\n      redirect: {{uri: /a}}"), 7, "has «route» and «redirect»"),
        (route("match: [{port: 1}]"), 7, "has none"),
        (route("delegate: {name: gone}"), 7, "there is no VirtualService 'gone'"),
        (route("delegate: {name: r}"), 7, "delegate in a circle: r → r"),
        (route(f"{TO_ONE}\n      mirror: {{host: two, subset: x}}"), 8, "there is no subset 'x'"),
        (route(f"{TO_ONE}\n      mirrorPercentage: {{value: 1}}"), 7, "without «mirror»"),
        (route(f"{TO_ONE}\n      retries: {{attempts: 1, retryOn: never}}"), 8, "'never' is no reason"),
        (route(f"{TO_ONE}\n      fault: {{abort: {{}}}}"), 8, "needs one of «httpStatus»"),
        (route(f"{TO_ONE}\n      headers: {{request: {{set: {{x: é}}}}}}"), 8, "not the value of a header"),
        (route(TO_ONE, hosts="[a.example, A.example]"), 5, "host 'a.example' is already at"),
        (route(TO_ONE, hosts="['a.example:80']"), 5, "is no host"),
        (route(TO_ONE, hosts="['a.*']"), 5, "is no host"),
        (route(TO_ONE) + "  gateways: [other]\n", 8, "there is no gateway 'other'"),
        (route(TO_ONE) + "  tls: []\n", 8, "field spec.tls is not supported"),
        (route(TO_ONE).replace("istio.io/v1", "istio.io/v2"), 1, "version networking.istio.io/v2"),
        (route(TO_ONE).replace("networking.istio.io", "example.com"), 2, "kind VirtualService of example.com/v1"),
    ],
)
def test_virtual_services_that_are_refused(merged: Merge, document: str, line: int, says: str) -> None:
    ((file, found, what),) = lines(merged(SERVICES, document))
    assert (file, found) == ("b.yaml", line)
    assert says in what


@pytest.mark.parametrize(
    ("document", "line", "says"),
    [
        (semantic(ONE.replace("one", "onee")), 7, "there is no service 'onee'"),
        (semantic(ONE.replace(": m,", ": auto,")), 7, "leave the choice to the router"),
        (semantic(ONE.replace("[text]", "[]")), 7, "at least 1 item"),
        (semantic(ONE.replace("[text]", "[text, text]")), 7, "names a modality twice"),
        (semantic(ONE.replace("[text]", "[smell]")), 7, "'text', 'image', 'audio' or 'video'"),
        (semantic(ONE.replace(": d}", ": ' '}")), 7, "is empty"),
        (semantic(f"{ONE}\n    - {ONE.replace(': d}', ': e}')}"), 8, "service 'one' is already at"),
        (semantic(f"{ONE}\n    - {ONE.replace('one', 'two')}"), 8, "description 'd' is already at"),
        (semantic(ONE, "thresholds: {text: 1.5}"), 5, "less than or equal to 1"),
        (semantic(ONE, "thresholds: {text: .nan}"), 5, "finite number"),
        (semantic(ONE, "topK: 0"), 5, "greater than or equal to 1"),
        (semantic(ONE, "top_k: 1"), 5, "field spec.top_k is not supported"),
        (semantic(ONE, "defaults: {text: two}"), 5, "none of the services"),
        (semantic(ONE, "defaults: {image: one}"), 5, "does not take image"),
        (semantic(ONE, "hosts: [b.example]"), 5, "no VirtualService is for host 'b.example'"),
    ],
)
def test_semantic_routes_that_are_refused(merged: Merge, document: str, line: int, says: str) -> None:
    ((file, found, what),) = lines(merged(SERVICES, route(TO_ONE), document))
    assert (file, found) == ("c.yaml", line)
    assert says in what


def test_hosts_and_names_are_claimed_once_over_all_files(merged: Merge) -> None:
    result = merged(SERVICES, route(TO_ONE), route(TO_ONE), semantic(ONE), semantic(ONE))
    assert lines(result) == [
        ("c.yaml", 3, "VirtualService 'r' is already at b.yaml:3"),
        ("c.yaml", 5, "host 'a.example' is already at b.yaml:5"),
        ("e.yaml", 3, "SemanticRoute 's' is already at d.yaml:3"),
        ("e.yaml", 5, "host of a SemanticRoute '*' is already at d.yaml:5"),
    ]


def test_namespaces_keep_names_apart(mesh: Build) -> None:
    other = route(TO_ONE, hosts="[b.example]").replace("{name: r}", "{name: r, namespace: n}")
    assert [found.name for found in mesh(SERVICES, route(TO_ONE), other).routes] == ["n/r", "r"]


def test_all_problems_are_reported_sorted_by_place(merged: Merge) -> None:
    result = merged("services: [{name: a}]", route("route: []"), "kind: Pod\napiVersion: v1")
    assert result.mesh is None
    assert [(file, line) for file, line, _ in lines(result)] == [("a.yaml", 1), ("b.yaml", 7), ("c.yaml", 1)]


def test_what_an_unreadable_document_would_have_named_is_not_missed_as_well(merged: Merge) -> None:
    assert [file for file, _, _ in lines(merged("services: [{name: one, endpoint: []}]", route(TO_ONE)))] == [
        "a.yaml"
    ] * 2


@pytest.mark.parametrize("texts", [(), ("services: []",), ("# nothing",)])
def test_nothing_to_serve_is_a_problem(merged: Merge, texts: tuple[str, ...]) -> None:
    (problem,) = merged(*texts).problems
    assert problem.code == "MM1206"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("*", "a", True),
        ("*.b", "a.b", True),
        ("*.b", "b", False),
        ("*.b", "a.c.b", True),
        ("*.b", "*.a.b", True),
        ("*.b", "*.c", False),
        ("*.b", "xb", False),
    ],
)
def test_overlap_of_host_patterns(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected
