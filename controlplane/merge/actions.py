"""What a rule of a VirtualService does to requests: its fields → the model's."""

from __future__ import annotations

from typing import Final

from controlplane.kinds import actions as kind
from controlplane.kinds.base import milliseconds
from controlplane.merge.texts import text_match
from controlplane.model import Cors, Fault, Redirect, Response, Retries, Rewrite

__all__ = ["DEFAULT_RETRY_ON", "cors", "fault", "millionths", "redirect", "response", "retries", "rewrite"]

DEFAULT_RETRY_ON: Final = ("connect-failure", "refused-stream", "unavailable", "cancelled", "reset-before-request")
"""Istio's, and requests that no backend has seen."""

_DEFAULT_STATUSES: Final = (503,)


def millionths(percentage: kind.PercentageEntry | None) -> int:
    """Return a share; not given: all."""
    return 1_000_000 if percentage is None else round(percentage.value * 10_000)


def retries(entry: kind.RetriesEntry) -> Retries:
    """Return when to try again; reasons that are numbers are statuses."""
    items = [item.strip() for item in entry.retry_on.split(",")] if entry.retry_on else []
    on = tuple(sorted({item for item in items if not item.isdigit()}))
    statuses = tuple(sorted({int(item) for item in items if item.isdigit()}))
    if not items:
        on, statuses = tuple(sorted(DEFAULT_RETRY_ON)), _DEFAULT_STATUSES
    return Retries(
        attempts=entry.attempts,
        on=on,
        statuses=statuses,
        per_try_ms=milliseconds(entry.per_try_timeout) if entry.per_try_timeout else None,
        base_ms=milliseconds(entry.backoff) if entry.backoff else None,
    )


def fault(entry: kind.FaultEntry) -> Fault:
    """Return what is done on purpose."""
    delay, abort = entry.delay, entry.abort
    return Fault(
        delay_ms=milliseconds(delay.fixed_delay) if delay else 0,
        delay_millionths=millionths(delay.percentage) if delay else 0,
        abort_status=(abort.http_status or 0) if abort else 0,
        abort_grpc=kind.GRPC_CODES[abort.grpc_status] if abort and abort.grpc_status else None,
        abort_millionths=millionths(abort.percentage) if abort else 0,
    )


def rewrite(entry: kind.RewriteEntry) -> Rewrite:
    """Return what the backend sees."""
    by_regex = entry.uri_regex_rewrite
    return Rewrite(
        path=entry.uri,
        pattern=by_regex.match if by_regex else None,
        substitution=by_regex.rewrite if by_regex else "",
        authority=entry.authority,
    )


def redirect(entry: kind.RedirectEntry) -> Redirect:
    """Return the other place."""
    return Redirect(
        path=entry.uri, authority=entry.authority, scheme=entry.scheme, port=entry.port, code=entry.redirect_code
    )


def response(entry: kind.ResponseEntry) -> Response:
    """Return the answer."""
    return Response(entry.status, entry.body.string if entry.body else "")


def cors(entry: kind.CorsEntry) -> Cors:
    """Return what browsers are told."""
    return Cors(
        origins=tuple(sorted(text_match(origin) for origin in entry.allow_origins)),
        methods=tuple(sorted(entry.allow_methods)),
        headers=tuple(sorted(entry.allow_headers)),
        expose=tuple(sorted(entry.expose_headers)),
        max_age_s=milliseconds(entry.max_age) // 1000 if entry.max_age else None,
        credentials=entry.allow_credentials,
        forward_unmatched=entry.unmatched_preflights != "IGNORE",
    )
