"""The routes and the fields of the recorded /openapi.json, and requests that each of its routes takes.

They come from that file and not from the code, so that the requests that are made of them stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.e2e.test_boundaries import BASES
from tests.security.recorded.asking import OPENAPI, read_rows
from tests.security.recorded.corpus import JSON

SEED = 20_261_123


class Interface:
    """The recorded document, of a server without keys."""

    def __init__(self) -> None:
        self.document = next(read_rows(OPENAPI))["open"]
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
        ]

    def with_body(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(path, name of the body's type, the properties of its schema)."""
        for _, path, operation in self.operations:
            if "requestBody" in operation:
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                yield path, name, self.document["components"]["schemas"][name]["properties"]

    def types(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """As `with_body`, with the first route of each type alone."""
        seen = set()
        for path, name, properties in self.with_body():
            if name not in seen:
                seen.add(name)
                yield path, name, properties


def post(path: str, field: str, fault: str, body: bytes, /, **more: Any) -> dict[str, Any]:
    return {
        "route": f"POST {path}", "field": field, "fault": fault, "server": "open", "method": "POST", "path": path,
        "headers": tuple(JSON.items()), "body": body, **more,
    }  # fmt: skip


def base(name: str, without: str = "") -> list[str]:
    """The members of a body that is taken, as JSON."""
    given = json.loads("{" + BASES[name] + "}")
    return [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in given.items() if key != without]


def body_of(members: list[str]) -> bytes:
    return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")
