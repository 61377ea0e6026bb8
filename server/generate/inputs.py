"""Many inputs of one request: a bounded number of them in the engine at a time, and their results in order.

If the request ends early (the client leaves, a deadline passes, an input fails), every input still running is aborted.
Knows no HTTP, and not what an input is computed for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from msgspec import structs

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Delta, Failure, Submit
from inferd.engine.api.wire.params import SamplingParams
from inferd.server.auth.quotas import Account
from inferd.server.dispatch.router import Router
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.errors import messages as errors
from inferd.server.schema.latency import MAX_PRIORITY

T = TypeVar("T")

MAX_AT_ONCE = 256
"""Inputs of one request that are in the engine at a time: enough to fill its steps, and few enough to leave space in
the queue that all callers share."""
MAX_TOKENS_AT_ONCE = 2**14
"""Tokens of these inputs, unless one input has more: two steps of most engines. The tenant's other requests wait for no
more than that."""

_BULK_TOKENS = 2**14
"""Tokens of a request behind which its inputs are scheduled one level later: 10 s of waiting. So a short request goes
before the thousands of texts of another one, which still get on."""

_UNNAMED = Failure("engine_error", "The engine could not serve this request.")


class ManyInputs(Protocol):
    """A valid request with many inputs."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def account(self) -> Account:
        """The account that its tokens are charged to."""
        ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs together."""
        ...

    def submits(self) -> Iterator[Submit]:
        """One submit for each input, in order."""
        ...

    def name_of(self, index: int) -> str:
        """Name of an input in error messages."""
        ...


async def results_of(router: Router, request: ManyInputs, read: Callable[[tuple[Delta, ...]], T]) -> tuple[T, ...]:
    """The results in the order of the inputs. `read` makes one of all deltas of an input.

    Raises `RequestError` or `EngineDeadError` if an input fails, and `RequestError` if one is not taken.
    """
    with router.adapters.held(request.params.adapter):
        return await _results_of(router, request, read)


async def _results_of(router: Router, request: ManyInputs, read: Callable[[tuple[Delta, ...]], T]) -> tuple[T, ...]:
    request.account.take(request.num_tokens)
    results: dict[int, T] = {}
    waiting = enumerate(request.submits())
    num_left, is_taken = request.num_tokens, False
    num_running = num_before = 0
    turn, ended = asyncio.Lock(), asyncio.Event()

    async def run() -> None:
        nonlocal num_left, num_running, num_before, is_taken
        while True:
            async with turn:  # one task waits at a time, so that inputs are submitted in order
                i, submit = next(waiting, (0, None))
                if submit is None:
                    return
                num_tokens = len(submit.prompt_ids)
                if num_before > _BULK_TOKENS:
                    submit = _later(submit)
                num_before += num_tokens
                while num_running and num_running + num_tokens > MAX_TOKENS_AT_ONCE:
                    ended.clear()
                    await ended.wait()
                # All tasks begin in one turn, even if the first input is refused. Only a taken input exempts later
                # ones.
                stream = router.submit(submit, is_admitted=is_taken)
                num_left, num_running, is_taken = num_left - num_tokens, num_running + num_tokens, True
            results[i] = read(await _deltas(stream, request.name_of(i)))
            num_running -= num_tokens
            ended.set()

    # A `TaskGroup` and the errors that it raises refer to each other, so a failed request would keep its inputs alive.
    tasks = [asyncio.create_task(run()) for _ in range(min(MAX_AT_ONCE, request.num_inputs))]
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
    return tuple(results[i] for i in range(request.num_inputs))


def _later(submit: Submit) -> Submit:
    """The same input, one level later, unless it has the last level already."""
    scheduling = submit.scheduling
    later = structs.replace(scheduling, priority=min(scheduling.priority + 1, MAX_PRIORITY))
    return structs.replace(submit, scheduling=later)


async def _deltas(stream: TokenStream, where: str) -> tuple[Delta, ...]:
    """All deltas of one input. Raises `RequestError` and `EngineDeadError`."""
    deltas: list[Delta] = []
    try:
        async for delta in stream:
            if delta.finish_reason == "error":
                failure = delta.failure or _UNNAMED
                param = where if failure.param == "prompt" else failure.param
                raise RequestError(failure.code, failure.message, param, failure.retry_after_s)
            if delta.finish_reason == "abort":
                raise errors.given_up()
            deltas.append(delta)
            if delta.finish_reason is not None:
                return tuple(deltas)
    finally:
        stream.abort()
    raise AssertionError("a stream ended without a terminal delta")


def vector_of(deltas: tuple[Delta, ...]) -> bytes:
    """The embedding or the logits of an input."""
    assert deltas[-1].embedding, "an input ended without its vector"
    return deltas[-1].embedding
