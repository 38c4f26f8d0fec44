"""What a rule of Istio's ``VirtualService`` does to requests besides choosing a destination."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from controlplane.kinds.base import Milliseconds, Model, Percent, Port, Timeout
from controlplane.kinds.matching import GivenMatch, HeaderName, Regex

__all__ = [
    "GRPC_CODES",
    "CorsEntry",
    "FaultEntry",
    "HeadersEntry",
    "PercentageEntry",
    "RedirectEntry",
    "ResponseEntry",
    "RetriesEntry",
    "RewriteEntry",
]

RETRY_REASONS = frozenset(
    {
        *("5xx", "gateway-error", "reset", "reset-before-request", "connect-failure", "retriable-4xx"),
        *("refused-stream", "http3-post-connect-failure", "retriable-status-codes"),
        *("cancelled", "deadline-exceeded", "internal", "resource-exhausted", "unavailable"),
    }
)
"""Envoy's, of HTTP and gRPC; Istio's ``retryOn`` also takes statuses."""

GRPC_CODES = {
    "OK": 0,
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
    "UNAUTHENTICATED": 16,
}

_VISIBLE = re.compile(r"[\x20-\x7e]*", re.ASCII)


def _value(text: str) -> str:
    if not _VISIBLE.fullmatch(text) or text != text.strip():
        raise ValueError("is not the value of a header: printable ASCII without spaces around it")
    return text


HeaderValue = Annotated[str, AfterValidator(_value)]


class HeaderOperations(Model):
    """Set takes the place of what is there, add comes after it, remove takes it away."""

    set: Annotated[dict[HeaderName, HeaderValue], Field(default_factory=dict)]
    add: Annotated[dict[HeaderName, HeaderValue], Field(default_factory=dict)]
    remove: Annotated[list[HeaderName], Field(default_factory=list)]


class HeadersEntry(Model):
    """Of requests and of responses."""

    request: HeaderOperations | None = None
    response: HeaderOperations | None = None


class RegexRewriteEntry(Model):
    """What of the path fits ``match`` becomes ``rewrite``, in which the first group is a backslash and 1."""

    match: Regex
    rewrite: str


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("a path begins with «/»")
    return text


class RewriteEntry(Model):
    """What the backend sees in place of what was asked for."""

    uri: Annotated[str, AfterValidator(_absolute)] | None = None
    authority: Annotated[str, Field(min_length=1)] | None = None
    uri_regex_rewrite: RegexRewriteEntry | None = None

    @model_validator(mode="after")
    def _one_path(self) -> Self:
        if self.uri is not None and self.uri_regex_rewrite is not None:
            raise ValueError("has both «uri» and «uriRegexRewrite»")
        return self


class RedirectEntry(Model):
    """Another place that the client is told to ask."""

    uri: Annotated[str, AfterValidator(_absolute)] | None = None
    authority: Annotated[str, Field(min_length=1)] | None = None
    port: Port | None = None
    scheme: Annotated[str, Field(pattern=r"^https?$")] | None = None
    redirect_code: Annotated[int, Field(ge=301, le=308)] = 301

    @model_validator(mode="after")
    def _known_code(self) -> Self:
        if self.redirect_code not in (301, 302, 303, 307, 308):
            raise ValueError("redirectCode is one of 301, 302, 303, 307, 308")
        return self


class BodyEntry(Model):
    """A text."""

    string: Annotated[str, Field(max_length=4096)]


class ResponseEntry(Model):
    """An answer given at once."""

    status: Annotated[int, Field(ge=200, le=599)]
    body: BodyEntry | None = None


def _retry_on(text: str) -> str:
    for item in text.split(","):
        reason = item.strip()
        if reason not in RETRY_REASONS and not (reason.isascii() and reason.isdigit() and 400 <= int(reason) <= 599):
            raise ValueError(
                f"{reason!r} is no reason to try again; known: {', '.join(sorted(RETRY_REASONS))}, a status"
            )
    return text


class RetriesEntry(Model):
    """Attempts after the first that failed; 0: none, whatever the tier would do."""

    attempts: Annotated[int, Field(ge=0, le=100)]
    per_try_timeout: Milliseconds | None = None
    retry_on: Annotated[str, AfterValidator(_retry_on)] | None = None
    backoff: Milliseconds | None = None


class PercentageEntry(Model):
    """A share."""

    value: Percent = 0.0


class DelayEntry(Model):
    """Requests wait."""

    fixed_delay: Milliseconds
    percentage: PercentageEntry | None = None


class AbortEntry(Model):
    """Requests are answered with an error."""

    http_status: Annotated[int, Field(ge=200, le=599)] | None = None
    grpc_status: Annotated[str, Field(min_length=1)] | None = None
    percentage: PercentageEntry | None = None

    @model_validator(mode="after")
    def _one_status(self) -> Self:
        if (self.http_status is None) == (self.grpc_status is None):
            raise ValueError("needs one of «httpStatus» and «grpcStatus»")
        if self.grpc_status is not None and self.grpc_status not in GRPC_CODES:
            raise ValueError(f"grpcStatus is one of {', '.join(GRPC_CODES)}")
        return self


class FaultEntry(Model):
    """What is done to requests on purpose."""

    delay: DelayEntry | None = None
    abort: AbortEntry | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.delay is None and self.abort is None:
            raise ValueError("needs «delay» or «abort»")
        return self


class CorsEntry(Model):
    """What browsers are told of other origins' pages."""

    allow_origins: Annotated[list[GivenMatch], Field(min_length=1)]
    allow_methods: Annotated[list[str], Field(default_factory=list)]
    allow_headers: Annotated[list[str], Field(default_factory=list)]
    expose_headers: Annotated[list[str], Field(default_factory=list)]
    max_age: Timeout | None = None
    allow_credentials: bool | None = None
    unmatched_preflights: Annotated[str, Field(pattern=r"^(UNSPECIFIED|FORWARD|IGNORE)$")] = "UNSPECIFIED"
