"""The shell on a real unix socket, with a client in Envoy's place and an encoder that does as it is told."""

from __future__ import annotations

import asyncio
import stat
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from modalmesh.base.metrics import REGISTRY
from router.encoder.errors import EncoderUnavailableError, ItemError
from router.extproc import ExternalProcessor, ExtProcServer
from router.grpc_message import frame
from router.policy import PolicySet, parse
from router.request import MODEL_INFER
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from xds.pb.router import policy_pb2


@dataclass
class Encoded:
    vectors: NDArray[np.float32]
    fingerprint: str = "00112233aabbccdd"


@dataclass
class Encoder:
    """Turns everything into the first axis, or fails as told."""

    failure: BaseException | None = None
    fingerprint: str = "00112233aabbccdd"
    hold: asyncio.Event | None = None
    asked: list[str | bytes] = field(default_factory=list)

    async def encode(self, items: Sequence[str | bytes], timeout: float) -> Encoded:  # noqa: ASYNC109
        assert timeout > 0
        self.asked += items
        if self.hold:
            await self.hold.wait()
        if self.failure:
            raise self.failure
        return Encoded(np.eye(4, dtype=np.float32)[:1], self.fingerprint)


@dataclass
class Bench:
    processor: ExternalProcessor
    encoder: Encoder
    channel: Any

    def open(self) -> Any:
        return self.channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )()

    async def ask(self, body: bytes, *, end: bool = True) -> ext_proc.ProcessingResponse:
        call = self.open()
        await call.write(ext_proc.ProcessingRequest(request_headers=HEADERS))
        assert (await call.read()).WhichOneof("response") == "request_headers"
        await call.write(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=end)))
        reply: ext_proc.ProcessingResponse = await call.read()
        if reply.HasField("override_message_timeout"):
            reply = await call.read()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        return reply


HEADERS = ext_proc.HttpHeaders(
    headers=base_pb2.HeaderMap(
        headers=[
            base_pb2.HeaderValue(key=":authority", raw_value=b"api"),
            base_pb2.HeaderValue(key=":path", raw_value=MODEL_INFER.encode()),
        ]
    )
)


def infer(model: str = "auto", text: bytes = b"hello") -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id="r1")
    message.inputs.add(name="in", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    return frame([message.SerializeToString()])


def told(reply: ext_proc.ProcessingResponse) -> tuple[str, str]:
    """The reason, and the cluster that the header names."""
    options = reply.request_body.response.header_mutation.set_headers
    return str(MessageToDict(reply.dynamic_metadata)["modalmesh"]["reason"]), options[
        0
    ].header.raw_value.decode() if options else ""


def counted(reason: str, modality: str) -> float:
    labels = {"reason": reason, "modality": modality}
    return REGISTRY.get_sample_value("modalmesh_router_decisions_total", labels) or 0.0


@pytest.fixture
async def bench(policy_message: Callable[..., policy_pb2.SemanticPolicy]) -> AsyncIterator[Bench]:
    policies = PolicySet([parse("quick", policy_message().SerializeToString())])
    encoder = Encoder()
    processor = ExternalProcessor(
        lambda: policies, encoder, encoder_timeout_ms=200, most_requests=2, most_waiting_bytes=10_000
    )
    with tempfile.TemporaryDirectory(prefix="mm") as folder:
        path = Path(folder) / "router.sock"
        server = ExtProcServer(path, processor)
        await server.start()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield Bench(processor, encoder, channel)
        await server.close()
        assert not path.exists()


async def settled(bench: Bench) -> None:
    async with asyncio.timeout(5):
        while bench.processor.open_requests or bench.processor.waiting_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_auto_is_decided_rewritten_and_counted(bench: Bench) -> None:
    before = counted("matched", "text")
    reply = await bench.ask(infer())
    assert told(reply) == ("matched", "cluster-a")
    assert reply.request_body.response.body_mutation.body == infer("model-a")
    assert bench.encoder.asked == ["hello"]
    assert counted("matched", "text") == before + 1


async def test_envoy_is_asked_to_wait_before_the_encoder_is(bench: Bench) -> None:
    call = bench.open()
    await call.write(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=infer(), end_of_stream=True)))
    assert (await call.read()).override_message_timeout.ToMilliseconds() > 200
    assert told(await call.read()) == ("matched", "cluster-a")
    call.cancel()


