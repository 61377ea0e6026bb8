"""Format of log lines: one line each on stderr, as text or as JSON. The messages of warnings and errors are bounded,
because they may quote a file.

Each process calls `configure` once at its start, so that the engine's lines look like the server's.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from inferd.engine.arch.shown import clipped, cut

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}


class LogStyle(NamedTuple):
    """Level and format of the log, which the server passes to its engine."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


DEFAULT_STYLE = LogStyle()


class TextFormatter(logging.Formatter):
    """`08:15:30 info    what happened`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(level)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.level = f"{record.levelname.lower():<7}"
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = clipped(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Fields given as `extra` become keys of the object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": cut(record.getMessage()) if record.levelno >= logging.WARNING else record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure(style: LogStyle) -> None:
    """Send every logger of this process to stderr. Libraries log warnings and errors only, unless the level is
    debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style.format == "json" else TextFormatter())
    logging.root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[style.level.upper()]
    logging.root.setLevel(logging.DEBUG if style.level == "debug" else max(logging.WARNING, level))
    logging.getLogger("inferd").setLevel(level)


def counted(count: int, noun: str) -> str:
    """A count with its noun, whose plural ends in s: "1 answer", "2 answers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
