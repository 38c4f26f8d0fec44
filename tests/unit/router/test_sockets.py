from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from router.errors import SocketError
from router.sockets import private_mode, reserved


def test_a_reservation_makes_the_directory_and_ends_with_its_context(short_dir: Path) -> None:
    path = short_dir / "run" / "a.sock"
    with reserved(path):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
        with pytest.raises(SocketError, match="another process serves"), reserved(path):
            raise AssertionError
    with reserved(path):
        pass


def test_a_left_over_socket_is_removed_before_and_after(short_dir: Path) -> None:
    path = short_dir / "a.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with reserved(path):
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as mine:
            mine.bind(str(path))
    assert not path.exists()


def test_something_else_is_left_alone(short_dir: Path) -> None:
    path = short_dir / "a.sock"
    path.write_text("precious")
    with pytest.raises(SocketError, match="no socket"), reserved(path):
        raise AssertionError
    with pytest.raises(SocketError, match="can't be used"), reserved(path / "b.sock"):
        raise AssertionError
    assert path.read_text() == "precious"


@pytest.mark.parametrize(("folder_mode", "expected"), [(0o750, 0o600), (0o2750, 0o660)])
def test_the_mode_follows_the_directory(short_dir: Path, folder_mode: int, expected: int) -> None:
    short_dir.chmod(folder_mode)
    path = short_dir / "a.sock"
    with socket.socket(socket.AF_UNIX) as mine:
        with private_mode(path):
            mine.bind(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == expected
