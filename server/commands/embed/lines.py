"""The input of `inferd embed`: lines of text or of JSON, read one after another and never held all at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from inferd.engine.api.errors import ConfigError

MAX_LINE_BYTES = 32 * 2**20
"""Most bytes of a line. A longer one is most likely no text."""
_ENCODING = "utf-8"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input."""

    index: int
    raw: bytes
    """Its bytes, with the line break."""
    text: str = ""
    id: object = None
    """`id` of a line of JSON, which the output repeats."""
    error: str = ""
    """Fault of the line; empty if it has a text."""


def read_lines(stream: BinaryIO, field: str | None) -> Iterator[Line]:
    """`field`: each line is a JSON object whose text this is, or a JSON string; None: each line is a text. Raises
    `ConfigError` for a line that is too long to be one."""
    index = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise ConfigError(f"line {index + 1} has more than {MAX_LINE_BYTES:,} bytes: is the file a text?")
        yield _line(index, raw, field)
        index += 1


def _line(index: int, raw: bytes, field: str | None) -> Line:
    try:
        written = raw.decode(_ENCODING).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        return Line(index, raw, error=f"it is not UTF-8: {error.reason} at byte {error.start}")
    if field is None:
        return Line(index, raw, written, error="" if written else "it is empty")
    try:
        value = json.loads(written)
    except (ValueError, RecursionError) as error:
        return Line(index, raw, error=f"it is not JSON: {error}")
    if isinstance(value, str):
        return Line(index, raw, value, error="" if value else "it is an empty text")
    text = value.get(field) if isinstance(value, dict) else None
    line_id = value.get("id") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        return Line(index, raw, id=line_id, error=f"it has no text in '{field}' (--field names another)")
    return Line(index, raw, text, line_id)
