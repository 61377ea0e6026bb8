"""What the core knows of a live request beyond its counters: what was told of it, where it ends, what it may say.

Turns applied rows into deltas. Knows no queue, no blocks, no launched steps.
"""

from __future__ import annotations

from inferd.engine.api.process.flight_recorder import tag_of
from inferd.engine.api.wire.messages import Delta, Failure, FinishReason, WireLogprobs
from inferd.engine.grammar.ports import Grammar
from inferd.engine.request import Request
from inferd.engine.sched.plan import NO_RESULT, RowResult, TokenLogprobs
from inferd.engine.sched.scheduler import AppliedRow


class LiveRequest:
    """One accepted request, until its last delta."""

    __slots__ = ("_ending_ids", "_is_first_delta", "_num_prompt_logprobs", "grammar", "request", "tag")

    def __init__(self, request: Request, num_prompt_logprobs: int = 0) -> None:
        """`num_prompt_logprobs`: of a replay, prompt positions whose logprobs were delivered before."""
        params = request.params
        self.request = request
        self.tag = tag_of(request.request_id)
        """Its name in the flight record."""
        self.grammar: Grammar | None = None
        """Where its output stands; None where it may be any, and until its grammar is compiled."""
        self._ending_ids = frozenset(params.eos_token_ids + params.stop_token_ids)
        self._num_prompt_logprobs = num_prompt_logprobs
        """Prompt positions whose logprobs were sent, counted after the first, which has none."""
        self._is_first_delta = True

    @property
    def needs_grammar(self) -> bool:
        """Whether it draws under a grammar."""
        return bool(self.request.params.grammar) and self.request.params.max_tokens > 0

    def ends_with(self, token_id: int, num_output: int) -> bool:
        """Whether `token_id`, the output's token number `num_output`, ends the generation."""
        return token_id in self._ending_ids and num_output > self.request.params.min_tokens

    def ended_before(self) -> tuple[FinishReason, int | None] | None:
        """How a replayed request had ended already, when all that was missing is the word that it had."""
        request = self.request
        if request.num_output and self.ends_with(request.ids[-1], request.num_output):
            return "stop", request.ids[-1]
        if self.needs_grammar and self.grammar is None:
            return None
        if self.grammar is not None and self.grammar.is_finished:
            return "stop", None
        if request.num_output and request.num_output == request.params.max_tokens:
            return "length", None
        return ("error", None) if self.grammar_failure is not None else None

    def advance(self, token_ids: tuple[int, ...]) -> tuple[FinishReason | None, int | None]:
        """(why it ends now, the id that ended it), after its request was given `token_ids`.

        A grammar that fails ends nothing here: see `grammar_failure`.
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
        """Why its grammar cannot be followed further, where that is so."""
        if self.grammar is None or not self.grammar.failure:
            return None
        message = (
            f"the grammar could not be followed beyond token {self.request.num_output} of the answer: "
            f"{self.grammar.failure}; make it smaller or simpler"
        )
        return Failure("invalid_value", message, "grammar")

    def numerical_failure(self) -> Failure:
        """What its caller is told of a row without numbers."""
        num_tokens = len(self.request.ids)
        if self.request.params.pooling is None:
            message = f"nothing could be drawn after {num_tokens} tokens: the logits held no finite number"
        else:
            message = f"no vector could be made of {num_tokens} tokens: a hidden state held no finite number"
        return Failure("numerical_error", message)

    def empty_failure(self) -> Failure | None:
        """Why nothing was left to draw; None where the grammar may end here, and so it does."""
        if self.grammar is not None and self.grammar.is_accepting:
            return None
        names = "allowed_token_ids, bad_words, logit_bias and min_tokens"
        if self.grammar is not None:
            names = f"the grammar, {names}"
        message = f"{names} leave no token to draw after {self.request.num_output} tokens"
        return self.grammar_failure or Failure("invalid_value", message)

    def new_prompt_logprobs(self, applied: AppliedRow) -> tuple[WireLogprobs, ...]:
        """Those not sent before: a request that was preempted computes its prompt again."""
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
        failure: Failure | None = None,
    ) -> Delta:
        """The next delta: what a row gave, and how the request ends, if it does.

        `prompt_logprobs`: as many of the row's as were not sent before.
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
            scheduled_s=scheduled_s,
            failure=failure,
            embedding=result.embedding,
        )


def wire_logprobs(logprobs: tuple[TokenLogprobs, ...]) -> tuple[WireLogprobs, ...]:
    if not logprobs:
        return ()
    return tuple(WireLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top) for entry in logprobs)
