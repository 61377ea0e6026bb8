"""The input of `inferd embed`: lines of text or of JSON, read one after another and never held all at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from inferd.engine.api.errors import ConfigError

MAX_LINE_BYTES = 32 * 2**20
"""Most bytes of a line. A longer one is most likely no text."""
_MAX_LACKING = 20
"""Number of lines without the field, from the first on, after which the field is taken to be the wrong one."""
_MAX_KEYS = 200
"""Most characters of the names that an error lists."""
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
    lacks_field: bool = False
    """Whether the fault is that it is no JSON with the field that has the texts."""


def read_lines(stream: BinaryIO, field: str | None) -> Iterator[Line]:
    """`field`: each line is a JSON object whose text this is, or a JSON string; None: each line is a text. Raises
    `ConfigError` for a line that is too long to be one."""
    index = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise ConfigError(f"line {index + 1} has more than {MAX_LINE_BYTES:,} bytes: is the file a text?")
        yield _line(index, raw, field)
        index += 1


def check_field(lines: Iterator[Line], field: str | None) -> Iterator[Line]:
    """The same lines. Raises `ConfigError` if the first `_MAX_LACKING` all lack the field, or all lines of a shorter
    input. Reads no further than to the first line that does not."""
    first: list[Line] = []
    for line in lines:
        first.append(line)
        if not line.lacks_field or len(first) == _MAX_LACKING:
            break
    if first and first[-1].lacks_field:
        count = "the only line" if len(first) == 1 else f"the first {len(first)} lines"
        reason = f"line {first[0].index + 1}: {first[0].error}"
        raise ConfigError(f"no text in {count} of the input, as each needs a JSON object with '{field}' ({reason})")
    return chain(first, lines)


def _line(index: int, raw: bytes, field: str | None) -> Line:
    try:
        written = raw.decode(_ENCODING).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        return Line(index, raw, error=f"it is not UTF-8: {error.reason} at byte {error.start}")
    if field is None:
        return Line(index, raw, written, error="" if written else "it is empty")
    if not written.strip():
        return Line(index, raw, error="it is blank: each line needs a JSON object")
    try:
        value = json.loads(written)
    except (ValueError, RecursionError) as error:
        return Line(index, raw, error=f"it is not JSON: {error}", lacks_field=True)
    if isinstance(value, str):
        return Line(index, raw, value, error="" if value else "it is an empty text")
    if not isinstance(value, dict):
        return Line(index, raw, error="it is neither a JSON object nor a JSON string", lacks_field=True)
    text, line_id = value.get(field), value.get("id")
    if text == "":
        return Line(index, raw, id=line_id, error=f"its '{field}' is empty")
    if not isinstance(text, str):
        keys = ", ".join(f"'{key}'" for key, item in value.items() if isinstance(item, str) and item)
        hint = f": --field may name one of its texts, {keys[:_MAX_KEYS]}" if keys else ""
        return Line(index, raw, id=line_id, error=f"it has no text in '{field}'{hint}", lacks_field=True)
    return Line(index, raw, text, line_id)
