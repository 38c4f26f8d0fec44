from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from controlplane.compile import Options, Vectors
from controlplane.compile.policy import POLICY
from controlplane.embeddings import TextError
from controlplane.update import prepare
from modalmesh.base.errors import EncoderError
from router.encoder.errors import ItemError


class Fixed:
    """Vectors without an encoder; or its error."""

    def __init__(self, error: EncoderError | None = None) -> None:
        self.error = error

    def vectors(self, texts: Iterable[str]) -> Vectors:
        if self.error:
            raise self.error
        return Vectors("00112233aabbccdd", 2, {text: [1.0, 0.0] for text in texts})


@pytest.fixture
def documents(tmp_path: Path, quickstart: Path) -> Path:
    return Path(shutil.copytree(quickstart, tmp_path / "documents"))


def test_good_documents_are_compiled(documents: Path, options: Options) -> None:
    update = prepare(documents, Fixed(), options, without_policies=False)
    assert update.problems == ()
    assert update.compiled is not None
    assert list(update.compiled.router.of_type(POLICY)) == ["quickstart"]


def test_a_broken_document_refuses_everything(documents: Path, options: Options) -> None:
    with (documents / "virtual-service.yaml").open("a") as file:
        file.write("  tls: []\n")
    update = prepare(documents, Fixed(), options, without_policies=True)
    assert update.compiled is None
    assert not update.encoder_failed
    (problem,) = update.problems
    assert problem.where is not None
    assert problem.where.file == str(documents / "virtual-service.yaml")


@pytest.mark.parametrize("without_policies", [True, False])
def test_a_failed_encoder_costs_the_policies_or_the_update(
    documents: Path, options: Options, without_policies: bool
) -> None:
    broken = Fixed(EncoderError("no files"))
    update = prepare(documents, broken, options, without_policies=without_policies)
    assert update.encoder_failed
    assert [problem.what for problem in update.problems] == ["no files"]
    if without_policies:
        good = prepare(documents, Fixed(), options, without_policies=False).compiled
        assert update.compiled is not None
        assert good is not None
        assert update.compiled.envoy == good.envoy
        assert update.compiled.router.type_urls == ()
    else:
        assert update.compiled is None


def test_the_encoder_is_not_asked_when_nothing_is_described(documents: Path, options: Options) -> None:
    (documents / "semantic-route.yaml").unlink()
    update = prepare(documents, Fixed(EncoderError("no files")), options, without_policies=False)
    assert update.problems == ()
    assert update.compiled is not None


def test_a_description_that_cannot_be_encoded_is_a_problem_of_its_line(documents: Path, options: Options) -> None:
    text = (documents / "semantic-route.yaml").read_text()
    description = "Legal advice: contracts, courts, tenancy and employment rights."
    line = next(number for number, found in enumerate(text.splitlines(), 1) if description in found)
    broken = Fixed(TextError(description, ItemError("has no words", hint="describe it")))
    update = prepare(documents, broken, options, without_policies=True)
    assert update.compiled is None
    assert not update.encoder_failed
    (problem,) = update.problems
    assert problem.where is not None
    assert (problem.where.line, problem.hint) == (line, "describe it")
