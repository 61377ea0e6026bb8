"""/tokenize, /detokenize and /tokenizer_info: converts between texts or conversations and token ids."""

from __future__ import annotations

from typing import Annotated

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.api.body import Body, body_of
from inferd.server.api.respond import while_asked
from inferd.server.api.service import Service
from inferd.server.errors import table as errors
from inferd.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from inferd.server.text.json_bytes import exact
from inferd.server.text.template import conversation_of

MAX_TEXT_BYTES = 2**24
"""Maximum size of the text of token ids. It equals the default maximum of a body."""
_PART = 2**18
"""Number of characters that are encoded at a time."""


class TokensApi:
    """The routes' handlers, which need no engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(
        self, request: Request, body: Annotated[Body[TokenizeRequest], body_of(TokenizeRequest)]
    ) -> Response:
        """Raises `RequestError`."""
        service = self._service
        wire = body.wire
        service.intake.check_model(wire.model)
        token_ids = await while_asked(request, None, self._ids(wire))

        def work() -> bytes:
            token = service.model.tokenizer.token
            strings = [token(token_id) for token_id in token_ids] if wire.return_token_strs else None
            answer = {
                "count": len(token_ids),
                "max_model_len": service.model.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
            return exact(orjson.dumps(answer))

        data = await service.lanes.run(work, len(token_ids))
        return Response(data, headers=dict(body.headers), media_type="application/json")

    async def detokenize(
        self, request: Request, body: Annotated[Body[DetokenizeRequest], body_of(DetokenizeRequest)]
    ) -> Response:
        """Raises `RequestError`."""
        service = self._service
        wire = body.wire
        service.intake.check_model(wire.model)

        def work() -> bytes:
            service.prompts.check_ids(wire.tokens, "tokens")
            table = service.model.tokenizer.bytes
            num_bytes = sum(len(table.of(token_id)) for token_id in wire.tokens)
            if num_bytes > MAX_TEXT_BYTES:
                rule = f"Their text has {num_bytes} bytes. Expected at most {MAX_TEXT_BYTES}; send fewer ids."
                raise errors.invalid_value("tokens", f"{len(wire.tokens)} ids", rule)
            text = service.model.tokenizer.decode(wire.tokens, skip_special=False)
            # No other thread runs while orjson encodes. 9 MB would take 20 ms.
            parts = (orjson.dumps(text[start : start + _PART])[1:-1] for start in range(0, len(text), _PART))
            return exact(b'{"prompt":"' + b"".join(parts) + b'"}')

        data = await service.lanes.run(work, len(wire.tokens))
        return Response(data, headers=dict(body.headers), media_type="application/json")

    async def info(self, request: Request) -> Response:
        """The checkpoint's tokenizer_config.json, with the chat template even if that is in another file."""
        del request
        return Response(self._service.model.tokenizer_info, media_type="application/json")

    async def _ids(self, wire: TokenizeRequest) -> tuple[int, ...]:
        prompts = self._service.prompts
        if wire.messages is not None and wire.prompt is not None:
            raise RequestError("invalid_value", "Only one of 'prompt' and 'messages' can be given.", "prompt")
        if wire.messages is None:
            if wire.prompt is None:
                raise errors.missing("prompt", "Send either 'prompt' or 'messages'.")
            return await prompts.encode(wire.prompt, add_special=wire.add_special_tokens is not False)
        conversation = conversation_of(
            wire.messages,
            wire.tools,
            wire.add_generation_prompt,
            wire.continue_final_message,
            wire.chat_template_kwargs,
            wire.documents,
        )
        token_ids, _ = await prompts.render(conversation, add_special=bool(wire.add_special_tokens))
        return token_ids
