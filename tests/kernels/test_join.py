"""Joining columns equals plain PyTorch bit for bit."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.join import join

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(5,), (16, 8, 8), (1, 33), (128, 7, 64)])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
def test_equals_torch(dtype: torch.dtype, widths: tuple[int, ...], num_rows: int) -> None:
    parts = [torch.randn(num_rows, width).to(dtype) for width in widths]
    assert torch.equal(join(parts), torch.cat(parts, 1))
    wide = [torch.randn(num_rows, 2 * width).to(dtype)[:, ::2] for width in widths]
    assert torch.equal(join(wide), torch.cat(wide, 1))
    columns = [torch.randn(num_rows, 2 * width).to(dtype)[:, :width] for width in widths]
    assert torch.equal(join(columns), torch.cat(columns, 1))
