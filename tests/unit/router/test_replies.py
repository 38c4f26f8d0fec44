from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.json_format import MessageToDict

from router.decision import Reason, decide_named, pass_on
from router.policy import parse
from router.replies import answer_body, continue_with, read_head, wait_longer
from router.request import Answer, Head
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from xds.pb.router import policy_pb2


def headers(*pairs: base_pb2.HeaderValue) -> ext_proc.HttpHeaders:
    return ext_proc.HttpHeaders(headers=base_pb2.HeaderMap(headers=pairs))


def test_reads_headers_raw_or_not() -> None:
    head = read_head(
        headers(
            base_pb2.HeaderValue(key=":authority", raw_value=b"api.example.com"),
            base_pb2.HeaderValue(key=":path", value="/x/Y"),
            base_pb2.HeaderValue(key="grpc-encoding", raw_value=b"gzip"),
            base_pb2.HeaderValue(key="Content-Length", raw_value=b"7"),
            base_pb2.HeaderValue(key="x-odd", raw_value=b"\xff\xfe"),
        )
    )
    assert head == Head("api.example.com", "/x/Y", "gzip", has_content_length=True)
    assert read_head(headers()) == Head()


def test_an_answer_sets_cluster_body_and_metadata(policy_message: Callable[..., policy_pb2.SemanticPolicy]) -> None:
    policy = parse("quick", policy_message().SerializeToString())
    answer = Answer(decide_named(policy, "model-b"), "r1", b"new")
    reply = answer_body(answer, Head(has_content_length=True), router_us=7)
    common = reply.request_body.response
    (option,) = common.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-modalmesh-cluster", b"cluster-b")
    assert option.append_action == base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert common.clear_route_cache
    assert common.body_mutation.body == b"new"
    assert list(common.header_mutation.remove_headers) == ["content-length"]
    assert MessageToDict(reply.dynamic_metadata)["modalmesh"]["router_us"] == 7
    assert not answer_body(answer, Head(), router_us=7).request_body.response.header_mutation.remove_headers


def test_what_passes_keeps_its_body_and_loses_a_forged_destination() -> None:
    reply = answer_body(Answer(pass_on(Reason.NO_POLICY)), Head(has_content_length=True), router_us=7)
    assert reply.request_body.response == ext_proc.CommonResponse(
        header_mutation=ext_proc.HeaderMutation(remove_headers=["x-modalmesh-cluster"]), clear_route_cache=True
    )
    assert MessageToDict(reply.dynamic_metadata)["modalmesh"]["reason"] == "no_policy"


@pytest.mark.parametrize(
    "kind", [f.name for f in ext_proc.ProcessingRequest.DESCRIPTOR.oneofs_by_name["request"].fields]
)
def test_every_kind_of_message_has_a_reply_of_its_kind(kind: str) -> None:
    reply = continue_with(kind)
    assert reply is not None
    assert reply.WhichOneof("response") == kind


def test_no_message_no_reply() -> None:
    assert continue_with("") is None


def test_waiting_longer() -> None:
    assert wait_longer(2500).override_message_timeout.ToMilliseconds() == 2500
    assert wait_longer(2500).WhichOneof("response") is None
