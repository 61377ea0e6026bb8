"""One choice of a request: the journal of its tokens, and the tokens on their way from the router to their reader.

A token exists once it is in the journal, which is all that a new engine needs to continue the choice. Deltas that wait
are merged, and packed if they have log probabilities, so a slow reader costs at most its own answer. Knows no sockets,
no engine and no text, and of the router only the function that aborts.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
from msgspec import structs

from inferd.engine.api.process.flight_recorder import tag_of
from inferd.engine.api.wire.messages import Delta, FinishReason, Submit
from inferd.server.observability.request_record import RequestRecord, current_trace
from inferd.server.schema.strict_json import exact

_MANY_DELTAS, _MANY_SCORED = 64, 8
"""So many waiting deltas are merged into one: a delta of one token takes 400 bytes, the token in it 8. Its five best
alternatives take 850 bytes as objects, and 100 packed."""
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Delta).decode


class TokenStream:
    """The tokens of one choice as they come. Iterate it once; deltas that pile up arrive merged."""

    def __init__(self, submit: Submit, abort: Callable[[str], None], num_waiting_tokens: int | None = None) -> None:
        """`num_waiting_tokens`: prompt tokens that the queue counts for this choice; by default its whole prompt."""
        self.submit = submit
        self.tag = tag_of(submit.request_id)
        self.emitted_ids = array("i")
        """Tokens delivered so far, four bytes each."""
        self.num_prompt_logprobs = 0
        self.num_cached = 0
        """Prompt tokens found in the prefix cache, as reported to the caller with the first token."""
        self.num_known = 0
        """Prompt tokens whose KV was there then, with or without a recurrent state behind them."""
        self.num_loaded = 0
        """Found prompt tokens whose KV was loaded for it from below the pool."""
        self.num_drafts = self.num_accepted = 0
        """Guessed tokens that engines verified for it, and those that they accepted."""
        self.reached = 0
        """Number of positions up to which an engine had computed it when that engine died. 0: it is no suspect."""
        self.num_deaths = 0
        """Engines in a row that died while they computed it and before it got past `reached`."""
        self.num_deaths_alone = 0
        """Number of those engines that computed nothing else."""
        self._num_replayed = 0
        """Tokens that had been delivered when it was last sent again."""
        self.num_waiting_tokens = len(submit.prompt_ids) if num_waiting_tokens is None else num_waiting_tokens
        self.scheduled_s: float | None = None
        """When its first step began (`time.monotonic`, as all times here); None before."""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.pooled_s: float | None = None
        """End of the step that gave its vector."""
        self.abort_reason: FinishReason | None = None
        self.trace = current_trace.get()
        self.num_restarts = 0
        """Engines that died while they had it."""
        self._abort = abort
        self._pending: list[Delta | bytes] = []
        self._num_single = 0
        """Number of unmerged deltas at the end of `_pending`; those before them are merged or packed."""
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def num_generated(self) -> int:
        """Tokens that have come so far, read or not."""
        return len(self.emitted_ids)

    def record(self, finish_reason: FinishReason, e2e_target_s: float | None) -> RequestRecord:
        """Its times and counts at its end. `finish_reason` holds unless it was aborted for another reason."""
        ended_s = self.pooled_s if self.last_token_s is None else self.last_token_s
        return RequestRecord(
            scheduling=self.submit.scheduling,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            pooled_s=self.pooled_s,
            finished_s=time.monotonic() if ended_s is None else ended_s,
            num_prompt_tokens=len(self.submit.prompt_ids),
            num_generation_tokens=self.num_generated,
            num_cached_tokens=self.num_cached,
            finish_reason=self.abort_reason or finish_reason,
            e2e_target_s=e2e_target_s,
        )

    @property
    def has_begun(self) -> bool:
        return self.scheduled_s is not None

    @property
    def is_suspect(self) -> bool:
        """Whether nothing shows yet that it got past the position at which an engine died.

        A token drawn by this engine shows it one token late, because that token has not been computed itself.
        """
        if not self.reached or len(self.emitted_ids) == self._num_replayed:
            return self.reached > 0
        return len(self.submit.prompt_ids) + len(self.emitted_ids) <= self.reached

    def journal(self, delta: Delta) -> None:
        """Write a delta's tokens down."""
        if delta.token_ids:
            if not self.emitted_ids:
                self.num_cached, self.num_known = delta.num_cached_tokens, delta.num_known_tokens
                self.num_loaded = delta.num_loaded_tokens
            self.emitted_ids.extend(delta.token_ids)
            if delta.num_drafts:
                self.num_drafts += delta.num_drafts
                self.num_accepted += len(delta.token_ids) - 1
        self.num_prompt_logprobs += len(delta.prompt_logprobs)

    def replay(self, *, alone: bool) -> Submit:
        """The submit for a new engine: the same seed, positions and arrival, behind the tokens already delivered.

        `alone`: it runs by itself until it is past the position at which the last engine died.
        """
        self._num_replayed = len(self.emitted_ids)
        # It was admitted once; the outage must not make it late.
        scheduling = structs.replace(
            self.submit.scheduling, ttft_target_s=None, alone_until=self.reached if alone else 0
        )
        return structs.replace(
            self.submit,
            scheduling=scheduling,
            emitted_ids=tuple(self.emitted_ids),
            num_prompt_logprobs=self.num_prompt_logprobs,
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if isinstance(packed := self._pending[0], bytes):
            await asyncio.sleep(0)  # there may be many, and each takes up to some milliseconds
            del self._pending[0]
            return _unpack(packed)
        deltas: list[Delta] = []
        for delta in self._pending:
            if isinstance(delta, bytes):
                break
            deltas.append(delta)
        del self._pending[: len(deltas)]
        self._num_single = min(self._num_single, len(self._pending))
        return merge(deltas)

    def abort(self, reason: FinishReason = "abort") -> None:
        """Stop generating; the stream still ends with one terminal delta. Idempotent.

        The metrics count it under `reason`: a stop string found in the text is a "stop".
        """
        if not self._closed and self.abort_reason is None:
            self.abort_reason = reason
            self._abort(self.request_id)

    def push(self, delta: Delta) -> None:
        """Called by `LiveStreams` alone."""
        assert not self._closed, f"{self.request_id}: a delta after the terminal one"
        if delta.prompt_logprobs and self._pending:
            # Each by itself: all in one turn would hold the event loop.
            self._pending.append(exact(_pack(delta)))
            self._num_single = 0
        else:
            self._pending.append(delta)
            self._num_single += 1
        if self._num_single >= (_MANY_SCORED if delta.logprobs else _MANY_DELTAS):
            self._pending[-self._num_single :] = [self._merged_singles()]
            self._num_single = 0
        self._closed = delta.finish_reason is not None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _merged_singles(self) -> Delta | bytes:
        merged = merge([delta for delta in self._pending[-self._num_single :] if not isinstance(delta, bytes)])
        return exact(_pack(merged)) if merged.logprobs else merged


def merge(deltas: Sequence[Delta]) -> Delta:
    """One delta with the contents of all of them, in order."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return structs.replace(
        last,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        prompt_logprobs=tuple(logprobs for delta in deltas for logprobs in delta.prompt_logprobs),
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        scheduled_s=next((delta.scheduled_s for delta in deltas if delta.scheduled_s is not None), None),
        num_drafts=sum(delta.num_drafts for delta in deltas),
        num_known_tokens=max(delta.num_known_tokens for delta in deltas),
        num_loaded_tokens=max(delta.num_loaded_tokens for delta in deltas),
    )
