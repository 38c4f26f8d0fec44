"""Whether Envoy takes a regular expression: its engine is RE2, and it refuses what compiles into too large a program.

Checked with the same engine, the same encoding and the same limit, so that nothing is published that Envoy refuses; RE2
runs in time linear in its input, so an expression can be large but never a bomb.
"""

from __future__ import annotations

import functools
from typing import Final

import re2

__all__ = ["LONGEST", "MAX_PROGRAM", "check_regex", "matches_regex"]

LONGEST: Final = 1024
"""Characters."""

MAX_PROGRAM: Final = 100
"""Instructions: Envoy's default of ``re2.max_program_size.error_level``."""


def _options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    # As Envoy compiles them: one instruction per byte.
    options.encoding = re2.Options.Encoding.LATIN1
    return options


@functools.lru_cache(maxsize=4096)
def check_regex(text: str) -> None:
    """Make sure that Envoy takes an expression.

    Raises:
        ValueError: Says why not.
    """
    if len(text) > LONGEST:
        raise ValueError(f"is a regular expression of more than {LONGEST} characters")
    try:
        size = re2.compile(text.encode(), _options()).programsize
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"is no regular expression of RE2: {reason}") from error
    if size > MAX_PROGRAM:
        raise ValueError(f"is a regular expression of {size} instructions, of which Envoy allows {MAX_PROGRAM}")


def matches_regex(pattern: str, text: str) -> bool:
    """Return whether a text fits an expression as a whole."""
    return re2.fullmatch(pattern.encode(), text.encode(), _options()) is not None
