"""Meshes with one planted fault each, and what stands in its place where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.directory import Source
from controlplane.documents import parse
from controlplane.errors import UnreadableError
from controlplane.graph import as_dot
from controlplane.merge import Merged, merge
from controlplane.model import Mesh
from modalmesh.base.errors import DocumentError

DATA = Path(__file__).parents[2] / "data"
BROKEN = sorted((DATA / "broken").glob("*.yaml"))
SOUND = sorted((DATA / "sound").glob("*.yaml"))
CODES = Path(errors.__file__).with_name("CODES.md")


def read(path: Path) -> Merged:
    try:
        return merge(Source(parse(path.read_bytes(), path.name), ()))
    except UnreadableError as error:
        return merge(Source((), (error,)))


def test_there_are_thirty_of_each() -> None:
    assert len(BROKEN) >= 30
    assert len(SOUND) >= 30


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_the_planted_fault_is_found_and_nothing_else(path: Path) -> None:
    found = [problem for problem in read(path).problems if problem.code != "MM1206" or "MM1206" in path.name]
    marked = [number for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# <--")]
    assert [(problem.code, problem.where.line if problem.where else 0) for problem in found] == [
        (path.name[:6], marked[0] if marked else 0)
    ], [str(problem) for problem in found]
    assert found[0].hint or found[0].code in ("MM1201", "MM1203"), "what to do about it is not said"


@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.stem)
def test_a_sound_mesh_has_no_finding(path: Path) -> None:
    result = read(path)
    assert result.problems == ()
    assert result.mesh is not None
    assert result.mesh.services


def test_all_codes_are_documented_in_one_place_and_no_others() -> None:
    kinds: list[type[DocumentError]] = [DocumentError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    own = {kind.code: kind.__name__ for kind in kinds if kind.__module__.startswith("controlplane.")}
    documented = dict(re.findall(r"^\| (MM\d+) \| `(\w+)` \|", CODES.read_text(), re.MULTILINE))
    assert documented == own


def test_every_fault_of_the_graph_is_found_in_one_pass(merged: Callable[..., Merged]) -> None:
    text = """
    services:
      - {name: a, calls: [b], endpoints: [{host: 10.0.0.1, port: 1}]}
      - {name: b, calls: [c], endpoints: [{host: 10.0.0.1, port: 2}]}
      - {name: c, calls: [b], fallback: d, endpoints: [{host: 10.0.0.1, port: 3}]}
      - {name: d, fallback: c, endpoints: [{host: 10.0.0.1, port: 4}]}
      - {name: e, fallback: e, endpoints: [{host: 10.0.0.1, port: 5}]}
      - {name: f, calls: [g], endpoints: [{host: 10.0.0.1, port: 6}]}
      - {name: g, endpoints: [{host: 10.0.0.1, port: 7}]}
    ---
    apiVersion: networking.istio.io/v1
    kind: VirtualService
    metadata: {name: r}
    spec:
      hosts: [a.example]
      http:
        - {match: [{headers: {x-qos-level: {exact: best-effort}}}], route: [{destination: {host: a}}]}
        - {match: [{headers: {x-qos-level: {exact: realtime}}}], route: [{destination: {host: f}}]}
    """
    found = {problem.what for problem in merged(text).problems}
    assert found == {
        "calls go in a circle: b → c → b",
        "fallbacks go in a circle: c → d → c",
        "fallbacks go in a circle: e → e",
        "3 hops, but tier 'realtime' allows 2: gateway → a.example → f → g",
    }


def test_circles_that_no_tier_comes_to_are_no_fault(merged: Callable[..., Merged]) -> None:
    text = """
    services:
      - {name: a, calls: [b], endpoints: [{host: 10.0.0.1, port: 1}]}
      - {name: b, calls: [a], endpoints: [{host: 10.0.0.1, port: 2}]}
    """
    assert merged(text).problems == ()


def test_long_chains_are_followed_without_recursion(merged: Callable[..., Merged]) -> None:
    services = "\n".join(
        f"      - {{name: s{n}, calls: [s{n + 1}], endpoints: [{{host: 10.0.0.1, port: 1}}]}}" for n in range(3000)
    )
    text = f"""
    services:
{services}
      - {{name: s3000, endpoints: [{{host: 10.0.0.1, port: 1}}]}}
    ---
    apiVersion: networking.istio.io/v1
    kind: VirtualService
    metadata: {{name: r}}
    spec:
      hosts: [a.example]
      http:
        - {{match: [{{headers: {{x-qos-level: {{exact: realtime}}}}}}], route: [{{destination: {{host: s0}}}}]}}
    """
    (problem,) = merged(text).problems
    assert problem.what.startswith("3002 hops, but tier 'realtime' allows 2")


def test_the_drawing_shows_tiers_and_faults(mesh: Callable[..., Mesh], merged: Callable[..., Merged]) -> None:
    sound = as_dot(mesh((DATA / "sound" / "tier-leak.yaml").read_text()), ())
    assert '"host a.example" -> "service one" [label="0\\nrealtime\\none/qos-realtime", color=darkorange];' in sound
    assert "red" not in sound
    result = merged((DATA / "broken" / "MM1219-too-many-hops.yaml").read_text())
    broken = as_dot(result.draft, result.problems)
    assert 'color=red, fontcolor=red, penwidth=2, xlabel="MM1219"' in broken
    assert '"service two" -> "service one" [label="calls"];' in broken
    result = merged((DATA / "broken" / "MM1204-subset.yaml").read_text())
    assert "there is no subset 'v9' of 'one'" in as_dot(result.draft, result.problems)
