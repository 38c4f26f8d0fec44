"""Settings come from the environment over a file over defaults; nothing misspelt is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from modalmesh.base.errors import SettingsError
from modalmesh.base.settings import load, split_address


def test_the_environment_beats_the_file_and_the_file_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("gateway: {listen: 127.0.0.1:1}\nxds: {listen: 127.0.0.1:2, zstd_level: 7}\n")
    monkeypatch.setenv("MODALMESH_CONFIG", str(file))
    monkeypatch.setenv("MODALMESH_XDS__LISTEN", "unix:/run/x.sock")
    settings = load()
    assert settings.gateway.listen == "127.0.0.1:1"
    assert settings.xds.listen == "unix:/run/x.sock"
    assert settings.xds.zstd_level == 7
    assert settings.triton.listen == "127.0.0.1:8001"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MODALMESH_XDS__LISTEN", "18000", "xds.listen"),
        ("MODALMESH_XDS__LISTEN", "127.0.0.1:0", "xds.listen"),
        ("MODALMESH_XDS__LISTEN", "unix:", "xds.listen"),
        ("MODALMESH_ENCODER__THREADS", "many", "encoder.threads"),
        ("MODALMESH_ENCODER__TREADS", "2", "encoder.treads"),
        ("MODALMESH_ENCODR__THREADS", "2", "MODALMESH_ENCODR__THREADS"),
        ("MODALMESH_RUNTIME_DIR", "/tmp/" + "x" * 90, "runtime_dir"),
        ("MODALMESH_LOG__LEVEL", "loud", "log.level"),
    ],
)
def test_a_wrong_value_or_name_is_named(name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=says) as caught:
        load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"- a list", b"a: [unclosed", b"1: x", b"nonsense: {}", b"!!python/object/apply:os.getpid []"],
)
def test_a_file_that_can_not_be_read_is_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml") == load()


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("unix:/a/b", ("/a/b", 0)),
        ("h:65535", ("h", 65535)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", ":80", "host", "host:", "host:-1", "host:65536", "host:٣", "unix:"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError):
        split_address(address)
