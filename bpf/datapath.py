"""The node's programs and maps in the kernel: loaded, attached, filled, taken over, removed.

What is pinned below ``pins`` outlives this process: a successor opens the same maps and exchanges the programs of the
same links in one atomic step each, so that no packet and no connection notices.

    pins/maps/NAME              loader
    pins/links/xdp-IFINDEX      an interface, by index: a new one under an old name is another interface
    pins/links/PROGRAM          the cgroup

Maps of another layout can't be used again. What is in them comes from policy, so a successor with another layout
fills maps of its own (``pins/next``), exchanges the programs for ones that use these, and puts the new maps into the
old ones' place (``settle``). Counters begin again; connections go on.
"""

from __future__ import annotations

import contextlib
import enum
import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from bpf import links, loader
from bpf.errors import BpfError, HookTakenError, VerifierError
from bpf.layout import DevmapValue, GpuSlot, u32, unpack_u32
from bpf.links import Link, XdpMode
from bpf.loader import Object
from bpf.maps import Map
from bpf.program import Program
from bpf.sync import MIRRORED, Drop, Step
from modalmesh.base.logging import get_logger

__all__ = ["CGROUP_PROGRAMS", "OBJECTS", "Datapath", "Hook", "HookState", "links_directory", "recover", "remove"]

_log = get_logger()

Hook = Literal["gpu", "services", "join", "signals"]

OBJECTS: Final[dict[Hook, str]] = {
    "gpu": "xdp_gpu_bypass",
    "services": "sock_lb",
    "join": "sock_join",
    "signals": "tcp_signals",
}
"""Hook → object that serves it."""

CGROUP_PROGRAMS: Final[dict[Hook, tuple[str, ...]]] = {
    "services": tuple(
        f"sock_lb_{call}{family}" for call in ("connect", "sendmsg", "recvmsg", "getpeername") for family in (4, 6)
    ),
    "join": ("sock_join_established",),
    "signals": ("tcp_signals",),
}
_NEXT: Final = "next"
_OLD: Final = "old"
_XDP_PROGRAM: Final = "xdp_gpu_bypass"
_MESSAGE_PROGRAM: Final = "sock_join_message"
_SOCKETS: Final = "join_sockets"
_IF_MAP: Final = "gpu_if_map"
_SLOTS: Final = "gpu_slots"

# What a driver says that has no XDP.
_NOT_NATIVE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, 524})


class HookState(enum.StrEnum):
    """How it stands with a hook."""

    ATTACHED = "attached"
    REFUSED = "refused"
    """The kernel refused the program: not tried again by this process."""
    TAKEN = "taken"
    """Somebody else's program is there; it stays."""
    FAILED = "failed"
    """Tried again later."""


def links_directory(pins: Path) -> Path:
    """Return where the links are pinned."""
    return pins / "links"


