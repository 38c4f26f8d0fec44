"""HTTP/2 backends that say what they got, and a client: both plain ``h2`` on threads.

A backend's answer is JSON: its name, method, path, headers and the length of the body. A request steers it:
``x-test-NAME: 503`` makes the backend of that name answer so; ``x-test-delay: 0.5`` makes every backend wait.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions

LIMIT = 30.0


@dataclass
class Backend:
    """One server; ``seen`` are the requests it got."""

    name: str
    seen: list[dict[str, Any]] = field(default_factory=list)
    server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0), backlog=64))

    def __post_init__(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.getsockname()[1])

    def close(self) -> None:
        self.server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        http.initiate_connection()
        requests: dict[int, tuple[list[tuple[str, str]], int]] = {}
        lock = threading.Lock()
        connection.sendall(http.data_to_send())
        while data := _received(connection):
            with lock:
                for event in http.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        requests[event.stream_id] = (list(event.headers), 0)  # type: ignore[arg-type]
                    elif isinstance(event, h2.events.DataReceived):
                        headers, size = requests[event.stream_id]
                        requests[event.stream_id] = (headers, size + len(event.data))
                        http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, h2.events.StreamEnded):
                        reply = self._answer(connection, http, lock, event.stream_id, requests.pop(event.stream_id))
                        threading.Thread(target=reply, daemon=True).start()
                connection.sendall(http.data_to_send())
        connection.close()

    def _answer(
        self,
        connection: socket.socket,
        http: h2.connection.H2Connection,
        lock: threading.Lock,
        stream: int,
        request: tuple[list[tuple[str, str]], int],
    ) -> Callable[[], None]:
        headers, size = request
        values = dict(headers)

        def reply() -> None:
            self.seen.append(values)
            time.sleep(float(values.get("x-test-delay", 0)))
            status = values.get(f"x-test-{self.name}", "200")
            body = json.dumps({"name": self.name, "headers": headers, "size": size}).encode()
            answer = [(":status", status), ("content-type", "application/json"), ("x-backend", self.name)]
            if values.get("content-type", "").startswith("application/grpc"):
                answer = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")]
                body = b""
            # Reset meanwhile: nothing to do.
            with lock, contextlib.suppress(h2.exceptions.ProtocolError, OSError):
                http.send_headers(stream, answer)
                http.send_data(stream, body, end_stream=True)
                connection.sendall(http.data_to_send())

        return reply


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found

    @property
    def backend(self) -> str:
        """The name of the backend that answered."""
        return str(self.json["name"])

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def sent(self, name: str) -> list[str]:
        """Values of a header as the backend got it."""
        return [value for key, value in self.json["headers"] if key == name]


class Client:
    """One HTTP/2 connection to a port of loopback; requests one after the other, or several at once."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), LIMIT)
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._http.initiate_connection()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def request(self, authority: str, path: str = "/", method: str = "GET", **headers: str) -> Answer:
        return self.requests([(authority, path, method, headers)])[0]

    def requests(self, wanted: list[tuple[str, str, str, dict[str, str]]]) -> list[Answer]:
        """Send all, then wait for all; underscores in header names stand for hyphens."""
        order: list[int] = []
        answers: dict[int, Answer] = {}
        for authority, path, method, headers in wanted:
            stream = self._http.get_next_available_stream_id()
            fields = [(":method", method), (":scheme", "http"), (":authority", authority), (":path", path)]
            fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
            self._http.send_headers(stream, fields, end_stream=True)
            order.append(stream)
            answers[stream] = Answer(0, [], b"")
        open_streams = set(order)
        while open_streams:
            self._socket.sendall(self._http.data_to_send())
            for event in self._http.receive_data(self._socket.recv(65536)):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    answer = answers[event.stream_id]
                    answer.headers.extend(event.headers)  # type: ignore[arg-type]
                    answer.status = int(dict(answer.headers)[":status"])
                elif isinstance(event, h2.events.DataReceived):
                    answers[event.stream_id].body += event.data
                    self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    open_streams.discard(event.stream_id)
                elif isinstance(event, h2.events.StreamReset):
                    answers[event.stream_id].status = -1
                    open_streams.discard(event.stream_id)
        return [answers[stream] for stream in order]
