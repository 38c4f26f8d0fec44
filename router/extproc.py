"""Envoy's external processor: one gRPC stream for each HTTP request, over a unix socket of the node.

A thin shell: it moves messages between Envoy, ``router.request`` and the encoder, with a limit on everything. Whatever
fails here, the request goes on as it came (or to its default route), a counter rises and one log line says why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from modalmesh.base.errors import EncoderError
from modalmesh.base.logging import get_logger
from router.decision import FAILURES, Decision, Reason, decide, fall_back, pass_on
from router.encoder.errors import ItemError
from router.errors import SocketError
from router.grpc_message import is_compressed
from router.limits import LARGEST_MESSAGE, envoy_wait_ms
from router.policy import PolicySet
from router.replies import answer_body, continue_with, read_head, wait_longer
from router.request import Answer, Head, Question, classify, settle
from router.sockets import private_mode, reserved
from router.telemetry import ACTIVE, DECISION_SECONDS, DECISIONS, LogLimit
from xds.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

__all__ = ["Encoded", "Encodes", "ExtProcServer", "ExternalProcessor"]

log = get_logger()

_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

MOST_REQUESTS = 512
"""Requests open at once; more take default routes without the encoder. Each may hold a picture of 16 MiB, hence the
next limit too."""

MOST_WAITING_BYTES = 512 * 1024 * 1024
"""Bytes of bodies that wait for the encoder."""

_LONGEST_DETAIL = 300  # characters; a client's own bytes may be quoted in it


class Encoded(Protocol):
    """What an encoder returns."""

    @property
    def vectors(self) -> NDArray[np.float32]:
        """float32[n, dimension], rows of unit length."""

    @property
    def fingerprint(self) -> str:
        """Which encoder made them."""


class Encodes(Protocol):
    """What is asked of an encoder's client."""

    async def encode(self, items: Sequence[str | bytes], timeout: float) -> Encoded:  # noqa: ASYNC109
        """Return a vector for each text or picture within ``timeout`` seconds.

        Raises:
            ItemError: A text or picture can't be encoded.
            EncoderError: Anything else.
        """


