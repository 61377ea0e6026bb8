"""Random inputs are the same in every run. One thread: these shapes are too small to share out.

Tests that use `implementation` run once with the plain PyTorch references and once with the C++ kernels for each of the
instruction sets that this processor has: the best of them, all with `--long`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inferd.kernels import native, registry
from tests.conftest import KERNEL_CACHE

REFERENCE = "reference"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        levels = native.runnable_levels()
        chosen = levels if metafunc.config.getoption("--long") else levels[:1]
        metafunc.parametrize("implementation", [REFERENCE, *dict.fromkeys(chosen)], indirect=True)


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """`reference`, or the level of the C++ kernels that run where they can."""
    name: str = request.param
    if name != REFERENCE:
        built = native.prepare(KERNEL_CACHE, name)
        if not native.has_compiler():
            pytest.skip(built.reason)
        assert built.path is not None, built.reason
    for op in registry.ops().values():
        op.force(REFERENCE if name == REFERENCE and REFERENCE in op.implementation_names else None)
    yield name
    for op in registry.ops().values():
        op.force(None)
