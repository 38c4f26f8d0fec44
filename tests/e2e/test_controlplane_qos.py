"""Tiers through a running Envoy: never mixed, each with its own reaction to failure, and no way round in circles."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.plane import Plane, eventually

pytestmark = pytest.mark.e2e

DOCUMENTS = """
services:
  - name: api-v2
    endpoints:
      - {host: 127.0.0.1, port: {port:realtime}, tags: [qos=realtime]}
      - {host: 127.0.0.1, port: {port:elastic}, tags: [qos=elastic]}
      - {host: 127.0.0.1, port: {port:bulk}, tags: [qos=best-effort]}
  - name: shared
    endpoints: [{host: 127.0.0.1, port: {port:shared1}}, {host: 127.0.0.1, port: {port:shared2}}]
  - name: itself
    endpoints: [{host: 127.0.0.1, port: {port:gateway}}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: api-v2}
spec:
  host: api-v2
  subsets:
    - {name: qos-realtime, labels: {qos: realtime}}
    - {name: qos-elastic, labels: {qos: elastic}}
    - {name: qos-best-effort, labels: {qos: best-effort}}
---
# The specification's fixture.
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: api}
spec:
  hosts: [api.example.com]
  http:
    - match: [{headers: {x-qos-level: {exact: realtime}}}]
      route: [{destination: {host: api-v2, subset: qos-realtime}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: all-tiers}
spec:
  hosts: [all.example.com]
  http:
    - match: [{headers: {x-qos-level: {exact: realtime}}}]
      timeout: 2s
      route: [{destination: {host: api-v2, subset: qos-realtime}}]
    - match: [{headers: {x-qos-level: {exact: elastic}}}]
      timeout: 2s
      route: [{destination: {host: api-v2, subset: qos-elastic}}]
    - match: [{headers: {x-qos-level: {exact: best-effort}}}]
      timeout: 2s
      route: [{destination: {host: api-v2, subset: qos-best-effort}}]
---
apiVersion: modalmesh.io/v1alpha1
kind: QosPolicy
metadata: {name: tiers}
spec:
  hosts: [shared.example.com, circle.example.com]
  tiers:
    best-effort: {latencyBudget: 8s, streamIdleTimeout: 200ms}
    elastic: {latencyBudget: 2s}
    realtime: {latencyBudget: 500ms}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: shared}
spec:
  hosts: [shared.example.com]
  http: [{route: [{destination: {host: shared}}]}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: circle}
spec:
  hosts: [circle.example.com]
  http: [{timeout: 5s, route: [{destination: {host: itself}}]}]
