"""The exact key of an answer: whatever could change the answer changes the key.

Two requests that differ in a negation, a number, a unit, a name, the order of their pictures, the tenant or a
parameter have different keys: nothing is normalised here. The hash is BLAKE2b, because a tenant who could make two
requests collide could make the cache answer one with the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

from router.cache.errors import AnswerKeyError

__all__ = ["KEY_BYTES", "Json", "KeyParts", "answer_key", "approximate_key", "media_digest"]

KEY_BYTES = 32

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

# Begins every key, so that a change of the encoding below can't meet answers stored before it.
_EXACT = "modalmesh answer 1"
_APPROXIMATE = "modalmesh answer by fingerprint 1"


@dataclass(frozen=True, slots=True)
class KeyParts:
    """All that an answer depends on."""

    tenant: str
    service: str
    api: str
    """Protocol and method, e.g. ``openai/chat`` or ``kserve/infer``: the answer's form depends on it."""
    model: str
    version: str
    """A new version never meets an old version's answers."""
    messages: Json
    """The whole list of messages, or every input tensor with name, type and shape; never the last message alone."""
    parameters: Json = field(default_factory=dict)
    tools: Json = ()
    media: Sequence[bytes] = ()
    """``media_digest`` of every picture, sound, video and raw tensor, in the request's order."""


def media_digest(content: bytes | memoryview) -> bytes:
    """Return 32 bytes that stand for a picture, sound, video or tensor as it was sent."""
    return blake2b(content, digest_size=32).digest()


def answer_key(parts: KeyParts) -> bytes:
    """Return the 32 bytes under which an answer is stored and served.

    Raises:
        AnswerKeyError: A part is no JSON value (NaN, bytes, nested too deeply).
    """
    return _digest([_EXACT, *_shared(parts), parts.messages, [digest.hex() for digest in parts.media]])


def approximate_key(parts: KeyParts, fingerprint: bytes) -> bytes:
    """Return the key for routes whose policy says, in plain words, that like requests may share an answer.

    Messages and media count only as far as the fingerprint sees them.

    Raises:
        AnswerKeyError: As for ``answer_key``.
    """
    return _digest([_APPROXIMATE, *_shared(parts), fingerprint.hex()])


def _shared(parts: KeyParts) -> list[Json]:
    return [parts.tenant, parts.service, parts.api, parts.model, parts.version, parts.parameters, parts.tools]


def _digest(value: list[Json]) -> bytes:
    # JSON with sorted names is unambiguous for JSON values: 1, 1.0, true and "1" are all written differently.
    try:
        line = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise AnswerKeyError(f"no key can be made of the request: {error}") from error
    return blake2b(line.encode("ascii"), digest_size=KEY_BYTES).digest()
