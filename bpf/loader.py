"""From an object file to programs and maps in the kernel.

Maps are pinned by name in ``PINS/maps``; a map that is pinned there already is used again, which is how several
objects share one and how an agent's successor finds what its predecessor filled. Links go to ``PINS/links``
(``links.ensure_pinned``).

An object is built with the package. Where it is missing or can't be read by this node's libbpf, clang builds it again
from the sources in the package, once. A program that the verifier refuses is not tried again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Mapping
from ctypes import create_string_buffer
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from bpf import build, libbpf
from bpf.errors import BpfError, LayoutError, ObjectError, PermissionDeniedError, VerifierError
from bpf.layout import LAYOUT_VERSION, MeshConfig, u32
from bpf.libbpf import lib
from bpf.maps import Map
from bpf.program import Program

__all__ = ["Object", "load", "load_file", "maps_directory", "pinned_layout_version"]

_CONFIG: Final = "mesh_config"
_NO_LIMITS: Final[Mapping[str, int]] = MappingProxyType({})


def maps_directory(pins: Path) -> Path:
    """Return where the maps are pinned."""
    return pins / "maps"


def pinned_layout_version(pins: Path) -> int | None:
    """Return the layout version of the maps pinned below ``pins``, None if there are none."""
    path = maps_directory(pins) / _CONFIG
    if not path.exists():
        return None
    config = Map.open(path)
    try:
        return MeshConfig.unpack(config.get(u32(0)) or bytes(16)).layout_version
    finally:
        config.close()


class Object:
    """Programs and maps of one object file; closing it leaves what is pinned or attached.

    Attributes:
        programs: By function name.
        maps: By name.
    """

    def __init__(self, handle: int, data: object) -> None:
        self._handle = handle
        self._data = data  # libbpf reads the file's bytes as long as the object lives
        library = lib()
        self.programs: dict[str, Program] = {}
        pointer = None
        while pointer := library.bpf_object__next_program(handle, pointer):
            fd = library.bpf_program__fd(pointer)
            if fd >= 0:
                name = library.bpf_program__name(pointer).decode()
                kind = library.bpf_program__expected_attach_type(pointer)
                self.programs[name] = Program(name, fd, kind, pointer)
        self.maps: dict[str, Map] = {}
        pointer = None
        while pointer := library.bpf_object__next_map(handle, pointer):
            if not library.bpf_map__is_internal(pointer):
                name = library.bpf_map__name(pointer).decode()
                self.maps[name] = Map(library.bpf_map__fd(pointer), owned=False)

    def close(self) -> None:
        """Close all descriptors."""
        if self._handle:
            lib().bpf_object__close(self._handle)
            self._handle = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    name: str,
    *,
    pins: Path | None = None,
    programs: Collection[str] | None = None,
    max_entries: Mapping[str, int] = _NO_LIMITS,
    build_dir: Path | None = None,
) -> Object:
    """Load one of the package's objects.

    Args:
        name: A file of ``bpf/programs`` without ``.bpf.c``, e.g. ``sock_lb``.
        pins: Directory in a bpf file system below which maps are pinned and found; None: nothing is pinned.
        programs: Load only these functions; None: all.
        max_entries: Other sizes for maps, by name (tests).
        build_dir: Where an object that had to be built on this node is kept; None: ``build.node_directory()``.

    Raises:
        VerifierError: The kernel refused a program; carries the log.
        LayoutError: Maps of another layout are pinned.
        ObjectError: The object can't be read, and not be built either.
        PermissionDeniedError: This process may not use BPF.
    """
    packaged = build.packaged_object(name)
    try:
        return load_file(packaged, pins=pins, programs=programs, max_entries=max_entries)
    except ObjectError:
        rebuilt = build.build_on_node(name, build_dir)
        return load_file(rebuilt, pins=pins, programs=programs, max_entries=max_entries)


def load_file(
    file: Path,
    *,
    pins: Path | None = None,
    programs: Collection[str] | None = None,
    max_entries: Mapping[str, int] = _NO_LIMITS,
) -> Object:
    """Load an object file; see ``load``, which builds one that doesn't fit."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ObjectError(f"object {file} can't be read: {error.strerror}", hint="«make install» builds it") from error
    if pins is not None:
        _check_layout(pins)
        with contextlib.suppress(FileExistsError):
            maps_directory(pins).mkdir(parents=True)
    library = lib()
    libbpf.collected_log()
    data = create_string_buffer(content, len(content))
    handle = library.bpf_object__open_mem(data, len(content), None)
    if not handle:
        log = libbpf.collected_log()
        raise ObjectError(f"object {file} can't be opened by libbpf: {log}", hint="it is built again by clang")
    try:
        _prepare(handle, pins, programs, max_entries)
        _check_loaded(library.bpf_object__load(handle), file)
        loaded = Object(handle, data)
        if pins is not None and _CONFIG in loaded.maps:
            _claim(loaded.maps[_CONFIG])
    except BaseException:
        library.bpf_object__close(handle)
        raise
    return loaded


