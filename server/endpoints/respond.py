"""Turns a valid request into a response. Every generating route takes this path, for a stream or a plain answer.

A family of routes supplies a `Rendering`. This file submits the request, watches the client, and aborts the request if
the client has gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.auth.keyring import Holder
from inferd.server.auth.quotas import UNLIMITED
from inferd.server.dispatch.model_lifecycle import ModelLifecycle, State
from inferd.server.endpoints.chunks import AnswerOptions
from inferd.server.endpoints.long_lists import dumps, pieces
from inferd.server.endpoints.service import Service
from inferd.server.errors import messages as errors
from inferd.server.generate.events import Event, PromptRead, TextDelta
from inferd.server.generate.request import Caller, Deadline, GenerateRequest, until, within
from inferd.server.generate.stream import ChoiceStreams
from inferd.server.schema.answers.generation import Extra
from inferd.server.schema.generation import GenerationFields, StreamOptions
from inferd.server.schema.latency import TIMEOUT_HEADER, targets_of, timeout_of
from inferd.server.schema.strict_json import exact
from inferd.server.text.text_threads import TextThreads
from inferd.server.transport import sse

T = TypeVar("T")

_LARGE_ANSWER = 10_000
"""Number of log probabilities (about 1 us each) from which on a thread renders a plain answer, or a stream's prompt.
An event of a plain answer counts as one, a choice as `_CHOICE_SIZE`."""
_CHOICE_SIZE = 20


class Rendering(Protocol):
    """Writes one answer of a family of routes. It gets every event by `event` or `add`, and is then ended."""

    @property
    def keep_alive(self) -> bytes: ...

    def begin(self) -> bytes:
        """The stream's first bytes, if they were not made yet: they say that the request waits for the model. Empty for
        a family whose streams begin with the first text."""
        ...

    def event(self, event: Event) -> bytes:
        """The stream's bytes for an event; may be empty. Runs on a thread if the event is a long prompt."""
        ...

    def end(self, extra: Extra) -> bytes:
        """The last bytes of a successful stream."""
        ...

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        """The last bytes of a stream that failed, even before its first event."""
        ...

    def add(self, event: Event) -> None:
        """Collect an event of a plain answer."""
        ...

    def plain(self, extra: Extra) -> object:
        """The plain answer, for `long_lists` to write. Runs on a thread if it is long."""
        ...


def admit(
    request: Request, service: Service, timeout_s: float | None, num_choices: int, *, has_target: bool = True
) -> Caller:
    """Check before the prompt is read, while a refusal is cheap, whether the server accepts so many choices.

    The router checks again when it queues the request, because only then its number of prompt tokens is known.
    `timeout_s`: the request's own field. `has_target`: whether a TTFT target applies to it. Raises `RequestError`.
    """
    check_ready(service.router.lifecycle, service.model.names[0])
    caller = caller_of(request, timeout_s)
    ttft_s = caller.targets.over(service.targets).ttft_s if has_target else None
    left_s = None if ttft_s is None else caller.arrival_s + ttft_s - time.monotonic()
    service.router.check_queue(caller.tenant, 1, left_s, num_choices)
    return caller


def caller_of(request: Request, timeout_s: float | None = None) -> Caller:
    """The caller of a request. `timeout_s` is the request's own field. Raises `RequestError` for an invalid header."""
    arrival_s = request.state.arrival_s
    deadline = Deadline.after(arrival_s, timeout_of(timeout_s, request.headers.get(TIMEOUT_HEADER)))
    targets = targets_of(request.headers)
    holder: Holder | None = request.state.holder
    return Caller(
        tenant=request.state.tenant,
        arrival_s=arrival_s,
        deadline=deadline,
        targets=targets,
        weight=1.0 if holder is None else holder.weight,
        account=UNLIMITED if holder is None or holder.account is None else holder.account,
    )


async def while_asked(request: Request, deadline: Deadline | None, work: Awaitable[T]) -> T:
    """The result of `work`. Cancels it and raises `ClientGoneError` if the client disconnects first, or `RequestError`
    at the deadline. May be called only after the body was read.
    """
    return await sse.unless_disconnected(request.receive, within(deadline, work))


def check_ready(lifecycle: ModelLifecycle, name: str) -> None:
    """Raises `RequestError` if the server accepts no requests to the model `name`."""
    if not lifecycle.is_ready:
        if lifecycle.failure:
            raise errors.model_not_loaded(name, lifecycle.failure)
        if lifecycle.is_leaving:
            raise errors.leaving()
        if lifecycle.is_asleep:
            raise errors.model_is_asleep(name)
        message = "The server is not ready to accept requests. Please try again in a few seconds."
        raise RequestError("server_is_overloaded", message)


