"""YAML text to documents that remember the line of every value.

Why not ``yaml.safe_load``: it forgets lines, lets a repeated key win in silence, turns ``on`` and ``1:30`` into a
boolean and a number (YAML 1.1), and recurses as deep as the file says. Here PyYAML only splits the text into events;
values are built from those by the YAML 1.2 core schema (nothing but text, numbers, booleans, null, lists and
mappings), iteratively, with limits on depth and on the number of values that aliases may unfold into.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import yaml

from controlplane.errors import UnreadableError
from modalmesh.base.errors import Where

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_VALUES", "Document", "Path", "Value", "parse"]

Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"
Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the top of a document to a value."""

MAX_BYTES = 4 << 20
"""Of one file: about 40 000 endpoints."""

MAX_DEPTH = 64
"""Of nesting; the deepest supported document needs 10."""

MAX_VALUES = 500_000
"""Of one file, aliases unfolded: a small file with aliases of aliases must not fill the memory."""

# libyaml is eight times as fast; wheels for every platform that matters have it.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_TRUE = frozenset(("true", "True", "TRUE"))
_FALSE = frozenset(("false", "False", "FALSE"))
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_INF = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = frozenset((".nan", ".NaN", ".NAN"))
# Python refuses to read longer ones; none here has a meaning beyond 64 bits.
_LONGEST_INT = 40

