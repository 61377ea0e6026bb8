"""The gated delta rule agrees with transformers' own, and has the same bits however its tokens are split over steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from inferd.kernels.ops.gated_delta import Gates, gated_delta
from inferd.kernels.ops.states import copy_state
from tests.kernels.conftest import COMPILED, TRITON
from tests.kernels.recurrent import LENS, NUM_SLOTS, SLOTS, StateRows, alone, in_steps, whole

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Largest error, as a part of the largest result of a sequence."""
SHAPES = ((2, 4, 16, 32), (1, 2, 24, 16), (3, 3, 16, 48), (1, 1, 16, 160))
"""Key heads, value heads, and their sizes. A row with one token takes 128 columns at a time, and then the rest."""
SMALL = (1, 2, 12, 12)
"""Sizes that Triton's interpreter computes in seconds."""


class Problem:
    """Random inputs of all sequences, and a pool of states."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = shape
        num_tokens, width = sum(LENS), 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        self.qkv = torch.randn(num_tokens, width).to(dtype)
        self.ba = torch.randn(num_tokens, 2 * self.value_heads).to(dtype)
        self.a_log, self.dt_bias = torch.rand(self.value_heads) * 3 - 2, torch.randn(self.value_heads)
        self.state = torch.full((NUM_SLOTS, self.value_heads, self.key_dim, self.value_dim), float("nan"))

    def step(self, tokens: Tensor, rows: StateRows) -> Tensor:
        b, a = self.ba[tokens].chunk(2, dim=1)
        return gated_delta(self.qkv[tokens], Gates(b, a, self.a_log, self.dt_bias), self.state, rows)

    def theirs(self, first: int, end: int, decay: float = 1.0) -> tuple[Tensor, Tensor]:
        """Results and last state of a sequence by transformers, which forgets `decay` times as fast."""
        wide = self.qkv[first:end].float()
        sizes = (self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.value_heads * self.value_dim)
        q, k, v = (
            part.view(1, end - first, -1, size)
            for part, size in zip(wide.split(sizes, 1), (self.key_dim, self.key_dim, self.value_dim), strict=True)
        )
        b, a = self.ba[first:end].float().chunk(2, dim=1)
        g = -decay * self.a_log.exp() * functional.softplus(a + self.dt_bias)
        out, state = torch_recurrent_gated_delta_rule(
            q, k, v, g[None], b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return out[0].flatten(1), state[0]


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    problem = Problem(shape, dtype)
    result, first = whole(problem.step), 0
    for slot, count in zip(SLOTS, LENS, strict=True):
        expected, state = problem.theirs(first, first + count)
        own = result[first : first + count]
        assert error(own, expected) < TOLERANCE[dtype]
        assert error(problem.state[slot], state) < TOLERANCE[torch.float32]
        if count > 1:
            assert error(own, problem.theirs(first, first + count, decay=1.03)[0]) > TOLERANCE[dtype]
        first += count
    unused = [slot for slot in range(NUM_SLOTS) if slot not in SLOTS]
    assert problem.state[unused].isnan().all()


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("threads", "shape"), [(1, SHAPES[0]), (2, SHAPES[3])])
def test_the_same_bits_in_any_steps(
    dtype: torch.dtype, threads: int, shape: tuple[int, int, int, int], implementation: str
) -> None:
    problem = Problem(SMALL if implementation == TRITON else shape, dtype)
    torch.set_num_threads(threads)
    result = whole(problem.step)
    states = problem.state.clone()
    for num_drafts in (0,) if implementation in (TRITON, COMPILED) else (0, 3):
        problem.state.fill_(float("nan"))
        assert torch.equal(in_steps(problem.step, result, num_drafts), result)
        assert torch.equal(problem.state[list(SLOTS)], states[list(SLOTS)])
    assert torch.equal(alone(problem.step, 3), result[-LENS[3] :])


def test_a_state_is_read_again() -> None:
    """A row behind position 0 depends on what its slot holds."""
    problem = Problem(SMALL, torch.float32)
    result = whole(problem.step)
    problem.state.zero_()
    rows = StateRows(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([7]), torch.tensor([2]))
    assert not torch.equal(problem.step(torch.tensor([sum(LENS) - 1]), rows)[0], result[-1])


@pytest.mark.parametrize("size", [0, 5, 300_001])
def test_a_state_is_copied_in_each_layer(size: int) -> None:
    """Also one that is copied in several pieces, and the matrices of a model that has none."""
    pool = torch.randn(3, 4, size).bfloat16()
    expected = pool.clone()
    expected[:, 1] = pool[:, 3]
    copy_state(pool, 3, 1)
    assert torch.equal(pool, expected)


def test_layers_without_matrices_copy_nothing() -> None:
    copy_state(torch.empty(3, 4, 0, 8), 3, 1)
