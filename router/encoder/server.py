"""The encoder process: one model, one thread, many callers on a unix socket.

Why a process of its own: routers must answer in microseconds and never decode what strangers send. Here hostile
pictures are decoded, and here is the only model of the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Histogram

from modalmesh.base import logging, metrics
from modalmesh.base.logging import get_logger
from modalmesh.base.settings import Settings
from router.encoder import service
from router.encoder.errors import ItemError
from router.encoder.model import DualEncoder
from router.encoder.work import CallerGone, Full, Gone, Worker
from router.errors import SocketError
from router.sockets import private_mode, reserved
from xds.pb.router.encoder import encoder_pb2

__all__ = ["EncoderServer", "Encodes", "run"]

log = get_logger()

# Requests hold their pictures while they wait.
_MAX_WAITING_BYTES = 256 * 1024 * 1024

# Seconds that requests under way get when the process is told to stop.
_GRACE = 2.0

_items_total = Counter(
    "modalmesh_encoder_items",
    "Items by what became of them: ok; invalid (can't be encoded); refused (the line is full); "
    "skipped (the caller was gone); failed (the model).",
    ["modality", "outcome"],
    registry=metrics.REGISTRY,
)
_seconds = Histogram(
    "modalmesh_encoder_seconds",
    "Time to decode and encode one item, without waiting.",
    ["modality"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
    registry=metrics.REGISTRY,
)


class Encodes(Protocol):
    """What the server needs of an encoder."""

    name: str
    note: str
    dimension: int
    fingerprint: str
    max_tokens: int

    def encode_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [texts, dimension]."""

    def encode_images(self, pictures: Sequence[bytes]) -> NDArray[np.float32]:
        """Return [pictures, dimension]."""


class EncoderServer:
    """Serves an encoder on a unix socket, from ``start`` to ``close``.

    Args:
        encoder: Called from one thread only.
        socket: Must be reserved by the caller (``sockets.reserved``).
        queue: Requests that may wait.
    """

    def __init__(self, encoder: Encodes, *, socket: Path, queue: int) -> None:
        self._encoder = encoder
        self._socket = socket
        self._queue = queue
        self._worker: Worker[bytes] | None = None
        self._server: Any = None

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return self._worker.waiting if self._worker else 0

    async def start(self) -> None:
        """Open the socket.

        Raises:
            SocketError: It can't be opened.
        """
        self._worker = Worker(limit=self._queue, max_bytes=_MAX_WAITING_BYTES, thread_name="encoder")
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", service.MAX_MESSAGE),
                ("grpc.max_send_message_length", service.MAX_MESSAGE),
            ]
        )
        unary = grpc.unary_unary_rpc_method_handler
        handlers = {
            service.ENCODE: unary(
                self._encode,
                request_deserializer=encoder_pb2.EncodeRequest.FromString,
                response_serializer=encoder_pb2.EncodeResponse.SerializeToString,
            ),
            service.DESCRIBE: unary(
                self._describe,
                request_deserializer=encoder_pb2.DescribeRequest.FromString,
                response_serializer=encoder_pb2.DescribeResponse.SerializeToString,
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.SERVICE, handlers),))
        try:
            with private_mode(self._socket):
                self._server.add_insecure_port(f"unix:{self._socket}")
        except RuntimeError as error:
            await self._worker.close()
            raise SocketError(f"{self._socket} can't be opened: {error}", hint="choose another runtime_dir") from error
        await self._server.start()

    async def close(self) -> None:
        """Refuse new requests, give those under way a moment, stop."""
        if self._server:
            await self._server.stop(_GRACE)
        if self._worker:
            await self._worker.close()

    async def _describe(self, _request: encoder_pb2.DescribeRequest, _context: Any) -> encoder_pb2.DescribeResponse:
        encoder = self._encoder
        return encoder_pb2.DescribeResponse(
            name=encoder.name,
            dimension=encoder.dimension,
            fingerprint=encoder.fingerprint,
            max_tokens=encoder.max_tokens,
        )

    async def _encode(self, request: encoder_pb2.EncodeRequest, context: Any) -> encoder_pb2.EncodeResponse:
        items = request.items
        if not 1 <= len(items) <= service.MAX_ITEMS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"{len(items)} items; a request has 1 to {service.MAX_ITEMS}"
            )
        assert self._worker  # noqa: S101  start() came before
        remaining = context.time_remaining()
        begun = threading.Event()
        try:
            vectors = await self._worker.do(
                partial(_encode_all, self._encoder, items, begun),
                size=request.ByteSize(),
                deadline=None if remaining is None else asyncio.get_running_loop().time() + remaining,
            )
        except Full:
            _count(items, "refused")
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests wait for the encoder (encoder.queue)"
            )
        except CallerGone:
            _count(items, "skipped")
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request waited for longer than its deadline")
        except asyncio.CancelledError:
            if not begun.is_set():  # else the thread counts
                _count(items, "skipped")
            raise
        except ItemError as error:
            hint = f"; {error.hint}" if error.hint else ""
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"item {error.item}: {error.what}{hint}",
                trailing_metadata=((service.ITEM_KEY, str(error.item)),),
            )
        except Exception as error:
            log.error("encoding failed", error=str(error), items=len(items), exc_info=True)
            await context.abort(grpc.StatusCode.INTERNAL, f"encoding failed: {error}")
        return encoder_pb2.EncodeResponse(
            vectors=vectors, dimension=self._encoder.dimension, fingerprint=self._encoder.fingerprint
        )