_CORE = "tag:yaml.org,2002:"
_TAGS: Mapping[str, tuple[type, ...]] = {
    _CORE + "null": (type(None),),
    _CORE + "bool": (bool,),
    _CORE + "int": (int,),
    _CORE + "float": (int, float),
}


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document.

    Attributes:
        file: As it was found.
        line: Of its first value.
        value: Its content, a mapping.
        lines: Line of every value in it: of its key in a mapping, of itself in a list.
    """

    file: str
    line: int
    value: Mapping[str, Value]
    lines: Mapping[Path, int] = field(repr=False)

    def where(self, path: Path = ()) -> Where:
        """Return the place of a value, or of the nearest one around it that exists."""
        for end in range(len(path), 0, -1):
            line = self.lines.get(path[:end])
            if line is not None:
                return Where(self.file, line)
        return Where(self.file, self.line)


def parse(data: bytes, file: str) -> tuple[Document, ...]:
    """Read the documents of one file; empty ones are left out.

    Args:
        data: UTF-8 text, with or without byte order mark.
        file: Its name, for messages.

    Raises:
        UnreadableError: It is too large, not UTF-8, not YAML, repeats a key, nests too deeply, unfolds into too many
            values, or a document is not a mapping.
    """
    if len(data) > MAX_BYTES:
        raise UnreadableError(
            f"larger than {MAX_BYTES >> 20} MiB", hint="split it into several files", where=Where(file)
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableError("not UTF-8 text", hint="save it as UTF-8", where=Where(file, line)) from error
    try:
        return tuple(_documents(text, file))
    except yaml.YAMLError as error:
        raise _unreadable(error, text, file) from error
    except (ValueError, OverflowError, RecursionError) as error:
        # The parsers of PyYAML leak these on odd directives and escapes.
        raise UnreadableError(f"not YAML: {_one_line(error)}", where=Where(file)) from error


def _unreadable(error: yaml.YAMLError, text: str, file: str) -> UnreadableError:
    line = 0
    reason = _one_line(error)
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        reason = _one_line(error.problem or error.context or error)
    elif isinstance(error, yaml.reader.ReaderError):
        # Its position counts characters or bytes, depending on the parser; the character itself can be looked for.
        found = yaml.reader.Reader.NON_PRINTABLE.search(text)
        line = text.count("\n", 0, found.start()) + 1 if found else 0
        reason = f"character {found.group()!r} is not allowed" if found else str(error.reason)
    hint = "indent with spaces" if "\\t" in reason or "tab" in reason else ""
    return UnreadableError(f"not YAML: {reason}", hint=hint, where=Where(file, line))


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


@dataclass(slots=True)
class _Node:
    """A value before aliases are unfolded; ``items`` of a mapping alternate between key and value."""

    line: int
    scalar: Scalar = None
    items: list[_Node] | None = None
    mapping: bool = False
    anchor: str | None = None


class _Builder:
    """Events of one file → documents."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._stack: list[_Node] = []
        self._anchors: dict[str, _Node] = {}
        self._values = 0
        self._unfolded = 0
        self._root: _Node | None = None

    def error(self, what: str, line: int, hint: str = "") -> UnreadableError:
        return UnreadableError(what, hint=hint, where=Where(self._file, line))

    def feed(self, event: yaml.Event) -> Document | None:
        """Take one event; return a document when it ends one that has content."""
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.DocumentStartEvent):
            self._anchors, self._root = {}, None
        elif isinstance(event, yaml.DocumentEndEvent):
            return self._document() if self._root is not None else None
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self.error(f"alias *{event.anchor} stands for nothing that ends before it", line)
            self._add(self._anchors[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            node = _Node(line, scalar=self._scalar(event, line), anchor=event.anchor)
            self._add(node)
            self._remember(node)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            mapping = isinstance(event, yaml.MappingStartEvent)
            if event.tag not in (None, "!", _CORE + ("map" if mapping else "seq")):
                raise self._bad_tag(event.tag, line)
            node = _Node(line, items=[], mapping=mapping, anchor=event.anchor)
            self._add(node)
            self._stack.append(node)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._remember(self._stack.pop())
        return None

    def _add(self, node: _Node) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self.error(f"more than {MAX_VALUES} values", node.line, "split it into several files")
        if not self._stack:
            self._root = node
            return
        items = self._stack[-1].items
        assert items is not None  # noqa: S101 - only collections are on the stack
        items.append(node)

    def _remember(self, node: _Node) -> None:
        # Only what has ended can be referred to: a value inside itself has no end.
        if node.anchor:
            self._anchors[node.anchor] = node

    def _bad_tag(self, tag: str, line: int) -> UnreadableError:
        return self.error(f"tag {tag.replace(_CORE, '!!')} is not supported", line, "remove it")

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Scalar:
        text: str = event.value
        if event.tag in (_CORE + "str", "!") or (event.tag is None and event.style not in (None, "")):
            return text
        try:
            value = _core_schema(text)
        except ValueError as error:
            raise self.error(str(error), line, "put it in quotes if it is text") from error
        if event.tag is None:
            return value
        if event.tag not in _TAGS:
            raise self._bad_tag(event.tag, line)
        if type(value) not in _TAGS[event.tag]:
            raise self.error(f"{text[:40]!r} is not what its tag {event.tag.replace(_CORE, '!!')} says", line)
        return value

    def _document(self) -> Document:
        root = self._root
        assert root is not None  # noqa: S101 - the caller has looked
        if root.items is None and root.scalar is None:
            return Document(self._file, root.line, {}, {})
        if not root.mapping:
            raise self.error("the document is not a mapping", root.line, "begin with «apiVersion:» or «services:»")
        value: dict[str, Value] = {}
        lines: dict[Path, int] = {}
        # Aliases are unfolded here, each time they occur: that is what has to be counted.
        work: list[tuple[_Node, Path, dict[str, Value] | list[Value]]] = [(root, (), value)]
        while work:
            node, path, into = work.pop()
            if len(path) > MAX_DEPTH:
                raise self.error(f"nested more than {MAX_DEPTH} deep", node.line)
            for key, line, child in self._members(node):
                here = (*path, key)
                lines[here] = line
                self._unfolded += 1
                if self._unfolded > MAX_VALUES:
                    raise self.error(f"aliases unfold into more than {MAX_VALUES} values", line)
                made: Value = child.scalar
                if child.items is not None:
                    container: dict[str, Value] | list[Value] = {} if child.mapping else []
                    made = container
                    work.append((child, here, container))
                if isinstance(into, dict):
                    into[str(key)] = made
                else:
                    into.append(made)
        return Document(self._file, root.line, value, lines)

    def _members(self, node: _Node) -> Iterator[tuple[str | int, int, _Node]]:
        """Key or index, line and value of each; of a mapping only when its keys are text and differ."""
        items = node.items or []
        if not node.mapping:
            for index, item in enumerate(items):
                yield index, item.line, item
            return
        seen: dict[str, int] = {}
        for key, child in zip(items[::2], items[1::2], strict=True):
            name = key.scalar
            if key.items is not None or not isinstance(name, str):
                shown = "a collection" if key.items is not None else repr(name)
                raise self.error(f"key {shown} is not text", key.line, "put it in quotes")
            if name == "<<":
                raise self.error("merge keys («<<») are not supported", key.line, "write the fields out")
            if name in seen:
                raise self.error(f"key {name!r} is repeated, first on line {seen[name]}", key.line, "keep one of them")
            seen[name] = key.line
            yield name, key.line, child


def _documents(text: str, file: str) -> Iterator[Document]:
    builder = _Builder(file)
    for event in yaml.parse(text, Loader=_LOADER):
        document = builder.feed(event)
        if document is not None and document.value:
            yield document


def _core_schema(text: str) -> Scalar:
    """Resolve plain text by YAML 1.2.2 §10.3.2; ValueError: a number too long to mean one."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        if len(text) > _LONGEST_INT:
            raise ValueError(f"number {text[:20]}… is too long")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INF.fullmatch(text):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text in _NAN else text