async def test_a_named_model_does_not_ask_the_encoder(bench: Bench) -> None:
    assert told(await bench.ask(infer("model-c"))) == ("named", "cluster-c")
    assert bench.encoder.asked == []


@pytest.mark.parametrize(
    ("failure", "reason", "cluster"),
    [
        (EncoderUnavailableError("gone"), "encoder_unavailable", "cluster-d"),
        (ItemError("no picture"), "encoder_refused", "cluster-d"),
        (RuntimeError("a mistake"), "internal_error", "cluster-d"),
    ],
)
async def test_a_failing_encoder(bench: Bench, failure: Exception, reason: str, cluster: str) -> None:
    bench.encoder.failure = failure
    reply = await bench.ask(infer())
    assert told(reply) == (reason, cluster)
    assert reply.request_body.response.body_mutation.body == infer("model-d")


async def test_a_hanging_encoder(bench: Bench) -> None:
    bench.encoder.hold = asyncio.Event()
    assert told(await bench.ask(infer())) == ("encoder_unavailable", "cluster-d")
    await settled(bench)


async def test_another_encoder(bench: Bench) -> None:
    bench.encoder.fingerprint = "ffff"
    assert told(await bench.ask(infer())) == ("encoder_mismatch", "cluster-d")


async def test_garbage_and_parts_pass(bench: Bench) -> None:
    assert told(await bench.ask(b"garbage")) == ("malformed", "")
    assert told(await bench.ask(infer(), end=False)) == ("malformed", "")


async def test_a_client_that_leaves_takes_its_request_along(bench: Bench) -> None:
    bench.encoder.hold = asyncio.Event()
    call = bench.open()
    await call.write(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=infer(), end_of_stream=True)))
    assert (await call.read()).HasField("override_message_timeout")
    async with asyncio.timeout(5):
        while not bench.encoder.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (bench.processor.open_requests, bench.processor.waiting_bytes > 0) == (1, True)
    call.cancel()
    await settled(bench)
    idle = bench.open()
    await idle.write(ext_proc.ProcessingRequest(request_headers=HEADERS))
    await idle.read()
    assert bench.processor.open_requests == 1
    idle.cancel()
    await settled(bench)


async def test_requests_above_the_limit_do_without_the_encoder(bench: Bench) -> None:
    bench.encoder.hold = asyncio.Event()
    calls = [bench.open() for _ in range(2)]
    for call in calls:
        await call.write(ext_proc.ProcessingRequest(request_headers=HEADERS))
        await call.read()
    assert told(await bench.ask(infer())) == ("overloaded", "cluster-d")
    assert told(await bench.ask(infer("model-c"))) == ("named", "cluster-c")
    assert bench.encoder.asked == []
    for call in calls:
        call.cancel()
    await settled(bench)


async def test_bytes_above_the_limit_do_without_the_encoder(bench: Bench) -> None:
    assert told(await bench.ask(infer(text=b"x" * 11_000))) == ("overloaded", "cluster-d")
    assert bench.processor.waiting_bytes == 0


async def test_other_messages_are_answered_in_kind(bench: Bench) -> None:
    call = bench.open()
    for kind in ("request_trailers", "response_headers", "response_body", "response_trailers"):
        message = ext_proc.ProcessingRequest()
        getattr(message, kind).SetInParent()
        await call.write(message)
        assert (await call.read()).WhichOneof("response") == kind
    call.cancel()
    await settled(bench)
