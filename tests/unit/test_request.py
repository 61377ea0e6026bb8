"""Counters of a request: what a row may do, when it samples, when length ends it."""

from __future__ import annotations

import pytest

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.request import Request


def make(prompt: int = 4, max_tokens: int = 3, **kwargs: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request.create("r", tuple(range(prompt)), params, max_model_len=64, **kwargs)  # type: ignore[arg-type]


def counters(request: Request) -> tuple[int, int, int, int]:
    return request.cached, request.computed, request.scheduled, request.total


def test_a_prompt_in_chunks_samples_at_its_end_only() -> None:
    request = make(prompt=5)
    request.admit(2, now=1.0)
    assert request.launch(2) is False
    assert request.launch(1) is True
    assert counters(request) == (2, 2, 5, 6)
    request.apply(2, 2, ())
    request.apply(4, 1, (9,))
    assert (counters(request), request.ids, request.num_output) == ((2, 5, 5, 6), [0, 1, 2, 3, 4, 9], 1)


def test_overlap_launches_behind_a_token_nobody_has_seen() -> None:
    request = make(prompt=2)
    request.admit(0, now=1.0)
    assert request.launch(2) is True
    assert request.num_pending == 1
    assert request.launch(1) is True
    assert counters(request) == (0, 0, 3, 4)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_row_is_launched_that_the_length_makes_needless(max_tokens: int) -> None:
    request = make(prompt=3, max_tokens=max_tokens)
    request.admit(0, now=1.0)
    num_sampled = 0
    while request.num_pending:
        num_sampled += request.launch(request.num_pending)
    assert (num_sampled, request.scheduled, request.total) == (max_tokens, 2 + max_tokens, 3 + max_tokens)


def test_max_tokens_0_computes_the_whole_prompt_and_samples_nothing() -> None:
    request = make(prompt=3, max_tokens=0)
    request.admit(0, now=1.0)
    assert request.launch(3) is False
    assert not request.is_complete
    request.apply(0, 3, ())
    assert request.is_complete
    assert request.num_pending == 0


def test_the_models_length_bounds_the_output() -> None:
    params = SamplingParams(max_tokens=50, seed=0)
    request = Request.create("r", (1, 2), params, max_model_len=5)
    assert (request.max_total, request.num_needed) == (5, 4)


def test_replayed_ids_are_output() -> None:
    request = make(prompt=2, max_tokens=3, emitted_ids=(7, 8))
    assert (request.num_prompt, request.num_output, request.total, request.max_total) == (2, 2, 4, 5)
    assert not request.is_complete
    assert make(prompt=2, max_tokens=2, emitted_ids=(7, 8)).is_complete


def test_rewind_keeps_the_ids_and_the_first_admission() -> None:
    request = make(prompt=3)
    request.admit(2, now=1.0)
    request.launch(1)
    request.in_flight -= 1
    request.apply(2, 1, (5,))
    request.rewind()
    assert (counters(request), request.ids) == ((0, 0, 0, 4), [0, 1, 2, 5])
    request.admit(3, now=9.0)
    assert (request.cached, request.num_cached_tokens, request.scheduled_s) == (3, 2, 1.0)


def test_rewind_waits_for_what_is_in_flight() -> None:
    request = make(prompt=3)
    request.admit(0, now=1.0)
    request.launch(3)
    with pytest.raises(AssertionError, match="in flight"):
        request.rewind()


def test_rows_are_applied_in_order() -> None:
    request = make(prompt=4)
    request.admit(0, now=1.0)
    request.launch(2)
    request.launch(2)
    with pytest.raises(AssertionError, match="row at 2 applied, 0 computed"):
        request.apply(2, 2, (5,))


@pytest.mark.parametrize(
    "wrong", [{"cached": 3}, {"computed": 5}, {"scheduled": 1}, {"total": 3}, {"total": 99}, {"ids": [1]}]
)
def test_check_finds_each_counter_out_of_order(wrong: dict[str, object]) -> None:
    request = make(prompt=4)
    request.admit(1, now=1.0)
    request.launch(3)
    request.apply(1, 1, ())
    request.check()
    for name, value in wrong.items():
        setattr(request, name, value)
    with pytest.raises(AssertionError):
        request.check()


def test_prompt_logprobs_take_no_hit() -> None:
    assert make().takes_prefix_hits
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0)
    assert not Request.create("r", (1,), params, max_model_len=9).takes_prefix_hits
