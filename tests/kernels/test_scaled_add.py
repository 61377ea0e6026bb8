"""Scaling and adding equal plain PyTorch bit for bit."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.scaled_add import added, reference, scaled

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.sampled(keep=12, of="triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (9, 8193), (2, 3, 40)])
@pytest.mark.parametrize("multiplier", [0.22, 1.0, -12.0])
def test_equals_torch(dtype: torch.dtype, shape: tuple[int, ...], multiplier: float) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    assert torch.equal(scaled(x, multiplier), reference(x, multiplier, None))
    assert torch.equal(added(x, residual), x + residual)
    x, residual = x[..., :17].mT, residual[..., :17].mT
    assert torch.equal(added(x, residual), x + residual)


def test_each_step_is_rounded() -> None:
    x, residual = torch.randn(2, 64, 64).to(torch.bfloat16)
    both = reference(x, 0.22, residual)
    assert torch.equal(added(scaled(x, 0.22), residual), both)
    assert not torch.equal((x.float() * 0.22 + residual.float()).to(torch.bfloat16), both)


def test_what_is_no_number_stays_so() -> None:
    x = torch.tensor([[float("nan"), float("inf"), 1.0]])
    assert scaled(x, 0.5).isnan().tolist() == [[True, False, False]]
