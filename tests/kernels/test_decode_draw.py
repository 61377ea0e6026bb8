"""Rows drawn together equal those of `argmax` and `sample`, by the options of their slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.argmax import argmax, reference
from inferd.kernels.ops.decode_draw import draw
from inferd.kernels.ops.sample import philox
from inferd.kernels.ops.top_k_top_p import Cuts, top_k_top_p

pytestmark = pytest.mark.usefixtures("implementation")

NAN, INF, TINY = float("nan"), float("inf"), torch.finfo(torch.float32).tiny
TEMPERATURES = torch.tensor([0.0, 0.7, 1.0, 0.0, 2.0, TINY])
SEEDS = torch.tensor([3, 0, 2**53 - 1, 7, 2**40 + 5, 11])
FREE = Cuts(
    torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.float64), torch.full((6,), -INF, dtype=torch.float64)
)
CUT = Cuts(
    torch.tensor([3, 0, 40, 0, 7, 0]),
    torch.tensor([0.5, 1.0, 0.95, 1.0, 1.0, 0.5], dtype=torch.float64),
    torch.tensor([-1.0, -INF, -9.0, -INF, -INF, -INF], dtype=torch.float64),
)
"""Slot 0 is greedy, slots 1 and 3 have no cuts."""


def options(cuts: Cuts = FREE) -> tuple[Tensor, Tensor, Cuts]:
    device = torch.get_default_device()
    return TEMPERATURES.to(device), SEEDS.to(device), Cuts(*(of_slots.to(device) for of_slots in cuts))


def drawn(logits: Tensor, slots: Tensor, positions: Tensor, cuts: Cuts = FREE) -> tuple[Tensor, Tensor]:
    temperatures, seeds, of_slots = options(cuts)
    return draw(logits, slots, temperatures, seeds, positions, of_slots)


def cut_rows(logits: Tensor, slots: Tensor) -> Tensor:
    """Logits without the tokens that `CUT` excludes, by the op that cuts rows of scores."""
    scores = logits - logits.amax(dim=-1, keepdim=True)
    asked = TEMPERATURES.to(logits.device)[slots.clamp_min(0)].masked_fill(slots < 0, 0.0)
    scores /= asked.clamp_min(TINY)[:, None]
    top_k_top_p(scores, options(CUT)[2], slots.masked_fill(asked == 0.0, -1))
    return logits.masked_fill(scores == -INF, -INF)


def expected(row: Tensor, slot: int, position: int) -> int:
    """The greedy id, or the argmax of score + noise over all ids; the lowest id wins a tie."""
    temperature = 0.0 if slot < 0 else float(TEMPERATURES[slot])
    if temperature == 0.0:
        return row.tolist().index(max(row.tolist()))
    noise = philox.gumbel_noise(SEEDS[slot], torch.tensor(position, device="cpu"), torch.arange(len(row), device="cpu"))
    totals = ((row.cpu() - row.cpu().amax()) / temperature + noise).tolist()
    return totals.index(max(totals))


@pytest.mark.sampled(keep=4, of="triton")
@pytest.mark.parametrize("vocab_size", [1, 100, 1024, 2049, 5001])
@pytest.mark.parametrize("slots", [[1], [4, 0, -1, 2, 3, 5, -1]])
@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_each_row_by_its_slot(vocab_size: int, slots: list[int], scale: float) -> None:
    logits = torch.randn(len(slots), vocab_size) * scale
    for position in (0, 5, 2**33):
        ids, is_none = drawn(logits, torch.tensor(slots), torch.full((len(slots),), position))
        assert ids.tolist() == [expected(row, slot, position) for row, slot in zip(logits, slots, strict=True)]
        assert not is_none.any()


@pytest.mark.sampled(keep=4, of="triton")
@pytest.mark.parametrize("vocab_size", [1, 100, 2049, 5001])
@pytest.mark.parametrize("num_rows", [1, 7, 70])
def test_cuts_are_those_of_the_slot(vocab_size: int, num_rows: int, implementation: str) -> None:
    if implementation == "triton" and num_rows * max(vocab_size, 2048) > 20_000:
        pytest.skip("too much for the interpreter")
    slots = torch.arange(num_rows) % 7 - 1
    logits = (torch.randn(num_rows, vocab_size) * 3).round(decimals=1)
    before = logits.clone()
    left = cut_rows(logits, slots)
    assert vocab_size == 1 or num_rows < 7 or 0 < int((left > -INF).sum()) < left.numel()
    for position in (0, 11):
        ids, is_none = drawn(logits, slots, torch.full((num_rows,), position), CUT)
        places = zip(left, slots.tolist(), strict=True)
        assert ids.tolist() == [expected(row, slot, position) for row, slot in places]
        assert not is_none.any() and torch.equal(logits, before)


def test_ties_and_what_may_not_be_drawn() -> None:
    """Few values, most of them excluded, each at its own position."""
    logits = (torch.randn(40, 2100) * 2).round()
    logits[logits < 5.0] = -INF
    logits[:, 2060] = 7.0
    slots, positions = torch.arange(40) % 6, torch.arange(40)
    ids, _ = drawn(logits, slots, positions)
    assert ids.tolist() == [expected(logits[row], row % 6, row) for row in range(40)]


def test_rows_without_a_token_say_so_and_fail_alone() -> None:
    logits = torch.randn(6, 2500)
    sound = logits.clone()
    logits[0, 7], logits[1, 2499], logits[2] = NAN, INF, -INF
    slots, positions = torch.tensor([0, 1, 2] * 2), torch.arange(6)
    ids, is_none = drawn(logits, slots, positions, CUT)
    assert is_none.tolist() == [True] * 3 + [False] * 3
    assert is_none.tolist() == reference(logits)[1].tolist()
    assert bool(((ids >= 0) & (ids < 2500)).all())
    assert ids[3:].tolist() == drawn(sound, slots, positions, CUT)[0][3:].tolist()


def test_a_row_is_its_own_and_may_be_strided() -> None:
    logits = torch.randn(6, 3000)[:, :2500]
    slots, positions = torch.tensor([5, 4, 3, 2, 1, 0]), torch.arange(6)
    ids, _ = drawn(logits, slots, positions)
    for row in range(6):
        alone, _ = drawn(logits[row : row + 1].clone(), slots[row : row + 1], positions[row : row + 1])
        assert alone.tolist() == [int(ids[row])]
    assert torch.equal(drawn(logits.mT.contiguous().mT, slots, positions)[0], ids)
    greedy = drawn(logits, torch.full((6,), -1), positions)[0]
    assert torch.equal(greedy, argmax(logits)[0])