class ExternalProcessor:
    """Answers Envoy's messages.

    Args:
        policies: Returns the policies in force; asked once for each request.
        encoder: Makes vectors.
        encoder_timeout_ms: How long to wait for it.
        clock: Monotonic, in seconds.
        most_requests: Requests that may be open at once.
        most_waiting_bytes: Bytes of bodies that may wait for the encoder.
    """

    def __init__(
        self,
        policies: Callable[[], PolicySet],
        encoder: Encodes,
        *,
        encoder_timeout_ms: int,
        clock: Callable[[], float] = time.monotonic,
        most_requests: int = MOST_REQUESTS,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        self._policies = policies
        self._encoder = encoder
        self._timeout_ms = encoder_timeout_ms
        self._clock = clock
        self._most_requests = most_requests
        self._most_waiting_bytes = most_waiting_bytes
        self._limit = LogLimit()
        self.open_requests = 0
        self.waiting_bytes = 0

    async def serve(self, messages: AsyncIterator[ext_proc.ProcessingRequest], context: Any) -> None:
        """Serve one gRPC stream.

        Why not leave the generator to grpc: when Envoy resets the stream (the client is gone), a generator that is
        suspended would be cleaned up whenever the garbage collector finds it.
        """
        async with aclosing(self.process(messages)) as replies:
            async for reply in replies:
                await context.write(reply)

    async def process(
        self, messages: AsyncIterator[ext_proc.ProcessingRequest]
    ) -> AsyncGenerator[ext_proc.ProcessingResponse]:
        """Answer the messages of one HTTP request, each with one reply (or a longer time limit and a reply)."""
        self.open_requests += 1
        ACTIVE.inc()
        overloaded = self.open_requests > self._most_requests
        head = Head()
        try:
            async for message in messages:
                kind = message.WhichOneof("request")
                if kind == "request_body":
                    async for reply in self._answer_body(message.request_body, head, overloaded):
                        yield reply
                    continue
                if kind == "request_headers":
                    head = read_head(message.request_headers)
                reply_or_none = continue_with(kind or "")
                if reply_or_none is not None:
                    yield reply_or_none
        finally:
            self.open_requests -= 1
            ACTIVE.dec()

    async def _answer_body(
        self, body: ext_proc.HttpBody, head: Head, overloaded: bool
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        began = self._clock()
        answer: Answer
        try:
            if body.end_of_stream:
                step = await self._classify(head, body.body)
            else:
                # Envoy is configured for another body mode than BUFFERED.
                step = Answer(pass_on(Reason.MALFORMED), detail="only a part of the body came")
            if isinstance(step, Answer):
                answer = step
            elif overloaded:
                answer = _overloaded(step, f"{self.open_requests} requests are open")
            else:
                yield wait_longer(envoy_wait_ms(self._timeout_ms))
                answer = await self._ask(step)
        except Exception as error:  # whatever it is, the request must go on
            answer = Answer(pass_on(Reason.INTERNAL_ERROR), detail=_described(error))
        seconds = self._clock() - began
        self._report(answer, seconds)
        yield answer_body(answer, head, router_us=round(seconds * 1e6))

    async def _classify(self, head: Head, body: bytes) -> Answer | Question:
        if is_compressed(body):
            # Unpacking megabytes would keep every other request waiting; zlib lets other threads run.
            return await asyncio.to_thread(classify, self._policies(), head, body)
        return classify(self._policies(), head, body)

    async def _ask(self, question: Question) -> Answer:
        """Have the content encoded and decide; on failure the modality's default route is taken."""
        policy, content = question.policy, question.content
        size = len(question.message) + len(content.data)
        if self.waiting_bytes + size > self._most_waiting_bytes:
            return _overloaded(question, f"{self.waiting_bytes} bytes wait for the encoder")
        self.waiting_bytes += size
        detail = ""
        decision: Decision
        try:
            # The client keeps the time limit too; this one also holds if it doesn't.
            async with asyncio.timeout(self._timeout_ms / 1000):
                encoded = await self._encoder.encode([content.data], self._timeout_ms / 1000)
            if encoded.fingerprint == policy.fingerprint:
                decision = decide(policy, content.modality, encoded.vectors[0])
            else:
                decision = fall_back(policy, content.modality, Reason.ENCODER_MISMATCH)
                detail = f"policy: {policy.fingerprint}, encoder: {encoded.fingerprint}"
        except ItemError as error:
            decision, detail = fall_back(policy, content.modality, Reason.ENCODER_REFUSED), error.what
        except (EncoderError, TimeoutError) as error:
            decision = fall_back(policy, content.modality, Reason.ENCODER_UNAVAILABLE)
            detail = str(error) or f"no answer in {self._timeout_ms} ms"
        except Exception as error:
            decision, detail = fall_back(policy, content.modality, Reason.INTERNAL_ERROR), _described(error)
        finally:
            self.waiting_bytes -= size
        return settle(question, decision, detail=detail)

    def _report(self, answer: Answer, seconds: float) -> None:
        decision = answer.decision
        DECISIONS.labels(decision.reason.value, decision.modality.value).inc()
        DECISION_SECONDS.labels(decision.modality.value).observe(seconds)
        if decision.reason in FAILURES:
            held_back = self._limit.pass_through(decision.reason.value, self._clock())
            if held_back is not None:
                log.warning(
                    "request not decided as usual",
                    reason=decision.reason.value,
                    detail=answer.detail[:_LONGEST_DETAIL],
                    goes_to=decision.cluster or "Envoy's own routes",
                    request_id=answer.request_id,
                    not_logged=held_back,
                )
        else:
            log.debug(
                "decided",
                reason=decision.reason.value,
                modality=decision.modality.value,
                service=decision.service.service_id if decision.service else "",
                request_id=answer.request_id,
            )


def _overloaded(question: Question, detail: str) -> Answer:
    decision = fall_back(question.policy, question.content.modality, Reason.OVERLOADED)
    return settle(question, decision, detail=detail)


def _described(error: Exception) -> str:
    """Return an error that nobody expected as a line, and leave its traceback in the log for those who look for it."""
    log.debug("the router failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


class ExtProcServer:
    """The processor on a unix socket.

    Args:
        path: The socket, its owner's alone.
        processor: Answers.
    """

    def __init__(self, path: Path, processor: ExternalProcessor) -> None:
        self._path = path
        self._processor = processor
        self._reservation = ExitStack()
        self._server: Any = None

    async def start(self) -> None:
        """Listen.

        Raises:
            SocketError: The socket can't be had.
        """
        self._reservation.enter_context(reserved(self._path))
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", LARGEST_MESSAGE),
                ("grpc.max_send_message_length", LARGEST_MESSAGE),
            ],
            # The processor lets requests above its own limit pass and counts them; this is the wall behind it.
            maximum_concurrent_rpcs=2 * MOST_REQUESTS,
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    _SERVICE,
                    {
                        "Process": grpc.stream_stream_rpc_method_handler(
                            self._processor.serve,
                            request_deserializer=ext_proc.ProcessingRequest.FromString,
                            response_serializer=ext_proc.ProcessingResponse.SerializeToString,
                        )
                    },
                ),
            )
        )
        try:
            with private_mode(self._path):
                self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            self._reservation.close()
            raise SocketError(f"can't listen on {self._path}: {error}") from error
        await self._server.start()

    async def close(self, grace: float = 1.0) -> None:
        """Let open requests end for at most ``grace`` seconds, then stop and remove the socket."""
        if self._server is not None:
            await self._server.stop(grace)
        self._reservation.close()
