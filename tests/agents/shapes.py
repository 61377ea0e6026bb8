"""Requests of programs -> rows of data: one request of each shape, with long texts cut, and ids and folders replaced.

A shape is the set of a body's keys, with the texts under `type` and `role` and the kind of each value. Of a schema of
arguments only the keywords count. A row has `path` and `body`, without the model's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_TEXT = 60
"""Letters."""
_WHOLE = ("arguments", "data", "definition", "encrypted_content", "image_url", "signature", "url")
"""Texts that mean something only as a whole."""
_SCHEMAS = ("parameters", "input_schema", "schema")
_HOME = re.compile(r"/tmp/[a-z_]+-\w{8}\b")
_ID = re.compile(r"\b([a-z]+_)?(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{24,})\b")


def write_rows(path: Path, requests: list[dict[str, Any]]) -> None:
    """Write the rows of the requests that were answered."""
    path.parent.mkdir(exist_ok=True)
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        return f"{found[1] or 'id_'}{numbers.setdefault(found[0], len(numbers) + 1)}"

    with path.open("w") as lines:
        for row in rows_of(requests):
            # Before the texts are cut: a part of an id, or of a folder's name, would be a new one in each record.
            line = _ID.sub(numbered, _HOME.sub("/home/agent", json.dumps(row)))
            lines.write(json.dumps(trimmed(json.loads(line)), sort_keys=True) + "\n")


def rows_of(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each POST request that has a shape, or a part of one, for the first time. Its texts are whole."""
    known: set[str] = set()
    for request in requests:
        if request["method"] != "POST" or request["status"] != 200:
            continue
        body = json.loads(request["body"])
        body.pop("model", None)
        if "previous_response_id" in body or any(item.get("type") == "item_reference" for item in items_of(body)):
            continue  # another server does not hold what it refers to
        shape = {f"{request['path']} {part}" for part in parts_of(body)}
        if not shape <= known:
            known |= shape
            yield {"path": request["path"], "body": body}


def items_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of the input of a request to Responses."""
    given = body.get("input")
    return given if isinstance(given, list) else []


def parts_of(value: Any, place: str = "") -> Iterator[str]:
    """The parts of a value's shape."""
    match value:
        case dict():
            names = "/".join(str(value[key]) for key in ("type", "role") if isinstance(value.get(key), str))
            for key, below in value.items():
                inside = keywords_of(below) if key in _SCHEMAS else parts_of(below, f"{place}.{key}({names})")
                yield from inside
        case list():
            for below in value:
                yield from parts_of(below, f"{place}[]")
        case _:
            yield f"{place} {type(value).__name__}"


def keywords_of(schema: Any) -> Iterator[str]:
    """The keywords of a JSON schema, with the kinds of their values."""
    match schema:
        case dict():
            for key, below in schema.items():
                yield f"schema {key} {type(below).__name__}"
                inside = below.values() if key in ("properties", "$defs", "definitions") else [below]
                for each in inside:
                    yield from keywords_of(each)
        case list():
            for below in schema:
                yield from keywords_of(below)


def trimmed(value: Any, key: str = "") -> Any:
    """The value with its texts cut, and with those tools that add to the shape."""
    match value:
        case dict():
            return {name: trimmed(below, name) for name, below in value.items()}
        case list() if key == "tools":
            known: set[str] = set()
            kept = [item for item in value if not known.issuperset(parts_of(item)) and not known.update(parts_of(item))]
            return [trimmed(item) for item in kept]
        case list():
            return [trimmed(below, key) for below in value]
        case str() if key not in _WHOLE:
            return value[:LONGEST_TEXT]
    return value