class Datapath:
    """Programs and maps of one node.

    Args:
        pins: Directory in a bpf file system.
        hooks: What may be attached.
        xdp: ``auto``, ``native`` or ``generic``.
        staged: Maps go to ``pins/next`` until ``settle``.

    Attributes:
        maps: By name, of all that are loaded or pinned.
        states: (hook, place) → how it stands; the place is an interface's name, or empty.
        refused: Hook → what the verifier said.
    """

    def __init__(
        self,
        pins: Path,
        hooks: Iterable[Hook],
        *,
        xdp: Literal["auto", "native", "generic"] = "auto",
        staged: bool = False,
    ) -> None:
        self._pins = pins
        self._base = pins / _NEXT if staged else pins
        self._hooks: tuple[Hook, ...] = tuple(hook for hook in OBJECTS if hook in frozenset(hooks))
        self._xdp = xdp
        self._objects: dict[Hook, Object] = {}
        self._opened: list[Map] = []
        self._links: dict[str, Link] = {}
        self.maps: dict[str, Map] = {}
        self.states: dict[tuple[Hook, str], HookState] = {}
        self.refused: dict[Hook, str] = {}

    # ---- loading

    def load(self) -> None:
        """Load every object; one that the verifier refuses is left out, and what its predecessor attached stays.

        Raises:
            LayoutError: Maps of another layout are pinned.
            BpfError: The kernel takes no programs at all, or an object can't be had.
        """
        for hook in self._hooks:
            try:
                loaded = loader.load(OBJECTS[hook], pins=self._base)
            except VerifierError as error:
                self.refused[hook] = error.log
                self.states[hook, ""] = HookState.REFUSED
                _log.error("program refused; its traffic takes the plain way", hook=hook, verifier=error.log)
                continue
            self._objects[hook] = loaded
            self.maps.update(loaded.maps)
        links_directory(self._pins).mkdir(exist_ok=True)
        for hook, programs in CGROUP_PROGRAMS.items():
            if hook not in self._hooks:
                for name in programs:
                    _unpin_link(links_directory(self._pins) / name)
        for name in MIRRORED:
            # A predecessor's program may still run on a map whose new program was refused.
            path = loader.maps_directory(self._base) / name
            if name not in self.maps and path.exists():
                self.maps[name] = Map.open(path)
                self._opened.append(self.maps[name])

    def settle(self) -> None:
        """Put the new maps into the old ones' place, and detach what still uses those."""
        for path in sorted(links_directory(self._pins).glob("*")):
            if path.name not in self._links:
                _unpin_link(path)
        loader.maps_directory(self._pins).rename(self._pins / _OLD)
        recover(self._pins)
        self._base = self._pins

    def close(self) -> None:
        """Close all descriptors; what is pinned stays."""
        for link in self._links.values():
            link.close()
        for opened in self._opened:
            opened.close()
        for loaded in self._objects.values():
            loaded.close()
        self._links.clear()
        self._opened.clear()
        self._objects.clear()
        self.maps.clear()

    # ---- maps

    def contents(self) -> dict[str, dict[bytes, bytes]]:
        """Return what the maps hold that policy fills."""
        return {name: self.content(name) for name in MIRRORED if name in self.maps}

    def content(self, name: str) -> dict[bytes, bytes]:
        """Return what one map holds, as a ledger has it."""
        items = self.maps[name].items()
        if name == _IF_MAP:
            return {key: u32(DevmapValue.unpack(value).ifindex) for key, value in items}
        if name == _SLOTS:
            empty = bytes(len(GpuSlot(bytes(6), bytes(6)).pack()))
            return {key: value for key, value in items if value != empty}
        return dict(items)

    def take(self, step: Step) -> None:
        """Carry out one step.

        Raises:
            MapFullError: No room for all of it; what comes first is written.
            BpfError: The kernel refuses.
        """
        target = self.maps.get(step.map)
        if target is None:
            return
        if isinstance(step, Drop):
            target.delete_many(step.keys)
        elif step.map == _IF_MAP:
            for key, value in step.entries:
                target.set(key, DevmapValue(unpack_u32(value)).pack())
        else:
            target.set_many(step.entries)

    # ---- hooks

    def attached(self, hook: Hook) -> bool:
        """Say whether a hook is attached, everywhere or at least somewhere."""
        return any(name == hook and state is HookState.ATTACHED for (name, _), state in self.states.items())

    def attach_cgroup(self, hook: Hook, cgroup: Path) -> None:
        """Attach a hook's programs to a cgroup, or take over those that are there; a failure is noted in ``states``."""
        loaded = self._objects.get(hook)
        if loaded is None:
            return
        try:
            for name in CGROUP_PROGRAMS[hook]:
                self._pinned(name, loaded.programs[name], cgroup)
            if hook == "join":
                links.attach_sk_msg(loaded.programs[_MESSAGE_PROGRAM], loaded.maps[_SOCKETS])
        except (BpfError, OSError) as error:
            self._note(hook, "", HookState.FAILED, error)
        else:
            self._note(hook, "", HookState.ATTACHED)

    def keep_off(self, hook: Hook, why: Exception) -> None:
        """Detach a hook from the cgroup, whoever attached it, and say why."""
        for name in CGROUP_PROGRAMS[hook]:
            self._links.pop(name, Link(-1)).close()
            _unpin_link(links_directory(self._pins) / name)
        self._note(hook, "", HookState.FAILED, why)

    def _pinned(self, name: str, program: Program, cgroup: Path) -> None:
        held = self._links.get(name)
        if held is not None and held.facts.target:
            return
        path = links_directory(self._pins) / name
        self._links[name] = links.ensure_pinned(path, program, lambda: links.attach_cgroup(program, cgroup))

    def attach_xdp(self, interface: str, ifindex: int) -> None:
        """Attach the bypass to an interface, or take it over; a failure is noted in ``states``."""
        loaded = self._objects.get("gpu")
        if loaded is None:
            return
        name = f"xdp-{ifindex}"
        held = self._links.get(name)
        try:
            if held is None or not held.facts.target:
                path = links_directory(self._pins) / name
                self._links[name] = links.ensure_pinned(
                    path, loaded.programs[_XDP_PROGRAM], lambda: self._create_xdp(interface, ifindex)
                )
        except HookTakenError as error:
            self._note("gpu", interface, HookState.TAKEN, error)
        except BpfError as error:
            self._note("gpu", interface, HookState.FAILED, error)
        else:
            self._note("gpu", interface, HookState.ATTACHED)

    def _create_xdp(self, interface: str, ifindex: int) -> Link:
        program = self._objects["gpu"].programs[_XDP_PROGRAM]
        if self._xdp == "generic":
            return links.attach_xdp(program, ifindex, XdpMode.GENERIC)
        try:
            return links.attach_xdp(program, ifindex, XdpMode.NATIVE)
        except HookTakenError:
            raise
        except BpfError as error:
            if self._xdp == "native" or error.errno not in _NOT_NATIVE:
                raise
            _log.warning("driver has no XDP; the bypass runs in the stack", interface=interface, why=str(error))
            return links.attach_xdp(program, ifindex, XdpMode.GENERIC)

    def forget_interfaces(self, keep: Iterable[tuple[str, int]]) -> None:
        """Remove the bypass from interfaces that it isn't wanted on, and links whose interface is gone.

        Args:
            keep: Names and indices of those on which it is wanted.
        """
        wanted = list(keep)
        pins = {f"xdp-{ifindex}" for _, ifindex in wanted}
        for path in sorted(links_directory(self._pins).glob("xdp-*")):
            if path.name in pins:
                continue
            self._links.pop(path.name, Link(-1)).close()
            _unpin_link(path)
        names = {name for name, _ in wanted}
        for hook, place in [key for key in self.states if key[0] == "gpu" and key[1]]:
            if place not in names:
                del self.states[hook, place]

    def program_ids(self) -> frozenset[int]:
        """Return the ids of our programs."""
        return frozenset(program.id for loaded in self._objects.values() for program in loaded.programs.values())

    def _note(self, hook: Hook, place: str, state: HookState, error: Exception | None = None) -> None:
        before = self.states.get((hook, place))
        self.states[hook, place] = state
        if before is state:
            return
        where = {"interface": place} if place else {}
        if error is None:
            _log.info("hook attached", hook=hook, **where)
        else:
            _log.error("hook not attached; its traffic takes the plain way", hook=hook, why=str(error), **where)


