"""What tests of every package share."""

from __future__ import annotations

import os
import subprocess
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


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root, and certificates for a server on 127.0.0.1 and for a client; made new each time."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for root in ("ca", "other"):
        openssl(
            "req", "-x509", *ec, "-keyout", f"{root}.key", "-out", f"{root}.pem", "-days", "2", "-subj", f"/CN={root}"
        )
    for name in ("server", "client"):
        openssl("req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return folder
