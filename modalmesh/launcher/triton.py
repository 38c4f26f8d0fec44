"""Start a real Triton server from the ``nvidia-pytriton`` wheel, on a machine without a GPU and without containers.

The wheel holds NVIDIA's ``tritonserver``, its Python backend and its response cache, but not in the layout that
the server expects: the backend's helper program (the «stub») comes once for each version of Python, elsewhere.
``prepare`` puts that right with symbolic links, and ``command`` says how to start the server; starting, watching
and stopping the process is the caller's. Nothing is copied and the environment is left as it is.

The models' code is written once and served under any number of names: a folder of the repository holds only a
``config.pbtxt``, whose ``default_model_filename`` names a module, and ``prepare`` links the folder of all modules
in as the model's version 1. (The stub puts that folder on ``sys.path``, so modules can import each other. It
ignores ``PYTHONPATH``.)

What goes wrong silently or obscurely otherwise is checked first:

- the stub runs models with the first ``python3`` of ``PATH``, and loads that Python's shared library;
- under NumPy 2 its models return empty tensors without an error.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modalmesh.base.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Installation", "Server", "TritonUnavailableError", "command", "prepare", "remove_shared_memory"]

RESTRICTED = ("model-repository", "shared-memory", "logging", "trace")
"""Protocols of Triton's that change the server; the mesh's requests need none of them."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has POSIX shared memory; nothing is written here

# Asked of the environment's own interpreter: its version may differ from that of the one running this.
_PROBE = """
import importlib.metadata as m, json, sys, sysconfig as s
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "site": s.get_path("purelib"),
    "libdir": s.get_config_var("LIBDIR"),
    "library": s.get_config_var("INSTSONAME"),
    "shared": s.get_config_var("Py_ENABLE_SHARED"),
    "numpy": version("numpy"),
    "pytriton": version("nvidia-pytriton"),
}))
"""

_MAKE = "run `make install`, after removing {venv} if it is broken"


class TritonUnavailableError(MachineError):
    """The server can't be started from this environment; the message says what is missing and what to do."""

    code = "MM1302"


@dataclass(frozen=True)
class Installation:
    """What ``prepare`` found in the environment and laid out from it."""

    venv: Path
    wheel: Path
    library_dir: Path
    backends: Path
    repository: Path
    models: tuple[str, ...]

    @property
    def program(self) -> Path:
        """The server itself, which finds the wheel's libraries next to its own place."""
        return self.wheel / "bin" / "tritonserver"

    @property
    def caches(self) -> Path:
        """The directory of response caches, of which the wheel has ``local``."""
        return self.wheel / "caches"


@dataclass(frozen=True)
class Server:
    """How to start a server: ``subprocess.Popen(server.argv, env=server.env, start_new_session=True)``.

    In a session of its own, all its processes can be ended together, by their group.
    """

    argv: list[str]
    env: dict[str, str]
    shared_memory_prefix: str


def prepare(venv: Path, directory: Path, *, repository: Path, modules: Path) -> Installation:
    """Lay out, in ``directory``, what the server needs and the wheel has elsewhere, and the models.

    Safe to repeat, also while a server runs from it, and after the environment was rebuilt.

    Args:
        venv: The environment that ``nvidia-pytriton`` is installed in, with what the models import.
        directory: Where to put the links.
        repository: A folder for each model, with a complete ``config.pbtxt``: letting the server ask the models
            for what it doesn't say would start each of them twice, which costs more than a second.
        modules: What the configurations' ``default_model_filename`` are in.
    """
    found = _probe(venv)
    wheel = Path(found["site"]) / "pytriton" / "tritonserver"
    parts = [
        wheel / "backends" / "python" / "libtriton_python.so",
        wheel / "backends" / "python" / "triton_python_backend_utils.py",
        wheel / "python_backend_stubs" / found["python"] / "triton_python_backend_stub",
    ]
    _check(venv, wheel, parts, found)

    backends = directory.absolute() / "backends"
    (backends / "python").mkdir(parents=True, exist_ok=True)
    for part in parts:
        _link(backends / "python" / part.name, part)

    served = directory.absolute() / "repository"
    served.mkdir(exist_ok=True)
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    for name in models:
        (served / name).mkdir(exist_ok=True)
        _link(served / name / "config.pbtxt", (repository / name / "config.pbtxt").absolute())
        _link(served / name / "1", modules.absolute())
    for path in served.iterdir():
        if path.name not in models:
            shutil.rmtree(path)  # follows no links
    return Installation(venv.absolute(), wheel, Path(found["libdir"]), backends, served, tuple(models))


