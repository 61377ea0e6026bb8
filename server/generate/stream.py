"""Submits a request's choices and yields their events as one stream, in the order in which they happen.

If the stream ends early (the client leaves, a choice fails), every choice still running is aborted. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Self

from msgspec import structs

from inferd.engine.api.errors import RequestError
from inferd.engine.api.speculation import reason_against
from inferd.engine.api.wire.messages import Delta, Ready
from inferd.server.dispatch.router import Router
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.generate.choice import Choice
from inferd.server.generate.events import Event
from inferd.server.generate.request import GenerateRequest
from inferd.server.observability.metrics import Metrics
from inferd.server.schema.answers.generation import RequestTiming
from inferd.server.text.detokenizer import TokenBytes

_SHED = frozenset({"rate_limit_exceeded", "server_is_overloaded"})
"""Codes of a choice that was refused or given up: prompts that the engine has not begun are then not charged."""

_IDS_AT_ONCE, _CHOICES_AT_ONCE = 2**17, 64
"""Prompt ids, and choices, sent to the engine before other tasks of the event loop run (about 2 ms)."""

_SLICE = 512
"""Ids turned into text before other tasks of the event loop run (about 1 ms)."""


class ChoiceStreams:
    """The running choices of one request. `close` is safe at any time and any number of times."""

    def __init__(self, request: GenerateRequest, table: TokenBytes, metrics: Metrics | None = None) -> None:
        """Use `begin`."""
        self.request = request
        self._metrics = metrics
        self._table = table
        self._streams: list[TokenStream] = []
        self._choices: dict[int, Choice] = {}
        """Index -> each choice that has begun."""
        self._is_charged = False

    @classmethod
    async def begin(
        cls, router: Router, request: GenerateRequest, table: TokenBytes, metrics: Metrics | None = None
    ) -> Self:
        """Submit every choice. Submits none and raises `RequestError` if one is refused or exceeds the key's quota.

        `metrics`: counts what had to be repaired to read the answers.
        """
        streams = cls(request, table, metrics)
        request.account.take(request.num_prompt_tokens)
        try:
            await streams._submit(router)
        except BaseException:
            streams.close()
            request.account.owe(-request.num_prompt_tokens)
            raise
        return streams

    async def _submit(self, router: Router) -> None:
        """Send the choices, some at a time: to encode a million ids, or to make 2,048 choices, takes some 30 ms."""
        request, num_ids, num_choices = self.request, 0, 0
        for submits in request.submits():
            if num_ids >= _IDS_AT_ONCE or num_choices >= _CHOICES_AT_ONCE:
                await asyncio.sleep(0)
                num_ids = num_choices = 0
            self._streams += router.submit_choices(
                submits,
                is_admitted=bool(self._streams),
                num_choices=request.num_choices,
                num_tokens=request.num_prompt_tokens,
            )
            num_ids += len(submits[0].prompt_ids)
            num_choices += len(submits)

    def metrics(self, ready: Ready) -> RequestTiming | None:
        """Timing of the one choice; None for several choices, which differ."""
        if len(self._streams) > 1:
            return None
        params, speculates = self.request.params, ready.speculative != "none"
        not_speculated = reason_against(params) if speculates else "the server runs without --speculative"
        not_cached = reason_not_cached(self._streams[0], ready)
        return timing_of(self._streams[0], self.request.scheduling.arrival_s, not_speculated, not_cached)

    def close(self) -> None:
        """Abort the choices that run, and charge the key for the generated tokens, once."""
        for stream in self._streams:
            stream.abort()
        if not self._is_charged:
            self._is_charged = True
            self.request.account.owe(self._num_charged())

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event of every choice. Raises `RequestError` or `EngineDeadError` if a choice fails."""
        deltas, choices = _merged(self._streams), self._choices
        try:
            num_open = len(self._streams)
            async for index, delta in deltas:
                choice = choices.get(index)
                if choice is None:
                    choice = choices[index] = Choice(index, self.request, self._table)
                if choice.is_finished:
                    continue  # ids drawn after a stop string, or the end after an abort
                for i, part in enumerate(_slices(delta)):
                    if i:
                        await asyncio.sleep(0)
                    for event in choice.feed(part):
                        yield event
                    if choice.is_finished:
                        break
                if choice.is_finished and self._metrics is not None:
                    self._metrics.answer_repaired(choice.repairs)
                if choice.was_stopped_by_text:
                    self._streams[index].abort("stop")
                num_open -= choice.is_finished
                if num_open == 0:
                    return
        except RequestError as error:
            if error.code in _SHED:
                self.request.account.owe(-self._num_not_begun())
            raise
        finally:
            self.close()
            await deltas.aclose()

    def _num_charged(self) -> int:
        """Number of generated tokens. Of a choice that its text ended, those behind are not in the answer, so they do
        not count: how many there are depends on how many tokens a step gave."""
        charged = 0
        for index, stream in enumerate(self._streams):
            choice = self._choices.get(index)
            if choice is not None and choice.was_stopped_by_text:
                charged += choice.num_tokens
            else:
                charged += stream.num_generated
        return charged

    def _num_not_begun(self) -> int:
        """Number of tokens of prompts that no choice has begun to compute."""
        begun = {i // self.request.n for i, stream in enumerate(self._streams) if stream.scheduled_s is not None}
        return sum(len(prompt.token_ids) for i, prompt in enumerate(self.request.prompts) if i not in begun)


def _slices(delta: Delta) -> list[Delta]:
    """A long delta in pieces. Fields that occur once go with the first piece or the last."""
    if len(delta.token_ids) <= _SLICE:
        return [delta]
    starts = range(0, len(delta.token_ids), _SLICE)
    return [
        structs.replace(
            delta,
            token_ids=delta.token_ids[start : start + _SLICE],
            logprobs=delta.logprobs[start : start + _SLICE],
            prompt_logprobs=delta.prompt_logprobs if start == 0 else (),
            finish_reason=delta.finish_reason if start == starts[-1] else None,
            stop_token_id=delta.stop_token_id if start == starts[-1] else None,
            failure=delta.failure if start == starts[-1] else None,
            num_drafts=delta.num_drafts if start == 0 else 0,
        )
        for start in starts
    ]


async def _merged(streams: list[TokenStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(index, delta) of every stream until all have ended; a stream that ended is not read again.

    A stream is read only when its last delta was taken, so that deltas that pile up are merged in the stream.
    """
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    ended: asyncio.Queue[asyncio.Future[Delta]] = asyncio.Queue()
    reads: dict[asyncio.Future[Delta], int] = {}

    def read(index: int) -> None:
        """One task for each delta, with a callback at its end: waiting for all tasks costs time for each of them."""
        task = asyncio.ensure_future(anext(streams[index]))
        reads[task] = index
        task.add_done_callback(ended.put_nowait)

    try:
        for index in range(len(streams)):
            read(index)
            if index % _CHOICES_AT_ONCE == _CHOICES_AT_ONCE - 1:
                await asyncio.sleep(0)
        num_read = 0
        while reads:
            task = await ended.get()
            num_read += 1
            if num_read % _CHOICES_AT_ONCE == 0:
                await asyncio.sleep(0)  # `get` returns reads that have already ended without giving other tasks a turn
            index, delta = reads.pop(task), task.result()
            if delta.finish_reason is None:
                read(index)
            yield index, delta
    finally:
        for task in reads:
            task.cancel()
        # Errors of reads that are cancelled are dropped: the first error is the one reported.
        await asyncio.gather(*reads, return_exceptions=True)
        del task  # its error refers to this frame, and would keep itself alive


def reason_not_cached(stream: TokenStream, ready: Ready) -> str | None:
    """Why no more of the prompt was taken from the prefix cache; None if no more could be."""
    submit, num_cached, block_size = stream.submit, stream.num_cached, ready.block_size
    if not ready.prefix_caching:
        return "the server runs without a prefix cache"
    if submit.params.needs_every_position:
        return "all positions of the prompt are computed for its log probabilities or its mean"
    if len(submit.prompt_ids) <= block_size:
        return f"a prompt of at most {block_size} tokens is computed whole"
    if num_cached + block_size >= len(submit.prompt_ids):
        return None
    if stream.num_known > num_cached:
        return (
            f"{stream.num_known} tokens of the prompt were known, but a recurrent state was kept behind {num_cached} "
            "of them; if more than a block was missing, the next prompt finds one behind all of them"
        )
    return f"no prompt or answer in the cache has the same first {num_cached + block_size} tokens"


def timing_of(
    stream: TokenStream, arrival_s: float, not_speculated: str | None = None, not_cached: str | None = None
) -> RequestTiming:
    """The timing of one choice. `not_speculated`: why nothing was guessed for it. `not_cached`: why no more of its
    prompt was taken from the prefix cache."""
    scheduled_s, first_s, last_s = stream.scheduled_s, stream.first_token_s, stream.last_token_s
    num_tokens = stream.num_generated
    generation_s = _between(first_s, last_s)
    total_s = _between(scheduled_s, last_s)
    return {
        "time_to_first_token_ms": _ms(_between(scheduled_s, first_s)),
        "queue_time_ms": _ms(_between(arrival_s, scheduled_s)),
        "generation_time_ms": _ms(generation_s),
        "mean_itl_ms": _ms(generation_s / (num_tokens - 1)) if generation_s is not None and num_tokens > 1 else None,
        "tokens_per_second": round(num_tokens / total_s, 2) if total_s else None,
        "draft_tokens": stream.num_drafts,
        "accepted_draft_tokens": stream.num_accepted,
        "not_speculated": not_speculated,
        "cached_tokens": stream.num_cached,
        "not_cached": not_cached,
        "pool_tokens": stream.num_cached - stream.num_loaded,
        "loaded_tokens": stream.num_loaded,
        "computed_tokens": None if first_s is None else len(stream.submit.prompt_ids) - stream.num_cached,
        "restarts": stream.num_restarts,
    }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
