from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from router.decision import Reason, decide, fall_back
from router.grpc_message import frame
from router.modality import Modality
from router.policy import PolicySet, parse
from router.request import LONGEST_ID, MODEL_INFER, Answer, Head, Question, classify, settle
from xds.pb.router import policy_pb2

HEAD = Head(authority="api:80", path=MODEL_INFER)


def body(model: str = "auto", element: bytes = b"hello", datatype: str = "BYTES", **fields: Any) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id=fields.get("id", "r1"))
    message.inputs.add(name="in", datatype=datatype, shape=[1])
    message.raw_input_contents.append(struct.pack("<I", len(element)) + element)
    return frame([message.SerializeToString()])


@pytest.fixture
def policies(policy_message: Callable[..., policy_pb2.SemanticPolicy]) -> PolicySet:
    return PolicySet([parse("quick", policy_message().SerializeToString())])


def answer(policies: PolicySet, head: Head, data: bytes) -> Answer:
    step = classify(policies, head, data)
    assert isinstance(step, Answer)
    assert step.body is None
    return step


def test_auto_needs_the_encoder_and_is_rewritten(policies: PolicySet) -> None:
    step = classify(policies, HEAD, body())
    assert isinstance(step, Question)
    assert (step.content.modality, step.content.data) == (Modality.TEXT, "hello")
    vector = np.array([1, 0, 0, 0], dtype=np.float32)
    settled = settle(step, decide(step.policy, Modality.TEXT, vector))
    assert settled.body == body(model="model-a")
    assert settled.request_id == "r1"


def test_when_nothing_is_chosen_the_body_stays(policies: PolicySet) -> None:
    step = classify(policies, HEAD, body(element=b"\xff\xd8\xff"))
    assert isinstance(step, Question)
    assert settle(step, fall_back(step.policy, Modality.IMAGE, Reason.ENCODER_UNAVAILABLE)).body is None


def test_a_compressed_message_comes_out_uncompressed(policies: PolicySet) -> None:
    packed = gzip.compress(body()[5:])
    step = classify(policies, Head("api", MODEL_INFER, "gzip"), struct.pack(">BI", 1, len(packed)) + packed)
    assert isinstance(step, Question)
    settled = settle(step, fall_back(step.policy, Modality.TEXT, Reason.ENCODER_UNAVAILABLE))
    assert settled.body == body(model="model-d")


@pytest.mark.parametrize(
    ("head", "data", "reason", "cluster"),
    [
        (HEAD, body("model-c"), Reason.NAMED, "cluster-c"),
        (HEAD, body("elsewhere"), Reason.UNKNOWN_MODEL, ""),
        (HEAD, body(""), Reason.UNKNOWN_MODEL, ""),
        (HEAD, frame([]), Reason.UNKNOWN_MODEL, ""),
        (HEAD, body(datatype="FP32"), Reason.UNSUPPORTED_INPUT, ""),
        (HEAD, b"", Reason.MALFORMED, ""),
        (HEAD, body()[:-1], Reason.MALFORMED, ""),
        (HEAD, body() + body(), Reason.MALFORMED, ""),
        (HEAD, frame([b"\x0a\xff"]), Reason.MALFORMED, ""),
        (Head("api", "/inference.GRPCInferenceService/ServerLive"), body(), Reason.MALFORMED, ""),
    ],
)
def test_what_needs_no_encoder(policies: PolicySet, head: Head, data: bytes, reason: Reason, cluster: str) -> None:
    decision = answer(policies, head, data).decision
    assert (decision.reason, decision.cluster) == (reason, cluster)


def test_without_a_policy_the_body_is_not_read() -> None:
    assert answer(PolicySet(), HEAD, b"anything").decision.reason is Reason.NO_POLICY


def test_a_client_s_id_is_cut(policies: PolicySet) -> None:
    assert answer(policies, HEAD, body("model-c", id="x" * 1_000_000)).request_id == "x" * LONGEST_ID
    step = classify(policies, HEAD, body(id="x" * 1_000_000))
    assert isinstance(step, Question)
    assert step.request_id == "x" * LONGEST_ID