def command(
    installation: Installation,
    *,
    grpc_port: int,
    http_port: int | None = None,
    metrics_port: int | None = None,
    load: Sequence[str] | None = None,
    control_key: str = "",
    variables: dict[str, str] | None = None,
    threads: int = 1,
    response_cache_bytes: int = 0,
    exit_timeout_seconds: int = 5,
    verbose: bool = False,
) -> Server:
    """Say how to start the server, reachable from this machine only.

    Args:
        installation: What ``prepare`` returned.
        grpc_port: Where it serves gRPC.
        http_port: Where it serves HTTP/1.1, which is off unless asked for.
        metrics_port: Where Prometheus finds metrics, off unless asked for.
        load: Models to load at the start, all of the repository unless given. Only if given, others can be loaded
            later, by a call.
        control_key: Value of the header ``triton-grpc-protocol-modalmesh-control`` that calls of ``RESTRICTED``
            protocols must carry; default: one that nobody knows.
        variables: What else the models find in their environment.
        threads: Threads for computing in each model. Every model is a process, so these multiply.
        response_cache_bytes: Size of the response cache, 0 for none. A model uses it if its configuration says so.
        exit_timeout_seconds: How long a stop waits for requests, for HTTP connections (even idle ones), and for
            models whose process has died. A usual stop takes two seconds: the server looks once a second.
        verbose: Log also what isn't a warning or an error.
    """
    prefix = f"modalmesh-triton-{grpc_port}-"
    argv = [
        str(installation.program),
        f"--model-repository={installation.repository}",
        f"--backend-directory={installation.backends}",
        *_models(load),
        # Whoever reaches the port could otherwise read shared memory by name, or load code as a model: each of these
        # asks for a header whose value nobody knows.
        f"--grpc-restricted-protocol={','.join(RESTRICTED)}:modalmesh-control={control_key or secrets.token_hex(16)}",
        "--disable-auto-complete-config",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        *_listener("http", http_port),
        *_listener("metrics", metrics_port),
        f"--exit-timeout-secs={exit_timeout_seconds}",
        f"--log-info={str(verbose).lower()}",
        # Names what a killed server leaves behind, so that it can be removed: see remove_shared_memory.
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        # Memory for copies to a GPU. Without one, asking for it only logs warnings.
        "--pinned-memory-pool-byte-size=0",
    ]
    if metrics_port is not None:
        argv.append("--allow-gpu-metrics=false")
    if response_cache_bytes:
        argv += [
            f"--cache-directory={installation.caches}",
            f"--cache-config=local,size={response_cache_bytes}",
        ]
    # Nothing is inherited, so that the models find only what is in their environment.
    env = {
        "PATH": f"{installation.venv / 'bin'}:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": str(installation.library_dir),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        **(variables or {}),
    }
    return Server(argv, env, prefix)


def remove_shared_memory(server: Server) -> list[Path]:
    """Remove what a killed server left in shared memory, and say what that was.

    Its port being in the prefix, this touches no other server's, and is safe as long as this one isn't running.
    Something is left if all its processes were killed together, or one of a model's alone; not after a usual stop,
    nor if only the server itself was killed: the models' processes notice, clear up and end within a second.
    """
    left = sorted(SHARED_MEMORY.glob(f"{server.shared_memory_prefix}*"))
    for path in left:
        path.unlink(missing_ok=True)
    return left


def _models(load: Sequence[str] | None) -> list[str]:
    if load is None:
        return ["--model-control-mode=none"]
    return ["--model-control-mode=explicit", *(f"--load-model={name}" for name in load)]


def _listener(name: str, port: int | None) -> list[str]:
    if port is None:
        return [f"--allow-{name}=false"]
    return [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]


def _probe(venv: Path) -> dict[str, str]:
    interpreter = venv / "bin" / "python3"
    try:
        answer = subprocess.run(
            [interpreter, "-I", "-c", _PROBE], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except FileNotFoundError as error:
        msg = f"no Python environment in {venv} ({interpreter} is missing or leads nowhere)"
        raise TritonUnavailableError(f"{msg}; {_MAKE.format(venv=venv)}") from error
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise TritonUnavailableError(f"{interpreter} doesn't run ({why}); {_MAKE.format(venv=venv)}") from error
    found: dict[str, str] = json.loads(answer)
    return found


def _check(venv: Path, wheel: Path, parts: Sequence[Path], found: dict[str, str]) -> None:
    """Refuse what would fail only later, obscurely or silently."""
    python, pytriton, numpy = found["python"], found["pytriton"], found["numpy"]
    make = _MAKE.format(venv=venv)
    library = Path(found["libdir"]) / found["library"]
    stubs = sorted(wheel.glob("python_backend_stubs/3.*"), key=lambda path: int(path.name[2:]))
    missing = [str(path) for path in (wheel / "bin" / "tritonserver", *parts) if not path.exists()]

    if not pytriton:
        msg = f"{venv} has no nvidia-pytriton; {make}"
    elif stubs and python not in {path.name for path in stubs}:
        have = ", ".join(path.name for path in stubs)
        msg = f"{venv} is Python {python}; nvidia-pytriton {pytriton} runs models with {have} only; {make}"
    elif missing:
        msg = f"nvidia-pytriton {pytriton} in {venv} lacks {', '.join(missing)}; {make}"
    elif not numpy or int(numpy.split(".")[0]) > 1:
        have = f"NumPy {numpy}" if numpy else "no NumPy"
        msg = f"{venv} has {have}; the Python backend needs NumPy 1 (with 2, answers are empty); {make}"
    elif not found["shared"] or not library.exists():
        # The loader would look elsewhere, and might find another Python's.
        msg = (
            f"models run with Python {python}'s shared library, and {library} is missing; "
            f"for Debian's Python: apt-get install libpython{python}; "
            f"for one built from source: configure it with --enable-shared"
        )
    else:
        return
    raise TritonUnavailableError(msg)


def _link(link: Path, target: Path) -> None:
    """Make ``link`` lead to ``target`` in one step, so that a server just starting sees the old or the new one."""
    if link.is_symlink() and link.readlink() == target:
        return
    with tempfile.TemporaryDirectory(dir=link.parent) as scratch:
        fresh = Path(scratch) / link.name
        fresh.symlink_to(target)
        fresh.replace(link)
