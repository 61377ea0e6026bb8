"""The tokens of one request so far, compared with its answer. Knows no engine and no router.

Its text grows along the oracle's answer, and it ends once, as the answer does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inferd.engine.api.wire.messages import Delta, FinishReason, WireLogprobs
from tests.sim.oracle import Answer, Job


@dataclass(slots=True)
class Stream:
    """One request. Any difference from the answer raises `AssertionError`."""

    job: Job
    answer: Answer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[WireLogprobs] = field(default_factory=list)
    prompt_logprobs: list[WireLogprobs] = field(default_factory=list)
    is_aborted: bool = False
    finish_reason: FinishReason | None = None

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None

    def take(self, delta: Delta) -> None:
        """Check the next delta, but not its end: see `check_ending`."""
        request_id, answer = self.job.request_id, self.answer
        assert delta.request_id == request_id, f"{request_id} was given what is {delta.request_id}'s"
        assert self.is_live, f"{request_id} ended and was given {delta}"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        given, due = tuple(self.token_ids), answer.token_ids[: len(self.token_ids)]
        assert given == due, f"{request_id} was given {given}, and its answer is {answer.token_ids}"
        assert tuple(self.logprobs) == answer.logprobs[: len(given)], f"{request_id}: logprobs"
        due_logprobs = answer.prompt_logprobs[: len(self.prompt_logprobs)]
        assert tuple(self.prompt_logprobs) == due_logprobs, f"{request_id}: prompt logprobs"
        self.finish_reason = delta.finish_reason

    def check_ending(self, delta: Delta) -> None:
        """Check that it ended as the answer does, by its own abort, or by a refusal for its target before any work."""
        request_id, answer = self.job.request_id, self.answer
        if delta.finish_reason == "abort":
            assert self.is_aborted, f"{request_id} was aborted by nobody"
            return
        code = delta.failure.code if delta.failure is not None else None
        if code == "rate_limit_exceeded":
            assert self.job.ttft_target_s is not None, f"{request_id} has no target, and was refused for it"
            assert not self.token_ids, f"{request_id} was refused after work on it"
            assert delta.failure is not None
            assert delta.failure.retry_after_s is not None
            return
        end = (delta.finish_reason, delta.stop_token_id, code)
        assert end == (answer.finish_reason, answer.stop_token_id, answer.failure_code), f"{request_id}: {delta}"
        assert tuple(self.token_ids) == answer.token_ids, f"{request_id} ended before {answer.token_ids}"
        assert delta.embedding == answer.embedding, f"{request_id}: another vector"
        if answer.failure_code is None:
            assert tuple(self.prompt_logprobs) == answer.prompt_logprobs, f"{request_id}: prompt logprobs missing"

    def check_cached(self, num_cached: int, block_size: int, others: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """A hit is whole blocks that another request of the same salt began with. In a replay it may be the whole
        prompt.

        `others`: salt and tokens of each other request, and of this one if it was sent before.
        """
        job = self.job
        assert not job.params.needs_every_position, f"{job.request_id}: a prefix hit skips what is asked for"
        whole = num_cached % block_size == 0 or num_cached == len(job.prompt_ids)
        assert whole, f"{job.request_id}: {num_cached} cached tokens, block size {block_size}"
        hit = (*job.prompt_ids, *self.token_ids)[:num_cached]
        assert len(hit) == num_cached, f"{job.request_id}: {num_cached} cached tokens of {len(hit)}"
        known = any(salt == job.cache_salt and token_ids[:num_cached] == hit for salt, token_ids in others)
        assert known, f"{job.request_id}: {num_cached} cached tokens that nobody computed under salt {job.cache_salt!r}"
