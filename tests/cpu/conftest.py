"""Settings of these tests: the same random inputs in every run, no gradients, and one thread for such small shapes.

The C++ kernels compute, as in a server. `--kernels reference` uses plain PyTorch, which serves if there is no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inferd.kernels.cpu import native
from tests.conftest import KERNEL_CACHE


def pytest_itemcollected(item: pytest.Item) -> None:
    """All tests are `recorded`, except those of files with `IS_RECORDED = False`, which import more than the record
    covers."""
    if getattr(item.getparent(pytest.Module).obj, "IS_RECORDED", True):  # type: ignore[union-attr]
        item.add_marker(pytest.mark.recorded("models", keep=3))


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> str:
    """Kernels in use: "cpp", or "reference" with `--kernels reference` or without a compiler."""
    if request.config.getoption("--kernels") == "reference":
        return "reference"
    return "cpp" if native.prepare(KERNEL_CACHE).path else "reference"


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
