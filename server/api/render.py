"""/v1/chat/completions/render and /v1/completions/render: a checked request's prompt as ids, without generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.api.body import Body, body_of
from inferd.server.api.respond import caller_of, while_asked
from inferd.server.api.service import Service
from inferd.server.generate.request import Caller, GenerateRequest
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.text.json_bytes import exact

R = TypeVar("R", ChatRequest, CompletionRequest)


class RenderApi:
    """The routes' handlers, which need no engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request, body: Annotated[Body[ChatRequest], body_of(ChatRequest)]) -> Response:
        """`{"token_ids": [...]}`. Raises `RequestError`, as for a chat, and `ClientGoneError`."""
        return await self._render(request, body, self._service.intake.chat, is_list=False)

    async def completions(
        self, request: Request, body: Annotated[Body[CompletionRequest], body_of(CompletionRequest)]
    ) -> Response:
        """One `{"token_ids": [...]}` for each prompt. Raises the same errors."""
        return await self._render(request, body, self._service.intake.completion, is_list=True)

    async def _render(
        self, request: Request, body: Body[R], take: Callable[[R, Caller], Awaitable[GenerateRequest]], *, is_list: bool
    ) -> Response:
        service = self._service
        service.intake.check_model(body.wire.model)
        caller = caller_of(request, body.wire.timeout)
        taken = await while_asked(request, caller.deadline, take(body.wire, caller))
        data = await self._written(taken, is_list=is_list)
        return Response(data, headers=dict(body.headers), media_type="application/json")

    async def _written(self, taken: GenerateRequest, *, is_list: bool) -> bytes:
        def work() -> bytes:
            prompts = [{"token_ids": prompt.token_ids} for prompt in taken.prompts]
            return exact(orjson.dumps(prompts if is_list else prompts[0]))

        return await self._service.lanes.run(work, taken.num_prompt_tokens)
