"""ext_proc messages: headers read into a ``Head``, answers written as replies. No I/O.

Source: envoy/service/ext_proc/v3/external_processor.proto.
"""

from __future__ import annotations

from google.protobuf import duration_pb2

from router.decision import to_metadata
from router.request import Answer, Head
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

__all__ = ["CLUSTER_HEADER", "answer_body", "continue_with", "read_head", "wait_longer"]

CLUSTER_HEADER = "x-modalmesh-cluster"
"""The header by which Envoy's routes pick the cluster; its listener strips it from clients' requests."""

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def read_head(headers: ext_proc.HttpHeaders) -> Head:
    """Return what counts of a request's headers."""
    values = {
        # Envoy fills raw_value; other senders may fill value.
        header.key.lower(): (header.raw_value.decode("latin-1") if header.raw_value else header.value)
        for header in headers.headers.headers
    }
    return Head(
        authority=values.get(":authority", ""),
        path=values.get(":path", ""),
        grpc_encoding=values.get("grpc-encoding", ""),
        has_content_length="content-length" in values,
    )


def continue_with(kind: str) -> ext_proc.ProcessingResponse | None:
    """Return the reply that changes nothing to a message of a kind (a field of ProcessingRequest), None for no kind."""
    reply = ext_proc.ProcessingResponse()
    if kind not in _KINDS:
        return None
    getattr(reply, kind).SetInParent()
    return reply


_KINDS = frozenset(
    {
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    }
)


def wait_longer(milliseconds: int) -> ext_proc.ProcessingResponse:
    """Return the message that asks Envoy to wait for the next one; it counts from Envoy's receiving this one.

    Envoy takes one for each message, and none above its ``max_message_timeout``.
    """
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(milliseconds)
    return ext_proc.ProcessingResponse(override_message_timeout=duration)


def answer_body(answer: Answer, head: Head, *, router_us: int) -> ext_proc.ProcessingResponse:
    """Return the reply to a request's body.

    Args:
        answer: What to do.
        head: The request's headers.
        router_us: Microseconds since the body came.
    """
    reply = ext_proc.ProcessingResponse(
        dynamic_metadata=to_metadata(answer.decision, request_id=answer.request_id, router_us=router_us)
    )
    common = reply.request_body.response
    # Clears the route that Envoy has picked already, whatever the decision: it may be a forged header's, which a filter
    # before this one has removed too late. Envoy clears it only if a header changes, hence the removal.
    common.clear_route_cache = True
    if not answer.decision.service:
        common.header_mutation.remove_headers.append(CLUSTER_HEADER)
    else:
        option = common.header_mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = CLUSTER_HEADER
        option.header.raw_value = answer.decision.cluster.encode()
    if answer.body is not None:
        common.body_mutation.body = answer.body
        if head.has_content_length:
            # Envoy answers 500 to a new body that doesn't fit the old length.
            common.header_mutation.remove_headers.append("content-length")
    return reply
