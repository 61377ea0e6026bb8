"""/v1/messages and /v1/messages/count_tokens of Anthropic's API: parse -> translate to chat -> generate -> render.

An answer is content blocks, in Anthropic's stream of named events. A plain answer is put together from the events that
a stream would have sent, so that the two cannot differ.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import orjson
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.endpoints.anthropic.chat_request import (
    anthropic_words,
    chat_of,
    in_anthropic_words,
    notices_of,
    prompt_of,
)
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.chunks import AnswerOptions, Counts, fingerprint
from inferd.server.endpoints.respond import admit, caller_of, respond, while_asked
from inferd.server.endpoints.service import Services
from inferd.server.errors import anthropic as anthropic_errors
from inferd.server.generate.events import (
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.answers.anthropic import (
    BlockDelta,
    BlockDeltaEvent,
    ContentBlock,
    Message,
    MessageDeltaEvent,
    MessageEvent,
    MessageStartEvent,
    MessageStop,
    MessageUsage,
    StopReason,
)
from inferd.server.schema.answers.generation import EndReason, Extra
from inferd.server.schema.answers.tokens import TokenCount
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.transport import sse

_STOP_REASONS: dict[EndReason, StopReason] = {"stop": "end_turn", "tool_calls": "tool_use"}


@dataclass(slots=True)
class _Block:
    """A content block while it grows. `start` is the block in its first event."""

    start: ContentBlock
    pieces: list[str] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    is_json: bool | None = None
    """Whether the input of a tool is JSON; None before its first piece."""

    @property
    def signature(self) -> str:
        """A digest of the reasoning. Clients expect a signature and send it back; the server never checks it."""
        return base64.b64encode(self.digest.digest()).decode()

    def takes(self, text: str) -> bool:
        """Whether the next piece of a tool's input is of JSON: SDKs fail at any other. A call that was cut off may be
        in the model's own format."""
        if self.is_json is None and text.strip():
            self.is_json = text.lstrip().startswith("{")
        return self.is_json is not False

    def whole(self) -> ContentBlock:
        start, text = self.start, "".join(self.pieces)
        if start["type"] == "text":
            return {**start, "text": text}
        if start["type"] == "thinking":
            return {**start, "thinking": text, "signature": self.signature}
        return {**start, "input": _input_of(text)}


