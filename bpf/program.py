"""A program in the kernel, and how to run it on a packet without a network."""

from __future__ import annotations

import os
import struct
from ctypes import byref, c_void_p, cast, create_string_buffer, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bpf.libbpf import ProgInfo, TestRunOpts, check, info, lib

__all__ = ["Program", "TestRun"]

_LIVE_FRAMES: Final = 2  # BPF_F_TEST_XDP_LIVE_FRAMES


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a program did with a packet."""

    verdict: int
    """XDP_*, TC_ACT_*."""
    packet: bytes
    """As the program left it."""
    nanoseconds: int
    """Mean of all repetitions."""


class Program:
    """A loaded program; libbpf's object owns the descriptor.

    Attributes:
        attach_type: ``enum bpf_attach_type`` by its section.
        handle: libbpf's pointer.
    """

    def __init__(self, name: str, fd: int, attach_type: int, handle: int) -> None:
        self.name = name
        self.fd = fd
        self.attach_type = attach_type
        self.handle = handle

    def __repr__(self) -> str:
        return f"<Program {self.name} id {self.id}>"

    @property
    def id(self) -> int:
        """The kernel's number for it."""
        return int(info(self.fd, ProgInfo).id)

    @property
    def statistics(self) -> tuple[int, int]:
        """Runs and nanoseconds, counted while ``kernel.bpf_stats_enabled`` is on."""
        found = info(self.fd, ProgInfo)
        return int(found.run_cnt), int(found.run_time_ns)

    def pin(self, path: Path) -> None:
        """Give the program a name in a bpf file system."""
        check(lib().bpf_obj_pin(self.fd, os.fsencode(path)), f"pin of program {self.name} at {path}")

    def test_run(self, packet: bytes, *, repeat: int = 1, ifindex: int | None = None) -> TestRun:
        """Run an XDP or tc program on a packet (BPF_PROG_TEST_RUN).

        Args:
            packet: From the destination MAC on; the kernel wants 14 bytes at least.
            repeat: How often, for the time it takes.
            ifindex: For XDP: the interface it comes in by.
        """
        room = len(packet) + 512  # no program of ours makes a packet longer
        data, out = create_string_buffer(packet, max(1, len(packet))), create_string_buffer(room)
        options = TestRunOpts(
            sz=sizeof(TestRunOpts),
            data_in=cast(data, c_void_p),
            data_size_in=len(packet),
            data_out=cast(out, c_void_p),
            data_size_out=room,
            repeat=repeat,
        )
        context = _context(packet, ifindex)
        if context:
            buffer = create_string_buffer(context, len(context))
            options.ctx_in, options.ctx_size_in = cast(buffer, c_void_p), len(context)
        check(lib().bpf_prog_test_run_opts(self.fd, byref(options)), f"test run of {self.name}")
        return TestRun(options.retval, out.raw[: options.data_size_out], options.duration)

    def inject(self, packet: bytes, *, ifindex: int, count: int, batch: int = 64) -> float:
        """Let an XDP program act on ``count`` copies of a packet for real: redirected ones leave, passed ones arrive.

        Args:
            packet: From the destination MAC on.
            ifindex: The interface by which they seem to come in.
            count: How many.
            batch: How many are handled at once, at most 256.

        Returns:
            Nanoseconds a packet.
        """
        data = create_string_buffer(packet, len(packet))
        context = _context(packet, ifindex)
        buffer = create_string_buffer(context, len(context))
        options = TestRunOpts(
            sz=sizeof(TestRunOpts),
            data_in=cast(data, c_void_p),
            data_size_in=len(packet),
            ctx_in=cast(buffer, c_void_p),
            ctx_size_in=len(context),
            repeat=count,
            flags=_LIVE_FRAMES,
            batch_size=batch,
        )
        check(lib().bpf_prog_test_run_opts(self.fd, byref(options)), f"live run of {self.name}")
        return float(options.duration)


def _context(packet: bytes, ifindex: int | None) -> bytes:
    """Return a ``struct xdp_md``: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex."""
    return b"" if ifindex is None else struct.pack("=6I", 0, len(packet), 0, ifindex, 0, 0)
