"""Where the kernel refuses BPF, its tests say «not run» and why; with MODALMESH_REQUIRE_BPF=1 they fail instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpf import build, loader
from bpf.errors import PermissionDeniedError
from tests.kernel.lab import Lab


@pytest.fixture(scope="session")
def refusal() -> str:
    """Why the kernel takes no programs from us; empty: it does.

    Only a lack of permission counts: a program that can't be built, or that the verifier refuses, is our fault.
    """
    build.build_package()
    try:
        loader.load("xdp_gpu_bypass").close()
    except PermissionDeniedError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def _kernel_takes_programs(refusal: str) -> None:
    if refusal and os.environ.get("MODALMESH_REQUIRE_BPF") == "1":
        pytest.fail(f"MODALMESH_REQUIRE_BPF=1, but the kernel refuses: {refusal}")
    if refusal:
        pytest.skip(f"not run: {refusal}")


@pytest.fixture
def lab(short_dir: Path) -> Iterator[Lab]:
    """Namespaces, cgroups and children, removed afterwards."""
    with Lab(short_dir) as made:
        yield made
