"""/v1/chat/completions: parse -> generate -> render. A stream renders each event, a plain answer their fold."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inferd.server.api.answer import Chunks, Json, Shape, head, usage_of
from inferd.server.api.body import read_body
from inferd.server.api.logprobs import chat_logprobs, prompt_logprobs
from inferd.server.api.respond import caller_of, check_ready, respond, shape_of
from inferd.server.api.service import Service
from inferd.server.generate.events import Event, Finished, PromptRead, TextDelta
from inferd.server.generate.fold import ChoiceResult
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.chat import ChatRequest


class ChatApi:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._service
        body = await read_body(request, service, ChatRequest)
        shape = shape_of(body.wire, service.intake.check_model(body.wire.model))
        check_ready(service.router)
        taken = await service.intake.chat(body.wire, caller_of(request))
        service.metrics.request_arrived("chat")
        return await respond(request, service, taken, shape, ChatRendering(service, taken, shape), body.headers)


class ChatRendering:
    """Chat chunks and answers."""

    def __init__(self, service: Service, taken: GenerateRequest, shape: Shape) -> None:
        self._service, self._taken, self._shape = service, taken, shape
        self._table = service.model.tokenizer.bytes
        self._scores = taken.params.logprobs is not None
        self._introduced: set[int] = set()
        self.chunks = Chunks(head(service, taken, shape, "chat.completion.chunk"), shape, taken)

    def event(self, event: Event) -> bytes:
        match event:
            case PromptRead():
                return b""  # scored prompts are not streamed
            case TextDelta():
                self.chunks.count(event)
                return self._role(event.choice) + self._text(event)
            case Finished():
                end: Json = {"delta": {}, "finish_reason": event.reason, "stop_reason": event.stop_reason}
                return self._role(event.choice) + self._chunk(event.choice, end)

    def plain(self, choices: tuple[ChoiceResult, ...]) -> Json:
        answer = head(self._service, self._taken, self._shape, "chat.completion")
        answer["choices"] = [self._choice(i, choice) for i, choice in enumerate(choices)]
        answer["usage"] = usage_of(self._taken, choices)
        if self._shape.return_token_ids:
            answer["prompt_token_ids"] = self._taken.prompts[0].token_ids
        if self._shape.num_prompt_logprobs is not None and choices[0].prompt is not None:
            scored = choices[0].prompt.scored
            answer["prompt_logprobs"] = prompt_logprobs(self._table, scored, self._shape.num_prompt_logprobs)
        return answer

    def _role(self, choice: int) -> bytes:
        """The first chunk of a choice says who speaks."""
        if choice in self._introduced:
            return b""
        self._introduced.add(choice)
        extra: Json = {}
        if self._shape.return_token_ids and len(self._introduced) == 1:
            extra["prompt_token_ids"] = self._taken.prompts[0].token_ids
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(choice, {"delta": delta, "finish_reason": None}, extra)

    def _text(self, event: TextDelta) -> bytes:
        shows_tokens = bool(event.token_ids) and (self._scores or self._shape.return_token_ids)
        if not event.text and not shows_tokens:
            return b""
        choice: Json = {"delta": {"content": event.text}, "finish_reason": None}
        if self._scores and event.scored:
            choice["logprobs"] = chat_logprobs(self._table, event.scored)
        if self._shape.return_token_ids:
            choice["token_ids"] = event.token_ids
        return self._chunk(event.choice, choice)

    def _chunk(self, choice: int, fields: Json, extra: Json | None = None) -> bytes:
        return self.chunks.chunk({"index": choice, "logprobs": None, **fields}, extra)

    def _choice(self, index: int, result: ChoiceResult) -> Json:
        choice: Json = {
            "index": index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": chat_logprobs(self._table, result.scored) if self._scores else None,
            "finish_reason": result.reason,
            "stop_reason": result.stop_reason,
        }
        if self._shape.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice
