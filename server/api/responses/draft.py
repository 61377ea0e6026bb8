"""A response while it is generated: the request's fields, its status, its output so far, its usage.

Its rendering writes it, as a stream of events with consecutive numbers or as a plain answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import orjson

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.api.answer import Counts, fingerprint
from inferd.server.api.logprobs import chat_logprobs
from inferd.server.api.responses.output import Output, OutputEvent, Style
from inferd.server.api.service import Service
from inferd.server.errors import table as errors
from inferd.server.generate.events import Event, TextDelta
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.response_options import SEALED_REASONING, TextOption
from inferd.server.schema.responses import ResponsesRequest
from inferd.server.transport import sse

Json = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseDraft:
    """A response, from `queued` or `in_progress` to its final status."""

    def __init__(self, service: Service, wire: ResponsesRequest, taken: GenerateRequest, model: str) -> None:
        self.status: Status = "queued" if wire.background else "in_progress"
        self.id = taken.response_id
        self.is_kept = wire.store is not False
        """Whether it is stored, or will be."""
        self._taken = taken
        self._counts = Counts(taken.num_prompt_tokens)
        table = service.model.tokenizer.bytes
        self._output = Output(
            Style(
                logprobs=lambda scored: chat_logprobs(table, scored)["content"],
                seals_reasoning=SEALED_REASONING in (wire.include or ()),
            )
        )
        self._error: Json | None = None
        self._completed_at: int | None = None
        self._asked = _asked(wire, taken, model) | {"system_fingerprint": fingerprint(service)}

    def feed(self, event: Event) -> Iterator[OutputEvent]:
        """The stream's events for an event of the choice. Must be read to its end."""
        self.status = "in_progress"
        if isinstance(event, TextDelta):
            self._counts.add(event, self._taken)
        return self._output.feed(event)

    def finish(self) -> None:
        """Set the final status after the last event."""
        assert self._output.end is not None, "a choice that ends says so"
        self.status = "incomplete" if self._output.end.reason == "length" else "completed"
        self._completed_at = int(time.time())

    def fail(self, error: RequestError | EngineDeadError) -> None:
        self._output.stop()
        self.status = "failed"
        body = errors.body_of(error)["error"]
        assert isinstance(body, dict)
        # OpenAI's clients know few codes here. More precise values stand beside the code.
        status = errors.row_of(error).status
        code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status == 400 else "server_error"
        self._error = {"code": code, **{key: body[key] for key in ("message", "type", "param")}}

    def cancel(self) -> None:
        self._output.stop()
        self.status = "cancelled"

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Ids of the output's items."""
        return self._output.item_ids

    def shown(self) -> Json:
        """The response object as it is now, for orjson to write."""
        end = self._output.end
        is_over = self.status not in ("queued", "in_progress")
        return {
            "id": self.id,
            "object": "response",
            **self._asked,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": self._output.items() if is_over else [],
            "usage": self._usage() if is_over else None,
            "store": self.is_kept,
            "stop_reason": end.stop_reason if end is not None else None,
        }

    def _usage(self) -> Json:
        usage = self._counts.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


class ResponsesRendering:
    """Writes one response. It ends with `response.completed`, `.incomplete` or `.failed`, without [DONE]."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(self, draft: ResponseDraft, keep: Callable[[ResponseDraft], None]) -> None:
        """`keep` stores the response after a successful end."""
        self._draft, self._keep = draft, keep
        self._num_events = 0

    def event(self, event: Event) -> bytes:
        return self._written(self._begun()) + self._written(self._draft.feed(event))

    def end(self, extra: Json) -> bytes:
        self._finish()
        return self._written([(f"response.{self._draft.status}", {"response": {**self._draft.shown(), **extra}})])

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        """Two events, because some clients read the one and some the other."""
        body = errors.body_of(error)["error"]
        assert isinstance(body, dict)
        begun = self._written(self._begun())
        self._draft.fail(error)
        flat = {key: body[key] for key in ("code", "message", "param")}
        failed = {"response": self._draft.shown()}
        return begun + self._written([("error", {**flat, "error": body}), ("response.failed", failed)])

    def add(self, event: Event) -> None:
        for _ in self._draft.feed(event):
            pass

    def plain(self, extra: Json) -> Json:
        self._finish()
        return {**self._draft.shown(), **extra}

    def _finish(self) -> None:
        self._draft.finish()
        self._keep(self._draft)

    def _begun(self) -> Iterator[OutputEvent]:
        if self._num_events == 0:
            for kind in ("response.created", "response.in_progress"):
                yield kind, {"response": self._draft.shown()}

    def _written(self, events: Iterable[OutputEvent]) -> bytes:
        return b"".join(self._one(kind, fields) for kind, fields in events)

    def _one(self, kind: str, fields: Json) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return sse.event(data, kind)


def _asked(wire: ResponsesRequest, taken: GenerateRequest, model: str) -> Json:
    """The request's fields that the response repeats, with defaults for those that were not given."""
    reasoning, text = wire.reasoning, wire.text or TextOption({"type": "text"}, None)
    return {
        "created_at": int(time.time()),
        "model": model,
        "background": bool(wire.background),
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": None,
        "metadata": wire.metadata or {},
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": wire.safety_identifier,
        "service_tier": "default",
        "temperature": taken.params.temperature,
        "text": {"format": text.format, "verbosity": text.verbosity},
        "tool_choice": wire.tool_choice.given if wire.tool_choice is not None else "auto",
        "tools": list(wire.tools or ()),
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": taken.params.top_p,
        "truncation": wire.truncation or "disabled",
        "user": wire.user,
        "seed": taken.seed,
    }
