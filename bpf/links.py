"""Programs on their hooks.

A link is what keeps a program attached: pinned in a bpf file system it outlives the process that made it, its program
can be exchanged in one atomic step, and nobody else's attachment can push it out unnoticed. Programs on a sock map
have no links on older kernels: they are attached to the map and stay as long as it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import byref, c_uint32, sizeof
from dataclasses import dataclass
from enum import IntEnum
from errno import EBUSY, EEXIST, ENOENT, ENOLINK
from pathlib import Path
from typing import Final, Self

from bpf.errors import BpfError, HookTakenError
from bpf.libbpf import LinkCreateOpts, LinkInfo, check, info, lib
from bpf.maps import Map
from bpf.program import Program

__all__ = [
    "Link",
    "LinkFacts",
    "XdpMode",
    "attach_cgroup",
    "attach_sk_msg",
    "attach_tcx",
    "attach_tracing",
    "attach_xdp",
    "attached_xdp",
    "detach_sk_msg",
    "ensure_pinned",
]

# enum bpf_attach_type (linux/bpf.h)
_SK_MSG_VERDICT: Final = 7
_XDP: Final = 37
_TCX_INGRESS: Final = 46
_TCX_EGRESS: Final = 47

_TAKEN_HINT: Final = "«bpftool net» and «bpftool cgroup tree» show whose program is there; it stays"


class XdpMode(IntEnum):
    """Where a program runs (XDP_FLAGS_*)."""

    NATIVE = 4
    """In the driver, before a packet has a socket buffer."""
    GENERIC = 2
    """In the stack, on any interface."""


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What the kernel says of a link."""

    id: int
    kind: int
    """``enum bpf_link_type``."""
    program_id: int
    target: int
    """Interface index, or the low half of the cgroup's id; 0: what it hung on is gone."""


class Link:
    """An attachment by its descriptor: closed without a pin, the program is detached."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the link pinned at ``path``.

        Raises:
            BpfError: There is none.
        """
        return cls(check(lib().bpf_obj_get(os.fsencode(path)), f"open of link {path}"))

    @property
    def facts(self) -> LinkFacts:
        """What the kernel says of it now."""
        found = info(self.fd, LinkInfo)
        return LinkFacts(found.id, found.type, found.prog_id, found.target)

    def pin(self, path: Path) -> None:
        """Keep the program attached beyond this process."""
        check(lib().bpf_obj_pin(self.fd, os.fsencode(path)), f"pin of a link at {path}")

    def update(self, program: Program) -> None:
        """Exchange the program in one step: every packet and call meets the old or the new one.

        Raises:
            BpfError: ``errno`` is ENOLINK when what the link hung on is gone.
        """
        check(lib().bpf_link_update(self.fd, program.fd, None), f"exchange of program {program.name}")

    def detach(self) -> None:
        """Detach the program now; one whose link is only closed or unpinned goes a moment later."""
        check(lib().bpf_link_detach(self.fd), "detaching a link")

    def close(self) -> None:
        """Close the descriptor; not pinned, the program is detached."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(program: Program, target: int, attach_type: int, flags: int, where: str) -> Link:
    options = LinkCreateOpts(sz=sizeof(LinkCreateOpts), flags=flags)
    result = lib().bpf_link_create(program.fd, target, attach_type, byref(options))
    taken = result in (-EBUSY, -EEXIST)
    return Link(
        check(
            result,
            f"attaching {program.name} to {where}",
            HookTakenError if taken else BpfError,
            _TAKEN_HINT if taken else "",
        )
    )


def attach_xdp(program: Program, ifindex: int, mode: XdpMode) -> Link:
    """Attach an XDP program to an interface of this process's network namespace.

    Raises:
        HookTakenError: Another program is there.
    """
    return _create(program, ifindex, _XDP, mode, f"interface {ifindex}")


def attached_xdp(ifindex: int) -> int:
    """Return the id of the XDP program on an interface, 0 if there is no program or no interface."""
    found = c_uint32()
    check(lib().bpf_xdp_query_id(ifindex, 0, byref(found)), f"query of interface {ifindex}")
    return found.value


def attach_cgroup(program: Program, cgroup: Path) -> Link:
    """Attach a sock_addr or sockops program to a cgroup (version 2) and all below it, next to others' programs."""
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _create(program, fd, program.attach_type, 0, f"cgroup {cgroup}")
    finally:
        os.close(fd)


def attach_tcx(program: Program, ifindex: int, *, egress: bool = False) -> Link:
    """Attach a tc program by tcx (Linux 6.6), next to others' programs."""
    return _create(program, ifindex, _TCX_EGRESS if egress else _TCX_INGRESS, 0, f"interface {ifindex}")


def attach_tracing(program: Program) -> Link:
    """Attach a program to the tracepoint that its section names."""
    library = lib()
    link = library.bpf_program__attach(program.handle)
    check(link, f"attaching {program.name}")
    fd = os.dup(library.bpf_link__fd(link))
    library.bpf_link__destroy(link)
    return Link(fd)


def attach_sk_msg(program: Program, sockets: Map) -> None:
    """Let a program decide on every message of the sockets in a map; replaces the one that did before."""
    check(
        lib().bpf_prog_attach(program.fd, sockets.fd, _SK_MSG_VERDICT, 0),
        f"attaching {program.name} to map {sockets.name}",
    )


def detach_sk_msg(program: Program, sockets: Map) -> None:
    """Let no program decide any more on messages of sockets that join the map from now on."""
    check(
        lib().bpf_prog_detach2(program.fd, sockets.fd, _SK_MSG_VERDICT),
        f"detaching {program.name} from map {sockets.name}",
    )


def ensure_pinned(path: Path, program: Program, create: Callable[[], Link]) -> Link:
    """Return the link pinned at ``path`` with ``program`` in it.

    A link that is there is taken over by exchanging its program, so that nothing passes unseen; one whose interface or
    cgroup is gone is replaced by what ``create`` returns.

    Args:
        path: In a bpf file system; the directory exists.
        program: What shall run.
        create: Attaches the program where there is no link yet.

    Raises:
        HookTakenError: Another program is there.
    """
    try:
        link = Link.open(path)
    except BpfError as error:
        if error.errno != ENOENT:
            raise
    else:
        try:
            if link.facts.target:
                link.update(program)
                return link
        except BpfError as error:
            if error.errno != ENOLINK:
                link.close()
                raise
        link.close()
        path.unlink()
    link = create()
    try:
        link.pin(path)
    except BaseException:
        link.close()
        raise
    return link
