"""Limits that the router and whoever configures Envoy for it must agree on. Imports nothing heavy."""

from __future__ import annotations

__all__ = ["ENVOY_MARGIN_MS", "LARGEST_MESSAGE", "LARGEST_UNPACKED", "envoy_wait_ms"]

LARGEST_MESSAGE = 64 * 1024 * 1024
"""Bytes of one ext_proc message. Envoy buffers at most 16 MiB of body; grpc's default, 4 MiB, would refuse pictures."""

LARGEST_UNPACKED = 32 * 1024 * 1024
"""Bytes that a compressed gRPC message may unpack to: a few kilobytes can unpack to gigabytes."""

ENVOY_MARGIN_MS = 500
"""How much longer Envoy waits than the router waits for its encoder, so that it is the router that falls back and can
say why."""


def envoy_wait_ms(encoder_timeout_ms: int) -> int:
    """Return how long Envoy must be ready to wait (``max_message_timeout``), in milliseconds."""
    return encoder_timeout_ms + ENVOY_MARGIN_MS
