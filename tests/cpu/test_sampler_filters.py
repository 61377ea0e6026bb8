"""Filters: compared with transformers' own warpers, with ties at the threshold, and rows independent of
one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.sampler import cuts_of
from inferd.kernels.ops.top_k_top_p import top_k_top_p

NEVER = float("-inf")


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=0, **options)


def tempered(scores: Tensor) -> Tensor:
    return scores - scores.amax(dim=-1, keepdim=True)


def cut_of(scores: Tensor, *rows: SamplingParams) -> Tensor:
    result = scores.clone()
    top_k_top_p(result, cuts_of(rows))
    return result


def warped(scores: Tensor, options: SamplingParams) -> Tensor:
    """The same by transformers' warpers, in its order."""
    ids: Any = torch.zeros(len(scores), 1, dtype=torch.int64)
    result: Any = scores.clone()
    if options.top_k:
        result = TopKLogitsWarper(options.top_k)(ids, result)
    if options.top_p < 1:
        result = TopPLogitsWarper(options.top_p)(ids, result)
    if options.min_p > 0:
        result = MinPLogitsWarper(options.min_p)(ids, result)
    warped_scores: Tensor = result
    return warped_scores


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize(
    "options",
    [
        params(top_k=1), params(top_k=37), params(top_k=10_000), params(top_p=0.5), params(top_p=0.999),
        params(top_p=1e-6), params(min_p=0.02), params(min_p=1.0), params(top_k=50, top_p=0.8),
        params(top_k=300, top_p=0.9, min_p=0.1),
    ],
    ids=lambda options: f"{options.top_k} {options.top_p} {options.min_p}",
)  # fmt: skip
def test_equals_transformers(options: SamplingParams, spread: float) -> None:
    scores = tempered(torch.randn(8, 3001) * spread)
    assert torch.equal(cut_of(scores, *[options] * 8), warped(scores, options))


def test_the_comparison_sees_one_token_more() -> None:
    scores = tempered(torch.randn(8, 3001))
    assert not torch.equal(cut_of(scores, *[params(top_k=37)] * 8), warped(scores, params(top_k=38)))
    assert not torch.equal(cut_of(scores, *[params(top_p=0.5)] * 8), warped(scores, params(top_p=0.501)))


def test_tokens_that_tie_at_the_border_stay_together() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -2.0]])
    assert cut_of(scores, params(top_k=2)).tolist() == [[0.0, -1.0, -1.0, NEVER]]
    assert cut_of(scores, params(top_p=0.65)).tolist() == [[0.0, -1.0, -1.0, NEVER]]
    assert cut_of(scores, params(top_p=0.0)).tolist() == [[0.0, NEVER, NEVER, NEVER]]


def test_a_greedy_request_asks_for_no_cut() -> None:
    scores = tempered(torch.randn(1, 100))
    assert torch.equal(cut_of(scores, params(temperature=0.0, top_k=3, top_p=0.5, min_p=0.9)), scores)


def test_a_row_is_its_own() -> None:
    """Each row has other parameters and gives the same bits as alone. Rows without filters stay untouched."""
    rows = [
        params(), params(top_k=3), params(top_p=0.3), params(top_p=0.99999), params(min_p=0.2),
        params(top_k=900, top_p=0.7),
    ] * 3  # fmt: skip
    scores = tempered(torch.randn(len(rows), 2000) * 3)
    whole = cut_of(scores, *rows)
    for row, options in enumerate(rows):
        assert torch.equal(whole[row : row + 1], cut_of(scores[row : row + 1], options))
    assert torch.equal(whole[0], scores[0])
