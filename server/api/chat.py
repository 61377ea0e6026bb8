"""/v1/chat/completions: parse -> generate -> render. A stream renders each event, a plain answer all of them."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from inferd.server.api.answer import ChunkRendering, Chunks, Json, Shape, head, usage_of
from inferd.server.api.body import Body, body_of
from inferd.server.api.logprobs import chat_logprobs, prompt_logprobs
from inferd.server.api.respond import admit, respond, shape_of, while_asked
from inferd.server.api.service import Service
from inferd.server.generate.events import (
    EndReason,
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.generate.request import GenerateRequest
from inferd.server.generate.results import ChoiceResult
from inferd.server.schema.chat import ChatRequest


class ChatApi:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request, body: Annotated[Body[ChatRequest], body_of(ChatRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._service
        shape = shape_of(body.wire, service.intake.check_model(body.wire.model))
        caller = admit(request, service, body.wire.timeout, body.wire.n or 1)
        taken = await while_asked(request, caller.deadline, service.intake.chat(body.wire, caller))
        service.metrics.request_arrived("chat")
        return await respond(request, service, taken, shape, ChatRendering(service, taken, shape), body.headers)


class ChatRendering(ChunkRendering):
    """Chat chunks and answers."""

    def __init__(self, service: Service, taken: GenerateRequest, shape: Shape) -> None:
        super().__init__(Chunks(head(service, taken, shape, "chat.completion.chunk"), shape, taken), taken)
        self._service, self._taken, self._shape = service, taken, shape
        self._table = service.model.tokenizer.bytes
        self._scores = taken.params.logprobs is not None
        self._introduced: set[int] = set()

    def event(self, event: Event) -> bytes:
        match event:
            case PromptRead():
                return b""  # scored prompts are not streamed
            case TextDelta():
                role = self._role(event.choice)
                self._chunks.count(event)
                return role + self._text(event)
            case ReasoningDelta():
                return self._delta(event.choice, _reasoning(event.text))
            case ToolCallStart():
                function = {"name": event.name, "arguments": ""}
                call: Json = {"index": event.index, "id": event.id, "type": "function", "function": function}
                return self._delta(event.choice, {"tool_calls": [call]})
            case ToolCallArguments():
                call = {"index": event.index, "function": {"arguments": event.text}}
                return self._delta(event.choice, {"tool_calls": [call]})
            case Finished():
                self._chunks.ended(event.choice)
                end: Json = {"delta": {}, "finish_reason": self._reason(event.reason), "stop_reason": event.stop_reason}
                return self._role(event.choice) + self._chunk(event.choice, end)

    def plain(self, extra: Json) -> Json:
        choices = self._builder.results()
        answer = head(self._service, self._taken, self._shape, "chat.completion")
        answer["choices"] = [self._choice(i, choice) for i, choice in enumerate(choices)]
        answer["usage"] = usage_of(self._taken, choices)
        if self._shape.return_token_ids:
            answer["prompt_token_ids"] = self._taken.prompts[0].token_ids
        if self._shape.num_prompt_logprobs is not None and choices[0].prompt is not None:
            scored = choices[0].prompt.scored
            answer["prompt_logprobs"] = prompt_logprobs(self._table, scored, self._shape.num_prompt_logprobs)
        return {**answer, **extra}

    def _role(self, choice: int) -> bytes:
        """The first chunk of a choice, which has the role; empty if it was sent."""
        if choice in self._introduced:
            return b""
        self._introduced.add(choice)
        extra: Json = {}
        if self._shape.return_token_ids and len(self._introduced) == 1:
            extra["prompt_token_ids"] = self._taken.prompts[0].token_ids
        # If the answer has only calls, clients that add up deltas must not end with an empty text.
        content = "" if self._taken.parser_config is None else None
        delta = {"role": "assistant", "content": content, "refusal": None}
        return self._chunk(choice, {"delta": delta, "finish_reason": None}, extra)

    def _text(self, event: TextDelta) -> bytes:
        shows_tokens = bool(event.token_ids) and (self._scores or self._shape.return_token_ids)
        if not event.text and not shows_tokens:
            return b""
        is_silent = self._taken.parser_config is not None and not event.text
        choice: Json = {"delta": {} if is_silent else {"content": event.text}, "finish_reason": None}
        if self._scores and event.scored:
            choice["logprobs"] = chat_logprobs(self._table, event.scored)
        if self._shape.return_token_ids:
            choice["token_ids"] = event.token_ids
        return self._chunk(event.choice, choice)

    def _delta(self, choice: int, delta: Json) -> bytes:
        return self._role(choice) + self._chunk(choice, {"delta": delta, "finish_reason": None})

    def _chunk(self, choice: int, fields: Json, extra: Json | None = None) -> bytes:
        return self._chunks.chunk({"index": choice, "logprobs": None, **fields}, extra)

    def _reason(self, reason: EndReason) -> EndReason:
        """The finish reason. If the caller named the function, the model did not decide to call: OpenAI says `stop`."""
        config = self._taken.parser_config
        return "stop" if reason == "tool_calls" and config is not None and config.names_function else reason

    def _choice(self, index: int, result: ChoiceResult) -> Json:
        choice: Json = {
            "index": index,
            "message": _message(result),
            "logprobs": chat_logprobs(self._table, result.scored) if self._scores else None,
            "finish_reason": self._reason(result.reason),
            "stop_reason": result.stop_reason,
        }
        if self._shape.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice


def _message(result: ChoiceResult) -> Json:
    """The message of a choice. `content` is null if there are only calls."""
    content = None if result.calls and not result.text else result.text
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if result.reasoning:
        message |= _reasoning(result.reasoning)
    if result.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in result.calls
        ]
    return message


def _reasoning(text: str) -> Json:
    """The reasoning under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}
