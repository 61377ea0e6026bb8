"""Which package may import which. The rules are data below; the test walks every import statement of the product.

A package may import itself, the standard library, and the names in its row. Imports inside functions count too, so that
no cycle is broken by a deferred import.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("server", "engine", "kernels")

SERVER_LIBRARIES = (
    "fastapi", "httptools", "httpx", "msgspec", "opentelemetry", "orjson", "packaging", "prometheus_client",
    "pydantic", "pydantic_core", "pydantic_settings",
    "rich", "starlette", "tokenizers", "typer", "typing_extensions", "click", "uvicorn", "uvloop", "yaml",
    "huggingface_hub",
    "transformers.tokenization_utils_tokenizers", "transformers.utils.chat_template_utils",
    "transformers.utils.chat_parsing", "jinja2", "anyio",
)  # fmt: skip

RULES: dict[str, tuple[str, ...]] = {
    "server": ("inferd.engine.api", *SERVER_LIBRARIES),
    "engine.arch.families": (
        "inferd.engine.arch.base", "inferd.engine.arch.description", "inferd.engine.arch.experts",
        "inferd.engine.arch.fields", "inferd.engine.arch.heads", "inferd.engine.arch.recurrent",
        "inferd.engine.arch.rope", "inferd.engine.arch.rotary",
        "inferd.engine.arch.tensors", "inferd.engine.arch.windows",
    ),
    "engine.arch.encoders": (
        "inferd.engine.arch.description", "inferd.engine.arch.encoder", "inferd.engine.arch.encoder_base",
        "inferd.engine.arch.encoder_tensors", "inferd.engine.arch.fields", "inferd.engine.arch.rope",
        "inferd.engine.arch.rotary", "inferd.engine.arch.windows",
    ),
    "engine.arch": (),
    "engine.api": (
        "inferd.engine.arch", "inferd.kernels.device", "msgspec", "zmq", "huggingface_hub", "pynvml", "xxhash",
    ),
    "engine.request": ("inferd.engine.api.wire.params",),
    "engine.cache": ("inferd.engine.request", "inferd.engine.arch.paging"),
    "engine.sched": (
        "inferd.engine.request", "inferd.engine.cache", "inferd.engine.api.wire.params",
        "inferd.engine.speculation.ports", "inferd.engine.api.speculation",
    ),
    "engine.speculation.ports": ("inferd.engine.request", "inferd.engine.grammar.ports"),
    "engine.speculation": ("inferd.engine.request", "inferd.engine.grammar.ports", "inferd.engine.api"),
    "engine.grammar.ports": (),
    "engine.grammar": ("inferd.engine.api", "llguidance", "msgspec", "tokenizers"),
    "engine.core.live_request": (
        "inferd.engine.api", "inferd.engine.grammar.ports", "inferd.engine.request", "inferd.engine.sched",
    ),
    "engine.core": (
        "inferd.engine.sched", "inferd.engine.cache", "inferd.engine.request", "inferd.engine.grammar.ports",
        "inferd.engine.api", "inferd.engine.worker.executor", "inferd.engine.speculation.ports",
    ),
    "engine.process.boot": (
        "inferd.engine.process.main", "inferd.engine.api.process.garbage", "inferd.engine.api.errors",
        "inferd.engine.models.meta_tensors", "inferd.engine.process.priority",
    ),
    "engine.process.priority": (),
    "engine.process.forker": ("inferd.engine.process.boot", "inferd.engine.models.meta_tensors"),
    "engine.process.host_store": ("inferd.engine.api", "inferd.engine.cache", "xxhash"),
    "engine.process.step_watch": ("inferd.engine.api",),
    "engine.process.standby": ("inferd.engine.api",),
    "engine.process": (
        "inferd.engine.core", "inferd.engine.grammar", "inferd.engine.api", "inferd.engine.sched",
        "inferd.engine.cache", "inferd.engine.worker", "inferd.engine.speculation", "inferd.engine.models.meta_tensors",
        "msgspec", "zmq",
    ),
    "engine.worker.executor": ("inferd.engine.sched.plan",),
    "engine.worker.followers": ("inferd.engine.sched.plan", "inferd.engine.api", "msgspec"),
    "engine.worker": (
        "inferd.engine.models", "inferd.engine.layers", "inferd.engine.lora", "inferd.engine.quant",
        "inferd.engine.sample", "inferd.engine.sched.plan", "inferd.engine.cache.ledger",
        "inferd.engine.api", "inferd.engine.arch", "inferd.kernels", "torch", "msgspec", "xxhash",
    ),
    "engine.models.meta_tensors": (),
    "engine.models": (
        "inferd.engine.api.checkpoint", "inferd.engine.api.pinned_files", "inferd.engine.api.sentence_folder",
        "inferd.engine.api.sentence_heads", "inferd.engine.api.weight_cache",
        "inferd.engine.arch", "inferd.engine.layers", "inferd.engine.quant",
        "inferd.kernels", "torch", "safetensors", "transformers",
    ),
    "engine.lora": (
        "inferd.engine.api.adapter", "inferd.engine.api.errors", "inferd.engine.api.pinned_files", "inferd.engine.arch",
        "inferd.kernels", "torch", "safetensors",
    ),
    "engine.layers": ("inferd.engine.quant", "inferd.kernels", "inferd.engine.arch", "torch"),
    "engine.quant": ("inferd.engine.api.pinned_files", "inferd.engine.arch", "inferd.kernels", "torch"),
    "engine.sample": ("inferd.kernels", "inferd.engine.api.wire.params", "torch"),
    "kernels.registry": (),
    "kernels.device": ("inferd.kernels.registry",),
    "kernels.cpu": ("torch",),
    "kernels.gpu": ("inferd.kernels.device", "inferd.kernels.ops", "torch", "triton"),
    "kernels.ops": (
        "inferd.kernels.cpu", "inferd.kernels.device", "inferd.kernels.gpu", "inferd.kernels.registry",
        "torch", "triton", "cudnn", "flash_attn", "flash_attn_interface", "flashinfer",
    ),
    "kernels.compile": ("inferd.kernels.device", "inferd.kernels.gpu", "triton"),
}  # fmt: skip

WINGS: dict[str, tuple[str, ...]] = {
    "run": ("cli", "commands", "lifecycle"),
    "http": ("endpoints", "playground", "transport"),
    "chat": ("generate", "text", "tools"),
    "fleet": ("supervision", "dispatch", "observability"),
    "base": ("config", "auth", "schema", "structured", "errors"),
}
"""The packages of the server, from the top down. One may import those of its own wing and of the wings below it."""

PURE = ("engine.arch", "engine.request", "engine.cache", "engine.sched", "engine.speculation")
"""Packages that may not import clocks, randomness or input and output from the standard library."""

IMPURE_MODULES = {"time", "random", "secrets", "datetime", "socket", "asyncio", "threading", "subprocess", "uuid", "io"}


def modules() -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def package_of(module: str) -> str | None:
    """The package of the longest rule that covers the module; None for packages that are only a folder."""
    matches = [package for package in RULES if module == package or module.startswith(package + ".")]
    return max(matches, key=len, default=None)


def imported(path: Path) -> tuple[str, ...]:
    """Every imported name in full. In `from a import b` both could be modules, so it gives `a.b`."""
    return _imported_by(path.read_text())


@functools.cache
def _imported_by(source: str) -> tuple[str, ...]:
    found = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import of {node.names[0].name} in {source[:100]!r}"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(module: str, path: Path) -> list[str]:
    package = package_of(module)
    found = []
    for name in imported(path):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            if package in PURE and top in IMPURE_MODULES:
                found.append(f"{module} is pure and imports {name}")
            continue
        allowed = RULES.get(package, ()) if package else ()
        own = f"inferd.{package}"
        if not (package and within(name, own)) and not any(within(name, prefix) for prefix in allowed):
            found.append(f"{module} ({package}) imports {name}")
    return found


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_module_imports_only_what_its_package_may(module: str, path: Path) -> None:
    assert violations(module, path) == []


def server_package(name: str) -> str:
    """The package of a module of the server, or of a name that it exports."""
    return name.removeprefix("inferd.").split(".")[1]


def server_imports() -> Iterator[tuple[str, str]]:
    """(importing package, imported package) for each import between two packages of the server."""
    for module, path in modules():
        if module.startswith("server."):
            for name in imported(path):
                if within(name, "inferd.server") and server_package(name) != server_package(module):
                    yield server_package(module), server_package(name)


def test_the_wings_hold_each_package_of_the_server_once() -> None:
    packages = {path.parent.name for path in (ROOT / "server").glob("*/__init__.py")} | {"cli"}
    assert sorted(package for wing in WINGS.values() for package in wing) == sorted(packages)


def test_a_wing_of_the_server_imports_only_downwards() -> None:
    height = {package: -depth for depth, wing in enumerate(WINGS.values()) for package in wing}
    upwards = {(package, target) for package, target in server_imports() if height[package] < height[target]}
    assert not upwards


def test_packages_of_the_server_form_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for package, target in server_imports():
        graph.setdefault(package, set()).add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_packages_export_nothing() -> None:
    """`engine.api.wire.params` loads without pyzmq, and so on: packages export nothing but an op's own signature, and
    what all Triton kernels need to list their forms."""
    for module, path in modules():
        if path.name == "__init__.py" and not module.startswith("kernels.ops.") and module != "kernels.gpu":
            assert imported(path) == (), f"{module} imports in its __init__"


def test_there_are_no_import_cycles() -> None:
    graph = {f"inferd.{module}": set(imported(path)) for module, path in modules()}
    edges = {
        module: {known for name in names for known in (name, name.rpartition(".")[0]) if known in graph} - {module}
        for module, names in graph.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for target in sorted(edges[module]):
            visit(target, (*trail, module))
        done.add(module)

    for module in sorted(edges):
        visit(module, ())


def test_the_walker_sees_a_violation(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    import torch\n    from inferd.engine.core.loop import EngineCore\n")
    assert len(violations("server.bad", bad)) == 2
    bad.write_text("import time\n")
    assert len(violations("engine.sched.bad", bad)) == 1
