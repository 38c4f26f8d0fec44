"""Decides: a policy, a modality and a vector in, a decision out. No clock, no randomness, no I/O.

The rule (cosine similarity, top-k, threshold, default route): both sides have unit length, so the similarity is the dot
product. The most similar description wins if it reaches the modality's threshold; else the modality's default route is
taken; without one the request goes where Envoy's own routes send it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from google.protobuf import struct_pb2
from numpy.typing import NDArray

from router.errors import RouterError
from router.modality import Modality
from router.policy import Policy, Service

__all__ = [
    "NAMESPACE",
    "Candidate",
    "Decision",
    "Reason",
    "decide",
    "decide_named",
    "fall_back",
    "pass_on",
    "to_metadata",
]

NAMESPACE = "modalmesh"
"""Namespace of the dynamic metadata."""

_DIGITS = 6
"""Similarities are rounded before they are compared: BLAS may sum two equal rows in different orders."""


class Reason(StrEnum):
    """Why a request goes where it goes. Values are labels of a metric: few, and stable."""

    MATCHED = "matched"
    NAMED = "named"
    DEFAULT = "default"
    """No description is similar enough; the default route is taken."""
    NO_MATCH = "no_match"
    """No description is similar enough, and there is no default route."""
    NO_CANDIDATE = "no_candidate"
    """No service takes the modality."""
    UNSUPPORTED_INPUT = "unsupported_input"
    """No tensor holds a text or a picture that can be recognised."""
    UNKNOWN_MODEL = "unknown_model"
    NO_POLICY = "no_policy"
    ENCODER_UNAVAILABLE = "encoder_unavailable"
    ENCODER_MISMATCH = "encoder_mismatch"
    ENCODER_REFUSED = "encoder_refused"
    """The encoder can't read the picture or text."""
    MALFORMED = "malformed"
    """The body is no single, readable ModelInferRequest."""
    OVERLOADED = "overloaded"
    INTERNAL_ERROR = "internal_error"


TEXTS = {
    Reason.MATCHED: "the description is the most similar one and reaches the threshold",
    Reason.NAMED: "the request names the model",
    Reason.DEFAULT: "no description reaches the threshold: default route",
    Reason.NO_MATCH: "no description reaches the threshold, and there is no default route: Envoy's routes decide",
    Reason.NO_CANDIDATE: "no service takes this modality",
    Reason.UNSUPPORTED_INPUT: "no BYTES tensor holds a text or a picture",
    Reason.UNKNOWN_MODEL: "the policy lists no service with this model: passed unchanged",
    Reason.NO_POLICY: "no policy covers this host: passed unchanged",
    Reason.ENCODER_UNAVAILABLE: "the encoder did not answer in time: default route",
    Reason.ENCODER_MISMATCH: "the policy was computed with another encoder: default route",
    Reason.ENCODER_REFUSED: "the encoder can't read the content: default route",
    Reason.MALFORMED: "the body is no single, readable ModelInferRequest: passed unchanged",
    Reason.OVERLOADED: "the router has too much to do: default route",
    Reason.INTERNAL_ERROR: "the router failed: default route if it got that far",
}
"""Each reason as a sentence for people."""

