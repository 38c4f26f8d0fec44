"""libbpf through ctypes: declarations and error handling, nothing else.

Why ctypes: Debian's ``libbpf1`` is there wherever ``iproute2`` is, and loading an object takes 11 ms and 10 MiB,
against 0.3 s and 122 MiB for ``bcc``, which compiles and has no ``devmap_hash``.

Functions return ``-errno``, or NULL with ``errno``. What libbpf prints (the verifier's log among it) is collected
instead, and ends up in the exception.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Final, TypeVar

from bpf.errors import BpfError, ObjectError, PermissionDeniedError

__all__ = [
    "BatchOpts",
    "LinkCreateOpts",
    "LinkInfo",
    "MapInfo",
    "ProgInfo",
    "TestRunOpts",
    "check",
    "collected_log",
    "from_errno",
    "info",
    "lib",
    "possible_cpus",
]

_PRINT = CFUNCTYPE(c_int, c_int, c_void_p, c_void_p)
_WORTH_KEEPING: Final = 1  # LIBBPF_WARN = 0, LIBBPF_INFO = 1, LIBBPF_DEBUG = 2


class BatchOpts(Structure):
    """``struct bpf_map_batch_opts``."""

    _fields_ = (("sz", c_size_t), ("elem_flags", c_uint64), ("flags", c_uint64))


class LinkCreateOpts(Structure):
    """The beginning of ``struct bpf_link_create_opts``; what is left out counts as zero."""

    _fields_ = (("sz", c_size_t), ("flags", c_uint32), ("_pad", c_uint32))


class TestRunOpts(Structure):
    """``struct bpf_test_run_opts``."""

    _fields_ = (
        ("sz", c_size_t),
        ("data_in", c_void_p),
        ("data_out", c_void_p),
        ("data_size_in", c_uint32),
        ("data_size_out", c_uint32),
        ("ctx_in", c_void_p),
        ("ctx_out", c_void_p),
        ("ctx_size_in", c_uint32),
        ("ctx_size_out", c_uint32),
        ("retval", c_uint32),
        ("repeat", c_int),
        ("duration", c_uint32),
        ("flags", c_uint32),
        ("cpu", c_uint32),
        ("batch_size", c_uint32),
    )


class MapInfo(Structure):
    """The beginning of ``struct bpf_map_info``."""

    _fields_ = (
        ("type", c_uint32),
        ("id", c_uint32),
        ("key_size", c_uint32),
        ("value_size", c_uint32),
        ("max_entries", c_uint32),
        ("map_flags", c_uint32),
        ("name", c_char * 16),
    )


class ProgInfo(Structure):
    """The beginning of ``struct bpf_prog_info``."""

    _fields_ = (
        ("type", c_uint32),
        ("id", c_uint32),
        ("tag", c_char * 8),
        ("jited_prog_len", c_uint32),
        ("xlated_prog_len", c_uint32),
        ("jited_prog_insns", c_uint64),
        ("xlated_prog_insns", c_uint64),
        ("load_time", c_uint64),
        ("created_by_uid", c_uint32),
        ("nr_map_ids", c_uint32),
        ("map_ids", c_uint64),
        ("name", c_char * 16),
        ("ifindex", c_uint32),
        ("gpl_compatible", c_uint32),
        ("netns_dev", c_uint64),
        ("netns_ino", c_uint64),
        ("nr_jited_ksyms", c_uint32),
        ("nr_jited_func_lens", c_uint32),
        ("jited_ksyms", c_uint64),
        ("jited_func_lens", c_uint64),
        ("btf_id", c_uint32),
        ("func_info_rec_size", c_uint32),
        ("func_info", c_uint64),
        ("nr_func_info", c_uint32),
        ("nr_line_info", c_uint32),
        ("line_info", c_uint64),
        ("jited_line_info", c_uint64),
        ("nr_jited_line_info", c_uint32),
        ("line_info_rec_size", c_uint32),
        ("jited_line_info_rec_size", c_uint32),
        ("nr_prog_tags", c_uint32),
        ("prog_tags", c_uint64),
        ("run_time_ns", c_uint64),
        ("run_cnt", c_uint64),
        ("recursion_misses", c_uint64),
        ("verified_insns", c_uint32),
        ("_pad", c_uint32),
    )


class LinkInfo(Structure):
    """The beginning of ``struct bpf_link_info``; ``target`` is what the link hangs on.

    XDP and tcx: the interface's index. cgroup: the low half of the cgroup's id. 0: it is gone.
    """

    _fields_ = (
        ("type", c_uint32),
        ("id", c_uint32),
        ("prog_id", c_uint32),
        ("_pad", c_uint32),
        ("target", c_uint32),
        ("target_high", c_uint32),
        ("attach_type", c_uint32),
        ("_pad2", c_uint32),
    )


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "libbpf_set_print": (c_void_p, _PRINT),
    "libbpf_num_possible_cpus": (c_int,),
    "libbpf_major_version": (c_uint32,),
    "libbpf_minor_version": (c_uint32,),
    "libbpf_probe_bpf_prog_type": (c_int, c_int, c_void_p),
    "libbpf_probe_bpf_map_type": (c_int, c_int, c_void_p),
    "libbpf_probe_bpf_helper": (c_int, c_int, c_int, c_void_p),
    "bpf_object__open_mem": (c_void_p, c_void_p, c_size_t, c_void_p),
    "bpf_object__load": (c_int, c_void_p),
    "bpf_object__close": (None, c_void_p),
    "bpf_object__next_program": (c_void_p, c_void_p, c_void_p),
    "bpf_object__next_map": (c_void_p, c_void_p, c_void_p),
    "bpf_program__name": (c_char_p, c_void_p),
    "bpf_program__fd": (c_int, c_void_p),
    "bpf_program__set_autoload": (c_int, c_void_p, c_bool),
    "bpf_program__expected_attach_type": (c_int, c_void_p),
    "bpf_program__attach": (c_void_p, c_void_p),
    "bpf_link__fd": (c_int, c_void_p),
    "bpf_link__disconnect": (None, c_void_p),
    "bpf_link__destroy": (c_int, c_void_p),
    "bpf_map__name": (c_char_p, c_void_p),
    "bpf_map__fd": (c_int, c_void_p),
    "bpf_map__is_internal": (c_bool, c_void_p),
    "bpf_map__type": (c_int, c_void_p),
    "bpf_map__key_size": (c_uint32, c_void_p),
    "bpf_map__value_size": (c_uint32, c_void_p),
    "bpf_map__max_entries": (c_uint32, c_void_p),
    "bpf_map__reuse_fd": (c_int, c_void_p, c_int),
    "bpf_map__set_max_entries": (c_int, c_void_p, c_uint32),
    "bpf_map__set_pin_path": (c_int, c_void_p, c_char_p),
    "bpf_map_lookup_elem": (c_int, c_int, c_void_p, c_void_p),
    "bpf_map_update_elem": (c_int, c_int, c_void_p, c_void_p, c_uint64),
    "bpf_map_delete_elem": (c_int, c_int, c_void_p),
    "bpf_map_get_next_key": (c_int, c_int, c_void_p, c_void_p),
    "bpf_map_update_batch": (c_int, c_int, c_void_p, c_void_p, POINTER(c_uint32), POINTER(BatchOpts)),
    "bpf_map_delete_batch": (c_int, c_int, c_void_p, POINTER(c_uint32), POINTER(BatchOpts)),
    "bpf_map_lookup_batch": (
        c_int,
        c_int,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        POINTER(c_uint32),
        POINTER(BatchOpts),
    ),
    "bpf_obj_pin": (c_int, c_int, c_char_p),
    "bpf_obj_get": (c_int, c_char_p),
    "bpf_obj_get_info_by_fd": (c_int, c_int, c_void_p, POINTER(c_uint32)),
    "bpf_prog_get_fd_by_id": (c_int, c_uint32),
    "bpf_link_create": (c_int, c_int, c_int, c_int, POINTER(LinkCreateOpts)),
    "bpf_link_update": (c_int, c_int, c_int, c_void_p),
    "bpf_link_detach": (c_int, c_int),
    "bpf_prog_attach": (c_int, c_int, c_int, c_int, c_uint32),
    "bpf_prog_detach2": (c_int, c_int, c_int, c_int),
    "bpf_prog_test_run_opts": (c_int, c_int, POINTER(TestRunOpts)),
    "bpf_enable_stats": (c_int, c_int),
    "bpf_xdp_query_id": (c_int, c_int, c_int, POINTER(c_uint32)),
}
"""Name → result and arguments, as ``bpf/libbpf.h`` and ``bpf/bpf.h`` of libbpf 1.1 have them."""

_Info = TypeVar("_Info", bound=Structure)
_log: list[str] = []


@functools.cache
def lib() -> ctypes.CDLL:
    """Return the library, loaded once.

    Raises:
        ObjectError: It is not installed, or older than 1.0.
    """
    try:
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ObjectError(f"libbpf can't be loaded: {error}", hint="install Debian's libbpf1") from error
    library.libbpf_set_print(_collector)
    return library


_libc = ctypes.CDLL(None)
_libc.vasprintf.argtypes = (POINTER(c_void_p), c_void_p, c_void_p)
_libc.free.argtypes = (c_void_p,)


def _collect(level: int, message: int, arguments: int) -> int:
    if level > _WORTH_KEEPING:
        return 0
    text = c_void_p()
    if _libc.vasprintf(ctypes.byref(text), message, arguments) >= 0 and text.value:
        _log.append(ctypes.string_at(text).decode(errors="replace").rstrip())
        _libc.free(text)
    return 0


_collector = _PRINT(_collect)
"""Kept for as long as libbpf may call it."""


def collected_log() -> str:
    """Return what libbpf has printed since the last call."""
    text = "\n".join(_log)
    _log.clear()
    return text


def from_errno(number: int, what: str, kind: type[BpfError] = BpfError, hint: str = "") -> BpfError:
    """Return the error for a failed call.

    Args:
        number: The kernel's error number, positive.
        what: What was tried, e.g. ``update of map services``.
        kind: The error, unless it is a lack of permission.
        hint: What to do, likewise.
    """
    message = f"{what} failed: {os.strerror(number)}"
    if number == 1:  # EPERM. EACCES is the verifier's «no», or an attach type's
        return PermissionDeniedError(message, hint="CAP_BPF and CAP_NET_ADMIN are needed", errno=number)
    return kind(message, hint=hint, errno=number)


def check(result: int | None, what: str, kind: type[BpfError] = BpfError, hint: str = "") -> int:
    """Return ``result``, unless it says that the call failed.

    Raises:
        BpfError: Negative (``-errno``) or NULL; of ``kind``, or PermissionDeniedError.
    """
    if result is None or result < 0:
        raise from_errno(-result if result else ctypes.get_errno(), what, kind, hint)
    return result


def info(fd: int, kind: type[_Info]) -> _Info:
    """Return what the kernel knows of a map, program or link (BPF_OBJ_GET_INFO_BY_FD)."""
    value = kind()
    size = c_uint32(ctypes.sizeof(value))
    check(lib().bpf_obj_get_info_by_fd(fd, ctypes.byref(value), ctypes.byref(size)), "BPF_OBJ_GET_INFO_BY_FD")
    return value


@functools.cache
def possible_cpus() -> int:
    """Return how many values a per-CPU map holds for each key."""
    return check(lib().libbpf_num_possible_cpus(), "count of possible CPUs")
