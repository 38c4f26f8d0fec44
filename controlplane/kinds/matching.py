"""How Istio's kinds say which texts and headers fit."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from controlplane.kinds.base import Model
from controlplane.regex import check_regex

__all__ = ["GivenMatch", "HeaderMatches", "HeaderName", "PathMatch", "Regex", "StringMatch"]

# RFC 9110 §5.6.2, in lower case as HTTP/2 demands (RFC 9113 §8.2).
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,256}", re.ASCII)


def _regex(text: str) -> str:
    check_regex(text)
    return text


Regex = Annotated[str, Field(min_length=1), AfterValidator(_regex)]
"""A regular expression that Envoy takes."""


class StringMatch(Model):
    """A text is this, begins with this, or fits this regular expression as a whole."""

    exact: str | None = None
    prefix: Annotated[str, Field(min_length=1)] | None = None
    regex: Regex | None = None

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if sum(item is not None for item in (self.exact, self.prefix, self.regex)) > 1:
            raise ValueError("has more than one of «exact», «prefix» and «regex»")
        return self


def _given(match: StringMatch) -> StringMatch:
    if match.exact is None and match.prefix is None and match.regex is None:
        raise ValueError("needs «exact», «prefix» or «regex»")
    return match


GivenMatch = Annotated[StringMatch, AfterValidator(_given)]


def _path(match: StringMatch) -> StringMatch:
    text = match.exact or match.prefix
    if text is not None and not text.startswith("/"):
        raise ValueError("a path begins with «/»")
    return match


PathMatch = Annotated[GivenMatch, AfterValidator(_path)]


def _header_name(name: str) -> str:
    if not _HEADER.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a header in lower case")
    if name.startswith("x-modalmesh-"):
        raise ValueError(f"{name!r} is the mesh's own header")
    return name


HeaderName = Annotated[str, AfterValidator(_header_name)]


def _headers(headers: dict[str, StringMatch]) -> dict[str, StringMatch]:
    for name in headers:
        _header_name(name)
    return headers


HeaderMatches = Annotated[dict[str, StringMatch], AfterValidator(_headers), Field(default_factory=dict)]
"""By name; an empty match asks only that the header is there."""