def options_of(body: GenerationFields, name: str) -> AnswerOptions:
    stream = body.stream_options or StreamOptions()
    return AnswerOptions(
        name=name,
        is_stream=bool(body.stream),
        include_usage=stream.include_usage,
        continuous_usage=stream.include_usage and stream.continuous_usage_stats,
        return_token_ids=bool(body.return_token_ids),
        num_prompt_logprobs=body.prompt_logprobs,
        include_metrics=bool(body.include_metrics),
    )


async def respond(
    request: Request, service: Service, accepted: GenerateRequest, options: AnswerOptions, rendering: Rendering
) -> Response:
    """Generate and answer. Raises `RequestError` and `EngineDeadError` if the router takes no request, or until the
    response has begun, and `ClientGoneError`."""
    request.state.notices += accepted.notices
    streams = await ChoiceStreams.begin(service.router, accepted, service.model.tokenizer.bytes, service.metrics)
    events = until(accepted.deadline, streams.events())

    def extra() -> Extra:
        if not options.include_metrics:
            return {}
        return {"metrics": streams.metrics(service.router.replicas.ready)}

    per_token = 1 + max(accepted.params.logprobs or 0, accepted.params.prompt_logprobs or 0)
    if options.is_stream:
        begins_early = accepted.scheduling.ttft_target_s is None
        data = _streamed(events, rendering, extra, service.threads, per_token, begins_early=begins_early)
        notice = partial(_notice, service) if _notice(service) else None
        return sse.EventStream(data, rendering, streams.close, service.keep_alive_s, notice)
    num_events, num_scored = await sse.unless_disconnected(request.receive, _taken_in(events, rendering))

    size = num_scored * per_token + num_events + _CHOICE_SIZE * accepted.num_choices
    if size < _LARGE_ANSWER:
        return Response(exact(dumps(rendering.plain(extra()))), media_type="application/json")
    rendered = service.threads.run(lambda: rendering.plain(extra()), size, is_begun=True)
    answer = await while_asked(request, accepted.deadline, rendered)
    return LargeAnswer(pieces(answer), service.threads)


def _notice(service: Service) -> bytes:
    """Says in a stream why nothing comes, while the model is loaded or asleep; empty afterwards."""
    state = service.router.lifecycle.state
    if state not in (State.UNLOADED, State.LOADING, State.SLEEPING):
        return b""
    what = "asleep" if state is State.SLEEPING else "being loaded"
    name = "".join(char if char.isprintable() else "?" for char in service.model.names[0])
    return f": the model {name} is {what}\n\n".encode()


async def _streamed(
    events: AsyncGenerator[Event, None],
    rendering: Rendering,
    extra: Callable[[], Extra],
    threads: TextThreads,
    per_token: int,
    *,
    begins_early: bool,
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. `per_token`: number of log probabilities of each scored token. `begins_early`: the first
    bytes come before the prompt is computed. A request with a TTFT target may still be refused with a 429 then."""
    try:
        if begins_early and (begun := rendering.begin()):
            yield begun
        async for event in events:
            if isinstance(event, PromptRead) and len(event.scored) * per_token >= _LARGE_ANSWER:
                data = await threads.run(partial(rendering.event, event), len(event.scored) * per_token, is_begun=True)
            else:
                data = rendering.event(event)
            if data:
                yield data
    finally:
        await events.aclose()
    yield rendering.end(extra())


async def _taken_in(events: AsyncGenerator[Event, None], rendering: Rendering) -> tuple[int, int]:
    """Give `rendering` every event. Returns (number of events, number of tokens with log probabilities)."""
    num_events = num_scored = 0
    async for event in events:
        rendering.add(event)
        num_events += 1
        if isinstance(event, (TextDelta, PromptRead)):
            num_scored += len(event.scored)
    return num_events, num_scored


class LargeAnswer(Response):
    """A plain answer that is too large for one object.

    A thread makes each piece after the client has read the one before. The answer has no stated length, so HTTP/1.1
    sends it in chunks. It ends quietly if the client disconnects first.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], threads: TextThreads) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._pieces, self._threads = pieces, threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The answer has begun, so no handler could answer this error, and it would be logged with its stack.
        with contextlib.suppress(sse.ClientGoneError):
            await sse.unless_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while piece := await self._threads.run(lambda: next(self._pieces, b""), 0, is_begun=True):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
