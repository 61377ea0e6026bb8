"""From a valid request to a response: the one path that every generating route takes, streamed or plain.

A route family supplies a `Rendering`; this file submits, watches the client, and aborts what nobody waits for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server import sse
from inferd.server.api.answer import Chunks, Json, Shape
from inferd.server.api.service import Service
from inferd.server.generate.events import Event
from inferd.server.generate.fold import ChoiceResult, fold
from inferd.server.generate.intake import Caller
from inferd.server.generate.ports import Router
from inferd.server.generate.request import GenerateRequest
from inferd.server.generate.stream import Generation
from inferd.server.schema.generation import GenerationFields, StreamOptions

_LARGE_ANSWER = 20_000
"""Log probabilities from which on a plain answer is rendered on a thread (about 1 us each)."""


class Rendering(Protocol):
    """How one family of routes writes events and results."""

    @property
    def chunks(self) -> Chunks: ...

    def event(self, event: Event) -> bytes:
        """What a stream says of an event; may be nothing."""
        ...

    def plain(self, choices: tuple[ChoiceResult, ...]) -> Json:
        """The answer that is not streamed."""
        ...


def caller_of(request: Request) -> Caller:
    return Caller(tenant=request.state.tenant, arrival_s=request.state.arrival_s)


def check_ready(router: Router) -> None:
    """Before any work is done. Raises `RequestError`."""
    if not router.is_ready:
        message = "The server is not ready to take requests. Please try again in a few seconds."
        raise RequestError("server_is_overloaded", message)


def shape_of(wire: GenerationFields, name: str) -> Shape:
    options = wire.stream_options or StreamOptions()
    return Shape(
        name=name,
        is_stream=bool(wire.stream),
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        return_token_ids=bool(wire.return_token_ids),
        num_prompt_logprobs=wire.prompt_logprobs,
    )


async def respond(
    request: Request,
    service: Service,
    taken: GenerateRequest,
    shape: Shape,
    rendering: Rendering,
    headers: Mapping[str, str],
) -> Response:
    """Raises `RequestError` and `EngineDeadError` until the response has begun, and `ClientGoneError`."""
    generation = Generation(service.router, taken, service.model.tokenizer.bytes)
    if shape.is_stream:
        data = _streamed(generation.events(), rendering)
        return sse.EventStream(data, generation.abort, headers, service.keep_alive_s)
    choices = await sse.unless_disconnected(request.receive, fold(taken, generation.events()))

    def work() -> bytes:
        return orjson.dumps(rendering.plain(choices))

    size = _num_logprobs(taken, choices)
    body = work() if size < _LARGE_ANSWER else await service.lanes.run(work, size)
    return Response(body, headers=dict(headers), media_type="application/json")


async def _streamed(events: AsyncGenerator[Event, None], rendering: Rendering) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream, [DONE] excepted."""
    try:
        async for event in events:
            data = rendering.event(event)
            if data:
                yield data
    finally:
        await events.aclose()
    usage = rendering.chunks.usage()
    if usage:
        yield usage


def _num_logprobs(taken: GenerateRequest, choices: tuple[ChoiceResult, ...]) -> int:
    num_top = max(taken.params.logprobs or 0, taken.params.prompt_logprobs or 0)
    num_tokens = sum(len(choice.scored) + (len(choice.prompt.scored) if choice.prompt else 0) for choice in choices)
    return num_tokens * (1 + num_top)
