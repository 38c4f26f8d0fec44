"""A directory of documents: which files belong to it, and whether they have changed.

Names that begin with a dot are left out: editors keep their backups there, and Kubernetes mounts a ConfigMap as links
into ``..data``, where each file would be found a second time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controlplane.documents import MAX_BYTES, Document, parse
from controlplane.errors import UnreadableError
from modalmesh.base.errors import DocumentError, Where

__all__ = ["MAX_FILES", "SUFFIXES", "Source", "read", "signature"]

MAX_FILES = 10_000
"""In one directory, all its folders together."""

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Source:
    """What a directory holds: the documents that could be read, and what is wrong with the rest."""

    documents: tuple[Document, ...]
    problems: tuple[DocumentError, ...]


def read(directory: Path) -> Source:
    """Read every ``*.yaml`` and ``*.yml`` file in a directory and its folders, in the order of their paths.

    Links are followed; a file or folder that is reached twice is read once.
    """
    documents: list[Document] = []
    problems: list[DocumentError] = []
    for path in _files(directory, problems):
        try:
            documents.extend(parse(_content(path), str(path)))
        except DocumentError as error:
            problems.append(error)
    return Source(tuple(documents), tuple(problems))


def signature(directory: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Return what changes whenever a file is added, removed, replaced or written: path, inode, size and both times."""
    found = []
    for path in _files(directory, []):
        try:
            info = path.stat()
        except OSError:
            continue  # removed since it was listed
        found.append((str(path), info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns))
    return tuple(found)


def _files(directory: Path, problems: list[DocumentError]) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()
    found = 0
    pending = [directory]
    while pending:
        path = pending.pop()
        try:
            info = path.stat()
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            if stat.S_ISDIR(info.st_mode):
                inside = sorted((item for item in path.iterdir() if not item.name.startswith(".")), reverse=True)
                pending.extend(inside)
                continue
        except OSError as error:
            if path == directory or path.suffix in SUFFIXES or path.is_dir():
                hint = "name a directory that exists" if path == directory else ""
                problems.append(UnreadableError(f"can't be read: {error.strerror}", hint=hint, where=Where(str(path))))
            continue
        if path == directory:
            problems.append(UnreadableError("not a directory", where=Where(str(path))))
        elif path.suffix in SUFFIXES:
            found += 1
            if found > MAX_FILES:
                problems.append(UnreadableError(f"more than {MAX_FILES} files", where=Where(str(directory))))
                return
            yield path


def _content(path: Path) -> bytes:
    """At most one byte more than is allowed, so that the parser refuses it by its size."""
    try:
        # A named pipe called x.yaml would block the open for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UnreadableError("not a regular file", where=Where(str(path)))
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableError(f"can't be read: {error.strerror}", where=Where(str(path))) from error
