"""A request's parameters are passed on whole: nothing copies them field by field. So a new field has three places: its
schema, its struct, its use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {*SamplingParams.__struct_fields__, *SchedulingParams.__struct_fields__}

SOURCES = {
    ("server/endpoints/respond.py", "tenant"),
    ("server/endpoints/responses/routes.py", "tenant"),
    ("server/generate/request.py", "arrival_s"),
    ("server/generate/request.py", "max_tokens"),
    ("server/generate/request.py", "tenant"),
    ("server/generate/request.py", "weight"),
}
"""Files that fill the structs, from the HTTP request, its client and its prompts."""


def copied(path: Path) -> Iterator[str]:
    """Each field `f` that the file passes on as `f=x.f`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.keyword(arg=str(name), value=ast.Attribute(attr=attribute)) if (
                name == attribute and name in FIELDS
            ):
                yield name


def test_no_field_of_a_request_is_relayed() -> None:
    files = [path for folder in ("server", "engine") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {(str(path.relative_to(ROOT)), name) for path in files for name in copied(path)}
    assert found == SOURCES


def test_a_relay_is_seen(tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text("Request(priority=submit.priority, max_tokens=n, is_echo=submit.is_echo)")
    assert list(copied(relay)) == ["priority"]
