"""The one tree of errors.

    ModalMeshError            MM1000   exit 1
    ├── UsageError            MM1100   exit 2   the command can't be carried out as given
    │   └── SettingsError     MM1101   exit 2   a setting has no valid value
    ├── DocumentError         MM1200   exit 1   a document is wrong; carries file and line
    ├── MachineError          MM1300   exit 1   something the machine must offer is missing or taken
    ├── XdsError              MM1400   exit 1   configuration can't travel
    └── EncoderError          MM1500   exit 1   a text or picture can't become a vector

Packages derive their own from these, each with a code of its own; a code, once published, keeps its meaning. A
message says what is wrong, where, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "DocumentError",
    "EncoderError",
    "MachineError",
    "ModalMeshError",
    "SettingsError",
    "UsageError",
    "Where",
    "XdsError",
]


@dataclass(frozen=True, slots=True, order=True)
class Where:
    """A place in a document; lines count from 1."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class ModalMeshError(Exception):
    """Base of all errors that are meant to be read by a person.

    Args:
        what: What is wrong, one sentence without a full stop.
        hint: What to do about it, one sentence without a full stop.
        where: The place in a document, if there is one.
    """

    code: ClassVar[str] = "MM1000"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, hint: str = "", where: Where | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{place}{self.what}{hint} [{self.code}]"


class UsageError(ModalMeshError):
    """The command can't be carried out as given."""

    code = "MM1100"
    exit_code = 2


class SettingsError(UsageError):
    """A setting is missing, unknown, or has no valid value."""

    code = "MM1101"


class DocumentError(ModalMeshError):
    """A document is wrong. What was being served stays."""

    code = "MM1200"


class MachineError(ModalMeshError):
    """Something the machine must offer is missing or taken: a binary, a port, a permission."""

    code = "MM1300"


class XdsError(ModalMeshError):
    """Configuration can't be built, sent or read."""

    code = "MM1400"


class EncoderError(ModalMeshError):
    """A text or picture can't become a vector."""

    code = "MM1500"
