"""Packed masks agree with a check of each single bit."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.mask_tokens import mask_tokens

pytestmark = pytest.mark.usefixtures("implementation")

NEVER = float("-inf")


def is_allowed(words: list[int], token_id: int) -> bool:
    return token_id // 32 < len(words) and bool(words[token_id // 32] % 2**32 >> token_id % 32 & 1)


@pytest.mark.parametrize("density", ["few", "half", "most", "all", "none"])
@pytest.mark.parametrize(
    ("vocab_size", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (100, 3), (100, 6), (2500, 79), (2500, 40), (70, 0)]
)
def test_every_bit_is_its_tokens(vocab_size: int, words: int, density: str) -> None:
    """Masks come in another order than rows, one without a row. Rows without a mask keep their bits."""
    masks = torch.randint(-(2**31), 2**31, (4, words)).to(torch.int32)
    for _ in range(4):
        other = torch.randint(-(2**31), 2**31, (4, words)).to(torch.int32)
        masks = {"few": masks & other, "most": masks | other}.get(density, masks)
    masks = {"all": masks | -1, "none": masks & 0}.get(density, masks)
    logits, row_of = torch.randn(5, vocab_size), torch.tensor([3, -1, 0, 4])
    logits[:, 0] = float("nan")
    found = logits.clone()
    mask_tokens(found, masks, row_of)
    for row in range(5):
        mine = [masks[m].tolist() for m in range(4) if row_of[m] == row]
        stays = [not mine or is_allowed(mine[0], token_id) for token_id in range(vocab_size)]
        expected = torch.where(torch.tensor(stays), logits[row], NEVER)
        assert torch.equal(found[row].view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("bit", [0, 1, 30, 31])
def test_the_sign_is_a_bit_too(bit: int) -> None:
    """Words are signed; bit 31 belongs to the last of 32 tokens."""
    word = 1 << bit if bit < 31 else -(2**31)
    logits = torch.zeros(1, 96)
    mask_tokens(logits, torch.tensor([[0, word, 0]], dtype=torch.int32), torch.tensor([0]))
    assert (logits[0] > NEVER).nonzero()[:, 0].tolist() == [32 + bit]


def test_no_masks() -> None:
    logits = torch.randn(2, 40)
    kept = logits.clone()
    mask_tokens(kept, torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(kept, logits)
