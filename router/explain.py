"""What the router would do with a text or picture, and why: the same policies, encoder and rule as for a request.

The policies come from the running control plane, as a router's do. The vector comes from the encoder process, or from
an encoder loaded here when that process isn't running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modalmesh.base.errors import UsageError
from modalmesh.base.settings import Settings
from router.app import node
from router.decision import TEXTS, Decision, decide
from router.encoder.client import EncoderClient
from router.encoder.errors import EncoderFilesError, EncoderUnavailableError, ItemError
from router.encoder.files import find
from router.errors import NoPolicyError
from router.kserve import LONGEST_TEXT, Content
from router.limits import LARGEST_UNPACKED
from router.modality import Modality
from router.policy import TYPE_URL, Policy, PolicySet, check_encoder, parse
from xds.client import fetch
from xds.listening import context_of

__all__ = ["Explanation", "Vector", "encode", "explain", "fetch_policies", "picture", "text", "to_json"]

_FETCH_TIMEOUT = 5.0

Progress = Callable[[str], AbstractContextManager[object]]
"""Shows that something takes a while."""


@dataclass(frozen=True, slots=True)
class Vector:
    """An embedding, and what made it."""

    values: NDArray[np.float32]
    """float32[dimension], unit length."""
    fingerprint: str
    encoder: str
    note: str
    """What the encoder doesn't know; empty if nothing is known about that."""
    is_starter: bool
    loaded_here: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with all that led to it."""

    authority: str
    policy: Policy
    decision: Decision
    vector: Vector


def text(value: str) -> Content:
    """Return a text as a request would carry it.

    Raises:
        UsageError: It is empty.
    """
    if not value.strip():
        raise UsageError("the text is empty", hint="say what a request would say")
    if not value.isprintable() and any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError("the text is not UTF-8", hint="requests carry UTF-8")
    return Content(Modality.TEXT, value.encode()[:LONGEST_TEXT].decode(errors="ignore"))


def picture(path: Path) -> Content:
    """Return a picture file as a request would carry it.

    Raises:
        UsageError: It can't be read, is empty, or too large.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_UNPACKED:
            raise UsageError(f"picture {path} has {size} bytes, more than {LARGEST_UNPACKED}", hint="make it smaller")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"picture {path} can't be read: {error.strerror}") from error
    if not data:
        raise UsageError(f"picture {path} is empty")
    return Content(Modality.IMAGE, data)


async def fetch_policies(settings: Settings) -> PolicySet:
    """Ask the control plane for the policies that it gives to routers.

    Raises:
        XdsError: It can't be reached.
        NoPolicyError: It has none.
        PolicyError: One can't be used.
    """
    bodies = await fetch(settings.xds.listen, node(settings), TYPE_URL, _FETCH_TIMEOUT, tls=context_of(settings.xds))
    if not bodies:
        raise NoPolicyError("the control plane serves no SemanticRoute", hint="add one to its documents")
    return PolicySet(parse(name, body) for name, body in bodies.items())


async def encode(content: Content, settings: Settings, progress: Progress = lambda _: nullcontext()) -> Vector:
    """Turn content into a vector, by the encoder process or else here.

    Raises:
        EncoderError: The content can't be read, or no encoder can be loaded.
    """
    seconds = settings.router.encoder_timeout_ms / 1000
    client = EncoderClient(settings.encoder_socket)
    try:
        described = await client.describe(seconds)
        with _blamed_on(content):
            encoded = await client.encode([content.data], seconds)
    except EncoderUnavailableError:
        with progress("The encoder process does not answer; loading the encoder here ..."), _blamed_on(content):
            return _encode_here(content, settings)
    finally:
        await client.close()
    is_starter, note = _about(encoded.fingerprint, settings)
    return Vector(encoded.vectors[0], encoded.fingerprint, described.name, note, is_starter, loaded_here=False)


def explain(
    policies: PolicySet, authority: str, content: Content, vector: Vector, *, top_k: int | None = None
) -> Explanation:
    """Decide as the router would.

    Args:
        policies: All policies.
        authority: The request's ``:authority``, which selects one.
        content: What is asked about.
        vector: Its embedding.
        top_k: How many candidates to list; default: the policy's.

    Raises:
        NoPolicyError: No policy covers the authority.
        EncoderMismatchError: The policy was computed with another encoder.
    """
    policy = policies.pick(authority)
    if policy is None:
        raise NoPolicyError(
            f"no policy covers {authority!r}: the router would pass the request unchanged",
            hint=f"--authority with one of: {', '.join(policies.hosts)}",
        )
    if top_k is not None:
        policy = replace(policy, top_k=top_k)
    check_encoder(policy, vector.fingerprint, len(vector.values))
    return Explanation(authority, policy, decide(policy, content.modality, vector.values), vector)


def to_json(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as JSON's types; names are those of the decision's metadata."""
    decision, vector = explanation.decision, explanation.vector
    return {
        "authority": explanation.authority,
        "policy": explanation.policy.name,
        "modality": decision.modality.value,
        "reason": decision.reason.value,
        "explanation": TEXTS[decision.reason],
        "service": decision.service.service_id if decision.service else None,
        "model": decision.model or None,
        "cluster": decision.cluster or None,
        "similarity": decision.similarity,
        "threshold": decision.threshold,
        "runner_up": decision.runner_up.service_id if decision.runner_up else None,
        "runner_up_similarity": decision.runner_up.similarity if decision.runner_up else None,
        "candidates": [
            {"service": candidate.service_id, "similarity": candidate.similarity} for candidate in decision.candidates
        ],
        "encoder": {
            "name": vector.encoder,
            "fingerprint": vector.fingerprint,
            "starter": vector.is_starter,
            "note": vector.note,
            "loaded_here": vector.loaded_here,
        },
    }


@contextmanager
def _blamed_on(content: Content) -> Iterator[None]:
    """Let an error about an item say which: there is only one, and it has a kind rather than a number."""
    try:
        yield
    except ItemError as error:
        kind = "text" if content.modality is Modality.TEXT else "picture"
        what = error.what.removeprefix(f"item {error.item}: ")
        raise ItemError(f"the {kind} {what}", hint=error.hint) from error


def _encode_here(content: Content, settings: Settings) -> Vector:
    from router.encoder.model import DualEncoder  # loads a model runtime: only when it is needed

    options = settings.encoder
    encoder = DualEncoder.load(options.path, threads=options.threads, max_pixels=options.max_pixels)
    data = content.data
    rows = encoder.encode_texts([data]) if isinstance(data, str) else encoder.encode_images([data])
    is_starter, _ = _about(encoder.fingerprint, settings)
    return Vector(rows[0], encoder.fingerprint, encoder.name, encoder.note, is_starter, loaded_here=True)


def _about(fingerprint: str, settings: Settings) -> tuple[bool, str]:
    """Tell whether the encoder is the starter, and what its files say it doesn't know."""
    for path in {None, settings.encoder.path}:
        try:
            files = find(path)
        except EncoderFilesError:
            continue  # the process that answered may run with other settings than these
        if files.fingerprint == fingerprint:
            return path is None, files.note
    return False, ""
