"""Which requests a route is for."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.model import Match, TextMatch
from xds.pb.envoy.config.route.v3 import route_components_pb2
from xds.pb.envoy.type.matcher.v3 import string_pb2

__all__ = ["route_match"]


def route_match(match: Match) -> route_components_pb2.RouteMatch:
    """Return Envoy's match; the port of the listener is not in it."""
    message = route_components_pb2.RouteMatch()
    path = match.path
    if path is None:
        message.prefix = "/"
    elif path.regex:
        message.safe_regex.regex = path.text
    elif path.prefix and match.segments:
        message.path_separated_prefix = path.text
    elif path.prefix:
        message.prefix = path.text
    else:
        message.path = path.text
    if match.ignore_case:
        message.case_sensitive.value = False
    _add(message, match.headers, invert=False)
    _add(message, match.without, invert=True)
    for name, text in match.query:
        parameter = message.query_parameters.add(name=name)
        if _is_there(text):
            parameter.present_match = True
        else:
            parameter.string_match.CopyFrom(_string_match(text))
    return message


def _add(message: route_components_pb2.RouteMatch, headers: Iterable[tuple[str, TextMatch]], *, invert: bool) -> None:
    for name, text in headers:
        header = message.headers.add(name=name)
        if invert:
            header.invert_match = True
        if _is_there(text):
            header.present_match = True
        else:
            header.string_match.CopyFrom(_string_match(text))
            # Else a request without the header would not fit, though it is without what is not wanted.
            header.treat_missing_header_as_empty = invert


def _is_there(text: TextMatch) -> bool:
    return text.prefix and not text.text


def _string_match(text: TextMatch) -> string_pb2.StringMatcher:
    matcher = string_pb2.StringMatcher()
    if text.regex:
        matcher.safe_regex.regex = text.text
    elif text.prefix:
        matcher.prefix = text.text
    else:
        matcher.exact = text.text
    return matcher
