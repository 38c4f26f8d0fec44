"""A gRPC service and its client, as processes of their own: grpcio must not be forked.

python -m tests.kernel.grpc_ends serve ADDRESS
python -m tests.kernel.grpc_ends ask ADDRESS
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

_OPTIONS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.use_local_subchannel_pool", 1)]
SIZES = (0, 1, 1000, 65_536, 1 << 20, 4 << 20)


def _echo(request: bytes, _context: Any) -> bytes:
    return request


def _digests(requests: Iterator[bytes], _context: Any) -> Iterator[bytes]:
    for request in requests:
        yield hashlib.blake2b(request).digest()


def serve(address: str) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(8), options=_OPTIONS)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Digests": grpc.stream_stream_rpc_method_handler(_digests),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Ends", handlers),))
    server.add_insecure_port(address)
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


def ask(address: str) -> None:
    """Print the peer that the client saw, once every answer was right."""
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        echo = channel.unary_unary("/test.Ends/Echo")
        for size in SIZES * 3:
            sent = bytes([size & 255]) * size
            answer = echo(sent, timeout=20)
            assert answer == sent
        digests = channel.stream_stream("/test.Ends/Digests")
        parts = [bytes([number & 255]) * (number * 997) for number in range(100)]
        answers = list(digests(iter(parts), timeout=20))
        assert answers == [hashlib.blake2b(part).digest() for part in parts]
        waiting = [echo.future(bytes([number]) * 10_000, timeout=20) for number in range(64)]
        assert [future.result() for future in waiting] == [bytes([number]) * 10_000 for number in range(64)]
    print("all right", flush=True)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](sys.argv[2])
