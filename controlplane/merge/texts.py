"""Matches of texts and headers, as Istio's kinds write them → the model's."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.kinds.actions import HeadersEntry
from controlplane.kinds.matching import StringMatch
from controlplane.model import HeaderEdits, TextMatch

__all__ = ["edits", "text_match", "text_matches"]


def text_match(match: StringMatch) -> TextMatch:
    """Return what fits; nothing given: that it is there."""
    if match.exact is not None:
        return TextMatch(match.exact)
    if match.regex is not None:
        return TextMatch(match.regex, regex=True)
    return TextMatch(match.prefix or "", prefix=True)


def text_matches(matches: Mapping[str, StringMatch]) -> tuple[tuple[str, TextMatch], ...]:
    """Return what fits by name, sorted."""
    return tuple(sorted((name, text_match(match)) for name, match in matches.items()))


def edits(entry: HeadersEntry | None) -> HeaderEdits:
    """Return what happens to headers."""
    if entry is None:
        return HeaderEdits()
    request, response = entry.request, entry.response
    return HeaderEdits(
        set=tuple(sorted(request.set.items())) if request else (),
        add=tuple(sorted(request.add.items())) if request else (),
        remove=tuple(sorted(request.remove)) if request else (),
        response_set=tuple(sorted(response.set.items())) if response else (),
        response_add=tuple(sorted(response.add.items())) if response else (),
        response_remove=tuple(sorted(response.remove)) if response else (),
    )
