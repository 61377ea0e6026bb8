"""The recurrence of Mamba-2 agrees with transformers' own, and has the same bits however its tokens are split over
steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

from inferd.kernels.ops.mamba2 import Weights, mamba2
from tests.kernels.conftest import COMPILED, TRITON
from tests.kernels.recurrent import LENS, NUM_SLOTS, SLOTS, StateRows, alone, in_steps, whole

pytestmark = pytest.mark.usefixtures("implementation")

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 4e-6
"""Largest error, as a part of the largest result of a sequence: results are in fp32."""
SHAPES = ((2, 4, 16, 32), (1, 2, 24, 16), (3, 3, 16, 48))
"""Groups, heads, and the sizes of a state: of B and C, and of x."""
SMALL = (1, 2, 12, 12)
"""Sizes that Triton's interpreter computes in seconds."""


class Problem:
    """Random inputs of all sequences, and a pool of states."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.groups, self.heads, self.state_size, self.head_dim = shape
        num_tokens, width = sum(LENS), self.heads * self.head_dim + 2 * self.groups * self.state_size
        self.xbc = torch.randn(num_tokens, width).to(dtype)
        self.dt = torch.randn(num_tokens, 3 * self.heads).to(dtype)[:, self.heads : 2 * self.heads]
        a_log, dt_bias, d = torch.rand(self.heads) * 3 - 2, torch.randn(self.heads), torch.randn(self.heads)
        self.weights = Weights(a_log, dt_bias, d)
        self.state = torch.full((NUM_SLOTS, self.heads, self.state_size, self.head_dim), float("nan"))

    def step(self, tokens: Tensor, rows: StateRows) -> Tensor:
        return mamba2(self.xbc[tokens], self.dt[tokens], self.weights, self.state, rows)

    def theirs(self, first: int, end: int, decay: float = 1.0, skip: float = 1.0) -> tuple[Tensor, Tensor]:
        """Results and last state of a sequence by transformers, which forgets `decay` times as fast, and adds `skip`
        times as much of a token to its result."""
        wide, bc_size = self.xbc[first:end].float(), self.groups * self.state_size
        x, b, c = wide.split((self.heads * self.head_dim, bc_size, bc_size), 1)
        out, state = mamba2_chunk_scan(
            x.view(1, end - first, self.heads, self.head_dim),
            self.dt[None, first:end].float(),
            -decay * self.weights.a_log.exp(),
            b.view(1, end - first, self.groups, self.state_size),
            c.view(1, end - first, self.groups, self.state_size),
            chunk_size=8,
            D=skip * self.weights.d,
            dt_bias=self.weights.dt_bias,
            dt_softplus=True,
            return_final_states=True,
        )
        return out[0].flatten(1), state[0].transpose(1, 2)


def error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    problem = Problem(shape, dtype)
    result, first = whole(problem.step), 0
    for slot, count in zip(SLOTS, LENS, strict=True):
        expected, state = problem.theirs(first, first + count)
        own = result[first : first + count]
        assert error(own, expected) < TOLERANCE
        assert error(problem.state[slot], state) < TOLERANCE
        if count > 1:
            assert error(own, problem.theirs(first, first + count, decay=1.001)[0]) > TOLERANCE
            assert error(own, problem.theirs(first, first + count, skip=1.001)[0]) > TOLERANCE
        first += count
    unused = [slot for slot in range(NUM_SLOTS) if slot not in SLOTS]
    assert problem.state[unused].isnan().all()


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_in_any_steps(dtype: torch.dtype, threads: int, implementation: str) -> None:
    problem = Problem(SMALL if implementation == TRITON else SHAPES[0], dtype)
    torch.set_num_threads(threads)
    result = whole(problem.step)
    states = problem.state.clone()
    for num_drafts in (0,) if implementation in (TRITON, COMPILED) else (0, 3):
        problem.state.fill_(float("nan"))
        assert torch.equal(in_steps(problem.step, result, num_drafts), result)
        assert torch.equal(problem.state[list(SLOTS)], states[list(SLOTS)])
    assert torch.equal(alone(problem.step, 3), result[-LENS[3] :])
