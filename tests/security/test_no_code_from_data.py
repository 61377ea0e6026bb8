"""No data from the wire or a disk can become code. The product contains no call that could do it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted(path for room in ("server", "engine", "kernels") for path in (ROOT / room).rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "yaml.load_all", "os.system", "os.popen", "builtins.eval", "builtins.exec",
}  # fmt: skip
FORBIDDEN_METHODS = {"send_pyobj", "recv_pyobj"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` for an attribute chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    name = dotted(node.func)
    if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_METHODS:
        yield name
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg in ("shell", "trust_remote_code") and not (isinstance(value, ast.Constant) and not value.value):
            yield f"{name}({keyword.arg}=...)"


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_product_holds_no_such_call(path: Path) -> None:
    assert list(offences(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "eval('1')", "import torch\ntorch.load('x')", "yaml.load(text)",
        "subprocess.run('ls', shell=True)", "load(path, trust_remote_code=True)", "load(path, trust_remote_code=flag)",
        "socket.recv_pyobj()", "__import__(name)",
    ],
)  # fmt: skip
def test_the_gate_sees_each_kind(source: str) -> None:
    assert list(offences(source))
