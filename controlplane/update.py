"""One update: a directory of documents → snapshots, or the reasons why not. Blocks; knows no server and no clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controlplane import directory
from controlplane.compile import Compiled, Options, Vectors, compile_mesh
from controlplane.compile.policy import descriptions
from controlplane.embeddings import TextError
from controlplane.errors import FieldError
from controlplane.merge import merge
from controlplane.model import Mesh
from modalmesh.base.errors import EncoderError, ModalMeshError

__all__ = ["Describes", "Update", "prepare"]


class Describes(Protocol):
    """Gives vectors of texts (``embeddings.Embedder``)."""

    def vectors(self, texts: tuple[str, ...], /) -> Vectors:
        """Return the vectors; raises EncoderError."""
        ...


@dataclass(frozen=True, slots=True)
class Update:
    """What became of a directory.

    Attributes:
        compiled: What can be served; None: refused.
        problems: Why it was refused, or why there are no policies in it.
        encoder_failed: The documents are fine, the encoder is not: trying again may help.
    """

    compiled: Compiled | None
    problems: tuple[ModalMeshError, ...] = ()
    encoder_failed: bool = False


def prepare(documents: Path, embedder: Describes, options: Options, *, without_policies: bool) -> Update:
    """Read, check and compile a directory.

    Args:
        documents: The directory.
        embedder: Turns descriptions into vectors.
        options: From the settings.
        without_policies: When the encoder fails, compile the rest without policies (then requests go where the plain
            routes send them) instead of refusing.
    """
    merged = merge(directory.read(documents))
    if merged.mesh is None:
        return Update(None, merged.problems)
    problem: ModalMeshError | None = None
    vectors: Vectors | None = None
    try:
        vectors = embedder.vectors(descriptions(merged.mesh)) if merged.mesh.semantic_routes else None
    except TextError as error:
        return Update(None, tuple(_unencodable(merged.mesh, error)))
    except EncoderError as error:
        problem = error
        if not without_policies:
            return Update(None, (error,), encoder_failed=True)
    try:
        compiled = compile_mesh(merged.mesh, vectors, options)
    except ModalMeshError as error:
        return Update(None, (error,))
    return Update(compiled, (problem,) if problem else (), encoder_failed=problem is not None)


def _unencodable(mesh: Mesh, error: TextError) -> list[FieldError]:
    return [
        FieldError(f"description: {error.what}", hint=error.hint, where=service.where)
        for route in mesh.semantic_routes
        for service in route.services
        if service.description == error.text
    ]
