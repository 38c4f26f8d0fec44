"""Files of requests are checked before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from modalmesh.base.errors import MachineError, UsageError
from modalmesh.launcher.requests import Outcome, Request, Routed, read_requests


def test_the_quickstarts_file(root: Path) -> None:
    requests = read_requests(root / "deploy/examples/quickstart.requests.yaml")
    assert len(requests) == 10
    for request in requests:
        name, content = request.tensor()
        assert name in ("TEXT", "IMAGE")
        assert content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"requests: []",
        b"requests: [{expect: a}]",
        b"requests: [{text: a, picture: skimage/a.png, expect: a}]",
        b"requests: [{text: '', expect: a}]",
        b"requests: [{text: a}]",
        b"requests: [{text: a, expect: a, more: 1}]",
        b"requests: [{picture: ../../etc/passwd, expect: a}]",
        b"requests: [{picture: /etc/passwd, expect: a}]",
        b"[",
    ],
)
def test_a_bad_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "requests.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"requests\.yaml"):
        read_requests(path)


@pytest.mark.parametrize("picture", ["nopackage/a.png", "skimage/data/none.png"])
def test_a_picture_that_is_not_installed(picture: str) -> None:
    with pytest.raises(MachineError, match="not installed"):
        Request(picture=picture, expect="a").tensor()


def routed(service: str = "a", model: str = "m", reason: str = "matched") -> Routed:
    return Routed(service, model, "text", reason, 0.5, "b", 0.1, 1.0, 2.0)


def test_right_means_the_routers_word_and_the_backends() -> None:
    request = Request(text="x", expect="a")
    assert Outcome(request, routed(), "m", "").right
    assert not Outcome(request, routed(service="b"), "m", "").right
    assert not Outcome(request, routed(reason="default"), "m", "").right
    assert not Outcome(request, routed(), "other", "").right
    assert not Outcome(request, routed(model=""), "", "failed").right
    assert not Outcome(request, None, "m", "").right
