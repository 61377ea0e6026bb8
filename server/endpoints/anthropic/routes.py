"""/v1/messages and /v1/messages/count_tokens of Anthropic's API: parse -> translate to chat -> generate -> render."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.answer import AnswerOptions, fingerprint
from inferd.server.endpoints.anthropic.answer import MessageRendering
from inferd.server.endpoints.anthropic.chat_request import (
    anthropic_words,
    chat_of,
    in_anthropic_words,
    notices_of,
    prompt_of,
)
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.respond import Services, admit, caller_of, respond, while_asked
from inferd.server.schema.answers.tokens import TokenCount
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest

T = TypeVar("T")


class MessagesApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request, wire: Annotated[MessagesRequest, body_of(MessagesRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._services.of(wire.model)
        name = service.intake.check_model(wire.model)
        caller = admit(request, service, None, num_choices=1)
        request.state.notices += notices_of(wire, service.model)
        chat = chat_of(wire, service.model)
        work = service.intake.chat(chat, caller, prefix="msg_", most=wire.max_tokens)
        accepted = (await _in_anthropic_words(while_asked(request, caller.deadline, work))).in_words(anthropic_words)
        service.metrics.request_arrived("messages")
        prints = fingerprint(service, accepted)
        rendering = MessageRendering(accepted, name, wire.max_tokens, request.state.request_id, prints)
        return await respond(request, service, accepted, _options(name, wire), rendering)

    async def count_tokens(
        self, request: Request, wire: Annotated[CountTokensRequest, body_of(CountTokensRequest)]
    ) -> Response:
        """The count, even if it exceeds the context. Needs no engine. Raises `RequestError`."""
        service = self._services.of(wire.model)
        service.intake.check_model(wire.model)
        caller = caller_of(request)
        request.state.notices += notices_of(wire, service.model)
        work = service.intake.read_chat(prompt_of(wire, service.model), request.state.notices)
        token_ids, _ = await _in_anthropic_words(while_asked(request, caller.deadline, work))
        answer: TokenCount = {"input_tokens": len(token_ids)}
        return Response(orjson.dumps(answer), media_type="application/json")


async def _in_anthropic_words(work: Awaitable[T]) -> T:
    try:
        return await work
    except RequestError as error:
        reworded = in_anthropic_words(error)
    try:
        raise reworded
    finally:
        del reworded  # it refers to this frame, and would keep itself alive


def _options(name: str, wire: MessagesRequest) -> AnswerOptions:
    return AnswerOptions(
        name=name,
        is_stream=bool(wire.stream),
        include_usage=False,
        continuous_usage=False,
        return_token_ids=False,
        num_prompt_logprobs=None,
    )
