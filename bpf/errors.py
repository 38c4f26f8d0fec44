"""What can go wrong between user space and the kernel's programs.

    BpfError                  MM1700   a call into the kernel failed
    ├── VerifierError         MM1701   the kernel refused a program; carries the whole log
    ├── ObjectError           MM1702   an object can't be read or built
    ├── LayoutError           MM1703   pinned maps have another layout
    ├── MapFullError          MM1704   a map has no room left
    ├── PermissionDeniedError MM1705   this process may not use BPF
    ├── HookTakenError        MM1706   somebody else's program is attached there
    ├── SelftestError         MM1707   the kernel does not behave as sock_join needs it
    └── TraceError            MM1708   a tracing tool can't run

MM1700 to MM1719 belong to this module; the node agent's begin at MM1720.
"""

from __future__ import annotations

from modalmesh.base.errors import MachineError

__all__ = [
    "BpfError",
    "HookTakenError",
    "LayoutError",
    "MapFullError",
    "ObjectError",
    "PermissionDeniedError",
    "SelftestError",
    "TraceError",
    "VerifierError",
]


class BpfError(MachineError):
    """A call into the kernel failed.

    Attributes:
        errno: The kernel's number, 0 if there is none.
    """

    code = "MM1700"

    def __init__(self, what: str, *, hint: str = "", errno: int = 0) -> None:
        super().__init__(what, hint=hint)
        self.errno = errno


class VerifierError(BpfError):
    """The kernel refused a program. Trying again can't help: it stops whoever loads it.

    Attributes:
        log: libbpf's messages and the verifier's log, whole.
    """

    code = "MM1701"

    def __init__(self, what: str, *, hint: str = "", errno: int = 0, log: str = "") -> None:
        super().__init__(what, hint=hint, errno=errno)
        self.log = log


class ObjectError(BpfError):
    """An object file is missing, can't be read or can't be built."""

    code = "MM1702"


class LayoutError(BpfError):
    """Pinned maps have another layout than this version's programs."""

    code = "MM1703"


class MapFullError(BpfError):
    """A map has no room for another entry."""

    code = "MM1704"


class PermissionDeniedError(BpfError):
    """This process may not use BPF."""

    code = "MM1705"


class HookTakenError(BpfError):
    """Somebody else's program is attached where ours should be; it stays."""

    code = "MM1706"


class SelftestError(BpfError):
    """The kernel does not behave as joined sockets need it; they stay off."""

    code = "MM1707"


class TraceError(BpfError):
    """A tracing tool can't run here."""

    code = "MM1708"
