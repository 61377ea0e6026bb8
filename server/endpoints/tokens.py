"""Routes that convert texts and conversations to token ids or back, without generation.

/tokenize, /detokenize and /tokenizer_info take texts. /v1/chat/completions/render and /v1/completions/render take a
whole request, check it, and return its prompt as ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.respond import caller_of, while_asked
from inferd.server.endpoints.service import Service, Services
from inferd.server.errors import messages as errors
from inferd.server.generate.intake import Intake
from inferd.server.generate.request import Caller, GenerateRequest
from inferd.server.schema.answers.tokens import RenderedPrompt, Tokenized
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.notices import Notice
from inferd.server.schema.strict_json import exact
from inferd.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from inferd.server.text.template import conversation_of

R = TypeVar("R", ChatRequest, CompletionRequest)

MAX_TEXT_BYTES = 2**24
"""Maximum size of the text of token ids. It equals the default maximum of a body."""
_PART = 2**18
"""Number of characters that are encoded at a time."""


class TokensApi:
    """Handlers of /tokenize, /detokenize and /tokenizer_info, which need no engine."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, request: Request, body: Annotated[TokenizeRequest, body_of(TokenizeRequest)]) -> Response:
        """Raises `RequestError`."""
        service = self._services.of(body.model)
        service.intake.check_model(body.model)
        token_ids = await while_asked(request, None, self._ids(service, body, request.state.notices))

        def work() -> bytes:
            token = service.model.tokenizer.token
            strings = [token(token_id) for token_id in token_ids] if body.return_token_strs else None
            answer: Tokenized = {
                "count": len(token_ids),
                "max_model_len": service.model.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
            return exact(orjson.dumps(answer))

        data = await service.threads.run(work, len(token_ids))
        return Response(data, media_type="application/json")

    async def detokenize(
        self, request: Request, body: Annotated[DetokenizeRequest, body_of(DetokenizeRequest)]
    ) -> Response:
        """Raises `RequestError`."""
        service = self._services.of(body.model)
        service.intake.check_model(body.model)

        def work() -> bytes:
            service.prompts.check_ids(body.tokens, "tokens")
            table = service.model.tokenizer.bytes
            num_bytes = sum(len(table.of(token_id)) for token_id in body.tokens)
            if num_bytes > MAX_TEXT_BYTES:
                rule = f"Their text has {num_bytes} bytes. Expected at most {MAX_TEXT_BYTES}; send fewer ids."
                raise errors.invalid_value("tokens", f"{len(body.tokens)} ids", rule)
            text = service.model.tokenizer.decode(body.tokens, skip_special=False)
            # No other thread runs while orjson encodes. 9 MB would take 20 ms.
            parts = (orjson.dumps(text[start : start + _PART])[1:-1] for start in range(0, len(text), _PART))
            return exact(b'{"prompt":"' + b"".join(parts) + b'"}')

        data = await service.threads.run(work, len(body.tokens))
        return Response(data, media_type="application/json")

    async def info(self, request: Request) -> Response:
        """The model's tokenizer_config.json, with the chat template even if that is in another file. Raises
        `RequestError`."""
        return Response(self._services.of_query(request).model.tokenizer_info, media_type="application/json")

    async def _ids(self, service: Service, body: TokenizeRequest, notices: list[Notice]) -> tuple[int, ...]:
        """`notices` gets what was changed in the text. Raises `RequestError`."""
        prompts = service.prompts
        if body.messages is not None and body.prompt is not None:
            raise RequestError("invalid_value", "Only one of 'prompt' and 'messages' can be given.", "prompt")
        if body.messages is None:
            if body.prompt is None:
                raise errors.missing("prompt", "Send either 'prompt' or 'messages'.")
            add_special = body.add_special_tokens is not False
            notices += prompts.second_bos((body.prompt,), add_special=add_special)
            return await prompts.encode(body.prompt, add_special=add_special)
        conversation = conversation_of(
            body.messages,
            [tool.shown for tool in body.tools] if body.tools else None,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
            body.documents,
        )
        add_special = bool(body.add_special_tokens)
        token_ids, text = await prompts.render(conversation, add_special=add_special, notices=notices)
        notices += prompts.second_bos((text,), add_special=add_special)
        return token_ids


class RenderApi:
    """Handlers of the two render routes, which need no engine."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, request: Request, body: Annotated[ChatRequest, body_of(ChatRequest)]) -> Response:
        """`{"token_ids": [...]}`. Raises `RequestError`, as for a chat, and `ClientGoneError`."""
        return await self._render(request, body, Intake.chat, is_list=False)

    async def completions(
        self, request: Request, body: Annotated[CompletionRequest, body_of(CompletionRequest)]
    ) -> Response:
        """One `{"token_ids": [...]}` for each prompt. Raises the same errors."""
        return await self._render(request, body, Intake.completion, is_list=True)

    async def _render(
        self,
        request: Request,
        body: R,
        take: Callable[[Intake, R, Caller], Awaitable[GenerateRequest]],
        *,
        is_list: bool,
    ) -> Response:
        service = self._services.generating(body.model)
        service.intake.check_model(body.model)
        caller = caller_of(request, body.timeout)
        accepted = await while_asked(request, caller.deadline, take(service.intake, body, caller))
        request.state.notices += accepted.notices
        data = await self._written(service, accepted, is_list=is_list)
        return Response(data, media_type="application/json")

    async def _written(self, service: Service, accepted: GenerateRequest, *, is_list: bool) -> bytes:
        def work() -> bytes:
            prompts: list[RenderedPrompt] = [{"token_ids": prompt.token_ids} for prompt in accepted.prompts]
            return exact(orjson.dumps(prompts if is_list else prompts[0]))

        return await service.threads.run(work, accepted.num_prompt_tokens)
