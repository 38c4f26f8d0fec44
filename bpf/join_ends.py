"""The two ends of the connections by which ``selftest`` finds out whether joined sockets behave on this kernel.

Run as a process of its own, since a socket belongs to the cgroup that its maker was in:

    python -m bpf.join_ends CGROUP

It waits for its own port to be allowed (a line on standard input), and prints what it saw as JSON. Everything stays on
loopback.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Final

__all__ = ["BOUND", "ROUNDS"]

ROUNDS: Final = 50
BOUND: Final = 32 << 20
"""Bytes that a writer may get rid of while nobody reads: the mark (4 MiB) and TCP's own buffers fit in, twice."""

_TIMEOUT_S: Final = 5.0
_STOPPED_S: Final = 0.5
"""A writer that has got rid of nothing for so long is stopped."""
_BULK: Final = 8 << 20


def _accept(listener: socket.socket) -> socket.socket:
    connection = listener.accept()[0]
    connection.settimeout(_TIMEOUT_S)
    return connection


def _echo(listener: socket.socket) -> None:
    with _accept(listener) as connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def _rounds(address: tuple[str, int]) -> bool:
    """Say whether what comes back is what was sent, in order."""
    with socket.create_connection(address, timeout=_TIMEOUT_S) as client:
        for number in range(ROUNDS):
            sent = bytes([number]) * (1 + 61 * number)
            client.sendall(sent)
            if client.recv(len(sent), socket.MSG_WAITALL) != sent:
                return False
    return True


def _digest(listener: socket.socket) -> None:
    with _accept(listener) as connection:
        digest = hashlib.blake2b()
        while data := connection.recv(1 << 18):
            digest.update(data)
        connection.sendall(digest.digest())


def _half_close(address: tuple[str, int]) -> bool:
    """Say whether a stream arrives whole and is answered after its end."""
    block, digest = os.urandom(1 << 20), hashlib.blake2b()
    with socket.create_connection(address, timeout=_TIMEOUT_S) as client:
        for _ in range(_BULK // len(block)):
            client.sendall(block)
            digest.update(block)
        client.shutdown(socket.SHUT_WR)
        return client.recv(64, socket.MSG_WAITALL) == digest.digest()


def _until_stopped(listener: socket.socket, address: tuple[str, int]) -> int:
    """Return how many bytes a writer gets rid of while its reader doesn't read."""
    block, sent = bytes(65536), 0
    with socket.create_connection(address, timeout=_TIMEOUT_S) as client, _accept(listener):
        client.settimeout(_STOPPED_S)
        with contextlib.suppress(TimeoutError):
            while sent <= BOUND:
                sent += client.send(block)
    return sent


def _main(cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)
        listener.settimeout(_TIMEOUT_S)
        address = listener.getsockname()
        print(address[1], flush=True)  # noqa: T201 - this is the conversation
        sys.stdin.readline()
        seen: dict[str, object] = {}
        for name, serve, ask in (("rounds", _echo, _rounds), ("half_close", _digest, _half_close)):
            server = threading.Thread(target=serve, args=(listener,), daemon=True)
            server.start()
            seen[name] = ask(address)
            server.join(_TIMEOUT_S)
        seen["stopped_after"] = _until_stopped(listener, address)
        print(json.dumps(seen), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
