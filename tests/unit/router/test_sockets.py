from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from modalmesh.base.errors import MachineError
from router.sockets import claim, private_mode


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mm") as name:
        yield Path(name)


def test_makes_the_directory(folder: Path) -> None:
    claim(folder / "run" / "a.sock")
    assert (folder / "run").is_dir()


def test_a_left_over_socket_is_removed(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    claim(path)
    assert not path.exists()


def test_a_socket_that_somebody_listens_on_is_not(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        with pytest.raises(MachineError, match="another process listens"):
            claim(path)
        assert path.exists()


def test_something_else_is_left_alone(folder: Path) -> None:
    path = folder / "a.sock"
    path.write_text("precious")
    with pytest.raises(MachineError, match="no socket"):
        claim(path)
    with pytest.raises(MachineError, match="can't be used"):
        claim(path / "b.sock")
    assert path.read_text() == "precious"


@pytest.mark.parametrize(("folder_mode", "expected"), [(0o750, 0o600), (0o2750, 0o660)])
def test_the_mode_follows_the_directory(folder: Path, folder_mode: int, expected: int) -> None:
    folder.chmod(folder_mode)
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as mine:
        with private_mode(path):
            mine.bind(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == expected
