"""What a route lets the cache do, in plain values; and whether one request's answer may be served or stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from router.cache.fingerprint import TextPolicy
from router.cache.key import Json

__all__ = ["CachePolicy", "Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """One route's rules. The defaults never serve an answer that the backend might have given differently."""

    match: Literal["exact", "fingerprint"] = "exact"
    """``exact``: all that could change the answer is equal. ``fingerprint``: texts that differ in case, spacing or
    compatibility forms, and pictures and sounds that are alike, share one answer."""
    text: TextPolicy = field(default_factory=TextPolicy)
    """How text is normalised for the fingerprint."""
    ttl_s: float = 3600.0
    ttl_jitter: float = 0.1
    """A life is shortened by up to this share, by the key, so that what came together does not expire together."""
    store_sampled: bool = False
    store_with_tools: bool = False
    store_streamed: bool = False

    def ttl_ms(self, key: bytes) -> int:
        """Return the life of an answer in milliseconds."""
        share = int.from_bytes(key[-4:], "little") / 2**32
        return max(1, int(self.ttl_s * 1000 * (1 - self.ttl_jitter * share)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be done for one request."""

    serve: bool
    """It may be answered from the cache."""
    store: bool
    """Its answer may be stored."""
    reason: str = ""
    """Why not, one of a bounded set."""


_BOTH = Verdict(serve=True, store=True)


def judge(
    policy: CachePolicy,
    *,
    generates: bool,
    streams: bool,
    parameters: Mapping[str, Json],
    tools: Json = None,
    cache_control: str = "",
) -> Verdict:
    """Return what may be done.

    Args:
        policy: The route's.
        generates: The backend writes text (it samples unless it is told not to); false for embeddings, classifiers.
        streams: The answer is asked for piece by piece.
        parameters: Of the request: ``temperature``, ``top_k``, ``n``, ``do_sample``.
        tools: If it offers any: what a tool does is not repeated by repeating the answer.
        cache_control: The request's header. ``no-store``: neither; ``no-cache``: a fresh answer is asked for, and
            may be stored.
    """
    directives = {part.strip().split("=")[0].lower() for part in cache_control.split(",")}
    if "no-store" in directives:
        return Verdict(serve=False, store=False, reason="no-store")
    if generates and not policy.store_sampled and _samples(parameters):
        return Verdict(serve=False, store=False, reason="sampled")
    if tools and not policy.store_with_tools:
        return Verdict(serve=False, store=False, reason="tools")
    if streams and not policy.store_streamed:
        return Verdict(serve=False, store=False, reason="streamed")
    if "no-cache" in directives or "max-age=0" in cache_control.lower().replace(" ", ""):
        return Verdict(serve=False, store=True, reason="no-cache")
    return _BOTH


def _samples(parameters: Mapping[str, Json]) -> bool:
    """A generator samples unless it is told not to: OpenAI's default temperature is 1."""
    several = parameters.get("n")
    if isinstance(several, int) and several > 1:
        return True
    if parameters.get("do_sample") is False or parameters.get("top_k") == 1:
        return False
    temperature = parameters.get("temperature")
    return not (isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0)
