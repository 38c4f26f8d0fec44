"""Reading the mount table."""

from __future__ import annotations

from pathlib import Path

from bpf import places

MOUNTINFO = """\
22 28 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw
31 22 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu
32 22 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw
33 22 0:28 / /mnt/two\\040words rw - cgroup2 none rw
"""


def test_only_version_2() -> None:
    assert places.cgroup2_mounts(MOUNTINFO) == [Path("/sys/fs/cgroup/unified"), Path("/mnt/two words")]


def test_an_ordinary_directory_is_no_bpf_file_system(tmp_path: Path) -> None:
    assert not places.is_bpf_filesystem(tmp_path)
    assert not places.is_bpf_filesystem(tmp_path / "missing")
