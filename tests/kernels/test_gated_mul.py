"""Gated activations agree with torch's own in fp64, and each element has the same bits in any shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inferd.kernels.ops.gated_mul import gelu_erf_mul, gelu_mul, limited_mul, silu_mul

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
Gate = Callable[[Tensor], Tensor]
limited: Gate = partial(limited_mul, limit=5.0, alpha=1.702)
ORACLES: dict[Gate, Callable[[Tensor, Tensor], Tensor]] = {
    silu_mul: lambda gate, up: functional.silu(gate) * up,
    gelu_mul: lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    gelu_erf_mul: lambda gate, up: functional.gelu(gate) * up,
    limited: lambda gate, up: (up.clamp(-5.0, 5.0) + 1) * functional.silu(1.702 * gate.clamp(max=5.0)) / 1.702,
}


def oracle(gate: Gate, gate_up: Tensor) -> Tensor:
    wide = gate_up.double()
    half = wide.shape[-1] // 2
    return ORACLES[gate](wide[..., :half], wide[..., half:])


def error(result: Tensor, expected: Tensor) -> float:
    return float(((result.double() - expected).abs() / (expected.abs() + 1)).max())


@pytest.mark.parametrize("gate", ORACLES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 66), (7, 1024)])
def test_equals_torch_in_fp64(gate: Gate, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate_up = (torch.randn(shape) * 4).to(dtype)
    assert error(gate(gate_up), oracle(gate, gate_up)) < TOLERANCE[dtype]


def test_the_tolerance_tells_the_gates_apart() -> None:
    gate_up = torch.randn(7, 64)
    assert error(gelu_mul(gate_up), oracle(gelu_erf_mul, gate_up)) > 10 * TOLERANCE[torch.float32]
    assert error(silu_mul(gate_up), oracle(gelu_mul, gate_up)) > 10 * TOLERANCE[torch.bfloat16]
    for changed in ({"limit": 4.9}, {"alpha": 1.7}):
        wrong = limited_mul(gate_up * 4, **{"limit": 5.0, "alpha": 1.702, **changed})
        assert error(wrong, oracle(limited, gate_up * 4)) > 10 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("gate", [silu_mul, gelu_mul])
def test_large_gates_stay_finite(gate: Gate) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 3.0, 3.0, 3.0]])
    assert torch.equal(gate(gate_up), torch.tensor([[0.0, 3e4, 0.0]]))


def test_limits_keep_nan_and_bound_the_rest() -> None:
    nan, inf = float("nan"), float("inf")
    found = limited(torch.tensor([[-1e4, inf, inf, nan, 1.0, 3.0, 9.0, -inf, 1.0, nan]]))
    assert torch.equal(found[0, :3], limited(torch.tensor([[-1e4, 5.0, 5.0, 3.0, 5.0, -5.0]]))[0])
    assert found[0, 0] == 0 and found[0, 3:].isnan().all()


@pytest.mark.sampled(keep=3, of="triton")
@pytest.mark.parametrize("gate", ORACLES)
@pytest.mark.parametrize(("rows", "size"), [(40, 7), (40, 100), (24, 4096), (12, 11008)])
def test_a_row_is_its_own(gate: Gate, rows: int, size: int) -> None:
    gate_up = torch.randn(rows, 2 * size)
    whole = gate(gate_up)
    for start, count in ((0, 1), (3, 1), (5, 2), (1, rows // 2), (rows // 4, rows - rows // 4)):
        assert torch.equal(gate(gate_up[start : start + count].clone()), whole[start : start + count])
