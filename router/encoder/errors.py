"""What can go wrong between a text or picture and its vector.

    EncoderError                MM1500   (modalmesh.base)
    ├── EncoderFilesError       MM1501   the encoder's directory is incomplete or not understood
    ├── EncoderModelError       MM1502   a model in it does not do what an encoder must
    ├── ItemError               MM1503   this text or picture can't be encoded; the caller must change it
    └── EncoderUnavailableError MM1504   the encoder process can't answer now; the caller must do without

The router tells the last (fail open, count it) from ``ItemError`` (the request's own fault) by class.
"""

from __future__ import annotations

from modalmesh.base.errors import EncoderError

__all__ = [
    "EncoderFilesError",
    "EncoderModelError",
    "EncoderUnavailableError",
    "ItemError",
]


class EncoderFilesError(EncoderError):
    """The encoder's directory is incomplete or not understood."""

    code = "MM1501"


class EncoderModelError(EncoderError):
    """A model can't be loaded, or does not do what an encoder must."""

    code = "MM1502"


class ItemError(EncoderError):
    """A text or picture can't be encoded.

    Args:
        what: What is wrong, to be read after "item 3: ".
        item: Its place among the items of the call, from 0.
        hint: What to do about it.
    """

    code = "MM1503"

    def __init__(self, what: str, *, item: int = 0, hint: str = "") -> None:
        super().__init__(what, hint=hint)
        self.item = item


class EncoderUnavailableError(EncoderError):
    """The encoder process is not there, too slow, or has too much to do."""

    code = "MM1504"
