"""/v1/chat/completions: parse -> generate -> render. A stream renders each event, a plain answer all of them."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.chunks import AnswerOptions, ChunkRendering, chat_logprobs, head, prompt_logprobs, usage_of
from inferd.server.endpoints.respond import admit, options_of, respond, while_asked
from inferd.server.endpoints.service import Service, Services
from inferd.server.generate.events import (
    CalledTool,
    ChoiceResult,
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.answers.generation import (
    ChatChoice,
    ChatChunkChoice,
    ChatChunkHead,
    ChatChunkTail,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatPrompt,
    CustomToolCall,
    CustomToolCallDelta,
    EndReason,
    Extra,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from inferd.server.schema.chat import ChatRequest


class ChatApi:
    """The route's handler."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request, body: Annotated[ChatRequest, body_of(ChatRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._services.generating(body.model)
        options = options_of(body, service.intake.check_model(body.model))
        caller = admit(request, service, body.timeout, body.n or 1)
        accepted = await while_asked(request, caller.deadline, service.intake.chat(body, caller))
        service.metrics.request_arrived("chat")
        return await respond(request, service, accepted, options, ChatRendering(service, accepted, options))


class ChatRendering(ChunkRendering):
    """Chat chunks and answers."""

    def __init__(self, service: Service, accepted: GenerateRequest, options: AnswerOptions) -> None:
        begin: ChatChunkHead = {
            "id": accepted.response_id,
            "object": "chat.completion.chunk",
            **head(service, accepted, options),
        }
        super().__init__(begin, service, accepted, options)
        self._scores = accepted.params.logprobs is not None
        self._custom_calls: set[tuple[int, int]] = set()
        """(choice, index) of the streamed calls of custom tools."""

    def event(self, event: Event) -> bytes:
        match event:
            case PromptRead():
                return b""  # scored prompts are not streamed
            case TextDelta():
                role = self._role(event.choice)
                self._counts.add(event, self._accepted)
                return role + self._text(event)
            case ReasoningDelta():
                return self._delta(event.choice, {"reasoning": event.text, "reasoning_content": event.text})
            case ToolCallStart():
                return self._delta(event.choice, {"tool_calls": [self._call_begun(event)]})
            case ToolCallArguments():
                return self._delta(event.choice, {"tool_calls": [self._call_grown(event)]})
            case Finished():
                self._counts.hold(event.choice, 0)
                end: ChatChunkChoice = {
                    "index": event.choice,
                    "logprobs": None,
                    "delta": {},
                    "finish_reason": self._reason(event.reason),
                    "stop_reason": event.stop_reason,
                }
                return self._role(event.choice) + self._choice_chunk(end)

    def plain(self, extra: Extra) -> ChatCompletion:
        choices = self._builder.results()
        prompt: ChatPrompt = {}
        if self._options.return_token_ids:
            prompt["prompt_token_ids"] = self._accepted.prompts[0].token_ids
        if self._options.num_prompt_logprobs is not None and choices[0].prompt is not None:
            scored = choices[0].prompt.scored
            prompt["prompt_logprobs"] = prompt_logprobs(self._table, scored, self._options.num_prompt_logprobs)
        return {
            "id": self._accepted.response_id,
            "object": "chat.completion",
            **head(self._service, self._accepted, self._options),
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage_of(self._accepted, choices),
            **prompt,
            **extra,
        }

    def _role(self, choice: int) -> bytes:
        """The first chunk of a choice, which has the role; empty if it was sent."""
        if choice in self._introduced:
            return b""
        self._introduced.add(choice)
        tail: ChatChunkTail = {}
        if self._options.return_token_ids and len(self._introduced) == 1:
            tail["prompt_token_ids"] = self._accepted.prompts[0].token_ids
        # If the answer has only calls, clients that add up deltas must not end with an empty text.
        content = "" if self._accepted.parser_config is None else None
        return self._choice_chunk(_growth(choice, {"role": "assistant", "content": content, "refusal": None}), tail)

    def _text(self, event: TextDelta) -> bytes:
        shows_tokens = bool(event.token_ids) and (self._scores or self._options.return_token_ids)
        if not event.text and not shows_tokens:
            return b""
        is_silent = self._accepted.parser_config is not None and not event.text
        choice = _growth(event.choice, {} if is_silent else {"content": event.text})
        if self._scores and event.scored:
            choice["logprobs"] = chat_logprobs(self._table, event.scored)
        if self._options.return_token_ids:
            choice["token_ids"] = event.token_ids
        return self._choice_chunk(choice)

    def _delta(self, choice: int, delta: ChatDelta) -> bytes:
        return self._role(choice) + self._choice_chunk(_growth(choice, delta))

    def _call_begun(self, event: ToolCallStart) -> ToolCallDelta | CustomToolCallDelta:
        if _is_custom(self._accepted, event.name):
            self._custom_calls.add((event.choice, event.index))
            return {"index": event.index, "id": event.id, "type": "custom", "custom": {"name": event.name, "input": ""}}
        function: FunctionDelta = {"name": event.name, "arguments": ""}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}

    def _call_grown(self, event: ToolCallArguments) -> ToolCallDelta | CustomToolCallDelta:
        if (event.choice, event.index) in self._custom_calls:
            return {"index": event.index, "custom": {"input": event.text}}
        return {"index": event.index, "function": {"arguments": event.text}}

    def _reason(self, reason: EndReason) -> EndReason:
        """The finish reason. If the caller named the function, the model did not decide to call: OpenAI says `stop`."""
        config = self._accepted.parser_config
        return "stop" if reason == "tool_calls" and config is not None and config.names_function else reason

    def _choice(self, index: int, result: ChoiceResult) -> ChatChoice:
        choice: ChatChoice = {
            "index": index,
            "message": _message(result, self._accepted),
            "logprobs": chat_logprobs(self._table, result.scored) if self._scores else None,
            "finish_reason": self._reason(result.reason),
            "stop_reason": result.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice


def _growth(choice: int, delta: ChatDelta) -> ChatChunkChoice:
    """A choice that has not ended."""
    return {"index": choice, "logprobs": None, "delta": delta, "finish_reason": None}


def _is_custom(accepted: GenerateRequest, name: str) -> bool:
    tool = accepted.tools.get(name)
    return tool is not None and tool.kind == "custom"


def _message(result: ChoiceResult, accepted: GenerateRequest) -> ChatMessage:
    """The message of a choice. `content` is null if there are only calls."""
    content = None if result.calls and not result.text else result.text
    message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if result.reasoning:
        message["reasoning"] = message["reasoning_content"] = result.reasoning
    if result.calls:
        message["tool_calls"] = [_call(call, accepted) for call in result.calls]
    return message


def _call(call: CalledTool, accepted: GenerateRequest) -> ToolCall | CustomToolCall:
    if _is_custom(accepted, call.name):
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
