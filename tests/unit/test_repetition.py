"""An answer that repeats itself is noticed at the token that completes the last copy, by vLLM's definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.api.errors import RequestError
from inferd.server.generate.choice import RepetitionDetector
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.repetition import RepetitionRule
from inferd.server.schema.request_model import read


def ends_in_copies(ids: Sequence[int], rule: RepetitionRule) -> bool:
    """The definition, word for word: slow, and obviously right."""
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        tail = ids[len(ids) - size * rule.min_count :]
        if len(ids) >= size * rule.min_count and list(tail) == list(tail[:size]) * rule.min_count:
            return True
    return False


RULES = st.builds(
    lambda low, more, count: RepetitionRule(low + more, low, count),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(2, 4),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), RULES)
def test_every_token_is_judged_by_the_definition(ids: list[int], rule: RepetitionRule) -> None:
    watched = RepetitionDetector(rule)
    for i, token_id in enumerate(ids):
        assert watched.feed(token_id) == ends_in_copies(ids[: i + 1], rule)


def test_without_a_rule_nothing_is_found() -> None:
    watched = RepetitionDetector(None)
    assert not any(watched.feed(1) for _ in range(1_000))


def rule_of(value: dict[str, object]) -> RepetitionRule | None:
    return read(CompletionRequest, {"prompt": "x", "repetition_detection": value}).repetition_detection


def test_the_rule_as_it_is_written() -> None:
    assert rule_of({"max_pattern_size": 5, "min_count": 3}) == RepetitionRule(5, 1, 3)
    assert rule_of({"max_pattern_size": 5, "min_pattern_size": 5, "min_count": 2}) == RepetitionRule(5, 5, 2)
    assert rule_of({}) is None
    assert rule_of({"max_pattern_size": 0, "min_count": 0}) is None


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ({"max_pattern_size": 257, "min_count": 2}, "repetition_detection.max_pattern_size", "integer_above_max_value"),
        ({"max_pattern_size": 5}, "repetition_detection.min_count", "missing_required_parameter"),
        ({"max_pattern_size": 5, "min_count": 0}, "repetition_detection.min_count", "integer_below_min_value"),
        ({"max_pattern_size": 5, "min_count": 1}, "repetition_detection.min_count", "integer_below_min_value"),
        (
            {"max_pattern_size": 5, "min_pattern_size": 6, "min_count": 2},
            "repetition_detection.min_pattern_size",
            "integer_above_max_value",
        ),
        ({"max_pattern_size": 5.5, "min_count": 2}, "repetition_detection.max_pattern_size", "invalid_type"),
        ({"size": 5}, "repetition_detection.size", "unknown_parameter"),
    ],
)
def test_a_rule_that_cannot_be(value: dict[str, object], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        rule_of(value)
    assert (caught.value.param, caught.value.code) == (param, code)