def _modality(item: encoder_pb2.Item) -> str:
    return item.WhichOneof("content") or "none"


def _count(items: Sequence[encoder_pb2.Item], outcome: str) -> None:
    for item in items:
        _items_total.labels(_modality(item), outcome).inc()


def _encode_all(encoder: Encodes, items: Sequence[encoder_pb2.Item], begun: threading.Event, gone: Gone) -> bytes:
    """Run in the thread; return the vectors as encoder.proto wants them.

    Raises:
        ItemError: An item can't be encoded; those after it are not looked at.
        CallerGone: Nobody waits any more.
    """
    begun.set()
    rows = np.empty((len(items), encoder.dimension), "<f4")
    for index, item in enumerate(items):
        if gone():
            _count(items[index:], "skipped")
            raise CallerGone
        modality = _modality(item)
        began = perf_counter()
        try:
            rows[index] = _vector(encoder, item, modality)
        except ItemError as error:
            error.item = index
            _items_total.labels(modality, "invalid").inc()
            raise
        except Exception:
            _items_total.labels(modality, "failed").inc()
            raise
        _items_total.labels(modality, "ok").inc()
        _seconds.labels(modality).observe(perf_counter() - began)
    return rows.tobytes()


def _vector(encoder: Encodes, item: encoder_pb2.Item, modality: str) -> NDArray[np.float32]:
    if modality == "text":
        return np.asarray(encoder.encode_texts([item.text])[0])
    if modality == "image":
        return np.asarray(encoder.encode_images([item.image])[0])
    raise ItemError("has neither text nor image")


def run(settings: Settings) -> None:
    """Be the encoder process until SIGTERM or SIGINT.

    Raises:
        SocketError: Another process serves the socket, or it can't be opened.
        EncoderError: The encoder can't be loaded.
        MachineError: The port for metrics is taken.
    """
    logging.configure(settings.log, "encoder")
    with reserved(settings.encoder_socket):
        began = perf_counter()
        options = settings.encoder
        encoder = DualEncoder.load(options.path, threads=options.threads, max_pixels=options.max_pixels)
        metrics.serve(settings.metrics.encoder)
        log.info(
            "encoder loaded",
            name=encoder.name,
            dimension=encoder.dimension,
            fingerprint=encoder.fingerprint,
            seconds=round(perf_counter() - began, 2),
        )
        if encoder.note:
            log.warning("this encoder is a starter", note=encoder.note, hint="set encoder.path to a CLIP export")
        server = EncoderServer(encoder, socket=settings.encoder_socket, queue=options.queue)
        asyncio.run(_serve_until_told(server, settings.encoder_socket))


async def _serve_until_told(server: EncoderServer, socket: Path) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(name: str) -> Callable[[], None]:
        def handler() -> None:
            told.set()
            log.info("stopping", signal=name)

        return handler

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell(number.name))
    await server.start()
    log.info("encoder serves", socket=str(socket))
    try:
        await told.wait()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await server.close()
