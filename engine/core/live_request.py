"""A live request, from its `Submit` to its last delta: all that the core knows of it beyond its counters.

Checks a `Submit` again, because the engine trusts no server, and makes it a `Request`. Turns applied rows into deltas.
Knows no queue, no blocks, no launched steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from inferd.engine.api.process.flight_recorder import tag_of
from inferd.engine.api.wire.messages import Delta, Failure, FinishReason, Submit, WireLogprobs
from inferd.engine.api.wire.params import ParamError, SamplingParams, check_token_ids
from inferd.engine.grammar.ports import WORD_BITS, Grammar
from inferd.engine.request import Request
from inferd.engine.sched.limits import Refusal
from inferd.engine.sched.plan import NO_RESULT, Row, RowResult, RowStatus, TokenLogprobs, TokenMasks
from inferd.engine.sched.scheduler import AppliedRow

Refuses = Callable[[SamplingParams], str | None]
"""Why an engine cannot answer requests with these parameters; None if it can."""


def fault_in(
    submit: Submit, vocab_size: int, adapters: Mapping[int, str], refuses: Refuses | None = None
) -> Failure | None:
    """Why this model cannot take a `Submit`, or its output is longer than requested; None if it is fine.

    `adapters`: digest of the adapter at each index that has one. Without `refuses` the engine answers all requests.
    """
    try:
        _check(submit, vocab_size)
    except ParamError as error:
        return Failure("invalid_value", str(error), error.param)
    reason = None if refuses is None else refuses(submit.params)
    if reason is not None:
        return Failure("invalid_value", reason)
    adapter = submit.params.adapter
    if adapter is not None and adapters.get(adapter.index) != adapter.digest:
        return Failure("model_not_found", f"the adapter at index {adapter.index} is not loaded", "model")
    return None


def fault_in_seed(submit: Submit) -> Failure | None:
    """As `fault_in`, for a choice of a prompt of which the first choice is fine."""
    try:
        submit.params.check_seed()
    except ParamError as error:
        return Failure("invalid_value", str(error), error.param)
    return None


def failure_of(refusal: Refusal) -> Failure:
    """The scheduler's refusal of a request, as its last delta tells it."""
    return Failure(refusal.code, refusal.message, refusal.param, refusal.retry_after_s)


def _check(submit: Submit, vocab_size: int) -> None:
    submit.params.check(vocab_size)
    submit.scheduling.check()
    if not submit.prompt_ids:
        raise ParamError("prompt", submit.prompt_ids, "must hold at least one token")
    check_token_ids("prompt", submit.prompt_ids, vocab_size)
    check_token_ids("emitted_ids", submit.emitted_ids, vocab_size)
    if len(submit.emitted_ids) > submit.params.max_tokens:
        rule = f"must hold at most max_tokens ({submit.params.max_tokens}) ids"
        raise ParamError("emitted_ids", len(submit.emitted_ids), rule)


def request_of(submit: Submit, max_model_len: int, now: float) -> Request:
    """The request of a `Submit` without a fault. `now`: monotonic seconds; its arrival is no later."""
    return Request.create(
        submit.request_id,
        submit.prompt_ids,
        submit.params,
        submit.scheduling.arrived_by(now),
        max_model_len=max_model_len,
        emitted_ids=submit.emitted_ids,
    )


