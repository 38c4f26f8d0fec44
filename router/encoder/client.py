"""The router's side of the encoder process: items out, vectors in, and two kinds of failure kept apart.

``ItemError`` is the request's own fault; ``EncoderUnavailableError`` means doing without. Nothing here waits longer
than the caller says, and a connection that was lost comes back by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from modalmesh.base.errors import EncoderError
from router.encoder import service
from router.encoder.errors import EncoderModelError, EncoderUnavailableError, ItemError
from xds.pb.router.encoder import encoder_pb2

__all__ = ["Described", "Encoded", "EncoderClient"]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Vectors of the items, in their order."""

    vectors: NDArray[np.float32]
    """[items, dimension], each row of unit length; read-only."""
    fingerprint: str
    """Of the encoder that made them."""


@dataclass(frozen=True, slots=True)
class Described:
    """What the encoder process says of itself."""

    name: str
    dimension: int
    fingerprint: str
    max_tokens: int
    """Tokens a text may have; 0: no limit known."""


class EncoderClient:
    """Talks to the encoder process on a unix socket; use it in the event loop of its first call.

    Args:
        socket: It need not be there yet.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: Any = None
        self._encode: Any = None
        self._describe: Any = None

    async def encode(self, items: Sequence[str | bytes], timeout: float) -> Encoded:  # noqa: ASYNC109  gRPC keeps it
        """Return the vectors of texts (``str``) and encoded pictures (``bytes``).

        Args:
            items: 1 to 256, together at most 32 MiB.
            timeout: Seconds after which the answer is not wanted any more; the server then drops the work.

        Raises:
            ItemError: An item can't be encoded; ``item`` says which.
            EncoderUnavailableError: No answer in time, or none at all.
            EncoderError: The answer makes no sense.
        """
        request = encoder_pb2.EncodeRequest(items=[_item(index, item) for index, item in enumerate(items)])
        if request.ByteSize() > service.MAX_MESSAGE:
            raise ItemError(
                f"the items have {request.ByteSize()} bytes together, more than {service.MAX_MESSAGE}",
                hint="send fewer, or smaller pictures",
            )
        self._connect()
        response = await self._call(self._encode, request, timeout)
        return _encoded(response, len(items))

    async def describe(self, timeout: float) -> Described:  # noqa: ASYNC109
        """Return what the encoder process says of itself.

        Raises:
            EncoderUnavailableError: No answer in time, or none at all.
        """
        self._connect()
        response = await self._call(self._describe, encoder_pb2.DescribeRequest(), timeout)
        return Described(
            name=response.name,
            dimension=response.dimension,
            fingerprint=response.fingerprint,
            max_tokens=response.max_tokens,
        )

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        """Make the channel on first use: gRPC binds it to the running event loop."""
        if self._channel is not None:
            return
        self._channel = grpc.aio.insecure_channel(
            f"unix:{self._socket}",
            options=[
                ("grpc.max_send_message_length", service.MAX_MESSAGE),
                ("grpc.max_receive_message_length", service.MAX_MESSAGE),
                # The encoder is back in a second after a restart; gRPC's default would wait for up to two minutes.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._encode = self._channel.unary_unary(
            f"/{service.SERVICE}/{service.ENCODE}",
            request_serializer=encoder_pb2.EncodeRequest.SerializeToString,
            response_deserializer=encoder_pb2.EncodeResponse.FromString,
        )
        self._describe = self._channel.unary_unary(
            f"/{service.SERVICE}/{service.DESCRIBE}",
            request_serializer=encoder_pb2.DescribeRequest.SerializeToString,
            response_deserializer=encoder_pb2.DescribeResponse.FromString,
        )

    async def _call(self, method: Any, request: object, timeout: float) -> Any:  # noqa: ASYNC109
        try:
            return await method(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, timeout) from error

    def _translated(self, error: Any, timeout: float) -> EncoderError:
        details = " ".join((error.details() or "").split())
        status = error.code()
        if status is grpc.StatusCode.INVALID_ARGUMENT:
            metadata = dict(error.trailing_metadata() or ())
            item = str(metadata.get(service.ITEM_KEY, "0"))
            return ItemError(details, item=int(item) if item.isdecimal() else 0)
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return EncoderUnavailableError(
                f"the encoder did not answer in {timeout:g} s", hint="see router.encoder_timeout_ms and its log"
            )
        if status is grpc.StatusCode.UNAVAILABLE:
            return EncoderUnavailableError(
                f"no encoder process answers on {self._socket}", hint="start it: modalmesh encoder"
            )
        return EncoderUnavailableError(f"the encoder refused: {details} ({status.name})")


def _item(index: int, item: str | bytes) -> encoder_pb2.Item:
    if isinstance(item, bytes):
        return encoder_pb2.Item(image=item)
    try:
        return encoder_pb2.Item(text=item)
    except (UnicodeEncodeError, ValueError) as error:
        raise ItemError("the text is not valid Unicode", item=index) from error


def _encoded(response: encoder_pb2.EncodeResponse, items: int) -> Encoded:
    if not response.dimension or len(response.vectors) != 4 * items * response.dimension:
        raise EncoderModelError(
            f"the encoder sent {len(response.vectors)} bytes for {items} vectors of {response.dimension} dimensions"
        )
    vectors = np.frombuffer(response.vectors, "<f4").reshape(items, response.dimension)
    if not np.isfinite(vectors).all():
        raise EncoderModelError("the encoder sent vectors that are not finite")
    return Encoded(vectors, response.fingerprint)
