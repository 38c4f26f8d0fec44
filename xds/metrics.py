"""What server and client count.

Labels: a type only by the short name of a type that a snapshot holds, everything else is ``other``, since a client must
not be able to invent label values.
"""

from __future__ import annotations

import functools

from prometheus_client import Counter, Gauge

from modalmesh.base.metrics import REGISTRY

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
    "answers",
    "responses",
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


# Looking a child up takes longer than everything else that is done for an ACK.
responses = functools.cache(RESPONSES.labels)
answers = functools.cache(ANSWERS.labels)
