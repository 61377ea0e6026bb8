"""Logprobs compared with fp64, ranks and alternatives with a sort by (logit, id), and rows independent of one
another."""

from __future__ import annotations

import pytest
import torch

from inferd.engine.sample.logprobs import logprobs_of

TOLERANCE = 2e-5
"""Absolute tolerance, for values of a few tens in fp32 and a sum over the vocabulary."""


@pytest.mark.parametrize("vocab_size", [3, 1000, 40_000])
@pytest.mark.parametrize("has_ties", [False, True])
def test_equals_a_sort(vocab_size: int, has_ties: bool) -> None:
    logits = torch.randn(7, vocab_size) * 5
    if has_ties:
        logits = logits.round()
        logits[0] = torch.tensor([0.0, -0.0]).repeat(vocab_size)[:vocab_size]
    token_ids = torch.randint(0, vocab_size, (7,))
    num_top = [0, 1, 2, 3, 5, 20, 2]
    exact = logits.double().log_softmax(-1)
    for row, (token_id, logprob, rank, top) in enumerate(logprobs_of(logits, token_ids, num_top).to_host()):
        values = logits[row].tolist()
        order = sorted(range(vocab_size), key=lambda other: (-values[other], other))
        assert token_id == token_ids[row]
        assert rank == order.index(token_id) + 1
        assert logprob == pytest.approx(float(exact[row, token_id]), abs=TOLERANCE)
        assert [other for other, _ in top] == order[: num_top[row]]
        assert [value for _, value in top] == pytest.approx(
            [float(exact[row, other]) for other, _ in top], abs=TOLERANCE
        )


def test_the_tolerance_sees_one_logit_less() -> None:
    logits = torch.randn(1, 1000)
    logprob = logprobs_of(logits, torch.tensor([0]), [0]).to_host()[0][1]
    assert abs(logprob - float(logits[0, :999].double().log_softmax(-1)[0])) > 10 * TOLERANCE


@pytest.mark.parametrize("vocab_size", [997, 40_000])
def test_a_row_is_its_own(vocab_size: int) -> None:
    logits, token_ids = torch.randn(33, vocab_size), torch.randint(0, vocab_size, (33,))
    whole = logprobs_of(logits, token_ids, [3] * 33).to_host()
    for row in (0, 1, 17, 32):
        assert logprobs_of(logits[row][None].clone(), token_ids[row][None], [3]).to_host()[0] == whole[row]


def test_ids_that_cannot_be_drawn_have_a_logprob_of_minus_infinity() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    ((_, logprob, rank, top),) = logprobs_of(logits, torch.tensor([1]), [3]).to_host()
    assert (logprob, rank, [token_id for token_id, _ in top]) == (float("-inf"), 3, [0, 2, 1])
