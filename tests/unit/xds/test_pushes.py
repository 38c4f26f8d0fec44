from __future__ import annotations

from xds.pushes import Form, Pushes
from xds.snapshot import Resource, content_version
from xds.types import CLUSTER, ENDPOINT


def resource(name: str, body: bytes = b"") -> Resource:
    return Resource(CLUSTER, name, body, content_version(body))


def test_equal_content_is_one_response() -> None:
    pushes = Pushes()
    first = pushes.response(Form.DELTA, CLUSTER, "v", (resource("a"),), ("b",), after=0)
    assert pushes.response(Form.DELTA, CLUSTER, "v", (resource("a"),), ("b",), after=0) is first


def test_different_content_has_another_number() -> None:
    pushes = Pushes()
    made = [
        pushes.response(Form.DELTA, CLUSTER, "v", (resource("a"),), (), after=0),
        pushes.response(Form.DELTA, CLUSTER, "v", (resource("a", b"1"),), (), after=0),
        pushes.response(Form.DELTA, CLUSTER, "v", (), ("a",), after=0),
        pushes.response(Form.DELTA, CLUSTER, "w", (), ("a",), after=0),
        pushes.response(Form.DELTA, ENDPOINT, "w", (), ("a",), after=0),
    ]
    assert len({response.nonce for response in made}) == len(made)


def test_a_stream_never_gets_a_number_that_it_had() -> None:
    pushes = Pushes()
    first = pushes.response(Form.DELTA, CLUSTER, "v", (), (), after=0)
    second = pushes.response(Form.DELTA, CLUSTER, "v", (), (), after=first.number)
    assert second.number > first.number
    assert pushes.response(Form.DELTA, CLUSTER, "v", (), (), after=first.number) is second


def test_what_is_remembered_is_bounded() -> None:
    pushes = Pushes()
    first = pushes.response(Form.DELTA, CLUSTER, "0", (), (), after=0)
    for number in range(1, 600):
        pushes.response(Form.DELTA, CLUSTER, str(number), (), (), after=0)
    assert len(pushes._recent) <= 512
    assert pushes.response(Form.DELTA, CLUSTER, "0", (), (), after=0) is not first
