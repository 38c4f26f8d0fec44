from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.cache.fingerprint import fingerprint
from router.cache.key import KeyParts, answer_key
from router.cache.model import Request

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"
VECTORS = Path(__file__).resolve().parents[2] / "data" / "cache"


class RedisServer:
    """Debian's redis-server on a unix socket, with no port and nothing kept on disk unless asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),  # a test that is killed must leave no server
                "redis-server",
                *("--port", "0"),
                *("--unixsocket", str(self.socket)),
                *("--save", ""),
                *("--appendonly", "no"),
                *("--dir", str(self.folder)),
                *("--maxmemory", "64mb"),
                *("--maxmemory-policy", "volatile-lru"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                if probe.recv(16).startswith(b"+PONG"):
                    return
            time.sleep(0.02)
        raise AssertionError("redis-server does not come up")

    def kill(self) -> None:
        if self.process:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None
            self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        assert self.process
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def redis_server(short_dir: Path) -> Iterator[RedisServer]:
    server = RedisServer(short_dir)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def request_for(text: str, *, tenant: str = "default", model: str = "m", version: str = "1") -> Request:
    parts = KeyParts(tenant=tenant, service="s", api="test", model=model, version=version, messages=[text])
    return Request(
        key=answer_key(parts),
        fingerprint=fingerprint(text),
        tenant=tenant,
        tags=(("service", "s"), ("model", model), ("version", f"{model}@{version}")),
    )
