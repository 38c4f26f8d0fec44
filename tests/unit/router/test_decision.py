from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from router.decision import TEXTS, Candidate, Reason, decide, decide_named, fall_back, pass_on, to_metadata
from router.errors import RouterError
from router.modality import Modality
from router.policy import Policy, parse
from xds.pb.router import policy_pb2

Build = Callable[..., policy_pb2.SemanticPolicy]


def vector(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


@pytest.fixture
def policy(policy_message: Build) -> Policy:
    return parse("quick", policy_message().SerializeToString())


def test_the_most_similar_description_wins(policy: Policy) -> None:
    decision = decide(policy, Modality.TEXT, vector(0.6, 0.8, 0, 0))
    assert (decision.reason, decision.cluster, decision.model) == (Reason.MATCHED, "cluster-b", "model-b")
    assert decision.similarity == 0.8
    assert decision.runner_up == Candidate("a", 0.6)
    assert decision.candidates == (Candidate("b", 0.8), Candidate("a", 0.6), Candidate("d", 0.0))
    assert decision.threshold == 0.25


def test_a_service_that_does_not_take_the_modality_is_no_candidate(policy: Policy) -> None:
    decision = decide(policy, Modality.IMAGE, vector(0.9, 0.3, 0.2, 0))
    assert [candidate.service_id for candidate in decision.candidates] == ["b", "c"]
    assert decision.cluster == "cluster-b"


def test_the_threshold_itself_is_enough_and_belongs_to_the_modality(policy: Policy) -> None:
    assert decide(policy, Modality.TEXT, vector(0.25, 0, 0, 0)).reason is Reason.MATCHED
    assert decide(policy, Modality.TEXT, vector(0.2499, 0, 0, 0)).reason is Reason.DEFAULT
    assert decide(policy, Modality.IMAGE, vector(0, 0.1, 0, 0)).reason is Reason.MATCHED


def test_below_the_threshold_the_default_route_is_taken(policy: Policy) -> None:
    decision = decide(policy, Modality.TEXT, vector(0.2, 0, 0.9, 0.05))
    assert (decision.reason, decision.cluster) == (Reason.DEFAULT, "cluster-d")
    assert decision.similarity == 0.05
    assert decision.runner_up == Candidate("a", 0.2)


def test_without_a_default_route_nothing_is_chosen(policy: Policy) -> None:
    decision = decide(policy, Modality.IMAGE, vector(0.9, 0.05, 0.02, 0))
    assert (decision.reason, decision.service, decision.similarity) == (Reason.NO_MATCH, None, None)
    assert decision.runner_up == Candidate("b", 0.05)
    assert (decision.cluster, decision.model) == ("", "")


def test_no_service_for_the_modality(policy: Policy) -> None:
    assert decide(policy, Modality.AUDIO, vector(1, 0, 0, 0)).reason is Reason.NO_CANDIDATE


def test_equal_descriptions_are_ranked_by_service_id(policy_message: Build) -> None:
    message = policy_message()
    random = np.random.default_rng(1)
    row = random.normal(size=512)
    row /= np.linalg.norm(row)
    message.encoder.dimension = 512
    del message.services[:]
    for place in reversed(range(37)):  # more rows than any vector unit takes at once
        message.services.add(
            service_id=f"s{place:02}", cluster="c", model=f"m{place}", modalities=[policy_pb2.TEXT], clip_text_emb=row
        )
    message.defaults[0].service_id = "s36"
    policy = parse("quick", message.SerializeToString())
    for _ in range(20):
        question = random.normal(size=512) + 3 * row
        question /= np.linalg.norm(question)
        decision = decide(policy, Modality.TEXT, question.astype(np.float32))
        assert [c.service_id for c in decision.candidates] == ["s00", "s01", "s02"]


@pytest.mark.parametrize("bad", [vector(1, 0, 0), vector(np.nan, 0, 0, 0), vector(np.inf, 0, 0, 0)])
def test_a_vector_that_can_not_be_compared_is_refused(policy: Policy, bad: NDArray[np.float32]) -> None:
    with pytest.raises(RouterError):
        decide(policy, Modality.TEXT, bad)


@given(
    hnp.arrays(np.float32, (6, 8), elements=st.floats(-1, 1, width=32)),
    hnp.arrays(np.float32, 8, elements=st.floats(-1, 1, width=32)),
    st.integers(1, 8),
    st.floats(-1, 1, width=32),
)
def test_agrees_with_brute_force(
    rows: NDArray[np.float32], question: NDArray[np.float32], top_k: int, threshold: float
) -> None:
    rows = rows[np.linalg.norm(rows, axis=1) > 0.01]
    if not len(rows):
        return
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    message = policy_pb2.SemanticPolicy(
        hosts=["*"],
        model="auto",
        top_k=top_k,
        encoder=policy_pb2.EncoderIdentity(fingerprint="f", dimension=8),
        thresholds=[policy_pb2.Threshold(modality=policy_pb2.TEXT, similarity=threshold)],
        services=[
            policy_pb2.SemanticService(
                service_id=str(place), cluster="c", model=f"m{place}", modalities=[policy_pb2.TEXT], clip_text_emb=row
            )
            for place, row in enumerate(rows.tolist())
        ],
    )
    decision = decide(parse("p", message.SerializeToString()), Modality.TEXT, question)
    exact = {
        str(place): sum(float(a) * float(b) for a, b in zip(row, question, strict=True))
        for place, row in enumerate(rows)
    }
    assert len(decision.candidates) == min(top_k, len(rows))
    for candidate in decision.candidates:
        assert candidate.similarity == pytest.approx(exact[candidate.service_id], abs=2e-6)
    best = max(exact.values())
    if decision.service:
        assert exact[decision.service.service_id] == pytest.approx(best, abs=2e-6)
        assert best >= threshold - 2e-6
    else:
        assert best < threshold + 2e-6


def test_a_named_model_needs_no_vector(policy: Policy) -> None:
    decision = decide_named(policy, "model-c")
    assert (decision.reason, decision.cluster, decision.modality) == (Reason.NAMED, "cluster-c", Modality.UNKNOWN)
    assert decide_named(policy, "elsewhere").reason is Reason.UNKNOWN_MODEL
    assert decide_named(policy, "elsewhere").service is None


def test_falling_back_takes_the_default_route_of_the_modality(policy: Policy) -> None:
    decision = fall_back(policy, Modality.TEXT, Reason.ENCODER_UNAVAILABLE)
    assert (decision.reason, decision.cluster) == (Reason.ENCODER_UNAVAILABLE, "cluster-d")
    assert fall_back(policy, Modality.IMAGE, Reason.ENCODER_UNAVAILABLE).service is None


def test_every_reason_has_a_text() -> None:
    assert set(TEXTS) == set(Reason)


def test_metadata(policy: Policy) -> None:
    decision = decide(policy, Modality.TEXT, vector(0.6, 0.8, 0, 0))
    assert MessageToDict(to_metadata(decision, request_id="r7", router_us=1234))["modalmesh"] == {
        "service": "b",
        "model": "model-b",
        "modality": "text",
        "similarity": 0.8,
        "runner_up": "a",
        "runner_up_similarity": 0.6,
        "reason": "matched",
        "candidates": [
            {"service": "b", "similarity": 0.8},
            {"service": "a", "similarity": 0.6},
            {"service": "d", "similarity": 0.0},
        ],
        "request_id": "r7",
        "router_us": 1234,
    }
    assert MessageToDict(to_metadata(pass_on(Reason.NO_POLICY), request_id="", router_us=1))["modalmesh"] == {
        "reason": "no_policy",
        "modality": "unknown",
        "router_us": 1,
    }
