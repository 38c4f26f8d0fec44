"""Semantic routes → the policies that routers decide by (``router/policy.proto``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.model import Mesh, Modality, SemanticRoute
from xds.pb.router import policy_pb2

__all__ = ["POLICY", "Vectors", "compile_policies", "descriptions"]

POLICY = "type.googleapis.com/modalmesh.router.v1.SemanticPolicy"

_MODALITY: Mapping[Modality, policy_pb2.Modality] = {
    "text": policy_pb2.TEXT,
    "image": policy_pb2.IMAGE,
    "audio": policy_pb2.AUDIO,
    "video": policy_pb2.VIDEO,
}


@dataclass(frozen=True, slots=True)
class Vectors:
    """Descriptions as vectors of unit length, each of ``dimension`` values, and the encoder they come from."""

    fingerprint: str
    dimension: int
    by_text: Mapping[str, Sequence[float]]


def descriptions(mesh: Mesh) -> tuple[str, ...]:
    """Return the texts that ``compile_policies`` needs vectors of, sorted, each once."""
    texts = {service.description for route in mesh.semantic_routes for service in route.services}
    return tuple(sorted(texts - {""}))


def compile_policies(routes: Iterable[SemanticRoute], vectors: Vectors) -> list[policy_pb2.SemanticPolicy]:
    """Return a policy for each semantic route.

    Raises:
        KeyError: A description has no vector.
    """
    return [_policy(route, vectors) for route in routes]


def _policy(route: SemanticRoute, vectors: Vectors) -> policy_pb2.SemanticPolicy:
    message = policy_pb2.SemanticPolicy(name=route.name, hosts=route.hosts, model=route.model, top_k=route.top_k)
    message.encoder.fingerprint = vectors.fingerprint
    message.encoder.dimension = vectors.dimension
    for modality, similarity in route.thresholds:
        message.thresholds.add(modality=_MODALITY[modality], similarity=similarity)
    for service in route.services:
        message.services.add(
            service_id=service.service,
            cluster=service.service,
            model=service.model,
            modalities=[_MODALITY[modality] for modality in service.modalities],
            description=service.description,
            clip_text_emb=vectors.by_text[service.description] if service.description else (),
        )
    for modality, name in route.defaults:
        message.defaults.add(modality=_MODALITY[modality], service_id=name)
    return message
