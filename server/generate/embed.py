"""Embeddings: inputs -> vectors. Each input is one request that draws no token; the engine batches it like any other.

Checks a request for embeddings and sends it through the router. If it ends early (the client leaves, a deadline
passes, an input fails), every input still running is aborted. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Failure, Submit
from inferd.engine.api.wire.params import Adapter, Pooling, SamplingParams, SchedulingParams
from inferd.server.auth.quotas import UNLIMITED, Account
from inferd.server.dispatch.router import Router
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.errors import messages as errors
from inferd.server.generate import work
from inferd.server.generate.prompts import PromptReader
from inferd.server.generate.request import Caller
from inferd.server.schema.embeddings import EmbeddingRequest

MAX_AT_ONCE = 256
"""Inputs of one request that are in the engine at a time: enough to fill its steps, and few enough to leave space in
the queue that all callers share."""
MAX_TOKENS_AT_ONCE = 2**14
"""Tokens of these inputs, unless one input has more: two steps of most engines. The tenant's other requests wait for no
more than that."""

_UNNAMED = Failure("engine_error", "The engine could not serve this request.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A valid request for embeddings, with inputs that fit the model. Only the intake makes one."""

    engine_id: str
    inputs: tuple[tuple[int, ...], ...]
    params: SamplingParams
    scheduling: SchedulingParams
    account: Account = UNLIMITED
    """The account that its tokens are charged to."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs together."""
        return sum(map(len, self.inputs))

    def submits(self) -> Iterator[Submit]:
        """One submit for each input, in order."""
        for i, token_ids in enumerate(self.inputs):
            yield Submit(
                request_id=f"{self.engine_id}-{i}", prompt_ids=token_ids, params=self.params, scheduling=self.scheduling
            )


class EmbedIntake:
    """The only maker of a valid `EmbedRequest`."""

    def __init__(self, prompts: PromptReader) -> None:
        self._prompts = prompts

    async def take(
        self, body: EmbeddingRequest, caller: Caller, hidden_size: int, adapter: Adapter | None = None
    ) -> EmbedRequest:
        """`hidden_size`: components of the model's vectors; 0: it gives none. Raises `RequestError`."""
        if hidden_size == 0:
            message = "This server's engine gives no hidden states that embeddings could be made of."
            raise RequestError("not_implemented", message)
        if body.dimensions is not None and body.dimensions > hidden_size:
            raise errors.above_max("dimensions", hidden_size, body.dimensions)
        add_special = body.add_special_tokens is not False
        kept = self._prompts.kept(body.truncate_prompt_tokens, 0, None)
        check_size = partial(self._prompts.check_least, "input") if kept is None else None
        all_encoded = await self._prompts.encode_all(
            body.input,
            add_special=add_special,
            param="input",
            check_size=check_size,
            kept=kept,
            check_total=work.check_input_ids,
        )
        inputs = tuple(
            self._prompts.fit(name_of(i, len(all_encoded)), encoded, 0, None, kept).token_ids
            for i, encoded in enumerate(all_encoded)
        )
        pooling = Pooling(
            body.pooling or "last", body.dimensions or hidden_size, is_normalized=body.normalize is not False
        )
        return EmbedRequest(
            engine_id=f"embd-{secrets.token_hex(8)}",
            inputs=inputs,
            params=SamplingParams(max_tokens=0, seed=0, pooling=pooling, adapter=adapter),
            scheduling=caller.scheduling(body),
            account=caller.account,
        )


def name_of(index: int, num_inputs: int) -> str:
    """Name of an input in error messages."""
    return "input" if num_inputs == 1 else f"input[{index}]"


async def embed(router: Router, request: EmbedRequest) -> tuple[bytes, ...]:
    """The vectors in the order of the inputs, as little-endian fp32 bytes.

    Raises `RequestError` or `EngineDeadError` if an input fails, and `RequestError` if one is not taken.
    """
    with router.adapters.held(request.params.adapter):
        return await _embed(router, request)


async def _embed(router: Router, request: EmbedRequest) -> tuple[bytes, ...]:
    request.account.take(request.num_tokens)
    vectors = [b""] * len(request.inputs)
    waiting = enumerate(request.submits())
    num_left, is_taken = request.num_tokens, False
    num_running = 0
    turn, ended = asyncio.Lock(), asyncio.Event()

    async def run() -> None:
        nonlocal num_left, num_running, is_taken
        while True:
            async with turn:  # one task waits at a time, so that inputs are submitted in order
                i, submit = next(waiting, (0, None))
                if submit is None:
                    return
                num_tokens = len(submit.prompt_ids)
                while num_running and num_running + num_tokens > MAX_TOKENS_AT_ONCE:
                    ended.clear()
                    await ended.wait()
                # All tasks begin in one turn, even if the first input is refused. Only a taken input exempts later
                # ones.
                stream = router.submit(submit, is_admitted=is_taken)
                num_left, num_running, is_taken = num_left - num_tokens, num_running + num_tokens, True
            vectors[i] = await _vector(stream, name_of(i, len(vectors)))
            num_running -= num_tokens
            ended.set()

    # A `TaskGroup` and the errors that it raises refer to each other, so a failed request would keep its inputs alive.
    tasks = [asyncio.create_task(run()) for _ in range(min(MAX_AT_ONCE, len(vectors)))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in filter(asyncio.Task.done, tasks):
            task.result()
    finally:
        # Tasks that fail after the first one were ended by it, or fail for the same reason.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del task, tasks  # an error refers to this frame, and would keep itself alive
        request.account.owe(-num_left)  # inputs that were not taken are not computed
    return tuple(vectors)


async def _vector(stream: TokenStream, where: str) -> bytes:
    """The vector of one input. Raises `RequestError` and `EngineDeadError`."""
    try:
        async for delta in stream:
            if delta.finish_reason == "error":
                failure = delta.failure or _UNNAMED
                param = where if failure.param == "prompt" else failure.param
                raise RequestError(failure.code, failure.message, param, failure.retry_after_s)
            if delta.finish_reason == "abort":
                raise errors.given_up()
            if delta.finish_reason is not None:
                assert delta.embedding, "an input ended without its vector"
                return delta.embedding
    finally:
        stream.abort()
    raise AssertionError("a stream ended without a terminal delta")