class MessageRendering:
    """One message."""

    keep_alive = sse.event(b'{"type":"ping"}', "ping")

    def __init__(
        self, accepted: GenerateRequest, model: str, max_tokens: int, request_id: str, fingerprint: str
    ) -> None:
        """`model`: the name as the caller wrote it. `max_tokens`: the caller's number, which may exceed the context."""
        self._accepted, self._model, self._max_tokens, self._request_id = accepted, model, max_tokens, request_id
        self._fingerprint = fingerprint
        self._counts = Counts(accepted.num_prompt_tokens)
        self._blocks: list[_Block] = []
        self._has_begun = self._is_open = False
        self._stop: MessageStop = {"stop_reason": None, "stop_sequence": None}

    def begin(self) -> bytes:
        """`message_start`, and a ping as in Anthropic's streams. The last usage has the number of cached tokens."""
        if self._has_begun:
            return b""
        self._has_begun = True
        start: MessageStartEvent = {"type": "message_start", "message": self._message()}
        return _written(start) + self.keep_alive

    def event(self, event: Event) -> bytes:
        return self.begin() + b"".join(map(_written, self._events(event, is_kept=False)))

    def end(self, extra: Extra) -> bytes:
        del extra
        last: MessageDeltaEvent = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        return _written(last) + _written({"type": "message_stop"})

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        return sse.event(orjson.dumps(anthropic_errors.body_of(error, self._request_id)), "error")

    def add(self, event: Event) -> None:
        for _ in self._events(event, is_kept=True):
            pass

    def plain(self, extra: Extra) -> Message:
        del extra
        return {**self._message(), "content": [block.whole() for block in self._blocks]}

    def _events(self, event: Event, *, is_kept: bool) -> Iterator[MessageEvent]:
        """The stream's events for an event of the choice. `is_kept`: the text is collected for a plain answer."""
        if isinstance(event, TextDelta):
            self._counts.add(event, self._accepted)
        match event:
            case TextDelta() if event.text:
                yield from self._block_of({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": event.text}, event.text, is_kept)
            case ReasoningDelta():
                yield from self._block_of({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": event.text}, event.text, is_kept)
            case ToolCallStart():
                yield from self._close()
                yield self._open({"type": "tool_use", "id": _id_of(event.id), "name": event.name, "input": {}})
            case ToolCallArguments() if self._blocks[-1].takes(event.text):
                yield self._delta({"type": "input_json_delta", "partial_json": event.text}, event.text, is_kept)
            case Finished():
                yield from self._close()
                self._stop = self._stop_of(event)
            case TextDelta() | PromptRead() | ToolCallArguments():
                pass

    def _block_of(self, start: ContentBlock) -> Iterator[MessageEvent]:
        """Open a new block, unless the open one has this type."""
        if self._is_open and self._blocks[-1].start["type"] == start["type"]:
            return
        yield from self._close()
        yield self._open(start)

    def _open(self, start: ContentBlock) -> MessageEvent:
        self._is_open = True
        self._blocks.append(_Block(start))
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": start}

    def _delta(self, delta: BlockDelta, text: str, is_kept: bool) -> BlockDeltaEvent:
        """The event for new text of the open block."""
        assert self._is_open
        block = self._blocks[-1]
        if is_kept:
            block.pieces.append(text)
        if delta["type"] == "thinking_delta":
            block.digest.update(text.encode())
        return self._block_delta(delta)

    def _block_delta(self, delta: BlockDelta) -> BlockDeltaEvent:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[MessageEvent]:
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block.start["type"] == "thinking":
            yield self._block_delta({"type": "signature_delta", "signature": block.signature})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _message(self) -> Message:
        return {
            "id": self._accepted.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            **self._stop,
            "usage": self._usage(),
            "seed": self._accepted.seed,
            "system_fingerprint": self._fingerprint,
        }

    def _usage(self) -> MessageUsage:
        """Anthropic's input tokens exclude cached ones. Filling the cache costs nothing here, so its count is 0."""
        counts = self._counts
        num_cached = sum(counts.cached_by_prompt.values())
        return {
            "input_tokens": counts.num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": counts.num_output,
            "output_tokens_details": {"thinking_tokens": counts.num_reasoning},
        }

    def _stop_of(self, end: Finished) -> MessageStop:
        if isinstance(end.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        reason = _STOP_REASONS.get(end.reason, "max_tokens")
        if reason == "max_tokens" and self._accepted.prompts[0].max_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def _written(event: MessageEvent) -> bytes:
    return sse.event(orjson.dumps(event), event["type"])


def _id_of(call_id: str) -> str:
    """The id with Anthropic's prefix. An id that is short because of the chat template stays as it is."""
    return call_id if not call_id.startswith("call_") else "toolu_" + call_id.removeprefix("call_")


def _input_of(text: str) -> orjson.Fragment:
    """The input of a tool as the model wrote it. If it was cut off, the complete part, as SDKs read a stream."""
    try:
        from_json(text)
    except ValueError:
        pass
    else:
        return orjson.Fragment(text)
    try:
        return orjson.Fragment(json.dumps(from_json(text, allow_partial=True), allow_nan=False))
    except ValueError:
        return orjson.Fragment("{}")


T = TypeVar("T")


class MessagesApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request, body: Annotated[MessagesRequest, body_of(MessagesRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._services.generating(body.model)
        name = service.intake.check_model(body.model)
        caller = admit(request, service, None, num_choices=1)
        request.state.notices += notices_of(body, service.model)
        chat = chat_of(body, service.model)
        work = service.intake.chat(chat, caller, prefix="msg_", most=body.max_tokens)
        accepted = (await _in_anthropic_words(while_asked(request, caller.deadline, work))).in_words(anthropic_words)
        service.metrics.request_arrived("messages")
        prints = fingerprint(service, accepted)
        rendering = MessageRendering(accepted, name, body.max_tokens, request.state.request_id, prints)
        return await respond(request, service, accepted, _options(name, body), rendering)

    async def count_tokens(
        self, request: Request, body: Annotated[CountTokensRequest, body_of(CountTokensRequest)]
    ) -> Response:
        """The count, even if it exceeds the context. Needs no engine. Raises `RequestError`."""
        service = self._services.generating(body.model)
        service.intake.check_model(body.model)
        caller = caller_of(request)
        request.state.notices += notices_of(body, service.model)
        work = service.intake.read_chat(prompt_of(body, service.model), request.state.notices)
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


def _options(name: str, body: MessagesRequest) -> AnswerOptions:
    return AnswerOptions(
        name=name,
        is_stream=bool(body.stream),
        include_usage=False,
        continuous_usage=False,
        return_token_ids=False,
        num_prompt_logprobs=None,
    )
