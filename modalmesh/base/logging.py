"""Structured logs on standard error: readable on a terminal, JSON elsewhere.

Secrets never reach a log: keys that look like one are masked here, once, for every process.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from typing import cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from modalmesh.base.settings import Log

__all__ = ["configure", "get_logger"]

_SECRET = re.compile(r"(authorization|password|secret|token|api_?key|cookie|private_?key)", re.IGNORECASE)


def _mask_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key in event:
        if _SECRET.search(key):
            event[key] = "[masked]"
    return event


class _DeafLogger:
    """Prints lines on standard error, and goes on when nobody reads them any more.

    Whoever started the process may be gone, and with it the pipe; a process that is told to stop then must not fail in
    saying so.
    """

    def __init__(self, *_name: str) -> None:
        self._stream = sys.stderr

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a full disk; a closed file
            print(message, file=self._stream, flush=True)

    log = debug = info = warning = error = critical = exception = failure = fatal = msg


def configure(settings: Log, process: str) -> None:
    """Set logging up for this process, once.

    Args:
        settings: Level and format.
        process: Its name, on every line of JSON; on a console whoever started the process says it.
    """
    console = settings.format == "console" or (settings.format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=40)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    # A console shows tracebacks itself.
    tracebacks: list[structlog.typing.Processor] = [] if console else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
            _mask_secrets,
            *tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.level.upper())),
        logger_factory=_DeafLogger,
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    if not console:
        structlog.contextvars.bind_contextvars(process=process)


def get_logger() -> FilteringBoundLogger:
    """Return the logger; call it when the module is imported."""
    return cast("FilteringBoundLogger", structlog.get_logger())
