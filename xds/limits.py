"""What a client may take of the server."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """In seconds, bytes and numbers.

    Attributes:
        ack_timeout: A compressed response without ACK or NACK for so long resets its stream: Envoy loses a message that
            it can't decompress without saying so. Doubled with each reset in a row.
        warming_timeout: The same for clusters and listeners. Above 15 s, since Envoy acknowledges clusters when they
            are warm (initial_fetch_timeout).
        write_timeout: A client that takes nothing of what waits for it for so long loses its connection.
        handshake: From connecting to the HTTP/2 preface.
        first_request: From opening a stream to its first request.
        keepalive_idle: Silence after which the peer is pinged.
        keepalive_timeout: Silence after the ping that ends the connection.
        max_request: Longest request message. Envoy's first has 61 kB; names and versions it holds come on top.
        max_connections: Of the whole server.
        max_streams: Per connection; a relay may carry many clients.
    """

    ack_timeout: float = 5.0
    warming_timeout: float = 20.0
    write_timeout: float = 30.0
    handshake: float = 10.0
    first_request: float = 10.0
    keepalive_idle: float = 30.0
    keepalive_timeout: float = 10.0
    max_request: int = 4 * 1024 * 1024
    max_connections: int = 4096
    max_streams: int = 128

    def __post_init__(self) -> None:
        if any(getattr(self, item.name) <= 0 for item in fields(self)):
            raise ValueError("limits are above zero")
