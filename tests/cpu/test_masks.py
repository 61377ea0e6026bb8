"""The sampler under masks: no forbidden token is drawn, allowed ones are drawn as without masks, and rows are
independent."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.sampler import Masks, Sampler, SampleResult

VOCAB = 100
GRAMMAR = "start: /any/"


def words_of(*allowed: set[int]) -> Tensor:
    """[M, W] int32."""
    bits = [[sum(1 << bit for bit in range(32) if 32 * word + bit in row) for word in range(4)] for row in allowed]
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32)


def draw(logits: Tensor, params: list[SamplingParams], masks: Masks | None, position: int = 7) -> SampleResult:
    sampler = Sampler(len(params), VOCAB, "cpu")
    for slot, asked in enumerate(params):
        sampler.fill(slot, asked, (1, 2, 3), 3)
    return sampler.sample(logits, range(len(params)), [position] * len(params), masks)


def bound(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "seed": 5, "grammar": GRAMMAR, **options})  # type: ignore[arg-type]


def test_a_masked_row_draws_what_it_would_if_nothing_else_were_there() -> None:
    """Compared with logits set to -inf by hand: greedy and sampled, with filters, rules and logprobs."""
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB)
    allowed = [{3, 31, 32, 99}, {0}, set(range(50, 70)), {95, 96}, {7, 8, 9}, set(range(VOCAB))]
    params = [
        bound(temperature=0.0),
        bound(),
        bound(top_k=3, seed=8),
        bound(temperature=2.0, min_p=0.1),
        bound(logit_bias=((8, 100.0), (50, 100.0))),
        bound(logprobs=2),
    ]
    expected = logits.clone()
    for row, ids in enumerate(allowed):
        expected[row, [i for i in range(VOCAB) if i not in ids]] = float("-inf")
    given = logits.clone()
    drawn = draw(given, params, Masks(range(6), words_of(*allowed)))
    assert torch.equal(given, logits), "logits are left as they are"
    assert torch.equal(drawn.token_ids, draw(expected, params, None).token_ids)
    assert all(int(token_id) in ids for token_id, ids in zip(drawn.token_ids, allowed, strict=True))
    assert drawn.logprobs is not None and drawn.logprob_rows == (5,)


def test_rows_without_a_mask_are_left_alone() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, VOCAB)
    params = [
        SamplingParams(max_tokens=9, seed=1),
        bound(seed=2),
        SamplingParams(max_tokens=9, seed=3, temperature=0.0),
        bound(seed=4),
    ]
    free = draw(logits, params, None).token_ids
    drawn = draw(logits, params, Masks([3], words_of({42}))).token_ids
    assert drawn[:3].tolist() == free[:3].tolist() and drawn[3] == 42


def test_what_leaves_nothing_is_empty_and_not_failed() -> None:
    logits = torch.randn(3, VOCAB)
    logits[2, 5] = float("nan")
    drawn = draw(logits, [bound(), bound(allowed_token_ids=(9,)), bound()], Masks(range(3), words_of(set(), {8}, {8})))
    assert drawn.is_empty[:2].tolist() == [True, True]
    assert drawn.is_failed.tolist() == [False, False, True]


def test_bits_beyond_the_vocabulary_say_nothing() -> None:
    logits = torch.randn(1, VOCAB)
    every = torch.full((1, 4), -1, dtype=torch.int32)
    assert (
        draw(logits, [bound()], Masks([0], every)).token_ids.tolist()
        == draw(logits, [bound()], None).token_ids.tolist()
    )


def test_a_grammar_row_is_never_a_plain_one() -> None:
    sampler = Sampler(2, VOCAB, "cpu")
    sampler.fill(0, bound(), (1,), 1)
    sampler.fill(1, SamplingParams(max_tokens=9, seed=5), (1,), 1)
    assert [sampler.is_plain(0), sampler.is_plain(1)] == [False, True]