class LiveRequest:
    """One accepted request, until its last delta."""

    __slots__ = ("_ending_ids", "_is_first_delta", "_num_prompt_logprobs", "grammar", "request", "tag")

    def __init__(self, request: Request, num_prompt_logprobs: int = 0) -> None:
        """`num_prompt_logprobs`: prompt positions whose logprobs were delivered before a replay."""
        params = request.params
        self.request = request
        self.tag = tag_of(request.request_id)
        """The request's name in the flight record."""
        self.grammar: Grammar | None = None
        """State of its grammar. None if it has none, and until it is compiled."""
        self._ending_ids = frozenset(params.eos_token_ids + params.stop_token_ids)
        self._num_prompt_logprobs = num_prompt_logprobs
        """Prompt positions whose logprobs were sent, counted from the second. The first has none."""
        self._is_first_delta = True

    @property
    def needs_grammar(self) -> bool:
        """Whether it draws under a grammar."""
        return bool(self.request.params.grammar) and self.request.params.max_tokens > 0

    def ends_with(self, token_id: int, num_output: int) -> bool:
        """Whether `token_id`, as output token number `num_output`, ends the generation."""
        return token_id in self._ending_ids and num_output > self.request.params.min_tokens

    def ended_before(self) -> Delta | None:
        """The last delta of a replayed request, if only that was lost; otherwise None."""
        request = self.request
        if request.num_output and self.ends_with(request.ids[-1], request.num_output):
            return self.delta("stop", request.ids[-1])
        if self.needs_grammar and self.grammar is None:
            return None
        if self.grammar is not None and self.grammar.is_finished:
            return self.delta("stop")
        if request.num_output and request.num_output == request.params.max_tokens:
            return self.delta("length")
        failure = self.grammar_failure
        return None if failure is None else self.delta("error", failure=failure)

    def until_end(self, result: RowResult) -> RowResult:
        """The result of a row with drafts, without what it drew behind a token that ends the generation."""
        num_output = self.request.num_output
        for count, token_id in enumerate(result.token_ids, start=1):
            if self.ends_with(token_id, num_output + count):
                return result._replace(token_ids=result.token_ids[:count], logprobs=result.logprobs[:count])
        return result

    def advance(self, applied: AppliedRow) -> Delta | None:
        """The delta of an applied row that drew what it should. It ends the request if the row's token, the grammar or
        the length ends it. None if there is nothing to tell."""
        result = applied.result
        prompt_logprobs = self.new_prompt_logprobs(applied)
        finish_reason, stop_token_id = self.end_of(result.token_ids)
        failure = self.grammar_failure if finish_reason is None else None
        if failure is not None:
            finish_reason = "error"
        if finish_reason is None and not result.token_ids and not prompt_logprobs:
            return None
        return self.delta(
            finish_reason,
            stop_token_id,
            result=result,
            prompt_logprobs=prompt_logprobs,
            num_drafts=applied.row.num_drafts,
            failure=failure,
        )

    def fail(self, applied: AppliedRow) -> Delta:
        """The last delta of a request whose applied row drew nothing."""
        is_numerical = applied.result.status is RowStatus.NUMERICAL_ERROR
        failure = self.numerical_failure() if is_numerical else self.empty_failure()
        if failure is not None:
            return self.delta("error", failure=failure)
        return self.delta("stop", prompt_logprobs=self.new_prompt_logprobs(applied))

    def end_of(self, token_ids: tuple[int, ...]) -> tuple[FinishReason | None, int | None]:
        """(finish reason, id that ended it) after the request was given `token_ids`; (None, None) if it goes on.

        A grammar that fails does not end it here: see `grammar_failure`.
        """
        request = self.request
        if token_ids and self.ends_with(token_ids[-1], request.num_output):
            return "stop", token_ids[-1]
        if self.grammar is not None and token_ids:
            self.grammar.accept(token_ids)
            if self.grammar.is_finished:
                return "stop", None
        if not request.is_complete:
            return None, None
        return ("length" if request.params.pooling is None else "stop"), None

    @property
    def grammar_failure(self) -> Failure | None:
        """Why its grammar can be followed no further, or None."""
        if self.grammar is None or not self.grammar.failure:
            return None
        message = (
            f"the grammar could not be followed beyond token {self.request.num_output} of the answer: "
            f"{self.grammar.failure}; make it smaller or simpler"
        )
        return Failure("invalid_value", message, "grammar")

    def numerical_failure(self) -> Failure:
        """The failure of a request whose row held a NaN."""
        num_tokens = len(self.request.ids)
        if self.request.params.pooling is None:
            message = f"nothing could be drawn after {num_tokens} tokens: the logits held no finite number"
        else:
            message = f"no vector could be made of {num_tokens} tokens: a hidden state held no finite number"
        return Failure("numerical_error", message)

    def empty_failure(self) -> Failure | None:
        """Why no token was left to draw. None if the grammar may end here: then the request ends normally."""
        if self.grammar is not None and self.grammar.is_accepting:
            return None
        names = "allowed_token_ids, bad_words, logit_bias and min_tokens"
        if self.grammar is not None:
            names = f"the grammar, {names}"
        message = f"{names} leave no token to draw after {self.request.num_output} tokens"
        return self.grammar_failure or Failure("invalid_value", message)

    def new_prompt_logprobs(self, applied: AppliedRow) -> tuple[WireLogprobs, ...]:
        """Logprobs not sent before: after a preemption the prompt is computed again."""
        logprobs = applied.result.prompt_logprobs
        if not logprobs:
            return ()
        new = logprobs[max(0, self._num_prompt_logprobs - applied.row.start) :]
        self._num_prompt_logprobs += len(new)
        return wire_logprobs(new)

    def delta(
        self,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        *,
        result: RowResult = NO_RESULT,
        prompt_logprobs: tuple[WireLogprobs, ...] = (),
        num_drafts: int = 0,
        failure: Failure | None = None,
    ) -> Delta:
        """The next delta: the result of a row, and how the request ends, if it does.

        `prompt_logprobs`: those of the row that were not sent before. `num_drafts`: drafts of the row.
        """
        request = self.request
        scheduled_s = request.scheduled_s if self._is_first_delta else None
        self._is_first_delta = False
        return Delta(
            request_id=request.request_id,
            token_ids=result.token_ids,
            logprobs=wire_logprobs(result.logprobs),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_known_tokens=request.num_known_tokens,
            num_loaded_tokens=request.num_loaded_tokens,
            scheduled_s=scheduled_s,
            failure=failure,
            embedding=result.embedding,
            num_drafts=num_drafts,
        )


def token_masks(rows: Sequence[Row], grammars: Iterable[Grammar | None], vocab_size: int) -> TokenMasks:
    """Masks of the draws of a step. `grammars`: of each row; None if any token may be drawn."""
    draws, bound, num_draws = list[int](), list[tuple[Grammar, Row]](), 0
    for row, grammar in zip(rows, grammars, strict=True):
        if row.samples and grammar is not None:
            bound.append((grammar, row))
            draws += range(num_draws, num_draws + row.num_draws)
        num_draws += row.num_draws
    num_words = -(-vocab_size // WORD_BITS)
    words, first_word = array("I", bytes(4 * num_words * len(draws))), 0
    for grammar, row in bound:
        grammar.fill(words, first_word)
        for number, draft_id in enumerate(row.draft_ids, start=1):
            grammar.accept((draft_id,))
            # No token may follow the end of the text, not even one that ends the answer.
            if not grammar.is_finished:
                grammar.fill(words, first_word + number * num_words)
        grammar.rollback(len(row.draft_ids))
        first_word += row.num_draws * num_words
    return TokenMasks(tuple(draws), words)


def wire_logprobs(logprobs: tuple[TokenLogprobs, ...]) -> tuple[WireLogprobs, ...]:
    if not logprobs:
        return ()
    return tuple(WireLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top) for entry in logprobs)
