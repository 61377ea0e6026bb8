"""Fixtures of the kernels' tests. Random inputs are the same in every run, on one thread: the shapes are too small to
share.

Tests that use `implementation` run three times: with the plain PyTorch references, with the Triton kernels in Triton's
interpreter, and with the C++ kernels. The latter are those for this processor's best instruction set, or with `--long`
for each that it has. A file with `HAS_TRITON = False` runs no Triton kernel. `--device interpreter` runs only the
interpreted ones, and tests of Triton kernels alone. `--device cuda` runs the same tests on a GPU: kernels are compiled
there, and tensors are made there by default.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu, registry
from inferd.kernels.cpu import library, native
from inferd.kernels.ops.paged_attention import AttentionBatch
from tests.conftest import KERNEL_CACHE
from tests.kernels import interpreter

REFERENCE, TRITON, COMPILED = "reference", "triton", "triton compiled"
"""Names of what a test runs. Interpreted Triton gets small cases, compiled Triton the cases of C++."""


def is_on_gpu(config: pytest.Config) -> bool:
    return bool(config.getoption("--device") == "cuda")


def is_triton_alone(config: pytest.Config) -> bool:
    return bool(config.getoption("--device") != "cpu")


def pytest_configure(config: pytest.Config) -> None:
    if not is_on_gpu(config):
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported, at the kernel's first use


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        has_triton = getattr(metafunc.module, "HAS_TRITON", True)
        if is_triton_alone(metafunc.config):
            name = COMPILED if is_on_gpu(metafunc.config) else TRITON
            metafunc.parametrize("implementation", [name] if has_triton else [], indirect=True)
            return
        levels = library.runnable_levels()
        chosen = levels if metafunc.config.getoption("--long") else levels[:1]
        names = [REFERENCE, *dict.fromkeys(chosen)]
        if has_triton and importlib.util.find_spec("triton") is not None:
            names.append(TRITON)
        metafunc.parametrize("implementation", names, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that interpret Triton are `recorded`, except those of files with `IS_RECORDED = False`, which import more
    than the record covers."""
    interprets = item.path.stem.endswith("_triton") or "interpreted" in getattr(item, "fixturenames", ())
    callspec = getattr(item, "callspec", None)
    if callspec and callspec.params.get("implementation") in (TRITON, COMPILED):
        interprets = True
    if interprets and getattr(item.getparent(pytest.Module).obj, "IS_RECORDED", True):  # type: ignore[union-attr]
        item.add_marker(pytest.mark.recorded("kernels"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_triton_alone(config):
        return
    others = [item for item in items if not is_of_triton(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def is_of_triton(item: pytest.Item) -> bool:
    """Whether the test runs a Triton kernel, by a fixture or because its whole file does."""
    return item.path.stem.endswith("_triton") or not {"implementation", "interpreted"}.isdisjoint(
        getattr(item, "fixturenames", ())
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip tests whose form a kernel refuses on a GPU and not in the interpreter, such as float32 on the tensor
    cores."""
    try:
        return (yield)
    except registry.KernelError as error:
        if is_on_gpu(item.config):
            pytest.skip(f"refused: {error}")
        raise


@pytest.fixture(autouse=True)
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With `--device cuda`: make tensors on the GPU, and keep those on the host that are made on the host for it."""
    if not is_on_gpu(request.config):
        yield
        return
    build = AttentionBatch.build

    def build_there(rows: Sequence[tuple[int, int]], tables: Tensor, block_size: int, _: Any, **options: Any) -> Any:
        with torch.device("cpu"):
            return build(rows, tables, block_size, tables.device, **options)

    monkeypatch.setattr(AttentionBatch, "build", build_there)
    with torch.device("cuda"):
        yield


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """`reference`, the Triton names, or the level of the C++ kernels."""
    name: str = request.param
    if name == COMPILED:
        yield from forced(name, TRITON)
        return
    gpu.interpret(name == TRITON)
    if name == TRITON:
        interpreter.repair()
    if name not in (REFERENCE, TRITON):
        built = native.prepare(KERNEL_CACHE, name)
        if not library.has_compiler():
            pytest.skip(built.reason)
        assert built.path is not None, built.reason
    yield from forced(name, name)
    gpu.interpret(False)


def forced(name: str, chosen: str) -> Iterator[str]:
    """Yields `name`, while every op that has implementation `chosen` runs it and no other."""
    for op in registry.ops().values():
        op.force(chosen if chosen in op.implementation_names else None)
    yield name
    for op in registry.ops().values():
        op.force(None)
