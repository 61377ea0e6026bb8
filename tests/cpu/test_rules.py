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
from inferd.engine.sample.rules import RULES, Admitted, rules_for

VOCAB = 50
NEVER = float("-inf")


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, seed=0, **options)


def admitted(options: SamplingParams, ids: Sequence[int], num_prompt: int) -> Admitted:
    return Admitted(options, tuple(ids), num_prompt, VOCAB, torch.device("cpu"))


def applied(options: SamplingParams, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
    """The logits after every rule: with the output drawn id by id, and then with the output given at admission."""
    drawn, resumed = logits.clone(), logits.clone()
    rules = rules_for(admitted(options, prompt, len(prompt)))
    for token_id in output:
        for rule in rules:
            rule.record(torch.tensor([token_id]))
    for rule in rules:
        rule.apply(drawn, len(prompt) + len(output))
    for rule in rules_for(admitted(options, [*prompt, *output], len(prompt))):
        rule.apply(resumed, len(prompt) + len(output))
    assert torch.equal(drawn, resumed)
    return drawn


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


def test_what_is_not_asked_for_costs_nothing() -> None:
    assert rules_for(admitted(params(), [1, 2], 2)) == ()
    assert rules_for(admitted(params(min_tokens=5), [1, 2], 2)) == ()
    assert len(RULES) == 5