def recover(pins: Path) -> None:
    """Finish, or take back, an exchange of maps in the middle of which an agent died."""
    maps, staged = loader.maps_directory(pins), loader.maps_directory(pins / _NEXT)
    if staged.is_dir() and not maps.exists() and (pins / _OLD).exists():
        staged.rename(maps)
    for folder in (pins / _OLD, staged):
        _remove_folder(folder)
    with contextlib.suppress(FileNotFoundError):
        (pins / _NEXT).rmdir()


def remove(pins: Path) -> None:
    """Detach and unpin everything below ``pins``, whichever version made it; nothing of ours stays in the kernel.

    Joined sockets stay joined until they are closed: the kernel keeps what they need for as long.
    """
    for path in sorted(links_directory(pins).glob("*")):
        _unpin_link(path)
    recover(pins)
    for folder in (links_directory(pins), loader.maps_directory(pins)):
        _remove_folder(folder)
    with contextlib.suppress(OSError):
        pins.rmdir()  # a mount point stays, and so does what others keep there


def _remove_folder(folder: Path) -> None:
    for path in sorted(folder.glob("*")):
        path.unlink()
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def _unpin_link(path: Path) -> None:
    """Detach and unpin; an interface that is gone has no link to detach."""
    with contextlib.suppress(BpfError):
        link = Link.open(path)
        with contextlib.closing(link), contextlib.suppress(BpfError):
            link.detach()
    path.unlink(missing_ok=True)
