"""Each capability's documents compile into exactly these resources; ``python -m tests.golden.render`` writes them."""

from __future__ import annotations

import pytest

from tests.golden import render


@pytest.mark.parametrize("name", render.names())
def test_documents_compile_into_the_golden_resources(name: str) -> None:
    assert render.render(name) == (render.FOLDER / f"{name}.out.yaml").read_text()


def test_there_are_pairs() -> None:
    assert len(render.names()) >= 20
    assert {path.name.partition(".")[0] for path in render.FOLDER.glob("*.out.yaml")} == set(render.names())