def _prepare(handle: int, pins: Path | None, programs: Collection[str] | None, max_entries: Mapping[str, int]) -> None:
    library = lib()
    pointer = None
    while programs is not None and (pointer := library.bpf_object__next_program(handle, pointer)):
        wanted = library.bpf_program__name(pointer).decode() in programs
        libbpf.check(library.bpf_program__set_autoload(pointer, wanted), "selection of programs")
    pointer = None
    while pointer := library.bpf_object__next_map(handle, pointer):
        name = library.bpf_map__name(pointer).decode()
        if name in max_entries:
            libbpf.check(library.bpf_map__set_max_entries(pointer, max_entries[name]), f"size of map {name}")
        if pins is not None and not library.bpf_map__is_internal(pointer):
            path = maps_directory(pins) / name
            if path.exists():
                _reuse(pointer, path)
            else:
                libbpf.check(library.bpf_map__set_pin_path(pointer, bytes(path)), f"pin of map {name}")


def _reuse(pointer: int, path: Path) -> None:
    """Let the object use a pinned map.

    libbpf would do that by the pin's path, but compares flags too, and the kernel sets one of its own on device maps.
    """
    library = lib()
    pinned = Map.open(path)
    try:
        found = (pinned.type, pinned.key_size, pinned.value_size, pinned.max_entries)
        needed = (
            library.bpf_map__type(pointer),
            library.bpf_map__key_size(pointer),
            library.bpf_map__value_size(pointer),
            library.bpf_map__max_entries(pointer),
        )
        if found != needed:
            raise LayoutError(
                f"pinned map {path} has type, key size, value size and size {found}, the program needs {needed}",
                hint=_OTHER_LAYOUT_HINT,
            )
        libbpf.check(library.bpf_map__reuse_fd(pointer, pinned.fd), f"use of pinned map {path}")
    finally:
        pinned.close()


def _check_loaded(result: int, file: Path) -> None:
    if result < 0:
        raise _load_error(-result, file, libbpf.collected_log())


def _load_error(number: int, file: Path, log: str) -> BpfError:
    what = f"object {file.name}"
    if "PROG LOAD LOG" in log:
        return VerifierError(
            f"the kernel refused a program of {what}; the verifier's log:\n{log}\n(end of log)", errno=number, log=log
        )
    if number == errno.EPERM:
        return PermissionDeniedError(
            f"loading {what} is not permitted", hint=f"CAP_BPF is needed ({log})", errno=number
        )
    return BpfError(f"loading {what} failed: {log or errno.errorcode.get(number, str(number))}", errno=number)


_OTHER_LAYOUT_HINT: Final = "stop the agent of the other version with «modalmesh node --cleanup», then start this one"


def _check_layout(pins: Path) -> None:
    version = pinned_layout_version(pins)
    if version not in (None, 0, LAYOUT_VERSION):
        raise LayoutError(
            f"maps pinned below {pins} have layout {version}, these programs need {LAYOUT_VERSION}",
            hint=_OTHER_LAYOUT_HINT,
        )


def _claim(config: Map) -> None:
    found = MeshConfig.unpack(config.get(u32(0)) or bytes(16))
    if found.layout_version == 0:
        config.set(u32(0), MeshConfig().pack())
