"""The sampler as a whole: greedy ties, seeds, options by slot, failures of one row, and state that follows the
draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.sampler import FAILED, Sampler
from inferd.kernels.ops.sample.philox import gumbel_noise

VOCAB = 100


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "seed": 0, "temperature": 0.0} | options)


def sampler_of(*rows: SamplingParams, prompt: tuple[int, ...] = (1, 2)) -> Sampler:
    sampler = Sampler(len(rows), VOCAB, "cpu")
    for slot, row in enumerate(rows):
        sampler.fill(slot, row, prompt, len(prompt))
    return sampler


def draw(sampler: Sampler, logits: Tensor, position: int = 2) -> list[int]:
    count = len(logits)
    ids: list[int] = sampler.sample(logits, range(count), [position] * count).token_ids.tolist()
    return ids


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [40, 7, 90]] = 1.0
    logits[2, 99] = 1e-3
    assert draw(sampler_of(params(), params(), params()), logits) == [0, 7, 99]
    with_rule = params(logit_bias=((98, 1.0), (97, 1.0)))
    assert draw(sampler_of(with_rule), logits[:1]) == [97]


def test_sampling_is_the_definition() -> None:
    """Row by row: argmax over ids of logit / temperature + noise(seed, position, id)."""
    seeds, temperatures = (0, 5, 2**53 - 1), (1.0, 0.3, 2.0)
    logits = torch.randn(3, VOCAB) * 2
    rows = [params(seed=seed, temperature=temp) for seed, temp in zip(seeds, temperatures, strict=True)]
    noise = gumbel_noise(torch.tensor(seeds)[:, None], torch.tensor(77), torch.arange(VOCAB))
    expected = ((logits - logits.amax(-1, keepdim=True)) / torch.tensor(temperatures)[:, None] + noise).argmax(-1)
    assert draw(sampler_of(*rows), logits, position=77) == expected.tolist()


def test_cuts_and_noise_are_the_definition() -> None:
    """Greedy rows, sampled rows, and sampled rows with cuts together, in slots of another order."""
    logits, slots = torch.randn(3, VOCAB) * 2, [2, 0, 1]
    sampler = sampler_of(params(temperature=0.7, seed=5, top_k=4), params(temperature=1.3, seed=6), params())
    scores = (logits - logits.amax(-1, keepdim=True)) / torch.tensor([1.0, 0.7, 1.3])[:, None]
    scores[1, scores[1] < scores[1].topk(4).values[-1]] = float("-inf")
    for position in range(2, 40):
        noise = gumbel_noise(torch.tensor([0, 5, 6])[:, None], torch.tensor(position), torch.arange(VOCAB))
        expected = (scores + noise * torch.tensor([0.0, 1.0, 1.0])[:, None]).argmax(-1)
        assert sampler.sample(logits, slots, [position] * 3).token_ids.tolist() == expected.tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    draw(sampler_of(params(temperature=1.0, top_k=2, logit_bias=((1, 3.0),)), params(presence_penalty=1.0)), logits)
    assert torch.equal(logits, before)


def test_penalties_and_bad_words_see_what_was_drawn() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 5], logits[:, 6] = 1.0, 0.9
    sampler = sampler_of(params(presence_penalty=0.5), params(bad_words=((5, 5),)))
    assert [draw(sampler, logits, position) for position in (2, 3, 4)] == [[5, 5], [6, 6], [5, 5]]


def test_a_slot_that_is_filled_again_starts_anew() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, 5], logits[:, 6] = 1.0, 0.9
    sampler = sampler_of(params(presence_penalty=0.5))
    assert draw(sampler, logits) == [5]
    sampler.fill(0, params(presence_penalty=0.5), (5, 1), 2)
    assert draw(sampler, logits) == [5]
    sampler.fill(0, params(presence_penalty=0.5), (1, 2, 5), 2)
    assert draw(sampler, logits, position=3) == [6]


def test_a_bad_row_fails_alone() -> None:
    options = [params(temperature=1.0, seed=row, frequency_penalty=0.1) for row in range(6)]
    options[2] = params()
    logits = torch.randn(6, VOCAB)
    clean = sampler_of(*options).sample(logits, range(6), [2] * 6)
    assert clean.is_failed.tolist() == [False] * 6
    logits[1, 50] = logits[2, 0] = float("nan")
    logits[3, 7] = float("inf")
    logits[4] = float("-inf")
    result = sampler_of(*options).sample(logits, range(6), [2] * 6)
    assert result.is_failed.tolist() == [False, True, True, True, True, False]
    assert result.token_ids[[0, 5]].tolist() == clean.token_ids[[0, 5]].tolist()
    assert bool(((result.token_ids >= 0) & (result.token_ids < VOCAB)).all())


def test_a_row_with_nothing_left_says_so_and_is_not_the_models_fault() -> None:
    nothing = {"allowed_token_ids": (3,), "eos_token_ids": (3,), "min_tokens": 2}
    logits = torch.randn(3, VOCAB)
    result = sampler_of(params(**nothing), params(**nothing, temperature=1.0), params()).sample(
        logits, range(3), [2] * 3
    )
    assert result.is_empty.tolist() == [True, True, False]
    assert not result.is_failed.any()
    later = sampler_of(params(**nothing)).sample(logits[:1], [0], [4])
    assert (later.is_empty.tolist(), later.token_ids.tolist()) == ([False], [3])


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 1e-50])
def test_a_temperature_too_small_for_fp32_draws_the_greedy_token(temperature: float) -> None:
    logits = torch.randn(1, VOCAB)
    assert draw(sampler_of(params(temperature=temperature)), logits) == draw(sampler_of(params()), logits)


def test_logprobs_are_of_the_rows_that_asked_and_of_the_raw_logits() -> None:
    logits = torch.randn(3, VOCAB)
    rows = (params(logprobs=2, logit_bias=((9, 100.0),)), params(), params(logprobs=0))
    result = sampler_of(*rows).sample(logits, range(3), [2] * 3)
    assert result.logprob_rows == (0, 2)
    assert result.logprobs is not None
    biased, plain = result.logprobs.to_host()
    exact = logits.log_softmax(-1)
    assert biased[:2] == (9, float(exact[0, 9]))
    assert [token_id for token_id, _ in biased[3]] == logits[0].topk(2).indices.tolist()
    assert plain == (int(logits[2].argmax()), float(exact[2].max()), 1, ())
    assert sampler_of(params()).sample(logits[:1], [0], [2]).logprobs is None


RULES: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.3},
    {"bad_words": ((3,), (1, 5), (5, 5)), "logit_bias": ((5, 4.0),)},
    {"allowed_token_ids": (3,), "eos_token_ids": (3,), "min_tokens": 2},
)


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 1e-40, 0.7, 2.0])
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules) or "none")
def test_plain_rows_are_drawn_the_same_from_what_lies_on_the_device(temperature: float, rules: dict[str, Any]) -> None:
    """Includes cuts, ties and a row that fails. Slots are in another order than rows."""
    cuts: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.7}, {}]
    rows = [params(temperature=temperature, seed=seed, **cut, **rules) for seed, cut in enumerate(cuts)]
    logits, slots = torch.randn(6, VOCAB).mul(2).round(), [3, 0, 5, 1, 4, 2]
    logits[4, 9] = float("nan")
    sampler, recorded = sampler_of(*rows), sampler_of(*rows)
    assert all(sampler.is_plain(slot) for slot in slots)
    for position in range(2, 7):
        expected = sampler.sample(logits, slots, [position] * 6)
        token_ids, outcomes = recorded.draw(logits.clone(), torch.tensor(slots), torch.full((6,), position))
        assert outcomes.tolist() == expected.outcomes.tolist()
        assert outcomes[4] == FAILED and torch.equal(token_ids, expected.token_ids)


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.99, "min_p": 0.01}, True),
        ({"frequency_penalty": 0.1, "bad_words": ((3,), (4, 5)), "min_tokens": 3, "eos_token_ids": (7,)}, True),
        ({"logprobs": 0}, False),
        ({"grammar": "any"}, False),
        ({"bad_words": (tuple(range(40)),)}, False),
    ],
)
def test_what_is_more_than_a_draw_is_not_plain(options: dict[str, Any], is_plain: bool) -> None:
    assert sampler_of(params(**options)).is_plain(0) == is_plain


def test_a_row_is_its_own() -> None:
    """32 rows of all kinds, 5 steps: ids and logprobs are those of a row alone."""
    kinds = (
        params(logprobs=1), params(temperature=1.0, logprobs=3),
        params(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
        params(temperature=1.3, top_k=5, min_p=0.01, bad_words=((1, 2), (3,)), logprobs=0),
    )  # fmt: skip
    rows = [kinds[row % 4] for row in range(32)]
    steps = torch.randn(5, 32, VOCAB) * 2
    together = sampler_of(*rows)
    expected = [together.sample(logits, range(32), [2 + step] * 32) for step, logits in enumerate(steps)]
    for row in range(32):
        alone = sampler_of(rows[row])
        for step, logits in enumerate(steps):
            result = alone.sample(logits[row][None].clone(), [0], [2 + step])
            assert result.token_ids[0] == expected[step].token_ids[row]
            if result.logprobs is not None:
                whole = expected[step].logprobs
                assert whole is not None
                assert result.logprobs.to_host()[0] == whole.to_host()[expected[step].logprob_rows.index(row)]
