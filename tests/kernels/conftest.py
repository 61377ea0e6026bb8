"""Random inputs are the same in every run. One thread: these shapes are too small to share out.

Tests that use `implementation` run once with the plain PyTorch references, once with the Triton kernels in Triton's
interpreter, and once with the C++ kernels for each of the instruction sets that this processor has: the best of them,
all with `--long`. `--device interpreter` leaves the second of these and the tests that are of a Triton kernel alone;
`--device cuda` runs the same ones on a GPU, where kernels are compiled, and tensors are if nothing else is said.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu, native, registry
from inferd.kernels.paged_attention import AttentionBatch
from tests.conftest import KERNEL_CACHE
from tests.kernels import interpreter

REFERENCE, TRITON, COMPILED = "reference", "triton", "triton compiled"
"""What a test is told that it runs: interpreted Triton takes what is small, compiled Triton what C++ takes."""


def is_on_gpu(config: pytest.Config) -> bool:
    return bool(config.getoption("--device") == "cuda")


def is_triton_alone(config: pytest.Config) -> bool:
    return bool(config.getoption("--device") != "cpu")


def pytest_configure(config: pytest.Config) -> None:
    if not is_on_gpu(config):
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported: when it is first chosen


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        if is_triton_alone(metafunc.config):
            name = COMPILED if is_on_gpu(metafunc.config) else TRITON
            metafunc.parametrize("implementation", [name], indirect=True)
            return
        levels = native.runnable_levels()
        chosen = levels if metafunc.config.getoption("--long") else levels[:1]
        names = [REFERENCE, *dict.fromkeys(chosen)]
        if importlib.util.find_spec("triton") is not None:
            names.append(TRITON)
        metafunc.parametrize("implementation", names, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_triton_alone(config):
        return
    others = [item for item in items if not is_of_triton(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def is_of_triton(item: pytest.Item) -> bool:
    """Whether it runs a Triton kernel: by a fixture, or all of its file does."""
    return item.path.stem.endswith("_triton") or not {"implementation", "interpreted"}.isdisjoint(
        getattr(item, "fixturenames", ())
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """On a GPU a kernel refuses some forms that the interpreter takes, float32 on the tensor cores for one."""
    try:
        return (yield)
    except registry.KernelError as error:
        if is_on_gpu(item.config):
            pytest.skip(f"refused: {error}")
        raise


@pytest.fixture(autouse=True)
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With `--device cuda`: tensors are made on the GPU, and what is made on the host for it stays there."""
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
    """`reference`, or the level of the C++ kernels that run where they can."""
    name: str = request.param
    if name == COMPILED:
        yield from forced(name, TRITON)
        return
    gpu.interpret(name == TRITON)
    if name == TRITON:
        interpreter.repair()
    if name not in (REFERENCE, TRITON):
        built = native.prepare(KERNEL_CACHE, name)
        if not native.has_compiler():
            pytest.skip(built.reason)
        assert built.path is not None, built.reason
    yield from forced(name, name)
    gpu.interpret(False)


def forced(name: str, chosen: str) -> Iterator[str]:
    """`name`, while every op that has it runs in implementation `chosen` and no other."""
    for op in registry.ops().values():
        op.force(chosen if chosen in op.implementation_names else None)
    yield name
    for op in registry.ops().values():
        op.force(None)
