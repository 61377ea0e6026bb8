"""The greedy token equals that of a search in Python, over chunks, ties and rows without one."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.argmax import argmax

pytestmark = pytest.mark.usefixtures("implementation")

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab_size"), [(3, 1), (7, 100), (4, 2048), (3, 5001)])
def test_it_is_the_first_of_the_largest(dtype: torch.dtype, rows: int, vocab_size: int) -> None:
    """Logits are rounded to whole numbers, so that most rows have ties."""
    logits = (torch.randn(rows, vocab_size) * 2).round().to(dtype)
    ids, is_none = argmax(logits)
    assert ids.dtype == torch.int64 and is_none.dtype == torch.bool
    values = logits.tolist()
    assert ids.tolist() == [row.index(max(row)) for row in values]
    assert not is_none.any()


@pytest.mark.parametrize("vocab_size", [3, 4500])
def test_rows_without_one_say_so(vocab_size: int) -> None:
    logits = torch.randn(8, vocab_size)
    logits[0, -1] = NAN
    logits[1, 0] = -NAN
    logits[2, 1] = INF
    logits[3] = -INF
    logits[4, 1:] = -INF
    logits[5], logits[5, 2] = -INF, -3e38
    logits[6] = NAN
    ids, is_none = argmax(logits)
    assert is_none.tolist() == [True, True, True, True, False, False, True, False]
    assert bool(((ids >= 0) & (ids < vocab_size)).all())
    assert ids[4:6].tolist() == [0, 2]


def test_zeros_of_both_signs_tie() -> None:
    logits = torch.full((2, 2100), -1.0)
    logits[0, [5, 2099]] = torch.tensor([-0.0, 0.0])
    logits[1, [7, 2060]] = torch.tensor([0.0, -0.0])
    assert argmax(logits)[0].tolist() == [5, 7]


def test_a_row_is_its_own_and_may_be_strided() -> None:
    logits = torch.randn(6, 3000)[:, :2500]
    ids, is_none = argmax(logits)
    for row in range(6):
        alone = argmax(logits[row : row + 1].clone())
        assert (alone[0].tolist(), alone[1].tolist()) == ([int(ids[row])], [bool(is_none[row])])
    assert torch.equal(argmax(logits.mT.contiguous().mT)[0], ids)
