"""One request's way through the router, without I/O: what is decided at once, what needs the encoder, what comes out.

    Head + body  →  classify  →  Answer
                              →  Question  →  (encoder)  →  settle  →  Answer

Whoever moves the bytes (now ``extproc``) asks the encoder between the two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.decision import Decision, Reason, decide_named, pass_on
from router.errors import GrpcMessageError, KServeError
from router.grpc_message import frame, unframe
from router.kserve import Content, InferRequest, find_content, read, rename
from router.modality import Modality
from router.policy import Policy, PolicySet

__all__ = ["MODEL_INFER", "Answer", "Head", "Question", "classify", "settle"]

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"

LONGEST_ID = 128
"""Characters of a request's id that go into logs and metadata: it is the client's, and may have megabytes."""


@dataclass(frozen=True, slots=True)
class Head:
    """What counts of a request's headers."""

    authority: str = ""
    path: str = ""
    grpc_encoding: str = ""
    has_content_length: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be done with a request."""

    decision: Decision
    request_id: str = ""
    body: bytes | None = None
    """The new body; None: it stays as it is."""
    detail: str = ""
    """For the log: what exactly was wrong."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request that leaves the choice to the router; its content must become a vector."""

    policy: Policy
    content: Content
    message: memoryview
    request: InferRequest

    @property
    def request_id(self) -> str:
        """The client's id, cut."""
        return self.request.request_id[:LONGEST_ID]


def classify(policies: PolicySet, head: Head, body: bytes) -> Answer | Question:
    """Read a request and decide what can be decided without the encoder.

    Args:
        policies: The policies in force; an update during the request does not change them for it.
        head: Its headers.
        body: Its whole body, one framed ModelInferRequest.
    """
    if head.path not in ("", MODEL_INFER):
        return Answer(pass_on(Reason.MALFORMED), detail=f"{head.path} is not ModelInfer")
    policy = policies.pick(head.authority)
    if policy is None:
        return Answer(pass_on(Reason.NO_POLICY))
    request_id = ""  # until it is read
    try:
        message = unframe(body, head.grpc_encoding)
        request = read(message)
        request_id = request.request_id[:LONGEST_ID]
        if request.model_name != policy.model:
            # The name is right already: only the cluster is chosen, and a compressed body stays compressed.
            return Answer(decide_named(policy, request.model_name), request_id)
        content = find_content(request)
    except (GrpcMessageError, KServeError) as error:
        return Answer(pass_on(Reason.MALFORMED), request_id, detail=error.what)
    if content is None:
        return Answer(Decision(Reason.UNSUPPORTED_INPUT, Modality.UNKNOWN), request_id)
    return Question(policy, content, message, request)


def settle(question: Question, decision: Decision, *, detail: str = "") -> Answer:
    """Return the answer to a question: the body with the chosen model's name, or as it is if none was chosen."""
    body = None
    if decision.service:
        body = frame(rename(question.message, question.request, decision.service.model))
    return Answer(decision, question.request_id, body, detail)
