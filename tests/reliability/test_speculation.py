"""Engines die while they verify guessed tokens, and every answer is that of an undisturbed run.

A free model's answers are known, so each is compared with what it must be.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Asker
from tests.reliability.conftest import WITHOUT_CACHE, count, faulty, restarts
from tests.reliability.workloads import copies, free_answer

STEP_MS = 2.0
NUM_REQUESTS, NUM_TOKENS = 4, 90
KILLED_AT = (2, 1, 1)
"""For each engine in turn, the number of its step with drafts that it dies in."""


@pytest.mark.sampled(keep=4, among="recoveries")
def test_a_death_while_drafts_are_verified_is_a_pause(start: Callable[..., Daemon]) -> None:
    faults = [f"kill@draft={step}@epoch={epoch}" for epoch, step in enumerate(KILLED_AT)]
    daemon = start(WITHOUT_CACHE, "--speculative", "ngram", program=faulty(*faults, step_ms=STEP_MS))
    asks = copies(NUM_REQUESTS, NUM_TOKENS)
    for answer, ask in zip(Asker(daemon.url).ask(asks), asks, strict=True):
        num_prompt = len(ask.body["prompt"])
        assert answer.choices[0]["token_ids"] == free_answer(num_prompt, NUM_TOKENS)
        assert answer.usage is not None
        assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (num_prompt, NUM_TOKENS)
    assert restarts(daemon) == len(KILLED_AT), daemon.output
    assert count(daemon, "inferd_accepted_draft_tokens_total") > 0, "the last engine speculated nothing"
