"""What can go wrong in the node agent.

    NodePolicyError           MM1720   a NodePolicy can't be used; the last good one stays in force
    └── PolicyFileError       MM1721   the file it stands in can't be read
    AgentRunningError         MM1722   another agent owns the pinned maps
    NetlinkError              MM1723   the kernel refused a request about interfaces or routes
    InstallError              MM1724   the service unit can't be written
    BrokenPinsError           MM1725   the directory for pins is not in a bpf file system

Codes below MM1720 belong to ``bpf.errors``.
"""

from __future__ import annotations

from modalmesh.base.errors import MachineError, ModalMeshError

__all__ = [
    "AgentRunningError",
    "BrokenPinsError",
    "InstallError",
    "NetlinkError",
    "NodePolicyError",
    "PolicyFileError",
]


class NodePolicyError(ModalMeshError):
    """A NodePolicy can't be used; the last good one stays in force."""

    code = "MM1720"


class PolicyFileError(NodePolicyError):
    """The file with a NodePolicy can't be read, or isn't one."""

    code = "MM1721"


class AgentRunningError(MachineError):
    """Another agent owns the pinned maps."""

    code = "MM1722"


class NetlinkError(MachineError):
    """The kernel refused a request about interfaces or routes.

    Attributes:
        errno: The kernel's number.
    """

    code = "MM1723"

    def __init__(self, what: str, *, hint: str = "", errno: int = 0) -> None:
        super().__init__(what, hint=hint)
        self.errno = errno


class InstallError(MachineError):
    """The service unit can't be written."""

    code = "MM1724"


class BrokenPinsError(MachineError):
    """The directory for pins is not in a bpf file system, or can't be written."""

    code = "MM1725"
