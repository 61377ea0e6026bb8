"""Rows drawn together equal those of `argmax` and `sample`, by the options of their slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferd.kernels.argmax import argmax, reference
from inferd.kernels.decode_draw import draw
from inferd.kernels.sample import philox

pytestmark = pytest.mark.usefixtures("implementation")

NAN, INF, TINY = float("nan"), float("inf"), torch.finfo(torch.float32).tiny
TEMPERATURES = torch.tensor([0.0, 0.7, 1.0, 0.0, 2.0, TINY])
SEEDS = torch.tensor([3, 0, 2**53 - 1, 7, 2**40 + 5, 11])


def options() -> tuple[Tensor, Tensor]:
    return TEMPERATURES.to(torch.get_default_device()), SEEDS.to(torch.get_default_device())


def expected(row: Tensor, slot: int, position: int) -> int:
    """The greedy id, or the argmax of score + noise over all ids; the lowest id wins a tie."""
    temperature = 0.0 if slot < 0 else float(TEMPERATURES[slot])
    if temperature == 0.0:
        return row.tolist().index(max(row.tolist()))
    noise = philox.gumbel_noise(SEEDS[slot], torch.tensor(position, device="cpu"), torch.arange(len(row), device="cpu"))
    totals = ((row.cpu() - row.cpu().amax()) / temperature + noise).tolist()
    return totals.index(max(totals))


@pytest.mark.sampled(keep=6, of="triton")
@pytest.mark.parametrize("vocab_size", [1, 100, 1024, 2049, 5001])
@pytest.mark.parametrize("slots", [[1], [4, 0, -1, 2, 3, 5, -1]])
@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_each_row_by_its_slot(vocab_size: int, slots: list[int], scale: float) -> None:
    logits = torch.randn(len(slots), vocab_size) * scale
    for position in (0, 5, 2**33):
        ids, is_none = draw(logits, torch.tensor(slots), *options(), torch.full((len(slots),), position))
        assert ids.tolist() == [expected(row, slot, position) for row, slot in zip(logits, slots, strict=True)]
        assert not is_none.any()


def test_ties_and_what_may_not_be_drawn() -> None:
    """Few values, most of them excluded, each at its own position."""
    logits = (torch.randn(40, 2100) * 2).round()
    logits[logits < 5.0] = -INF
    logits[:, 2060] = 7.0
    slots, positions = torch.arange(40) % 6, torch.arange(40)
    ids, _ = draw(logits, slots, *options(), positions)
    assert ids.tolist() == [expected(logits[row], row % 6, row) for row in range(40)]


def test_rows_without_a_token_say_so_and_fail_alone() -> None:
    logits = torch.randn(12, 2500)
    sound = logits.clone()
    logits[0:2, 7], logits[2:4, 2499], logits[4:6] = NAN, INF, -INF
    slots, positions = torch.tensor([0, 1] * 6), torch.arange(12)
    ids, is_none = draw(logits, slots, *options(), positions)
    assert is_none.tolist() == [True] * 6 + [False] * 6
    assert is_none.tolist() == reference.argmax(logits)[1].tolist()
    assert bool(((ids >= 0) & (ids < 2500)).all())
    assert ids[6:].tolist() == draw(sound, slots, *options(), positions)[0][6:].tolist()


def test_a_row_is_its_own_and_may_be_strided() -> None:
    logits = torch.randn(6, 3000)[:, :2500]
    slots, positions = torch.tensor([5, 4, 3, 2, 1, 0]), torch.arange(6)
    ids, _ = draw(logits, slots, *options(), positions)
    for row in range(6):
        alone, _ = draw(logits[row : row + 1].clone(), slots[row : row + 1], *options(), positions[row : row + 1])
        assert alone.tolist() == [int(ids[row])]
    assert torch.equal(draw(logits.mT.contiguous().mT, slots, *options(), positions)[0], ids)
    greedy = draw(logits, torch.full((6,), -1), *options(), positions)[0]
    assert torch.equal(greedy, argmax(logits)[0])