FAILURES = frozenset(
    {
        Reason.ENCODER_UNAVAILABLE,
        Reason.ENCODER_MISMATCH,
        Reason.ENCODER_REFUSED,
        Reason.MALFORMED,
        Reason.OVERLOADED,
        Reason.INTERNAL_ERROR,
    }
)
"""Reasons that an operator must hear of."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A service and its description's similarity to the request, from -1 to 1."""

    service_id: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    ``service`` is None when the request passes unchanged. ``similarity`` is the chosen service's own, if it was
    compared; ``runner_up`` is the most similar one of the others, so after a default route it may be the nearer one.
    """

    reason: Reason
    modality: Modality = Modality.UNKNOWN
    service: Service | None = None
    similarity: float | None = None
    runner_up: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    """The most similar ``top_k``, best first; equal ones by service_id."""
    threshold: float | None = None

    @property
    def cluster(self) -> str:
        """The Envoy cluster, empty if the request passes unchanged."""
        return self.service.cluster if self.service else ""

    @property
    def model(self) -> str:
        """The model to be written into the request, empty if it passes unchanged."""
        return self.service.model if self.service else ""


def decide(policy: Policy, modality: Modality, vector: NDArray[np.float32]) -> Decision:
    """Choose a service for a request.

    Args:
        policy: What to choose from.
        modality: What the request carries.
        vector: Its embedding, float32[dimension], of unit length.

    Raises:
        RouterError: The vector has another shape, or values that are not finite.
    """
    if vector.shape != (policy.dimension,) or not np.isfinite(vector).all():
        raise RouterError(f"a vector of shape {vector.shape} can't be compared with {policy.dimension} finite values")
    table = policy.candidates.get(modality)
    if table is None:
        return fall_back(policy, modality, Reason.NO_CANDIDATE)
    similarities = table.matrix @ vector.astype(np.float32, copy=False)
    ranked = sorted(
        (
            Candidate(service.service_id, round(float(similarity), _DIGITS))
            for service, similarity in zip(table.services, similarities, strict=True)
        ),
        key=lambda candidate: (-candidate.similarity, candidate.service_id),
    )
    threshold = policy.thresholds[modality]
    chosen: Service | None
    if ranked[0].similarity >= threshold:
        reason = Reason.MATCHED
        chosen = next(service for service in table.services if service.service_id == ranked[0].service_id)
    else:
        chosen = policy.defaults.get(modality)
        reason = Reason.DEFAULT if chosen else Reason.NO_MATCH
    own = next((c.similarity for c in ranked if chosen and c.service_id == chosen.service_id), None)
    others = [candidate for candidate in ranked if not chosen or candidate.service_id != chosen.service_id]
    return Decision(
        reason=reason,
        modality=modality,
        service=chosen,
        similarity=own,
        runner_up=others[0] if others else None,
        candidates=tuple(ranked[: policy.top_k]),
        threshold=threshold,
    )


def decide_named(policy: Policy, model: str) -> Decision:
    """Return the decision for a request that names its model: no encoder is needed."""
    service = policy.named(model)
    return Decision(Reason.NAMED if service else Reason.UNKNOWN_MODEL, service=service)


def fall_back(policy: Policy, modality: Modality, reason: Reason) -> Decision:
    """Return the decision when nothing could be compared: the modality's default route, if there is one."""
    return Decision(reason, modality, policy.defaults.get(modality), threshold=policy.thresholds.get(modality))


def pass_on(reason: Reason) -> Decision:
    """Return the decision that changes nothing."""
    return Decision(reason)


def to_metadata(decision: Decision, *, request_id: str, router_us: int) -> struct_pb2.Struct:
    """Return the decision as dynamic metadata: namespace → fields. What is not known is left out.

    Args:
        decision: What was decided.
        request_id: The request's KServe ``id``.
        router_us: Microseconds from the request's body to the answer, the encoder's part included.
    """
    fields: dict[str, Any] = {
        "reason": decision.reason.value,
        "modality": decision.modality.value,
        "router_us": router_us,
    }
    if request_id:
        fields["request_id"] = request_id
    if decision.service:
        fields |= {"service": decision.service.service_id, "model": decision.service.model}
    if decision.similarity is not None:
        fields["similarity"] = decision.similarity
    if decision.runner_up:
        fields["runner_up"] = decision.runner_up.service_id
        fields["runner_up_similarity"] = decision.runner_up.similarity
    if decision.candidates:
        fields["candidates"] = [
            {"service": candidate.service_id, "similarity": candidate.similarity} for candidate in decision.candidates
        ]
    struct = struct_pb2.Struct()
    struct.update({NAMESPACE: fields})
    return struct
