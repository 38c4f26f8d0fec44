"""What VirtualService, DestinationRule and ServiceEntry ask for, as a running Envoy does it."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.plane import Plane, eventually

pytestmark = pytest.mark.e2e

SERVICES = """
services:
  - name: a
    endpoints:
      - {host: 127.0.0.1, port: {port:a1}, tags: [v1]}
      - {host: 127.0.0.1, port: {port:a2}, tags: [version=v2]}
  - name: b
    endpoints: [{host: 127.0.0.1, port: {port:b}}]
  - name: primary
    fallback: b
    endpoints: [{host: 127.0.0.1, port: {port:a1}}]
  - name: bad
    endpoints:
      - {host: 127.0.0.1, port: {port:a1}}
      - {host: 127.0.0.1, port: {port:a2}}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: entry}
spec:
  hosts: [entry.example.com]
  resolution: STATIC
  ports: [{number: 80, name: h2, protocol: HTTP2, targetPort: {port:b}}]
  endpoints: [{address: 127.0.0.1}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec:
  host: a
  subsets:
    - {name: v1, labels: {version: v1}}
    - {name: v2, labels: {version: v2}}
    - name: by-user
      trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x-user, maglev: {tableSize: 1009}}}}
    - name: ring
      trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x-user}}}
    - name: one-at-a-time
      trafficPolicy: {connectionPool: {http: {http2MaxRequests: 1}}}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: primary}
spec:
  host: primary
  trafficPolicy: {outlierDetection: {consecutive5xxErrors: 1, interval: 100ms, baseEjectionTime: 1h}}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: bad}
spec:
  host: bad
  trafficPolicy:
    outlierDetection: {consecutive5xxErrors: 2, interval: 100ms, baseEjectionTime: 1h, maxEjectionPercent: 50}
    loadBalancer: {simple: ROUND_ROBIN}
"""

HEAD = """---
apiVersion: networking.istio.io/v1
kind: VirtualService
"""

ROUTES = (
    HEAD
    + """metadata: {name: matches}
spec:
  hosts: [matches.example]
  http:
    - match: [{uri: {exact: /exact}}]
      directResponse: {status: 200, body: {string: exact}}
    - match: [{uri: {prefix: /exact}}]
      directResponse: {status: 200, body: {string: prefix}}
    - match: [{uri: {regex: "/r/[0-9]+"}}]
      directResponse: {status: 200, body: {string: regex}}
    - match: [{uri: {prefix: /case}, ignoreUriCase: true}]
      directResponse: {status: 200, body: {string: case}}
    - match: [{method: {exact: DELETE}}]
      directResponse: {status: 200, body: {string: method}}
    - match: [{headers: {x-e: {exact: v}, x-p: {prefix: v}, x-r: {regex: "v[0-9]"}, x-t: {}}}]
      directResponse: {status: 200, body: {string: headers}}
    - match: [{queryParams: {q: {exact: "1"}}}]
      directResponse: {status: 200, body: {string: query}}
    - match: [{port: 1}]
      directResponse: {status: 200, body: {string: other port}}
    - match: [{port: {port:gateway}, headers: {x-port: {}}}]
      directResponse: {status: 200, body: {string: port}}
    - match: [{withoutHeaders: {x-not: {}, x-e: {exact: w}}}]
      directResponse: {status: 200, body: {string: without}}
    - directResponse: {status: 200, body: {string: rest}}
"""
    + HEAD
    + """metadata: {name: traffic}
spec:
  hosts: [traffic.example]
  http:
    - match: [{uri: {prefix: /weights}}]
      route:
        - {destination: {host: a, subset: v1}, weight: 80}
        - {destination: {host: b}, weight: 20}
    - match: [{uri: {exact: /v1}}]
      route: [{destination: {host: a, subset: v1}}]
    - match: [{uri: {exact: /v2}}]
      route: [{destination: {host: a, subset: v2}}]
    - match: [{uri: {exact: /maglev}}]
      route: [{destination: {host: a, subset: by-user}}]
    - match: [{uri: {exact: /ring}}]
      route: [{destination: {host: a, subset: ring}}]
    - match: [{uri: {exact: /limited}}]
      route: [{destination: {host: a, subset: one-at-a-time}}]
    - match: [{uri: {exact: /entry}}]
      route: [{destination: {host: entry.example.com}}]
    - match: [{uri: {exact: /timeout}}]
      timeout: 100ms
      route: [{destination: {host: b}}]
    - match: [{uri: {exact: /retries}}]
      retries: {attempts: 2, retryOn: "503", backoff: 1ms}
      route: [{destination: {host: a}}]
    - match: [{uri: {exact: /no-retries}}]
      route: [{destination: {host: a}}]
    - match: [{uri: {exact: /mirror}}]
      mirror: {host: b}
      route: [{destination: {host: a}}]
    - match: [{uri: {exact: /primary}}]
      route: [{destination: {host: primary}}]
    - match: [{uri: {exact: /ejected}}]
      route: [{destination: {host: bad}}]
