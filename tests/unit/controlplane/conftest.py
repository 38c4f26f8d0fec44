"""Builders that the control plane's tests share."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.compile import GatewayOptions, Options
from controlplane.directory import Source
from controlplane.documents import parse
from controlplane.merge import Merged, merge
from controlplane.model import Mesh

QUICKSTART = Path(__file__).parents[3] / "deploy" / "examples" / "quickstart"


@pytest.fixture
def quickstart() -> Path:
    return QUICKSTART


@pytest.fixture
def merged() -> Callable[..., Merged]:
    """Texts, each a file a.yaml, b.yaml …, → what they merge into."""

    def build(*texts: str) -> Merged:
        files = (
            parse(textwrap.dedent(text).encode(), f"{name}.yaml") for name, text in zip("abcdefgh", texts, strict=False)
        )
        return merge(Source(tuple(document for file in files for document in file), ()))

    return build


@pytest.fixture
def mesh(merged: Callable[..., Merged]) -> Callable[..., Mesh]:
    """The same, of valid texts."""

    def build(*texts: str) -> Mesh:
        result = merged(*texts)
        assert result.mesh is not None, result.problems
        return result.mesh

    return build


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(
        gateway=GatewayOptions(listen="127.0.0.1:10000", access_log=tmp_path / "access.log", router_wait_ms=2500),
        router_socket=tmp_path / "router.sock",
    )
