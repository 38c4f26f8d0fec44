"""BTF: what can't be read is refused by name."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from bpf import btf
from bpf.errors import ObjectError

SOURCE = """
struct inner { int a; long b; };
struct outer {
    char first;
    union { struct { short in_struct; int deeper; }; long in_union; };
    struct inner named;
    unsigned bits : 3, more : 5;
    int last;
};
enum colour { RED = 7, GREEN = -1 };
struct outer one; enum colour two;
"""


@pytest.fixture
def types(tmp_path: Path) -> btf.Btf:
    source, target = tmp_path / "a.c", tmp_path / "a.o"
    source.write_text(SOURCE)
    subprocess.run(["clang", "-target", "bpf", "-g", "-O2", "-c", source, "-o", target], check=True, timeout=60)
    return btf.of_object(target.read_bytes())


def test_members_of_anonymous_members_count(types: btf.Btf) -> None:
    outer = types.structure("outer")
    assert outer.size == 40
    assert outer.offsets == {
        "first": 0,
        "in_struct": 8,
        "deeper": 12,
        "in_union": 8,
        "named": 16,
        "bits": 32,
        "more": 32,
        "last": 36,
    }


def test_enumerations_have_signs(types: btf.Btf) -> None:
    assert types.enumeration("colour") == {"RED": 7, "GREEN": -1}


def test_unknown_names(types: btf.Btf) -> None:
    with pytest.raises(KeyError):
        types.structure("colour")


@pytest.mark.parametrize("data", [b"", b"\x9f\xeb", struct.pack("=HBBIIIII", 1, 1, 0, 24, 0, 0, 0, 0)])
def test_what_is_no_btf(data: bytes) -> None:
    with pytest.raises(ObjectError):
        btf.Btf(data)


def test_a_kernel_that_doesn_t_describe_itself(tmp_path: Path) -> None:
    with pytest.raises(ObjectError, match="CONFIG_DEBUG_INFO_BTF"):
        btf.of_kernel(tmp_path / "vmlinux")