"""
    + HEAD
    + """metadata: {name: changes}
spec:
  hosts: [changes.example]
  http:
    - match: [{uri: {exact: /abort}}]
      fault: {abort: {httpStatus: 418}}
      route: [{destination: {host: b}}]
    - match: [{uri: {exact: /some}}]
      fault: {abort: {httpStatus: 418, percentage: {value: 30}}}
      route: [{destination: {host: b}}]
    - match: [{uri: {exact: /abort-grpc}}]
      fault: {abort: {grpcStatus: RESOURCE_EXHAUSTED}}
      route: [{destination: {host: b}}]
    - match: [{uri: {exact: /delay}}]
      fault: {delay: {fixedDelay: 300ms}}
      route: [{destination: {host: b}}]
    - match: [{uri: {exact: /headers}}]
      headers:
        request: {set: {x-s: "100%"}, add: {x-a: added}, remove: [x-r]}
        response: {set: {y-s: "1"}, remove: [x-backend]}
      route: [{destination: {host: b}, headers: {request: {set: {x-to: b}}}}]
    - match: [{uri: {prefix: /old/}}]
      rewrite: {uri: /new/, authority: other.example}
      route: [{destination: {host: b}}]
    - match: [{uri: {prefix: /regex}}]
      rewrite: {uriRegexRewrite: {match: "^/regex/([^/]+)/", rewrite: "/\\\\1-"}}
      route: [{destination: {host: b}}]
    - match: [{uri: {exact: /gone}}]
      redirect: {uri: /here, authority: other.example, scheme: https, redirectCode: 308}
    - match: [{uri: {prefix: /cors}}]
      corsPolicy: {allowOrigins: [{exact: "https://a.example"}], allowMethods: [POST], maxAge: 10s}
      route: [{destination: {host: b}}]
    - match: [{uri: {prefix: /team}}]
      delegate: {name: team}
"""
    + HEAD
    + """metadata: {name: team}
spec:
  http:
    - match: [{uri: {prefix: /team/b}}]
      route: [{destination: {host: b}}]
    - route: [{destination: {host: a, subset: v1}}]
