"""Compares each rule with its option's meaning in plain Python, at admission, after draws, and after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.rules import SlotRequest, SlotRules, can_record

VOCAB = 50
NEVER = float("-inf")


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, seed=0, **options)


def rules_for(options: SamplingParams, ids: Sequence[int], num_prompt: int, *, is_recorded: bool = False) -> SlotRules:
    """The rules in slot 1 of 2, beside a slot whose state may be anything."""
    rules = SlotRules(2, VOCAB, torch.device("cpu"))
    rules.fill(1, SlotRequest(options, tuple(ids), num_prompt), is_recorded=is_recorded)
    return rules


def apply(rules: SlotRules, logits: Tensor, position: int) -> Tensor:
    changed = logits.clone()[None]
    rules.apply_all(changed, [1], torch.tensor([1]), torch.tensor([position]))
    return changed[0]


def applied(options: SamplingParams, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
    """The logits after every rule: with the output drawn id by id, with the output given at admission, and in a
    recorded step."""
    drawn, recorded = (rules_for(options, prompt, len(prompt), is_recorded=is_true) for is_true in (False, True))
    nothing = torch.zeros(1, dtype=torch.bool), torch.ones(1, dtype=torch.int32)
    for position, token_id in enumerate(output, start=len(prompt)):
        at = torch.tensor([1]), torch.tensor([position])
        drawn.record_all(torch.tensor([token_id]), *nothing, [1], *at)
        recorded.record(torch.tensor([token_id]), *nothing, *at)
    end = len(prompt) + len(output)
    found = apply(drawn, logits, end)
    assert torch.equal(found, apply(rules_for(options, [*prompt, *output], len(prompt)), logits, end))
    if can_record(options):
        by_tensors = logits.clone()[None]
        recorded.apply(by_tensors, torch.tensor([1]), torch.tensor([end]))
        assert torch.equal(found, by_tensors[0])
    return found


Oracle = Callable[[list[float], list[int], list[int]], list[float]]


def allowed(logits: list[float], prompt: list[int], output: list[int]) -> list[float]:
    return [value if token_id in (3, 7, 40) else NEVER for token_id, value in enumerate(logits)]


def biased(logits: list[float], prompt: list[int], output: list[int]) -> list[float]:
    return [value + {3: 2.0, 9: -100.0}.get(token_id, 0.0) for token_id, value in enumerate(logits)]


def presence_and_frequency(logits: list[float], prompt: list[int], output: list[int]) -> list[float]:
    counts = Counter(output)
    return [value - 0.5 * counts[token_id] - 0.25 * (counts[token_id] > 0) for token_id, value in enumerate(logits)]


def min_tokens(logits: list[float], prompt: list[int], output: list[int]) -> list[float]:
    return [NEVER if len(output) < 3 and token_id in (2, 4) else value for token_id, value in enumerate(logits)]


def bad_words(logits: list[float], prompt: list[int], output: list[int]) -> list[float]:
    history, result = prompt + output, list(logits)
    for word in ([5], [6, 8], [6, 8, 10], [1, 2, 3, 4]):
        if len(history) >= len(word) - 1 and history[len(history) - len(word) + 1 :] == word[:-1]:
            result[word[-1]] = NEVER
    return result


CASES: list[tuple[SamplingParams, Oracle]] = [
    (params(allowed_token_ids=(3, 7, 40)), allowed),
    (params(logit_bias=((3, 1.5), (9, -100.0), (3, 0.5))), biased),
    (params(presence_penalty=0.25, frequency_penalty=0.5), presence_and_frequency),
    (params(min_tokens=3, eos_token_ids=(2,), stop_token_ids=(4,)), min_tokens),
    (params(bad_words=((5,), (6, 8), (6, 8, 10), (1, 2, 3, 4))), bad_words),
]


@pytest.mark.parametrize(("options", "oracle"), CASES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("output", [[], [6], [6, 8], [1, 2, 3], [9, 9, 6, 8], [3, 3, 3, 1, 2, 3]])
@pytest.mark.parametrize("prompt", [[1], [1, 2, 6], [9, 1, 2, 3]])
def test_equals_its_meaning(options: SamplingParams, oracle: Oracle, output: list[int], prompt: list[int]) -> None:
    logits = torch.randn(VOCAB)
    expected = torch.tensor(oracle(logits.tolist(), prompt, output))
    assert torch.equal(applied(options, prompt, output, logits), expected)


def test_the_oracles_notice() -> None:
    """Each option changes something. An oracle that agrees with doing nothing would prove nothing."""
    logits = torch.zeros(VOCAB)
    for options, _ in CASES:
        assert not torch.equal(applied(options, [1, 2, 3], [6, 8], logits), logits)


def test_repetition_penalty_equals_transformers() -> None:
    random = Random(0)
    prompt, output = ([random.randrange(VOCAB) for _ in range(12)] for _ in range(2))
    logits = torch.randn(VOCAB)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits[None].clone())[0]
    assert torch.equal(applied(params(repetition_penalty=1.7), prompt, output, logits), expected)
    assert not torch.equal(applied(params(repetition_penalty=1.7), prompt, [], logits), expected)


def test_a_word_longer_than_the_history_is_never_due() -> None:
    logits = torch.randn(VOCAB)
    assert torch.equal(applied(params(bad_words=((1, 2, 3, 4, 5),)), [3, 4], [], logits), logits)


def test_rules_apply_in_the_documented_order() -> None:
    """A bias comes before the penalty that scales it, and nothing brings back an id that is not allowed."""
    options = params(allowed_token_ids=(1, 2), logit_bias=((1, 4.0), (3, 100.0)), repetition_penalty=2.0)
    result = applied(options, [1], [], torch.zeros(VOCAB))
    assert result[:4].tolist() == [NEVER, 2.0, 0.0, NEVER]


@pytest.mark.parametrize("words", [[[7] * 17 + [8], [1, 2]], [[token_id, 8] for token_id in range(2)] * 129])
def test_words_that_are_too_many_or_too_long_for_a_slot(words: list[list[int]]) -> None:
    options, logits = params(bad_words=tuple(map(tuple, words))), torch.randn(VOCAB)
    assert not can_record(options)
    for prompt, output in (([7] * 16, []), ([7] * 17, []), ([7] * 9, [7] * 8), ([3], [1]), ([1, 3], [0])):
        expected = logits.clone()
        history = prompt + output
        for word in words:
            if history[len(history) - len(word) + 1 :] == word[:-1] and len(history) >= len(word) - 1:
                expected[word[-1]] = NEVER
        assert torch.equal(applied(options, prompt, output, logits), expected)


def test_rules_that_a_recorded_step_must_leave_to_the_caller() -> None:
    logits = torch.zeros(1, VOCAB)
    left = rules_for(params(logit_bias=((1, 2.0),)), [1], 1)
    left.apply(logits, torch.tensor([1]), torch.tensor([1]))
    assert not logits.any()
    assert float(apply(left, logits[0], 1)[1]) == 2.0


def test_what_is_not_asked_for_costs_nothing() -> None:
    for options in (params(), params(min_tokens=5)):
        rules = rules_for(options, [1, 2], 2)
        logits = torch.randn(VOCAB)
        assert not rules.has_rules(1) and torch.equal(apply(rules, logits, 2), logits)
