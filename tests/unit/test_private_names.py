"""The libraries still have every name of theirs that we use and that they may drop without notice.

Such names are private ones, and what our subclasses take from a library's class. The test reads them from our sources.
If one is gone, it says which library lost which name, and which files of ours use it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in ("server", "engine", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
PROTOCOL = "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol"
CYCLE = "uvicorn.protocols.http.httptools_impl.RequestResponseCycle"
OURS_TOO = {
    "server/transport/connection.py": (
        f"{PROTOCOL}.access_log", f"{PROTOCOL}.cycle", f"{PROTOCOL}.flow", f"{PROTOCOL}.timeout_keep_alive_task",
        f"{CYCLE}.body", f"{CYCLE}.disconnected", f"{CYCLE}.message_event", f"{CYCLE}.response_complete",
        f"{CYCLE}.response_started", f"{CYCLE}.scope",
    ),
    "server/transport/uvicorn_server.py": (
        "uvicorn.Server.capture_signals", "uvicorn.Server.force_exit", "uvicorn.server.ServerState.connections",
        "uvicorn.server.ServerState.default_headers", "uvicorn.Config.encoded_headers",
        "uvicorn.Config.timeout_graceful_shutdown",
    ),
    "kernels/cpu/tape.py": ("torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",),
}  # fmt: skip
"""Names that the sources do not show to be a library's: our subclasses define them anew, or we read
them from an object of the library."""


def library_of(name: str) -> str:
    return name.partition(".")[0]


@cache
def read(source: str) -> tuple[dict[str, str], tuple[ast.ClassDef, ...]]:
    """({name in `source`: the library's full name of it}, the classes)."""
    found, classes = {}, list[ast.ClassDef]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {library_of(alias.name): library_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            classes.append(node)
    own = ("inferd", *sys.stdlib_module_names)
    return {name: full for name, full in found.items() if library_of(full) not in own}, tuple(classes)


@cache
def called_by_text() -> re.Pattern[str]:
    """Matches a private name of one of our libraries that is called, also in a program that is text."""
    libraries = {library_of(full) for source in SOURCES.values() for full in read(source)[0].values()}
    return re.compile(rf"(?<![\w.])(?:{'|'.join(sorted(libraries))})(?:\.\w+)*\._[a-z]\w*(?=\()")


def private_names(source: str) -> Iterator[str]:
    """Names with a part that begins with an underscore, also in programs that `source` holds as text."""
    yield from (full for full in read(source)[0].values() if re.search(r"\._[a-z]", full))
    yield from called_by_text().findall(source)


def inherited_names(source: str) -> Iterator[str]:
    """Names that a class in `source` takes from a library's class."""
    known, classes = read(source)
    for node in classes:
        if len(node.bases) != 1:
            continue
        root, dot, rest = ast.unparse(node.bases[0]).partition(".")
        # Attributes of a pydantic model are our own fields.
        if root in known and library_of(known[root]) != "pydantic":
            yield from (f"{known[root]}{dot}{rest}.{name}" for name in _taken(node))


def _taken(node: ast.ClassDef) -> set[str]:
    """Attributes of `self` that the class uses but does not make, and those of `super()`."""
    made = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    made |= {name.id for item in node.body for name in ast.walk(item)
             if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(name, ast.Name)}  # fmt: skip
    used, above = set(), set()
    for item in ast.walk(node):
        match item:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                made.add(attr)
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                used.add(attr)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=attr) if attr != "__init__":
                above.add(attr)
    return (used - made) | above


@cache
def uses() -> dict[str, list[str]]:
    """Name of a library -> our files that use it."""
    found = defaultdict(set)
    for file, source in SOURCES.items():
        for name in (*private_names(source), *inherited_names(source), *OURS_TOO.get(file, ())):
            found[name].add(file)
    return {name: sorted(files) for name, files in sorted(found.items())}


def is_there(name: str) -> bool:
    """Whether the library has it. A class also has what its methods make of `self`."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = resolve_name(path)
    except (AttributeError, ImportError):
        return False
    if not inspect.isclass(owner):
        return hasattr(owner, attribute)
    makes = re.compile(rf"\bself\.{attribute}\b(?:: [^=\n]+)? =|^    {attribute}: ", re.MULTILINE)
    classes = [part for part in owner.__mro__ if library_of(part.__module__) == library_of(name)]
    return hasattr(owner, attribute) or any(makes.search(inspect.getsource(part)) for part in classes)


def test_the_libraries_still_have_them_all() -> None:
    assert [how_to_mend(name) for name in uses() if not is_there(name)] == []


def how_to_mend(name: str) -> str:
    library = library_of(name)
    distribution = metadata.packages_distributions()[library][0]
    return (
        f"{distribution} {metadata.version(distribution)} has no {name.removeprefix(library + '.')}, "
        f"used by {' and '.join(uses()[name])}: use what replaced it, or change the bounds in pyproject.toml"
    )


def test_the_search_finds_each_way_of_using_one() -> None:
    """Imported, called, called in a program that is text, inherited as a method, and made by a base class."""
    known = {
        "uvicorn._types.ASGI3Application": "server/transport/connection.py",
        "transformers.utils.chat_template_utils._compile_jinja_template": "server/text/rendering.py",
        "torch._scaled_mm": "kernels/ops/linear_fp8/cuda.py",
        "torch.ops.mkldnn._is_mkldnn_bf16_supported": "server/commands/doctor.py",
        "llguidance.gbnf_to_lark.GrammarParser._parse_char": "engine/grammar/gbnf.py",
        f"{PROTOCOL}._unset_keepalive_if_required": "server/transport/connection.py",
        f"{PROTOCOL}.headers": "server/transport/connection.py",
        "uvicorn.Server.server_state": "server/transport/uvicorn_server.py",
    }
    assert {name: file for name, file in known.items() if file not in uses().get(name, ())} == {}


@pytest.mark.parametrize("name", ["torch._gone", "torch.gone._x", "uvicorn.Server._gone", f"{PROTOCOL}.gone"])
def test_a_name_that_is_gone_is_seen(name: str) -> None:
    assert not is_there(name)
