"""The rest of the server reads only the members of the router that are listed below.

The search is by name: an attribute of a variable `router`, or of an attribute `router` or `_router`, is a member that
the file reads.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MEMBERS: dict[str, tuple[str, ...]] = {
    # A request.
    "submit": ("server/generate",),
    "submit_choices": ("server/generate",),
    "check_queue": ("server/endpoints",),
    "adapters": ("server/endpoints", "server/generate"),
    "adapter_loading": ("server/endpoints",),
    "reset_prefix_cache": ("server/endpoints",),
    # The model: what it is doing, and what an operator asks of it.
    "lifecycle": ("server/endpoints", "server/lifecycle", "server/supervision"),
    "loading": ("server/endpoints", "server/lifecycle"),
    "sleeping": ("server/endpoints", "server/lifecycle"),
    "streams": ("server/endpoints", "server/lifecycle", "server/supervision"),
    "replicas": ("server/endpoints", "server/lifecycle", "server/supervision"),
    # The engines.
    "attach": ("server/supervision",),
    "run": ("server/supervision",),
    "recovery": ("server/supervision",),
    "hooks": ("server/lifecycle", "server/supervision"),
}
"""Member of the router -> the packages that read it."""
MOST = 15


def is_router(node: ast.expr) -> bool:
    match node:
        case ast.Name(id="router"):
            return True
        case ast.Attribute(value=value, attr="router" | "_router"):
            return not (isinstance(value, ast.Name) and value.id == "app")  # FastAPI's
    return False


def members(source: str) -> Iterator[str]:
    """Members of the router that a file reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_router(node.value):
            yield node.attr


def readers() -> dict[str, set[str]]:
    """Member -> packages outside `server/dispatch` that read it."""
    found = defaultdict(set)
    for path in sorted((ROOT / "server").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("server/dispatch/"):
            for member in members(path.read_text(encoding="utf-8")):
                found[member].add("/".join(name.split("/")[:2]))
    return found


def test_the_server_reads_few_members_and_each_where_it_belongs() -> None:
    assert readers() == {member: set(packages) for member, packages in MEMBERS.items()}
    assert len(MEMBERS) <= MOST


def test_the_search_sees_each_way_of_reading_one() -> None:
    source = "router.a; self._router.b; service.router.c(); model.router.d.e; app.router.f; x.routers.g"
    assert list(members(source)) and set(members(source)) == {"a", "b", "c", "d"}
