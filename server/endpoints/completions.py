"""/v1/completions: parse -> generate -> render. It has one prompt or many, and echoes and scores them if asked to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.chunks import AnswerOptions, ChunkRendering, head, prompt_logprobs, text_logprobs, usage_of
from inferd.server.endpoints.long_lists import Chained
from inferd.server.endpoints.respond import admit, options_of, respond, while_asked
from inferd.server.endpoints.service import Service, Services
from inferd.server.generate.events import (
    ChoiceResult,
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.answers.generation import (
    Completion,
    Extra,
    TextChoice,
    TextChunkChoice,
    TextHead,
    TextLogprobs,
)
from inferd.server.schema.completions import CompletionRequest


class CompletionsApi:
    """The route's handler."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(
        self, request: Request, body: Annotated[CompletionRequest, body_of(CompletionRequest)]
    ) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._services.generating(body.model)
        options = options_of(body, service.intake.check_model(body.model))
        caller = admit(request, service, body.timeout, len(body.prompt) * (body.n or 1))
        accepted = await while_asked(request, caller.deadline, service.intake.completion(body, caller))
        service.metrics.request_arrived("completions")
        return await respond(request, service, accepted, options, TextRendering(service, accepted, options))


class TextRendering(ChunkRendering):
    """Text chunks and answers."""

    def __init__(self, service: Service, accepted: GenerateRequest, options: AnswerOptions) -> None:
        super().__init__(_head(service, accepted, options), service, accepted, options)
        self._num_top = accepted.params.logprobs

    def event(self, event: Event) -> bytes:
        match event:
            case PromptRead():
                return self._prompt(event)
            case TextDelta():
                self._counts.add(event, self._accepted)
                return self._text(event)
            case Finished():
                self._counts.hold(event.choice, 0)
                end = _growth(event.choice, "", None)
                end["finish_reason"], end["stop_reason"] = event.reason, event.stop_reason
                return self._chunk(end)
            case ReasoningDelta() | ToolCallStart() | ToolCallArguments():
                raise AssertionError("a completion is one text")

    def plain(self, extra: Extra) -> Completion:
        choices = self._builder.results()
        return {
            **_head(self._service, self._accepted, self._options),
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage_of(self._accepted, choices),
            **extra,
        }

    def _prompt(self, event: PromptRead) -> bytes:
        """The echo, as the first chunk of its choice."""
        if not self._accepted.echo:
            return b""
        return self._chunk(_growth(event.choice, event.text, self._logprobs(event.choice, event.scored)))

    def _text(self, event: TextDelta) -> bytes:
        shows_tokens = bool(event.token_ids) and (self._num_top is not None or self._options.return_token_ids)
        if not event.text and not shows_tokens:
            return b""
        choice = _growth(event.choice, event.text, self._logprobs(event.choice, event.scored) if event.scored else None)
        if self._options.return_token_ids:
            choice["token_ids"] = event.token_ids
        return self._chunk(choice)

    def _chunk(self, choice: TextChunkChoice) -> bytes:
        index = choice["index"]
        if self._options.return_token_ids and index not in self._introduced:
            self._introduced.add(index)
            choice["prompt_token_ids"] = self._accepted.prompt_of(index).token_ids
        return self._choice_chunk(choice)

    def _choice(self, index: int, result: ChoiceResult) -> TextChoice:
        prompt = result.prompt
        echoed = prompt if self._accepted.echo else None
        choice: TextChoice = {
            "index": index,
            "text": (echoed.text if echoed else "") + result.text,
            "logprobs": self._logprobs(index, Chained(echoed.scored if echoed else (), result.scored)),
            "finish_reason": result.reason,
            "stop_reason": result.stop_reason,
        }
        if self._options.num_prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._table, prompt.scored, self._options.num_prompt_logprobs)
        if self._options.return_token_ids:
            choice["token_ids"] = result.token_ids
            choice["prompt_token_ids"] = self._accepted.prompt_of(index).token_ids
        return choice

    def _logprobs(self, choice: int, scored: Collection[ScoredToken | None]) -> TextLogprobs | None:
        if self._num_top is None:
            return None
        return text_logprobs(self._table, scored, self._num_top, self._accepted.prompt_of(choice).token_ids[0])


def _head(service: Service, accepted: GenerateRequest, options: AnswerOptions) -> TextHead:
    return {"id": accepted.response_id, "object": "text_completion", **head(service, accepted, options)}


def _growth(choice: int, text: str, logprobs: TextLogprobs | None) -> TextChunkChoice:
    """A choice that has not ended."""
    return {"index": choice, "logprobs": logprobs, "text": text, "finish_reason": None}
