"""Low-rank updates equal products in float64 to rounding. A row's bits are the same alone and among rows of other
adapters, and rows without an adapter keep theirs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.lora import LoraWeights, add_lora
from tests.kernels.conftest import TRITON

pytestmark = pytest.mark.usefixtures("implementation")

IN_SIZE, PART_SIZES, MAX_RANK = 85, (96, 33, 64), 24
RANKS = ((24, 3, 1), (7, 0, 16), (0, 0, 5))
"""Rank of each part, by adapter; 0: it leaves the part alone."""
ADAPTERS = [2, -1, 0, 1]
"""Adapter of each slot."""
DTYPES = [
    (torch.float32, torch.float32, 1e-6),
    (torch.float32, torch.bfloat16, 1e-6),
    (torch.bfloat16, torch.bfloat16, 2**-8),
]


@pytest.fixture(autouse=True)
def _mixed(implementation: str, request: pytest.FixtureRequest) -> None:
    """A GPU's adapters have the dtype of the model."""
    given = getattr(request.node, "callspec", None)
    dtypes = {given.params.get(name) for name in ("dtype", "weight_dtype")} if given else set()
    if implementation.startswith(TRITON) and len(dtypes - {None}) == 2:
        pytest.skip("refused by name")


def made(weight_dtype: torch.dtype) -> tuple[LoraWeights, Tensor]:
    """(weights, with NaN wherever no adapter has any; scale * B A of each adapter and None in float64)."""

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), torch.nan, dtype=dtype)

    weights = LoraWeights.empty(len(RANKS), MAX_RANK, IN_SIZE, PART_SIZES, weight_dtype, "cpu", allocate)
    deltas = torch.zeros(len(RANKS) + 1, sum(PART_SIZES), IN_SIZE, dtype=torch.float64)
    ends = [0, PART_SIZES[0], sum(PART_SIZES[:2]), sum(PART_SIZES)]
    for adapter, ranks in enumerate(RANKS):
        for part, (rank, (start, end)) in enumerate(zip(ranks, pairwise(ends), strict=True)):
            if not rank:
                continue
            a, b = torch.randn(rank, IN_SIZE).to(weight_dtype), torch.randn(end - start, rank).to(weight_dtype)
            weights.put(adapter, part, a, b, 0.25 + part)
            deltas[adapter, start:end] = (0.25 + part) * (b.double() @ a.double())
    return weights, deltas


def rows(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x, slots) of rows of all slots and of padding, some of them in runs of one slot."""
    slots = torch.randint(-1, len(ADAPTERS), (num_rows,)).repeat_interleave(torch.randint(1, 8, (num_rows,)))
    slots = slots[:num_rows]
    y, x = torch.randn(num_rows, sum(PART_SIZES)).to(dtype), torch.randn(num_rows, IN_SIZE + 3).to(dtype)[:, 3:]
    return y, x, slots.contiguous()


def updated(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor) -> Tensor:
    y = y.clone()
    add_lora(y, x, weights, slots, torch.tensor(ADAPTERS))
    return y


def expected(y: Tensor, x: Tensor, deltas: Tensor, slots: Tensor) -> Tensor:
    of_rows = torch.tensor([*ADAPTERS, -1])[slots]
    return y.double() + torch.einsum("toi,ti->to", deltas[of_rows], x.double())


@pytest.mark.sampled(keep=2, of="triton")
@pytest.mark.parametrize(("dtype", "weight_dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("num_rows", [1, 30])
def test_equals_products_in_float64(
    dtype: torch.dtype, weight_dtype: torch.dtype, tolerance: float, num_rows: int
) -> None:
    weights, deltas = made(weight_dtype)
    y, x, slots = rows(num_rows, dtype)
    for one in (slots, torch.full((num_rows,), 2)):
        wanted, got = expected(y, x, deltas, one), updated(y, x, weights, one)
        bounds = {"rtol": tolerance, "atol": tolerance * float(wanted.abs().max())}
        torch.testing.assert_close(got.double(), wanted, **bounds)
        if bool(((one == 2) | (one == 3)).any()):
            with pytest.raises(AssertionError):
                torch.testing.assert_close(got.double(), expected(y, x, 1.03 * deltas, one), **bounds)
        has_none = (one < 0) | (one == 1)
        assert torch.equal(got[has_none], y[has_none])
        assert torch.equal(got[one == 0, : PART_SIZES[0]], y[one == 0, : PART_SIZES[0]]), "of a part left alone"


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize(("dtype", "weight_dtype"), [pair[:2] for pair in DTYPES])
def test_a_row_has_its_bits_among_others(dtype: torch.dtype, weight_dtype: torch.dtype, implementation: str) -> None:
    weights, _ = made(weight_dtype)
    y, x, slots = rows(23, dtype)
    torch.set_num_threads(3)
    together = updated(y, x, weights, slots)
    order = torch.randperm(23)
    assert torch.equal(updated(y[order], x[order], weights, slots[order]), together[order])
    torch.set_num_threads(1)
    for row in range(0, 23, 6 if implementation == TRITON else 1):
        alone = slice(row, row + 1)
        assert torch.equal(updated(y[alone], x[alone], weights, slots[alone].contiguous()), together[alone])


def test_a_cleared_adapter_changes_nothing() -> None:
    weights, _ = made(torch.float32)
    weights.clear(0)
    y, x, _ = rows(5, torch.float32)
    assert torch.equal(updated(y, x, weights, torch.full((5,), 2)), y)
    assert not torch.equal(updated(y, x, weights, torch.full((5,), 3)), y)
