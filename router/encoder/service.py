"""Names and limits of the encoder's gRPC service that server and client must agree on (encoder.proto)."""

from __future__ import annotations

__all__ = ["DESCRIBE", "ENCODE", "ITEM_KEY", "MAX_ITEMS", "MAX_MESSAGE", "SERVICE"]

SERVICE = "modalmesh.encoder.v1.Encoder"
ENCODE = "Encode"
DESCRIBE = "Describe"

MAX_MESSAGE = 32 * 1024 * 1024
"""Bytes of a request: twice what Envoy buffers of a body, so that a picture it took also fits here."""

MAX_ITEMS = 256
"""Items of a request; at 10 ms each, more would keep everybody else waiting for seconds."""

ITEM_KEY = "modalmesh-item"
"""Trailing metadata of INVALID_ARGUMENT: the item's place, from 0."""
