"""Random inputs are the same in every run. One thread: these shapes are too small to share out.

Tests that use `implementation` run once with the plain PyTorch references, once with the Triton kernels in Triton's
interpreter, and once with the C++ kernels for each of the instruction sets that this processor has: the best of them,
all with `--long`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from inferd.kernels import gpu, native, registry
from tests.conftest import KERNEL_CACHE
from tests.kernels import interpreter

REFERENCE, TRITON = "reference", "triton"

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported, which is when it is first chosen


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        levels = native.runnable_levels()
        chosen = levels if metafunc.config.getoption("--long") else levels[:1]
        names = [REFERENCE, *dict.fromkeys(chosen)]
        if importlib.util.find_spec("triton") is not None:
            names.append(TRITON)
        metafunc.parametrize("implementation", names, indirect=True)


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """`reference`, or the level of the C++ kernels that run where they can."""
    name: str = request.param
    gpu.interpret(name == TRITON)
    if name == TRITON:
        interpreter.repair()
    if name not in (REFERENCE, TRITON):
        built = native.prepare(KERNEL_CACHE, name)
        if not native.has_compiler():
            pytest.skip(built.reason)
        assert built.path is not None, built.reason
    for op in registry.ops().values():
        op.force(name if name in op.implementation_names else None)
    yield name
    gpu.interpret(False)
    for op in registry.ops().values():
        op.force(None)
