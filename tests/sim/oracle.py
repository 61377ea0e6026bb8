"""The expected answer of each simulated request, computed from its prompt, seed and parameters alone.

The simulated model draws the token of a position from the tokens that each of its cache groups sees before it: all of
them, or a window. The device derives it from the tokens that it reads through block tables, this file from the sequence
itself. If the two differ, the engine mixed something up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from inferd.engine.api.wire.messages import FinishReason, WireLogprobs
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from tests.sim.grammar import VOCAB_SIZE, Rule, SimulatedGrammar

_MIX = 0x9E3779B97F4A7C15

STATE = 0
"""Stands for a window: what sees a recurrent state."""
Windows = tuple[int | None, ...]
"""By cache group: number of last positions that it sees; None for all. Behind the groups perhaps `STATE`."""
Views = tuple[tuple[int, ...], ...]
"""By cache group: the tokens that it sees, in order. Of a state one number."""


def views_of(ids: tuple[int, ...], windows: Windows) -> Views:
    """Tokens that each group sees of a sequence from its last token."""
    return tuple(
        (reduce(next_state, ids, 0),) if window == STATE else ids if window is None else ids[-window:]
        for window in windows
    )


def next_state(state: int, token_id: int) -> int:
    """The state behind a token, from the one before it. It is 0 before the first token."""
    return hash((state, token_id))


def next_token(views: Views, seed: int, allowed: Sequence[int] = range(VOCAB_SIZE)) -> int:
    """The token behind the seen ones. A change of any token in any view changes it in 63 of 64 cases.

    It is one of `allowed`.
    """
    # Unlike the hash of strings, the hash of a tuple of ints is the same in every process.
    return allowed[((hash((seed, views)) * _MIX) >> 40) % len(allowed)]


def logprob_of(views: Views, token_id: int) -> float:
    """The simulated log-probability of `token_id` behind the seen tokens. As in a model, it does not depend on the
    seed."""
    return -float(hash((views, token_id)) % 1_000_003)


def vector_of(states: Sequence[Views]) -> bytes:
    """The simulated vector of these pooled states. Any change of the states changes it."""
    return struct.pack("<q", hash(tuple(states)))


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a scenario."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_tick: int = 0
    priority: int = 0
    cache_salt: str = ""
    num_emitted: int = 0
    """Tokens that it was given before it was submitted, in a replay."""
    nan_position: int | None = None
    """Position of NaN logits."""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    tenant: str = ""
    weight: float = 1.0
    """Weight of its tenant."""

    def scheduling(self, arrival_s: float, alone_until: int = 0) -> SchedulingParams:
        return SchedulingParams(
            arrival_s=arrival_s,
            priority=self.priority,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            weight=self.weight,
            ttft_target_s=self.ttft_target_s,
            tpot_target_s=self.tpot_target_s,
            alone_until=alone_until,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a request is given, and how it ends."""

    token_ids: tuple[int, ...]
    logprobs: tuple[WireLogprobs, ...]
    prompt_logprobs: tuple[WireLogprobs, ...]
    finish_reason: FinishReason
    stop_token_id: int | None = None
    failure_code: str | None = None
    embedding: bytes = b""


def answer_of(job: Job, windows: Windows) -> Answer:
    """The answer to a request that is neither aborted nor refused, including replayed tokens."""
    params, ids = job.params, list(job.prompt_ids)
    logprobs: list[WireLogprobs] = []
    prompt_logprobs: tuple[WireLogprobs, ...] = ()
    if params.prompt_logprobs is not None:
        prompt_logprobs = tuple(_logprob(job.prompt_ids, i, windows) for i in range(1, len(ids)))

    def answer(reason: FinishReason, stop_token_id: int | None = None, failure_code: str | None = None) -> Answer:
        token_ids = tuple(ids[len(job.prompt_ids) :])
        return Answer(token_ids, tuple(logprobs), prompt_logprobs, reason, stop_token_id, failure_code)

    if params.pooling is not None:
        first = 1 if params.pooling.how == "mean" else len(ids)
        states = [views_of(job.prompt_ids[:end], windows) for end in range(first, len(ids) + 1)]
        return replace(answer("stop"), embedding=vector_of(states))
    ending_ids = params.eos_token_ids + params.stop_token_ids
    grammar = SimulatedGrammar(Rule.read(params.grammar), ending_ids) if params.grammar else None
    if grammar is not None and grammar.rule.end < 0 and params.max_tokens:
        return answer("error", failure_code="invalid_value")
    for num_output in range(1, params.max_tokens + 1):
        if len(ids) == job.nan_position:
            return answer("error", failure_code="numerical_error")
        allowed = range(VOCAB_SIZE) if grammar is None else sorted(grammar.allowed())
        if grammar is not None and not allowed:
            # The grammar may end here, and no end token was requested.
            return answer("stop") if grammar.is_accepting else answer("error", failure_code="invalid_value")
        ids.append(next_token(views_of(tuple(ids), windows), params.seed, allowed))
        if params.logprobs is not None:
            logprobs.append(_logprob(tuple(ids), len(ids) - 1, windows))
        if num_output > params.min_tokens and ids[-1] in ending_ids:
            return answer("stop", ids[-1])
        if grammar is not None:
            grammar.accept(ids[-1:])
            if grammar.is_finished:
                return answer("stop")
            if grammar.failure and num_output < params.max_tokens:
                return answer("error", failure_code="invalid_value")
    return answer("length")


def _logprob(ids: tuple[int, ...], position: int, windows: Windows) -> WireLogprobs:
    return WireLogprobs(ids[position], logprob_of(views_of(ids[:position], windows), ids[position]), 1, ())
