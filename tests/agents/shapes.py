"""Requests of programs -> rows of data: one request of each shape, with long texts cut, and ids and folders replaced.

A shape is the set of a body's keys, with the texts under `type` and `role` and the kind of each value. A row has
`path` and `body`, without the model's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_TEXT, LONGEST_WHOLE = 60, 400
"""Letters of a text, and of one that only means something as a whole."""
_WHOLE = ("arguments", "data", "definition", "encrypted_content", "image_url", "input", "signature", "url")
_PLACES = (
    (
        re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        "00000000-0000-0000-0000-000000000000",
    ),
    (re.compile(r"/tmp/[a-z_]+-\w{8}"), "/home/agent"),
    (re.compile(r"[0-9a-f]{64}"), "0" * 64),
)


def write_rows(path: Path, requests: list[dict[str, Any]]) -> None:
    """Write the rows of the requests that were answered."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lines:
        for row in rows_of(requests):
            lines.write(json.dumps(row, sort_keys=True) + "\n")


def rows_of(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each POST request that has a shape, or a part of one, for the first time."""
    known: set[str] = set()
    for request in requests:
        if request["method"] != "POST" or request["status"] != 200:
            continue
        body = json.loads(request["body"])
        body.pop("model", None)
        shape = {f"{request['path']} {part}" for part in parts_of(body)}
        if not shape <= known:
            known |= shape
            yield {"path": request["path"], "body": trimmed(body)}


def parts_of(value: Any, place: str = "") -> Iterator[str]:
    """The parts of a value's shape."""
    match value:
        case dict():
            names = "/".join(str(value[key]) for key in ("type", "role") if isinstance(value.get(key), str))
            for key, below in value.items():
                # The parameters of a tool are a schema, whose keys are the tool's own.
                if key not in _SCHEMAS:
                    yield from parts_of(below, f"{place}.{key}({names})")
        case list():
            for below in value:
                yield from parts_of(below, f"{place}[]")
        case _:
            yield f"{place} {type(value).__name__}"


_SCHEMAS = ("parameters", "input_schema", "schema")


def trimmed(value: Any, key: str = "") -> Any:
    """The value with its texts cut. Of several items with one shape a list keeps the first and the last."""
    match value:
        case dict():
            return {name: trimmed(below, name) for name, below in value.items()}
        case list():
            return [trimmed(below, key) for below in _kept(value, key)]
        case str():
            for pattern, text in _PLACES:
                value = pattern.sub(text, value)
            if key == "arguments" and len(value) > LONGEST_WHOLE:
                return "{}"
            return value[: LONGEST_WHOLE if key in _WHOLE else LONGEST_TEXT]
    return value


def _kept(items: list[Any], key: str) -> list[Any]:
    """Of tools, one of each shape. Of all else every item: messages belong together, and schemas are short."""
    if key != "tools":
        return items
    first: dict[frozenset[str], Any] = {}
    for item in items:
        first.setdefault(frozenset(parts_of(item)), item)
    return list(first.values())
