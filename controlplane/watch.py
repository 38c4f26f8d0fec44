"""When a directory of documents may have changed.

The kernel's notifications come within milliseconds but not always: not through links that lead out of the directory,
not over NFS, not after the directory itself was replaced. So once a second the files' times and sizes are compared too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import watchfiles

from controlplane.directory import SUFFIXES, signature
from modalmesh.base.logging import get_logger

__all__ = ["Signature", "changes"]

_log = get_logger()

Signature = tuple[tuple[str, int, int, int, int], ...]

_STEP_MS: Final = 10
"""An editor's truncating, writing and renaming is one change. More than that is merged by the snapshot store, so
that a single change does not wait."""

_COMPARE_MS: Final = 1000


async def changes(directory: Path, since: Signature, stop: asyncio.Event) -> AsyncIterator[None]:
    """Yield whenever the documents may have changed, until ``stop`` is set.

    Args:
        directory: May vanish and come back.
        since: Signature from before the documents were last read, so that nothing is missed in between.
        stop: Ends the iteration.
    """
    last = since
    while not stop.is_set():
        identity = _identity(directory)
        async for notified in _notifications(directory, stop, watch=identity is not None):
            now = await asyncio.to_thread(signature, directory)
            if notified or now != last:
                last = now
                yield
            if stop.is_set() or _identity(directory) != identity:
                break  # another directory has its name now: watch that one


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        info = directory.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


async def _notifications(directory: Path, stop: asyncio.Event, *, watch: bool) -> AsyncIterator[bool]:
    """Yield True when a document was touched, False once a second when not."""
    if watch:
        try:
            async for events in watchfiles.awatch(
                directory,
                watch_filter=None,
                debounce=_STEP_MS,
                step=_STEP_MS,
                stop_event=stop,
                rust_timeout=_COMPARE_MS,
                yield_on_timeout=True,
            ):
                yield any(path.endswith(SUFFIXES) for _, path in events)
        except (OSError, RuntimeError) as error:
            # The limit on inotify watches, for example.
            _log.warning("the kernel can't tell when documents change; looking once a second", reason=str(error))
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), _COMPARE_MS / 1000)
        except TimeoutError:
            yield False
