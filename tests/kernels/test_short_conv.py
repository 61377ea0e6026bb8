"""Short convolutions agree with torch's in fp64, and have the same bits however their tokens are split over steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inferd.kernels.ops.short_conv import short_conv
from tests.kernels.conftest import COMPILED, TRITON
from tests.kernels.recurrent import LENS, NUM_SLOTS, SLOTS, StateRows, alone, in_steps, rows_of, whole

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
CHANNELS = 83


class Problem:
    """Random inputs of all sequences, within wider rows, and a pool of states."""

    def __init__(self, width: int, dtype: torch.dtype, *, has_silu: bool, has_gates: bool = False) -> None:
        before, behind, self.x = torch.randn(sum(LENS), 3 * (CHANNELS + 5)).to(dtype).chunk(3, 1)
        self.gates = (before, behind) if has_gates else None
        self.weight, self.has_silu = torch.randn(width, CHANNELS), has_silu
        self.bias = torch.randn(CHANNELS) if has_silu else None
        self.state = torch.full((NUM_SLOTS, width - 1, CHANNELS), float("nan"), dtype=dtype)

    def step(self, tokens: Tensor, rows: StateRows) -> Tensor:
        x = self.x[tokens][:, :CHANNELS]
        gates = None
        if self.gates is not None:
            gates = self.gates[0][tokens][:, :CHANNELS], self.gates[1][tokens][:, :CHANNELS]
        return short_conv(x, self.weight, self.state, rows, has_silu=self.has_silu, bias=self.bias, gates=gates)

    def inputs(self, first: int, end: int) -> Tensor:
        """The inputs of the convolution."""
        x = self.x if self.gates is None else self.x * self.gates[0]
        return x[first:end, :CHANNELS]

    def theirs(self, first: int, end: int, weight: Tensor) -> Tensor:
        x = self.inputs(first, end).double().T[None]
        padded = functional.pad(x, (len(weight) - 1, 0))
        bias = None if self.bias is None else self.bias.double()
        out = functional.conv1d(padded, weight.double().T.unsqueeze(1), bias, groups=CHANNELS)[0].T
        out = functional.silu(out) if self.has_silu else out
        return out if self.gates is None else out * self.gates[1][first:end, :CHANNELS].double()


def error(result: Tensor, expected: Tensor) -> float:
    return float(((result.double() - expected).abs() / (expected.abs() + 1)).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "has_silu", "has_gates"), [(4, True, False), (3, False, True), (2, True, False)])
def test_equals_torch_in_fp64(width: int, has_silu: bool, has_gates: bool, dtype: torch.dtype) -> None:
    problem = Problem(width, dtype, has_silu=has_silu, has_gates=has_gates)
    result, first = whole(problem.step), 0
    for slot, count in zip(SLOTS, LENS, strict=True):
        own = result[first : first + count]
        assert error(own, problem.theirs(first, first + count, problem.weight)) < TOLERANCE[dtype]
        assert error(own, problem.theirs(first, first + count, problem.weight * 1.01)) > TOLERANCE[dtype]
        inputs = functional.pad(problem.inputs(first, first + count), (0, 0, width - 1, 0))
        assert torch.equal(problem.state[slot], inputs[count:])
        first += count


def test_a_long_row_is_its_parts() -> None:
    """Triton takes 64 tokens at a time."""
    x, weight, state = torch.randn(150, 9), torch.randn(4, 9), torch.full((2, 3, 9), float("nan"))
    cut = [short_conv(x[a:b], weight, state, rows_of([(1, a, b - a)]), has_silu=True) for a, b in ((0, 65), (65, 150))]
    assert torch.equal(short_conv(x, weight, state, rows_of([(0, 0, 150)]), has_silu=True), torch.cat(cut))
    assert torch.equal(state, torch.stack([x[-3:]] * 2))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_in_any_steps(dtype: torch.dtype, threads: int, implementation: str) -> None:
    problem = Problem(4, dtype, has_silu=True, has_gates=True)
    torch.set_num_threads(threads)
    result = whole(problem.step)
    states = problem.state.clone()
    for num_drafts in (0,) if implementation in (TRITON, COMPILED) else (0, 3):
        problem.state.fill_(float("nan"))
        assert torch.equal(in_steps(problem.step, result, num_drafts), result)
        assert torch.equal(problem.state[list(SLOTS)], states[list(SLOTS)])
    assert torch.equal(alone(problem.step, 1), result[LENS[0] : LENS[0] + LENS[1]])