"""
)


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with tempfile.TemporaryDirectory(prefix="mm-") as directory:
        found = Plane(Path(directory), ("a1", "a2", "b"))
        found.write("services.yaml", SERVICES)
        found.write("routes.yaml", ROUTES)
        try:
            found.start()
            eventually("the gateway", lambda: found.get("matches.example", "/exact").status == 200)
            yield found
        finally:
            found.stop()


def p_value(seen: Sequence[int], expected: Sequence[float]) -> float:
    """Of a χ² test with two classes: one degree of freedom."""
    assert len(seen) == 2
    statistic = sum((one - other) ** 2 / other for one, other in zip(seen, expected, strict=True))
    return math.erfc(math.sqrt(statistic / 2))


@pytest.mark.parametrize(
    ("path", "method", "headers", "says"),
    [
        ("/exact", "GET", {}, "exact"),
        ("/exact?x=1", "GET", {}, "exact"),
        ("/exact/more", "GET", {}, "prefix"),
        ("/r/12", "GET", {}, "regex"),
        ("/r/12a", "GET", {}, "without"),
        ("/CaSe", "GET", {}, "case"),
        ("/", "DELETE", {}, "method"),
        ("/exact", "DELETE", {}, "exact"),
        ("/", "GET", {"x_e": "v", "x_p": "vw", "x_r": "v1", "x_t": ""}, "headers"),
        ("/", "GET", {"x_e": "v", "x_p": "w", "x_r": "v1", "x_t": ""}, "without"),
        ("/", "GET", {"x_e": "v", "x_p": "v", "x_r": "v1"}, "without"),
        ("/?a=2&q=1", "GET", {}, "query"),
        ("/?q=11", "GET", {"x_not": ""}, "rest"),
        ("/", "GET", {"x_port": ""}, "port"),
        ("/", "GET", {"x_e": "w"}, "rest"),
    ],
)
def test_the_first_rule_that_fits_decides(
    plane: Plane, path: str, method: str, headers: dict[str, str], says: str
) -> None:
    assert plane.get("matches.example:80", path, method, **headers).body.decode() == says


def test_a_host_without_route_is_not_found(plane: Plane) -> None:
    assert plane.get("nowhere.example").status == 404


def test_weights(plane: Plane) -> None:
    found = Counter(answer.backend for answer in plane.many(1000, "traffic.example", "/weights"))
    assert set(found) == {"a1", "b"}
    assert p_value((found["a1"], found["b"]), (800, 200)) >= 1e-6, found


def test_subsets_by_label_and_by_bare_version(plane: Plane) -> None:
    assert {answer.backend for answer in plane.many(50, "traffic.example", "/v1")} == {"a1"}
    assert {answer.backend for answer in plane.many(50, "traffic.example", "/v2")} == {"a2"}


@pytest.mark.parametrize("path", ["/maglev", "/ring"])
def test_requests_of_one_user_go_to_one_endpoint(plane: Plane, path: str) -> None:
    users = {
        user: {answer.backend for answer in plane.many(10, "traffic.example", path, x_user=f"u{user}")}
        for user in range(24)
    }
    assert all(len(backends) == 1 for backends in users.values())
    assert set.union(*users.values()) == {"a1", "a2"}


def test_more_requests_than_allowed_overflow(plane: Plane) -> None:
    answers = plane.many(20, "traffic.example", "/limited", x_test_delay="0.3")
    statuses = Counter(answer.status for answer in answers)
    assert statuses[503] >= 10
    assert statuses[200] >= 1
    assert all(answer.header("x-envoy-overloaded") == ["true"] for answer in answers if answer.status == 503)


def test_service_entries_are_services(plane: Plane) -> None:
    assert plane.get("traffic.example", "/entry").backend == "b"


def test_timeouts(plane: Plane) -> None:
    assert plane.get("traffic.example", "/timeout").status == 200
    assert plane.get("traffic.example", "/timeout", x_test_delay="1").status == 504


def test_retries_go_to_another_endpoint(plane: Plane) -> None:
    answers = plane.many(40, "traffic.example", "/retries", x_test_a1="503")
    assert {(answer.status, answer.backend) for answer in answers} == {(200, "a2")}
    without = plane.many(40, "traffic.example", "/no-retries", x_test_a1="503")
    assert {answer.status for answer in without} == {200, 503}


def test_mirrored_requests_arrive_and_nobody_waits_for_their_answers(plane: Plane) -> None:
    before = len(plane.backends["b"].seen)
    assert plane.get("traffic.example", "/mirror", x_test_b="500").status == 200
    eventually("the mirrored request", lambda: len(plane.backends["b"].seen) == before + 1)
    assert plane.backends["b"].seen[-1][":authority"] == "traffic.example"


def test_an_endpoint_that_fails_is_ejected(plane: Plane) -> None:
    eventually(
        "ejection",
        lambda: (
            plane.many(4, "traffic.example", "/ejected", x_test_a1="500")
            and plane.stat("cluster.bad.outlier_detection.ejections_active") == 1
        ),
        limit=20,
    )
    assert {answer.backend for answer in plane.many(30, "traffic.example", "/ejected")} == {"a2"}


def test_a_fallback_takes_over(plane: Plane) -> None:
    assert plane.get("traffic.example", "/primary").backend == "a1"
    assert plane.get("traffic.example", "/primary", x_test_a1="500").status == 500
    assert plane.get("traffic.example", "/primary").backend == "b"


def test_faults(plane: Plane) -> None:
    assert plane.get("changes.example", "/abort").status == 418
    answer = plane.get("changes.example", "/abort-grpc", "POST", content_type="application/grpc")
    assert (answer.status, answer.header("grpc-status")) == (200, ["8"])
    begun = time.monotonic()
    assert plane.get("changes.example", "/delay").status == 200
    assert time.monotonic() - begun >= 0.29
    found = Counter(answer.status for answer in plane.many(500, "changes.example", "/some"))
    assert p_value((found[418], found[200]), (150, 350)) >= 1e-6, found


def test_header_edits(plane: Plane) -> None:
    answer = plane.get("changes.example", "/headers", x_s="old", x_a="old", x_r="old")
    assert [answer.sent(name) for name in ("x-s", "x-a", "x-r", "x-to")] == [["100%"], ["old", "added"], [], ["b"]]
    assert (answer.header("y-s"), answer.header("x-backend")) == (["1"], [])


def test_rewrites(plane: Plane) -> None:
    answer = plane.get("changes.example", "/old/x?q=1")
    assert (answer.sent(":path"), answer.sent(":authority")) == (["/new/x?q=1"], ["other.example"])
    assert plane.get("changes.example", "/regex/a/b").sent(":path") == ["/a-b"]


def test_redirects(plane: Plane) -> None:
    answer = plane.get("changes.example", "/gone")
    assert (answer.status, answer.header("location")) == (308, ["https://other.example/here"])


def test_browsers_are_told_what_other_origins_may_do(plane: Plane) -> None:
    asked = {"origin": "https://a.example", "access_control_request_method": "POST"}
    answer = plane.get("changes.example", "/cors", "OPTIONS", **asked)
    assert answer.header("access-control-allow-origin") == ["https://a.example"]
    assert (answer.header("access-control-allow-methods"), answer.header("access-control-max-age")) == (
        ["POST"],
        ["10"],
    )
    other = plane.get("changes.example", "/cors", origin="https://b.example")
    assert other.header("access-control-allow-origin") == []


def test_delegates(plane: Plane) -> None:
    assert plane.get("changes.example", "/team/b/x").backend == "b"
    assert plane.get("changes.example", "/team/c").backend == "a1"
