"""Timing of one request, compared with values computed by hand; null for what did not happen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import SamplingParams
from inferd.server.generate.stream import RequestTiming, reason_not_cached, timing_of


@pytest.mark.parametrize(
    ("scheduled_s", "first_s", "last_s", "num_tokens", "expected"),
    [
        (11.0, 11.5, 12.5, 5, (1000.0, 500.0, 1000.0, 250.0, 3.33)),
        (11.0, 11.5, 11.75, 2, (1000.0, 500.0, 250.0, 250.0, 2.67)),
        (11.0, 11.5, 11.5, 1, (1000.0, 500.0, 0.0, None, 2.0)),
        (11.0, None, None, 0, (1000.0, None, None, None, None)),
        (None, None, None, 0, (None, None, None, None, None)),
        (10.0, 10.0, 10.0, 1, (0.0, 0.0, 0.0, None, None)),
        (9.0, 9.5, 9.5, 1, (0.0, 500.0, 0.0, None, 2.0)),
    ],
)
def test_times_are_between_the_engines_stamps(
    scheduled_s: float | None,
    first_s: float | None,
    last_s: float | None,
    num_tokens: int,
    expected: tuple[float | None, ...],
) -> None:
    """It arrived at 10 s."""
    stream = SimpleNamespace(
        scheduled_s=scheduled_s,
        first_token_s=first_s,
        last_token_s=last_s,
        num_generated=num_tokens,
        num_drafts=num_tokens,
        num_accepted=num_tokens // 2,
        num_cached=32,
        num_loaded=24,
        submit=SimpleNamespace(prompt_ids=(1,) * 40),
        num_restarts=3,
    )
    names = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second")
    told: RequestTiming = timing_of(stream, 10.0, "a reason", "another")  # type: ignore[arg-type]
    assert told == {
        **dict(zip(names, expected, strict=True)),
        "draft_tokens": num_tokens,
        "accepted_draft_tokens": num_tokens // 2,
        "not_speculated": "a reason",
        "cached_tokens": 32,
        "not_cached": "another",
        "pool_tokens": 8,
        "loaded_tokens": 24,
        "computed_tokens": None if first_s is None else 8,
        "restarts": 3,
    }


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "num_known", "params", "words"),
    [
        (100, 96, 96, {}, None),
        (96, 64, 64, {}, None),
        (32, 0, 0, {}, "at most 32 tokens is computed whole"),
        (100, 0, 0, {}, "the same first 32 tokens"),
        (100, 32, 32, {}, "the same first 64 tokens"),
        (100, 32, 64, {}, "64 tokens of the prompt were known, but a recurrent state was kept behind 32"),
        (100, 0, 0, {"prompt_logprobs": 1}, "all positions"),
    ],
)
def test_why_no_more_was_cached(
    num_prompt: int, num_cached: int, num_known: int, params: dict[str, int], words: str | None
) -> None:
    submit = Submit(request_id="r", prompt_ids=(1,) * num_prompt, params=SamplingParams(max_tokens=1, seed=0, **params))
    stream = SimpleNamespace(submit=submit, num_cached=num_cached, num_known=num_known)
    ready = SimpleNamespace(prefix_caching=True, block_size=32)
    reason = reason_not_cached(stream, ready)  # type: ignore[arg-type]
    assert reason is None if words is None else reason is not None and words in reason
    ready.prefix_caching = False
    assert reason_not_cached(stream, ready) == "the server runs without a prefix cache"  # type: ignore[arg-type]
