"""Reading traces: one key a line, plain or gzip, as the Caffeine simulator distributes them."""

from __future__ import annotations

import gzip
import io
from array import array
from pathlib import Path

from modalmesh.base.errors import Where
from router.cache.errors import TraceError

__all__ = ["read_trace"]

# A trace is held in memory, 8 bytes a reference; this bounds what a wrong file (or a gzip bomb) can cost.
_LONGEST = 50_000_000
_LONGEST_LINE = 4096


def read_trace(path: Path, *, text_keys: bool = False) -> array[int]:
    """Return the keys in order, as numbers.

    Args:
        path: The file; gzip is recognised by its first bytes.
        text_keys: Every line that is not empty is a key, whatever it says (numbers stand for lines that differ). Else
            a key is a decimal number, the first word of its line, and lines that begin with none are skipped.

    Raises:
        TraceError: The file can't be read, holds no key, or is longer than can be replayed.
    """
    keys = array("q")
    numbers: dict[bytes, int] = {}
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw) if packed else io.BufferedReader(raw) as lines:
                while line := lines.readline(_LONGEST_LINE):
                    number += 1
                    if text_keys:
                        if stripped := line.strip():
                            keys.append(numbers.setdefault(stripped, len(numbers)))
                    else:
                        words = line.split(None, 1)
                        if words and words[0].isdigit() and len(words[0]) <= 18:
                            keys.append(int(words[0]))
                    if len(keys) > _LONGEST:
                        raise TraceError(
                            f"the trace has more than {_LONGEST} references",
                            hint="cut it",
                            where=Where(str(path), number),
                        )
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"the trace can't be read: {reason}", where=Where(str(path), number)) from error
    if not keys:
        raise TraceError(
            "the trace holds no key",
            hint="it wants one decimal number a line; for other keys say --text-keys",
            where=Where(str(path)),
        )
    return keys
