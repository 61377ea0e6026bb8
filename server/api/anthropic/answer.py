"""Writes the answers of /v1/messages: content blocks, in Anthropic's stream of named events.

A plain answer is put together from the events that a stream would have sent, so that the two cannot differ.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson
from pydantic_core import from_json

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.api.answer import Counts, Json
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
from inferd.server.transport import sse

_DELTAS = {"text": "text", "input_json": "partial_json", "thinking": "thinking"}
"""Kind of a delta -> the key of its text."""


@dataclass(slots=True)
class _Block:
    """A content block while it grows. `start` is the block in its first event."""

    start: Json
    pieces: list[str] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def kind(self) -> str:
        return str(self.start["type"])

    @property
    def signature(self) -> str:
        """A digest of the reasoning. Clients expect a signature and send it back; the server never checks it."""
        return base64.b64encode(self.digest.digest()).decode()

    def whole(self) -> Json:
        text = "".join(self.pieces)
        match self.kind:
            case "text":
                return {**self.start, "text": text}
            case "thinking":
                return {**self.start, "thinking": text, "signature": self.signature}
        return {**self.start, "input": _input_of(text)}


class MessageRendering:
    """One message."""

    keep_alive = sse.event(b'{"type":"ping"}', "ping")

    def __init__(self, taken: GenerateRequest, model: str, max_tokens: int, request_id: str) -> None:
        """`model`: the name as the caller wrote it. `max_tokens`: the caller's number, which may exceed the context."""
        self._taken, self._model, self._max_tokens, self._request_id = taken, model, max_tokens, request_id
        self._counts = Counts(taken.num_prompt_tokens)
        self._blocks: list[_Block] = []
        self._has_begun = self._is_open = False
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def event(self, event: Event) -> bytes:
        return b"".join(map(_written, self._events(event, is_kept=False)))

    def end(self, extra: Json) -> bytes:
        del extra
        usage = self._usage()
        closing: tuple[Json, ...] = (
            {"type": "message_delta", "delta": self._stop, "usage": usage},
            {"type": "message_stop"},
        )
        return b"".join(map(_written, closing))

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        return sse.event(orjson.dumps(anthropic_errors.body_of(error, self._request_id)), "error")

    def add(self, event: Event) -> None:
        for _ in self._events(event, is_kept=True):
            pass

    def plain(self, extra: Json) -> Json:
        del extra
        return {**self._message(), "content": [block.whole() for block in self._blocks]}

    def _events(self, event: Event, *, is_kept: bool) -> Iterator[Json]:
        """The stream's events for an event of the choice. `is_kept`: the text is collected for a plain answer."""
        if isinstance(event, TextDelta):
            self._counts.add(event, self._taken)
        if not self._has_begun:
            self._has_begun = True
            yield {
                "type": "message_start",
                "message": {**self._message(), "usage": {**self._usage(), "output_tokens": 0}},
            }
        match event:
            case TextDelta() if event.text:
                yield from self._block_of({"type": "text", "text": ""})
                yield self._delta("text", event.text, is_kept)
            case ReasoningDelta():
                yield from self._block_of({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta("thinking", event.text, is_kept)
            case ToolCallStart():
                yield from self._close()
                yield self._open({"type": "tool_use", "id": _id_of(event.id), "name": event.name, "input": {}})
            case ToolCallArguments():
                yield self._delta("input_json", event.text, is_kept)
            case Finished():
                yield from self._close()
                self._stop = self._stop_of(event)
            case TextDelta() | PromptRead():
                pass

    def _block_of(self, start: Json) -> Iterator[Json]:
        """Open a new block, unless the open one has this type."""
        if self._is_open and self._blocks[-1].kind == start["type"]:
            return
        yield from self._close()
        yield self._open(start)

    def _open(self, start: Json) -> Json:
        self._is_open = True
        self._blocks.append(_Block(start))
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": start}

    def _delta(self, kind: str, text: str, is_kept: bool) -> Json:
        assert self._is_open
        block = self._blocks[-1]
        if is_kept:
            block.pieces.append(text)
        if kind == "thinking":
            block.digest.update(text.encode())
        return self._block_delta({"type": f"{kind}_delta", _DELTAS[kind]: text})

    def _block_delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block.kind == "thinking":
            yield self._block_delta({"type": "signature_delta", "signature": block.signature})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _message(self) -> Json:
        return {
            "id": self._taken.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            **self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
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

    def _stop_of(self, end: Finished) -> Json:
        if isinstance(end.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        reason = {"stop": "end_turn", "tool_calls": "tool_use"}.get(end.reason, "max_tokens")
        if reason == "max_tokens" and self._taken.prompts[0].max_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def _written(event: Json) -> bytes:
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
