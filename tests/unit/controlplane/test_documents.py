from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from controlplane import documents
from controlplane.documents import Document, parse
from controlplane.errors import UnreadableError
from modalmesh.base.errors import DocumentError, Where


def one(text: str) -> Document:
    (document,) = parse(text.encode(), "f.yaml")
    return document


def refused(text: str | bytes) -> UnreadableError:
    with pytest.raises(UnreadableError) as caught:
        parse(text if isinstance(text, bytes) else text.encode(), "f.yaml")
    assert caught.value.where is not None
    assert caught.value.where.file == "f.yaml"
    return caught.value


def line_of(error: DocumentError) -> int:
    assert error.where is not None
    return error.where.line


def test_every_value_has_a_line() -> None:
    document = one("# first\na: 1\nb:\n  - x: 2\n    y: {z: 3}\n  -\n    - 4\n")
    assert document.value == {"a": 1, "b": [{"x": 2, "y": {"z": 3}}, [4]]}
    assert document.lines == {
        ("a",): 2,
        ("b",): 3,
        ("b", 0): 4,
        ("b", 0, "x"): 4,
        ("b", 0, "y"): 5,
        ("b", 0, "y", "z"): 5,
        ("b", 1): 7,
        ("b", 1, 0): 7,
    }


def test_a_place_that_does_not_exist_is_that_of_what_is_around_it() -> None:
    document = one("a:\n  b:\n    c: 1\n")
    assert document.where(("a", "b", "missing", 3)) == Where("f.yaml", 2)
    assert document.where(("missing",)) == Where("f.yaml", 1)


def test_several_documents_each_know_their_line() -> None:
    found = parse(b"---\n# nothing\n---\na: 1\n---\n\nb: 2\n---\n~\n", "f.yaml")
    assert [(document.line, dict(document.value)) for document in found] == [(4, {"a": 1}), (7, {"b": 2})]


@pytest.mark.parametrize("text", ["", "---\n", "# only a comment\n", "\ufeff", "--- ~\n...\n"])
def test_empty_files_hold_no_document(text: str) -> None:
    assert parse(text.encode(), "f.yaml") == ()


def test_a_byte_order_mark_is_skipped() -> None:
    assert one("\ufeffa: 1").value == {"a": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8001", 8001),
        ("-3", -3),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        # Text in YAML 1.2, something else in 1.1.
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("1_000", "1_000"),
        ("'8001'", "8001"),
        ("!!str 8001", "8001"),
        ("! 8001", "8001"),
        ("!!int 8001", 8001),
        ("!!float 1", 1),
        ("v2.3", "v2.3"),
        ("|\n  two\n  lines", "two\nlines"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = one(f"a: {text}").value["a"]
    assert found == value
    assert type(found) is type(value)


def test_not_a_number() -> None:
    found = one("a: .nan").value["a"]
    assert isinstance(found, float)
    assert math.isnan(found)


def test_aliases_are_copies_and_keep_the_lines_of_what_they_stand_for() -> None:
    document = one("a: &x\n  b: 1\nc: *x\n")
    assert document.value == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.value["a"] is not document.value["c"]
    assert document.lines[("c",)] == 3
    assert document.lines[("c", "b")] == 2


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "key 'a' is repeated, first on line 1"),
        ("a:\n  - {x: 1, x: 2}\n", 2, "repeated"),
        ("a: 1\n? [1]\n: 2\n", 2, "not text"),
        ("a: 1\n1: 2\n", 2, "key 1 is not text"),
        ("a: 1\ntrue: 2\n", 2, "key True is not text"),
        ("- 1\n", 1, "not a mapping"),
        ("\n\ntext\n", 3, "not a mapping"),
        ("a: 1\nb: *x\n", 2, "alias *x"),
        ("a: &x\n  b: *x\n", 2, "alias *x"),
        ("x: &x {a: 1}\nb:\n  <<: *x\n", 3, "merge keys"),
        ("a: 1\nb: !!python/object:os.system x\n", 2, "tag !!python/object:os.system is not supported"),
        ("a: !thing {b: 1}\n", 1, "tag !thing"),
        ("a: !!int x\n", 1, "not what its tag"),
        ("a: !!bool 1\n", 1, "not what its tag"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "not YAML"),
        ("a: 1\n\tb: 2\n", 2, "not YAML"),
        ("a: 1\nb: \x07\n", 2, "'\\x07' is not allowed"),
        ("a: 1\nb: " + "9" * 5000, 2, "too long"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    error = refused(text)
    assert says in error.what
    assert line_of(error) == line


def test_text_that_is_not_utf8_is_refused_with_its_line() -> None:
    assert line_of(refused(b"a: 1\nb: \xff\n")) == 2


def test_a_large_file_is_refused() -> None:
    assert "larger" in refused(b"#" * (documents.MAX_BYTES + 1)).what


def test_deep_nesting_is_refused() -> None:
    assert "nested" in refused("a: " + "[" * 70 + "]" * 70).what
    assert "nested" in refused("".join(f"{' ' * depth}a:\n" for depth in range(70)) + " " * 70 + "b").what


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "a: &x "])
def test_very_deep_nesting_is_refused_quickly(opening: str) -> None:
    refused("a:\n" + opening * 200_000)


def test_nesting_through_aliases_is_refused() -> None:
    lines = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [[[[[[[[*a{i - 1}]]]]]]]]" for i in range(1, 12)]
    assert "nested" in refused("\n".join(lines)).what


def test_a_billion_laughs_are_refused() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "unfold" in refused("\n".join(lines)).what


def test_documents_share_the_limit_of_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_VALUES", 100)
    text = "a: &a [1, 2, 3, 4, 5, 6, 7, 8]\nb: [*a, *a, *a]\n"
    assert len(parse((text + "---\n").encode() * 2, "f.yaml")) == 2
    assert "unfold" in refused((text + "---\n") * 3).what


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=20),
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text("abcdef-", min_size=1, max_size=6).filter(lambda key: key.strip("-")), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "kind"]), _values, min_size=1), st.booleans())
def test_what_yaml_writes_is_read_back(value: dict[str, object], flow: bool) -> None:
    # Everything quoted and tagged: PyYAML decides by YAML 1.1 what needs quotes.
    text = yaml.safe_dump(value, allow_unicode=True, default_flow_style=flow, default_style='"')
    assert one(text).value == value


@given(st.binary(max_size=200))
def test_any_bytes_are_documents_or_a_document_error(data: bytes) -> None:
    check_only_document_errors(data)


_fragments = st.sampled_from(
    [
        *"ab:-?[]{},&*!|>%@#1~\n\t '\"",
        "\n  ",
        ": ",
        "- ",
        "---",
        "...",
        "!!",
        "<<:",
        "*a",
        "&a",
        "%YAML",
        "%TAG",
        "1.1",
        "\\x",
        "\ufeff",
        "\u2028",
        "\x00",
        "\r",
    ]
)


@given(st.lists(_fragments, max_size=40))
def test_any_pieces_of_yaml_are_documents_or_a_document_error(pieces: list[str]) -> None:
    check_only_document_errors("".join(pieces).encode())


def check_only_document_errors(data: bytes) -> None:
    problem: DocumentError | None = None
    try:
        found = parse(data, "f.yaml")
    except DocumentError as error:
        problem = error
    if problem is None:
        assert all(document.value for document in found)
        return
    assert "\n" not in str(problem)
    # YAML 1.1 has line breaks that are several bytes long.
    assert line_of(problem) <= len(data.decode("utf-8", "replace").splitlines()) + 2
