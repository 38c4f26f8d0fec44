"""What server and client count.

Labels: a type only by the short name of a type that a snapshot holds, everything else is ``other``, since a client must
not be able to invent label values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from prometheus_client import Counter, Gauge

from modalmesh.base.metrics import REGISTRY
from xds.types import short_name

__all__ = [
    "ANSWERS",
    "BYTES",
    "CLIENT_CONNECTED",
    "CLIENT_UPDATES",
    "CONNECTIONS",
    "ENDED",
    "FAULTS",
    "PLAIN",
    "RESPONSES",
    "STREAMS",
    "Tally",
]

CONNECTIONS = Gauge("modalmesh_xds_connections", "Open connections.", registry=REGISTRY)
STREAMS = Gauge("modalmesh_xds_streams", "Open ADS streams.", ("group",), registry=REGISTRY)
RESPONSES = Counter("modalmesh_xds_responses", "Responses sent.", ("type",), registry=REGISTRY)
ANSWERS = Counter("modalmesh_xds_answers", "ACKs and NACKs received.", ("type", "answer"), registry=REGISTRY)
BYTES = Counter(
    "modalmesh_xds_bytes", "Bytes of responses: message as it is, and as sent.", ("form",), registry=REGISTRY
)
ENDED = Counter(
    "modalmesh_xds_ended",
    "Streams and connections ended by the server: ack_timeout, first_request, handshake, keepalive, protocol, refused, "
    "overflow, internal, capacity, write_timeout, tls.",
    ("reason",),
    registry=REGISTRY,
)
PLAIN = Counter(
    "modalmesh_xds_plain",
    "Clients put on uncompressed responses because compressed ones had no answer, again and again.",
    registry=REGISTRY,
)
FAULTS = Gauge(
    "modalmesh_xds_faults", "Resources that are not served as they were given.", ("group",), registry=REGISTRY
)
CLIENT_CONNECTED = Gauge("modalmesh_xds_client_connected", "1 while this process has an ADS stream.", registry=REGISTRY)
CLIENT_UPDATES = Counter(
    "modalmesh_xds_client_updates", "Responses taken or refused by this process.", ("answer",), registry=REGISTRY
)


class Tally:
    """Counts what happens for every client at every change; adds it to the metrics now and then.

    Why: a metric's own ``inc`` takes a lock, and looking its child up longer than all else that is done for an ACK.
    """

    def __init__(self) -> None:
        self._responses: defaultdict[str, int] = defaultdict(int)
        self._answers: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._message_bytes = 0
        self._sent_bytes = 0

    def sent(self, type_url: str, message_length: int, sent_length: int) -> None:
        """Count a response: before and after compression, in bytes."""
        self._responses[type_url] += 1
        self._message_bytes += message_length
        self._sent_bytes += sent_length

    def answered(self, type_url: str, answer: str) -> None:
        """Count an ACK or NACK."""
        self._answers[type_url, answer] += 1

    def add(self, known: Container[str]) -> None:
        """Add what was counted to the metrics; types that are not known are ``other``."""
        for type_url, count in self._responses.items():
            RESPONSES.labels(_label(type_url, known)).inc(count)
        for (type_url, answer), count in self._answers.items():
            ANSWERS.labels(_label(type_url, known), answer).inc(count)
        BYTES.labels("message").inc(self._message_bytes)
        BYTES.labels("sent").inc(self._sent_bytes)
        self._responses.clear()
        self._answers.clear()
        self._message_bytes = self._sent_bytes = 0


def _label(type_url: str, known: Container[str]) -> str:
    return short_name(type_url) if type_url in known else "other"
