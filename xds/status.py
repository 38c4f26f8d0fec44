"""The status service: what each client was sent and has acknowledged, over gRPC on the control plane's admin socket.

Why grpc.aio and not the server next door: this is a small admin service for our own command, where convenience counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from xds.errors import ListenError, UnreachableError
from xds.pb.xds import status_pb2

__all__ = ["StatusServer", "fetch_report", "fetch_status"]

_SERVICE: Final = "modalmesh.xds.v1.Status"
_GRACE: Final = 0.2
"""Seconds that a call in progress has to end when the server closes."""
_MAX_REPLY: Final = 64 * 1024 * 1024


class StatusServer:
    """Serves the status of an ADS server.

    Args:
        path: Unix socket; replaced if nobody answers there.
        clients: Called for each request, on the event loop.
        faults: Likewise.
    """

    def __init__(
        self,
        path: Path,
        clients: Callable[[], Sequence[status_pb2.Client]],
        faults: Callable[[], Sequence[status_pb2.Fault]] = tuple,
    ) -> None:
        self._path = path
        self._clients = clients
        self._faults = faults
        self._server: Any = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenError: The socket can't be opened.
        """
        # Two control planes on one socket would answer by turns.
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", _MAX_REPLY)])
        handler = grpc.unary_unary_rpc_method_handler(
            self._list,
            request_deserializer=status_pb2.ListRequest.FromString,
            response_serializer=status_pb2.ListResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"List": handler}),))
        try:
            server.add_insecure_port(f"unix:{self._path}")
            await server.start()
        except RuntimeError as error:
            raise ListenError(
                f"status service can't listen on {self._path}",
                hint="is another control plane running, and may this user write there?",
            ) from error
        self._server = server

    async def close(self) -> None:
        """Stop."""
        if self._server is not None:
            await self._server.stop(_GRACE)
            self._server = None

    async def _list(self, request: status_pb2.ListRequest, context: object) -> status_pb2.ListResponse:
        del request, context
        return status_pb2.ListResponse(clients=self._clients(), faults=self._faults())


def fetch_status(path: Path, timeout: float = 5.0) -> list[status_pb2.Client]:
    """Ask a running control plane for its clients; blocks. Arguments and errors are those of ``fetch_report``."""
    return list(fetch_report(path, timeout).clients)


def fetch_report(path: Path, timeout: float = 5.0) -> status_pb2.ListResponse:
    """Ask a running control plane for its clients and for what it can't serve; blocks.

    Args:
        path: Its admin socket.
        timeout: Seconds.

    Raises:
        UnreachableError: It isn't running, or doesn't answer in time.
    """
    with grpc.insecure_channel(
        f"unix:{path.absolute()}", options=[("grpc.max_receive_message_length", _MAX_REPLY)]
    ) as channel:
        call = channel.unary_unary(
            f"/{_SERVICE}/List",
            request_serializer=status_pb2.ListRequest.SerializeToString,
            response_deserializer=status_pb2.ListResponse.FromString,
        )
        try:
            response: status_pb2.ListResponse = call(status_pb2.ListRequest(), timeout=timeout)
        except grpc.RpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            what = f"does not answer within {timeout:g} s" if late else "is not running"
            raise UnreachableError(
                f"the control plane {what} (socket {path})",
                hint="start it with «modalmesh up» or «modalmesh controlplane»",
            ) from error
    return response
