"""One choice: deltas of ids in, events with text out.

Each token passes the detokenizer, the parser of reasoning and calls, and the stop strings, in this order. So the text,
the ids counted and the end by a stop string do not depend on how the engine's deltas were cut or merged. Knows no
router and no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Delta, Failure
from inferd.server.errors import messages as errors
from inferd.server.generate.answer_events import answer_of
from inferd.server.generate.events import (
    REPETITION_DETECTED,
    SCORED_PROMPT,
    Event,
    Finished,
    Packed,
    PromptRead,
    ScoredToken,
)
from inferd.server.generate.request import GenerateRequest
from inferd.server.observability.server_instruments import Repair
from inferd.server.schema.repetition import RepetitionRule
from inferd.server.structured.bounds import refusal
from inferd.server.text.detokenizer import Detokenizer, TokenBytes

_UNNAMED = Failure("engine_error", "The engine could not serve this request.")


class Choice:
    """Text and events of one choice while it runs."""

    def __init__(self, index: int, request: GenerateRequest, table: TokenBytes) -> None:
        self.index = index
        self.is_finished = False
        self.was_stopped_by_text = False
        self._request, self._table = request, table
        self._prompt = request.prompt_of(index)
        kept_ids = frozenset[int]() if request.parser_config is None else request.parser_config.kept_ids
        self._detokenizer = Detokenizer(table, self._prompt.token_ids, request.skip_special_tokens, kept_ids)
        self._repetition = RepetitionDetector(request.repetition)
        self._repeats = False
        self._answer = answer_of(index, request)
        self._stop_id: int | None = None
        """The caller's stop token that ended the answer, if the server and not the engine looks for them."""
        self._awaits_prompt = request.reads_prompt
        scores_prompt = request.params.prompt_logprobs is not None
        self._scored_prompt = Packed(SCORED_PROMPT, (None,) if scores_prompt else ())
        self._num_tokens = self._num_chars = self._num_prompt_chars = 0
        self._num_partial = 0
        """Number of tokens since the last one that completed a character."""
        self._unsent: deque[int] = deque()
        """Number of characters up to the end of each token whose text may not be sent yet."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens read: those of the answer."""
        return self._num_tokens

    @property
    def repairs(self) -> Mapping[Repair, int]:
        """How often the text was read otherwise than the model's format says."""
        return self._answer.repairs

    def feed(self, delta: Delta) -> Iterator[Event]:
        """The events of one delta. Raises `RequestError` if the engine failed the choice."""
        assert not self.is_finished, "a delta after the end"
        if delta.finish_reason == "error":
            raise self._error_of(delta.failure or _UNNAMED)
        if delta.prompt_logprobs:
            start = len(self._scored_prompt)
            offsets = self._prompt.offsets[start : start + len(delta.prompt_logprobs)]
            self._scored_prompt.extend(tuple(map(ScoredToken, delta.prompt_logprobs, offsets)))
        if self._awaits_prompt and (delta.token_ids or delta.finish_reason in ("stop", "length")):
            yield self._prompt_read()
        if delta.token_ids:
            yield from self._read(delta)
        if self._answer.stop is not None:
            self.is_finished = self.was_stopped_by_text = True
            yield from self._finished(Finished(self.index, "stop", self._answer.stop), delta)
        elif self._stop_id is not None:
            self.is_finished = self.was_stopped_by_text = True
            yield from self._close(Finished(self.index, "stop", self._stop_id), delta)
        elif self._answer.is_full:
            self.is_finished = self.was_stopped_by_text = True
            yield from self._finished(Finished(self.index, "stop", None), delta)
        elif self._repeats:
            self.is_finished = self.was_stopped_by_text = True
            yield from self._close(Finished(self.index, "repetition", REPETITION_DETECTED), delta)
        elif delta.finish_reason is not None:
            self.is_finished = True
            yield from self._end(delta)

    def _error_of(self, failure: Failure) -> RequestError:
        """The engine's error, with the request's field that the grammar comes from: the engine does not know it."""
        if failure.param == "grammar":
            return refusal(self._request.grammar_param, failure.message)
        return RequestError(failure.code, failure.message, failure.param, failure.retry_after_s)

    def _read(self, delta: Delta) -> Iterator[Event]:
        """Read the ids up to the one that completes a stop string or the last wanted call."""
        scored: list[ScoredToken] = []
        num_read = 0
        for i, token_id in enumerate(delta.token_ids):
            if delta.logprobs:
                scored.append(ScoredToken(delta.logprobs[i], self._num_prompt_chars + self._num_chars))
            num_read = i + 1
            self._num_tokens += 1
            self._answer.token(self._num_chars)
            is_armed = self._num_tokens > self._request.params.min_tokens
            is_stop = is_armed and token_id in self._request.content_stop_ids
            if is_stop and self._answer.stops_at(self._text_of(token_id)):
                self._stop_id = token_id
            is_end = delta.stop_token_id is not None and num_read == len(delta.token_ids)
            is_hidden = (is_end or self._stop_id is not None) and not self._request.include_stop
            piece = "" if is_hidden else self._detokenizer.feed(token_id)
            self._num_partial += 1
            if piece:
                self._num_chars += len(piece)
                self._unsent.extend([self._num_chars] * self._num_partial)
                self._num_partial = 0
                self._answer.feed(piece, is_armed)
            repeats = self._repetition.feed(token_id) and self._num_tokens >= self._request.params.min_tokens
            # If the last token also ends the answer by itself, that end is the reason.
            self._repeats = repeats and not (num_read == len(delta.token_ids) and delta.finish_reason is not None)
            is_over = self._answer.stop is not None or self._stop_id is not None
            if is_over or self._repeats or self._answer.is_full:
                break
        while self._unsent and self._unsent[0] <= self._num_chars - self._answer.num_held:
            self._unsent.popleft()
        num_unsent = len(self._unsent) + self._num_partial
        yield from self._answer.events(delta.token_ids[:num_read], tuple(scored), delta.num_cached_tokens, num_unsent)

    def _end(self, delta: Delta) -> Iterator[Event]:
        """The text still held back, then the end. Raises `RequestError` for an answer that the server gave up."""
        assert delta.finish_reason is not None and delta.finish_reason != "error"
        if delta.finish_reason == "abort":
            # A choice that its reader aborted is not read any more, so the server aborted this one.
            raise errors.given_up()
        yield from self._close(Finished(self.index, delta.finish_reason, self._stop_reason(delta)), delta)

    def _close(self, end: Finished, delta: Delta) -> Iterator[Event]:
        """As `_finished`, with the rest of a character that stays incomplete."""
        if rest := self._detokenizer.finish():
            self._answer.feed(rest)
        yield from self._finished(end, delta)

    def _finished(self, end: Finished, delta: Delta) -> Iterator[Event]:
        """The events still held back, then the end: `tool_calls` if the model stopped after calls, and `length` if it
        stopped in the middle of one."""
        self._answer.finish(is_cut=end.reason != "stop")
        yield from self._answer.events((), (), delta.num_cached_tokens)
        if self._answer.stop is not None:
            # Text that was still held back, such as the U+FFFD of an incomplete character, may complete a stop string.
            end = Finished(self.index, "stop", self._answer.stop)
        if end.reason == "stop" and self._answer.num_calls:
            end = replace(end, reason="length" if self._answer.is_in_call else "tool_calls")
        yield end

    def _text_of(self, token_id: int) -> str:
        return self._table.of(token_id).decode("utf-8", "replace")

    def _stop_reason(self, delta: Delta) -> int | None:
        given = (*self._request.params.stop_token_ids, *self._request.content_stop_ids)
        return delta.stop_token_id if delta.stop_token_id in given else None

    def _prompt_read(self) -> PromptRead:
        self._awaits_prompt = False
        text = (self._prompt.text or "") if self._request.echo else ""
        self._num_prompt_chars = len(text)
        num_scored = 0 if self._request.params.prompt_logprobs is None else len(self._prompt.token_ids)
        assert len(self._scored_prompt) == num_scored, "all prompt tokens but the first are scored"
        return PromptRead(self.index, text, self._scored_prompt)


class RepetitionDetector:
    """Finds an answer that repeats itself: its last tokens are `min_count` copies of one pattern (vLLM's definition).

    Each token costs one comparison for each size that a pattern may have.
    """

    def __init__(self, rule: RepetitionRule | None) -> None:
        """`rule`: None finds nothing."""
        self._rule = rule
        self._ids: list[int] = []
        self._runs = [0] * (rule.max_pattern_size + 1 if rule else 0)
        """Size p -> how many of the last tokens in a row equal the token p places before them."""

    def feed(self, token_id: int) -> bool:
        """Whether this token completes the last copy."""
        rule = self._rule
        if rule is None:
            return False
        ids, runs, copies = self._ids, self._runs, rule.min_count - 1
        ids.append(token_id)
        num_ids, is_found = len(ids), False
        for size in range(rule.min_pattern_size, min(rule.max_pattern_size, num_ids - 1) + 1):
            runs[size] = runs[size] + 1 if ids[-1 - size] == token_id else 0
            is_found = is_found or runs[size] >= size * copies
        return is_found
