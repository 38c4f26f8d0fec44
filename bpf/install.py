"""The agent as a service of the node: a systemd unit with exactly the capabilities it needs.

What each is for:

- CAP_BPF: maps and programs.
- CAP_NET_ADMIN: XDP, cgroup and sock map hooks, device maps, blackhole routes.
- CAP_PERFMON: ``sock_join`` reads how much a reader has queued, and so follows kernel pointers.

CAP_SYS_ADMIN is not among them: bpf and cgroup file systems are mounted by whoever runs the node. Without it others'
programs are reported by number instead of by name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from bpf.node_errors import InstallError
from modalmesh.base.settings import CONFIG_VARIABLE, Settings

__all__ = ["CAPABILITIES", "UNIT", "unit", "write"]

CAPABILITIES: Final = ("CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON")

UNIT: Final = Path("/etc/systemd/system/modalmesh-node.service")


def unit(settings: Settings) -> str:
    """Return the text of the unit.

    It keeps its runtime directory over restarts (the policies in force are in it) and is never started again after a
    wrong command line or setting. A program that the kernel refuses doesn't end the agent, so nothing is loaded in a
    loop.
    """
    capabilities = " ".join(CAPABILITIES)
    config = os.environ.get(CONFIG_VARIABLE)
    environment = f"Environment={CONFIG_VARIABLE}={Path(config).absolute()}\n" if config else ""
    return f"""[Unit]
Description=ModalMesh node agent
After=network.target
RequiresMountsFor=/sys/fs/bpf

[Service]
Type=notify
NotifyAccess=main
ExecStart={sys.executable} -m modalmesh.cli node
{environment}Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2
WatchdogSec=60
TimeoutStopSec=10
User=root
CapabilityBoundingSet={capabilities}
AmbientCapabilities=
NoNewPrivileges=yes
RuntimeDirectory={settings.runtime_dir.name}
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ReadWritePaths=/sys/fs/bpf
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
MemoryMax=256M

[Install]
WantedBy=multi-user.target
"""


def write(text: str, path: Path) -> None:
    """Write the unit.

    Raises:
        InstallError: It can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InstallError(f"{path} can't be written: {error.strerror}", hint="run as root, or use --print") from error
