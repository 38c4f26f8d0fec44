"""Network namespaces, cgroups and child processes for tests of kernel programs; everything made is removed again."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bpf import places

_CLONE_NEWNET = 0x4000_0000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()

Tell = Callable[[Any], None]
"""How a child speaks to the test: anything that JSON holds."""


def command(*arguments: str, check: bool = True, timeout: float = 20) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def enter(arguments: list[str], *, netns: str, cgroup: Path | None = None) -> list[str]:
    """The command, in a namespace and a cgroup."""
    arguments = ["ip", "netns", "exec", netns, *arguments]
    if cgroup:  # first, since «ip netns exec» mounts another /sys
        arguments = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *arguments]
    return arguments


def _enter(netns: str) -> None:
    fd = os.open(f"/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {netns}")
    finally:
        os.close(fd)


@contextlib.contextmanager
def inside(netns: str) -> Iterator[None]:
    """This thread, in another network namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(netns)
        yield
    finally:
        _libc.setns(home, _CLONE_NEWNET)
        os.close(home)


class Child:
    """A forked process that runs one function and tells what it sees."""

    def __init__(self, function: Callable[..., Any], *args: Any, netns: str | None, cgroup: Path | None) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            self._run(write, function, args, netns, cgroup)
        os.close(write)
        self._pipe = os.fdopen(read, "rb", buffering=0)
        self._buffer = b""
        self._reaped = False

    @staticmethod
    def _run(write: int, function: Callable[..., Any], args: Any, netns: str | None, cgroup: Path | None) -> None:
        def tell(value: Any) -> None:
            data = json.dumps(value).encode() + b"\n"
            while data:
                data = data[os.write(write, data) :]

        status = 1
        try:
            signal.alarm(120)  # whatever happens to the test, nothing is left running
            if cgroup:
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            if netns:
                _enter(netns)
            tell({"result": function(tell, *args)})
            status = 0
        except BaseException:
            with contextlib.suppress(OSError):
                tell({"error": traceback.format_exc()})
        finally:
            os._exit(status)

    def hear(self, timeout: float = 20) -> Any:
        """The next thing it tells."""
        until = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not select.select([self._pipe], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("the child says nothing")
            data = self._pipe.read(65536)
            if not data:
                raise RuntimeError("the child is gone without a word")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        value = json.loads(line)
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"in the child:\n{value['error']}")
        return value

    def result(self, timeout: float = 60) -> Any:
        """What the function returned."""
        while True:
            value = self.hear(timeout)
            if isinstance(value, dict) and "result" in value:
                self.kill()
                return value["result"]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it, and wait until it is gone."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            os.waitpid(self.pid, 0)
            self._reaped = True

    def close(self) -> None:
        self.kill()
        self._pipe.close()


class Lab:
    """Everything a test makes on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undo = contextlib.ExitStack()
        self._children: list[Child] = []

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def namespace(self, label: str) -> str:
        name = f"mm-{os.getpid()}-{next(_numbers)}-{label}"
        command("ip", "netns", "add", name)
        self._undo.callback(command, "ip", "netns", "del", name, check=False)
        command("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def veth(self, netns: str, device: str, peer_netns: str, peer: str) -> None:
        """A cable between two namespaces."""
        command("ip", "-n", netns, "link", "add", device, "type", "veth", "peer", "name", peer, "netns", peer_netns)
        for where, what in ((netns, device), (peer_netns, peer)):
            command("ip", "-n", where, "link", "set", what, "up")

    def address(self, netns: str, device: str, address: str) -> None:
        options = ("nodad",) if ":" in address else ()
        command("ip", "-n", netns, "address", "add", address, "dev", device, *options)

    def pins(self) -> Path:
        """A bpf file system of the test's own."""
        path = self.folder / f"bpf{next(_numbers)}"
        places.mount_bpf_filesystem(path)
        self._undo.callback(shutil.rmtree, path, ignore_errors=True)
        self._undo.callback(places.unmount, path)
        return path

    def cgroup(self) -> Path:
        mounts = places.cgroup2_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
        if mounts:
            root = mounts[0]
        else:
            root = self.folder / "cgroup"
            root.mkdir()
            command("mount", "-t", "cgroup2", "none", str(root))
            self._undo.callback(command, "umount", str(root), check=False)
        path = root / f"mm-test-{os.getpid()}-{next(_numbers)}"
        path.mkdir()
        self._undo.callback(_remove_cgroup, path)
        return path

    def start(
        self, function: Callable[..., Any], *args: Any, netns: str | None = None, cgroup: Path | None = None
    ) -> Child:
        """Run ``function(tell, *args)`` in a child."""
        child = Child(function, *args, netns=netns, cgroup=cgroup)
        self._undo.callback(child.close)
        self._children.append(child)
        return child

    def spawn(self, arguments: list[str], *, netns: str, cgroup: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a program; its standard output is a pipe."""
        place = enter(arguments, netns=netns, cgroup=cgroup)
        process = subprocess.Popen(place, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._undo.callback(_end, process)
        return process

    def stop_children(self) -> None:
        for child in self._children:
            child.kill()

    def closing(self, thing: Any) -> Any:
        """``thing``, closed at the end."""
        self._undo.callback(thing.close)
        return thing


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)
    if process.stdout:
        process.stdout.close()


def _remove_cgroup(path: Path) -> None:
    for _ in range(100):  # a killed process leaves its cgroup a moment after it was waited for
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
    path.rmdir()


def mac(netns: str, device: str) -> bytes:
    return bytes.fromhex(
        json.loads(command("ip", "-n", netns, "-j", "link", "show", device))[0]["address"].replace(":", "")
    )


def ifindex(netns: str, device: str) -> int:
    return int(json.loads(command("ip", "-n", netns, "-j", "link", "show", device))[0]["ifindex"])


def received(netns: str, device: str) -> int:
    """Packets that came in by a device."""
    shown = json.loads(command("ip", "-n", netns, "-j", "-s", "link", "show", device))
    return int(shown[0]["stats64"]["rx"]["packets"])
