from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from xds.errors import DuplicateResourceError
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.snapshot import Resource, Snapshot, content_version
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE, SECRET, push_rank, short_name

POLICY = "type.googleapis.com/example.Policy"


def resource(name: str, body: bytes = b"", type_url: str = CLUSTER) -> Resource:
    return Resource(type_url, name, body, content_version(body))


def test_a_version_is_sixteen_hexadecimal_characters_of_the_body() -> None:
    message = Struct()
    message["a"] = 1
    made = Resource.of(POLICY, "x", message)
    assert made.version == content_version(made.body)
    assert len(made.version) == 16
    assert int(made.version, 16) >= 0


def test_equal_messages_give_equal_versions_whatever_the_order_of_their_maps() -> None:
    one, other = Struct(), Struct()
    names = [f"key{number}" for number in range(50)]
    for name in names:
        one[name] = name
    for name in reversed(names):
        other[name] = name
    assert Resource.of(POLICY, "x", one) == Resource.of(POLICY, "x", other)


def test_wire_is_a_field_of_a_response_and_made_once() -> None:
    made = resource("x", b"body")
    response = discovery_pb2.DeltaDiscoveryResponse.FromString(made.wire + resource("y", b"other").wire)
    assert [item.name for item in response.resources] == ["x", "y"]
    assert response.resources[0].version == made.version
    assert response.resources[0].resource.type_url == CLUSTER
    assert response.resources[0].resource.value == b"body"
    assert made.wire is made.wire


def test_a_name_twice_is_refused_and_named() -> None:
    with pytest.raises(DuplicateResourceError, match=r"two CDS resources are named 'x' \[MM1401\]"):
        Snapshot([resource("x"), resource("y"), resource("x", b"1")])


def test_one_name_in_two_types_is_fine() -> None:
    snapshot = Snapshot([resource("x"), resource("x", type_url=ENDPOINT)])
    assert set(snapshot.of_type(CLUSTER)) == set(snapshot.of_type(ENDPOINT)) == {"x"}


def test_equality_and_versions_do_not_depend_on_order() -> None:
    items = [resource("x", b"1"), resource("y", b"2"), resource("z", b"3", ENDPOINT)]
    one, other = Snapshot(items), Snapshot(reversed(items))
    assert one == other
    assert hash(one) == hash(other)
    assert one.version(CLUSTER) == other.version(CLUSTER)
    assert one != Snapshot(items[:2])
    assert one != "something else"


def test_what_a_snapshot_does_not_hold() -> None:
    snapshot = Snapshot()
    assert snapshot.of_type(CLUSTER) == {}
    assert snapshot.version(CLUSTER) == ""
    assert snapshot.type_urls == ()


def test_a_types_version_stands_for_names_and_bodies() -> None:
    versions = {
        Snapshot(items).version(CLUSTER)
        for items in (
            [resource("x", b"1")],
            [resource("x", b"2")],
            [resource("y", b"1")],
            [resource("x", b"1"), resource("y", b"1")],
        )
    }
    assert len(versions) == 4
    assert all(len(version) == 16 for version in versions)


def test_a_snapshot_can_not_be_changed() -> None:
    snapshot = Snapshot([resource("x")])
    with pytest.raises(TypeError):
        snapshot.of_type(CLUSTER)["y"] = resource("y")  # type: ignore[index]


contents = st.dictionaries(
    st.tuples(st.sampled_from((CLUSTER, ENDPOINT)), st.sampled_from("abcd")), st.binary(max_size=1)
)


@given(contents, contents)
def test_changed_since_names_exactly_what_differs(
    old: dict[tuple[str, str], bytes], new: dict[tuple[str, str], bytes]
) -> None:
    before = Snapshot(resource(name, body, url) for (url, name), body in old.items())
    after = Snapshot(resource(name, body, url) for (url, name), body in new.items())
    expected: dict[str, set[str]] = {}
    for url, name in old.keys() | new.keys():
        if old.get((url, name)) != new.get((url, name)):
            expected.setdefault(url, set()).add(name)
    assert after.changed_since(before) == expected
    assert (after == before) == (not expected)


def test_types_are_pushed_in_make_before_break_order() -> None:
    types = [POLICY, SECRET, ROUTE, LISTENER, ENDPOINT, CLUSTER]
    assert sorted(types, key=push_rank)[:4] == [CLUSTER, ENDPOINT, LISTENER, ROUTE]
    snapshot = Snapshot([resource("x", type_url=url) for url in types])
    assert snapshot.type_urls[:4] == (CLUSTER, ENDPOINT, LISTENER, ROUTE)


def test_short_names() -> None:
    assert short_name(CLUSTER) == "CDS"
    assert short_name(POLICY) == "Policy"
    assert short_name("") == ""
