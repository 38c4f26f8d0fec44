from __future__ import annotations

import os
from pathlib import Path

import pytest

from controlplane import directory
from controlplane.directory import read, signature

GOOD = "a: 1\n"


def names(root: Path) -> list[str]:
    return [str(Path(document.file).relative_to(root)) for document in read(root).documents]


def test_files_are_found_in_folders_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("z.yaml", "a.yml", "b/c.yaml", "readme.md", "b/d.json"):
        (tmp_path / name).write_text(GOOD)
    assert names(tmp_path) == ["a.yml", "b/c.yaml", "z.yaml"]


def test_hidden_names_are_left_out(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.yaml").write_text(GOOD)
    (tmp_path / ".b.yaml").write_text(GOOD)
    assert names(tmp_path) == []


def test_a_mounted_config_map_is_read_once(tmp_path: Path) -> None:
    data = tmp_path / "..2026"
    data.mkdir()
    (data / "a.yaml").write_text(GOOD)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    assert names(tmp_path) == ["a.yaml"]


def test_links_in_a_loop_end(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self.yaml").symlink_to("self.yaml")
    source = read(tmp_path)
    assert [Path(document.file).name for document in source.documents] == ["a.yaml"]
    assert [Path(problem.where.file).name for problem in source.problems if problem.where] == ["self.yaml"]


def test_one_bad_file_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [")
    (tmp_path / "b.yaml").write_text(GOOD)
    (tmp_path / "c.yaml").symlink_to("nowhere")
    os.mkfifo(tmp_path / "d.yaml")
    source = read(tmp_path)
    assert [Path(document.file).name for document in source.documents] == ["b.yaml"]
    assert [Path(problem.where.file).name for problem in source.problems if problem.where] == [
        "a.yaml",
        "c.yaml",
        "d.yaml",
    ]


def test_a_directory_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    (problem,) = read(tmp_path / "no").problems
    assert "No such file" in problem.what
    (tmp_path / "file").write_text(GOOD)
    (problem,) = read(tmp_path / "file").problems
    assert problem.what == "not a directory"


def test_too_many_files_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text(GOOD)
    (problem,) = read(tmp_path).problems
    assert "more than 2 files" in problem.what


def test_the_signature_changes_with_every_file(tmp_path: Path) -> None:
    seen = {signature(tmp_path)}
    file = tmp_path / "a.yaml"
    file.write_text(GOOD)
    seen.add(signature(tmp_path))
    file.write_text(GOOD + "b: 2\n")
    seen.add(signature(tmp_path))
    other = tmp_path / "new"
    other.write_text("a: 2\nb: 2\n")
    other.replace(file)
    seen.add(signature(tmp_path))
    assert len(seen) == 4
    (tmp_path / "readme.md").write_text("no document")
    assert signature(tmp_path) in seen
