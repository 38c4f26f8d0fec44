"""What tests of every package share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see defaults, whatever the shell that started them had set."""
    for name in os.environ:
        if name.startswith("MODALMESH_") and name != "MODALMESH_REQUIRE_BPF":
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A test that configures logging binds it to its own captured standard error, which closes with it."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for unix sockets (108 bytes), which pytest's tmp_path may not."""
    with tempfile.TemporaryDirectory(prefix="mm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