"""

TIERS = {"realtime": "realtime", "elastic": "elastic", "best-effort": "bulk"}


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with tempfile.TemporaryDirectory(prefix="mm-") as directory:
        found = Plane(Path(directory), ("realtime", "elastic", "bulk", "shared1", "shared2"))
        found.write("documents.yaml", DOCUMENTS)
        try:
            found.start()
            eventually("the gateway", lambda: found.get("shared.example.com").status == 200)
            yield found
        finally:
            found.stop()


def test_the_fixture_takes_realtime_and_nothing_else(plane: Plane) -> None:
    assert {answer.backend for answer in plane.many(60, "api.example.com", x_qos_level="realtime")} == {"realtime"}
    for other in ("elastic", "best-effort", "Realtime", "realtime2", "realtim", "", "realtime,realtime"):
        assert plane.get("api.example.com", x_qos_level=other).status == 404, other
    assert plane.get("api.example.com").status == 404


def test_tiers_are_never_mixed(plane: Plane) -> None:
    for server in plane.backends.values():
        server.seen.clear()
    for tier, backend in TIERS.items():
        answers = plane.many(200, "all.example.com", at_once=20, x_qos_level=tier)
        assert {answer.backend for answer in answers} == {backend}
    for name in ("realtime", "elastic", "bulk"):
        assert {TIERS[seen["x-qos-level"]] for seen in plane.backends[name].seen} == {name}
    # Not even when its own subset fails.
    answers = plane.many(20, "all.example.com", x_qos_level="realtime", x_test_realtime="503")
    assert {answer.status for answer in answers} == {503}


def budget(plane: Plane, delay: str, level: str | None) -> int:
    headers = {"x_test_delay": delay} | ({"x_qos_level": level} if level is not None else {})
    return plane.get("shared.example.com", **headers).status


def test_each_tier_has_its_budget_and_the_default_one_takes_the_rest(plane: Plane) -> None:
    assert [budget(plane, "1", level) for level in ("realtime", "elastic", "best-effort")] == [504, 200, 200]
    assert [budget(plane, "3", level) for level in ("realtime", "elastic", "best-effort")] == [504, 504, 200]
    assert [budget(plane, "1", level) for level in (None, "gold")] == [200, 200]
    assert [budget(plane, "3", level) for level in (None, "gold")] == [504, 504]


def test_realtime_is_not_retried_and_elastic_is(plane: Plane) -> None:
    def statuses(level: str) -> set[int]:
        return {plane.get("shared.example.com", x_test_shared1="503", x_qos_level=level).status for _ in range(4)}

    assert statuses("elastic") == {200}
    before = plane.stat("cluster.shared@realtime.upstream_rq_retry")
    assert 503 in statuses("realtime")
    assert plane.stat("cluster.shared@realtime.upstream_rq_retry") == before == 0


def test_what_one_tier_ejects_the_others_keep(plane: Plane) -> None:
    def ejected(tier: str) -> int:
        return plane.stat(f"cluster.shared@{tier}.outlier_detection.ejections_enforced_total")

    before = ejected("best-effort")
    eventually(
        "ejection",
        lambda: (
            plane.many(8, "shared.example.com", x_test_shared2="500", x_qos_level="realtime") and ejected("realtime")
        ),
    )
    assert ejected("best-effort") == before
    both = {answer.backend for answer in plane.many(40, "shared.example.com", x_qos_level="best-effort")}
    assert both == {"shared1", "shared2"}


def test_of_all_tiers_the_cheapest_is_shed_first(plane: Plane) -> None:
    def refused(level: str) -> int:
        answers = plane.many(200, "shared.example.com", at_once=200, x_test_delay="0.1", x_qos_level=level)
        return sum(answer.header("x-envoy-overloaded") == ["true"] for answer in answers)

    assert refused("best-effort") > 20
    assert refused("realtime") == 0


def test_streams_have_no_limit_but_that_of_idleness(plane: Plane) -> None:
    headers = {"x_qos_level": "realtime", "accept": "text/event-stream"}
    assert plane.get("shared.example.com", x_test_delay="0.4", **headers).status == 200
    headers = {"x_qos_level": "best-effort", "accept": "text/event-stream"}
    begun = time.monotonic()
    assert plane.get("shared.example.com", x_test_delay="3", **headers).status == 504
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(("level", "passes"), [("realtime", 2), ("elastic", 4), ("best-effort", 8), ("gold", 4)])
def test_what_goes_in_circles_is_stopped(plane: Plane, level: str, passes: int) -> None:
    name = {"gold": "elastic"}.get(level, level)
    before = plane.stat(f"cluster.itself@{name}.upstream_rq_total")
    answer = plane.get("circle.example.com", x_qos_level=level)
    assert answer.status == 508
    assert answer.body.decode().startswith(f"more than {passes} passes through the gateway")
    assert plane.stat(f"cluster.itself@{name}.upstream_rq_total") == before + passes


def test_calls_that_go_in_circles_get_a_status_and_a_text(plane: Plane) -> None:
    answer = plane.get("circle.example.com", method="POST", x_qos_level="realtime", content_type="application/grpc")
    assert (answer.status, answer.header("grpc-status")) == (200, ["2"])
    (text,) = answer.header("grpc-message")
    assert "more than 2 passes" in text
