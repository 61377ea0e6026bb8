"""A response while it is generated: the request's fields, its status, its output so far, its usage.

Its rendering writes it, as a stream of events with consecutive numbers or as a plain answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import cast

import orjson

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.endpoints.chunks import Counts, chat_logprobs, fingerprint
from inferd.server.endpoints.responses.output import Output
from inferd.server.endpoints.responses.output_items import Style
from inferd.server.endpoints.service import Service
from inferd.server.errors import table
from inferd.server.generate.events import Event, TextDelta
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.answers.generation import Extra
from inferd.server.schema.answers.response_events import (
    ErrorEvent,
    OutputEvent,
    ResponseEvent,
    ResponseEventType,
    StreamedEvent,
)
from inferd.server.schema.answers.responses import (
    ResponseFailure,
    ResponseObject,
    ResponseRequest,
    ResponseStatus,
    ResponseUsage,
)
from inferd.server.schema.response_options import SEALED_REASONING, TextOption
from inferd.server.schema.responses import ResponsesRequest
from inferd.server.transport import sse

_MAX_SHOWN = 2**53
"""The largest limit that a response repeats. JSON has no larger whole number that all clients read."""


class OpenResponse:
    """A response, from `queued` or `in_progress` to its final status."""

    def __init__(
        self, service: Service, body: ResponsesRequest, accepted: GenerateRequest, model: str, tools: bytes
    ) -> None:
        """`tools`: those of the request as the response repeats them, as JSON."""
        self.status: ResponseStatus = "queued" if body.background else "in_progress"
        self.id = accepted.response_id
        self.numbers = count()
        """The numbers of the stream's events."""
        self.is_kept = body.store is not False
        """Whether it is stored, or will be."""
        self._accepted = accepted
        self._counts = Counts(accepted.num_prompt_tokens)
        token_bytes = service.model.tokenizer.bytes
        self._output = Output(
            Style(
                logprobs=lambda scored: chat_logprobs(token_bytes, scored)["content"],
                seals_reasoning=SEALED_REASONING in (body.include or ()),
                numbers=self.numbers,
                tools=accepted.tools,
            )
        )
        self._error: ResponseFailure | None = None
        self._completed_at: int | None = None
        self._asked = _asked(body, accepted, model, tools, fingerprint(service, accepted))

    def feed(self, event: Event) -> Iterator[OutputEvent]:
        """The stream's events for an event of the choice. Must be read to its end."""
        self.status = "in_progress"
        if isinstance(event, TextDelta):
            self._counts.add(event, self._accepted)
        return self._output.feed(event)

    def finish(self) -> None:
        """Set the final status after the last event."""
        assert self._output.end is not None, "a choice that ends says so"
        self.status = "incomplete" if self._output.end.reason == "length" else "completed"
        self._completed_at = int(time.time())

    def fail(self, error: RequestError | EngineDeadError) -> None:
        self._output.stop()
        self.status = "failed"
        detail = table.body_of(error)["error"]
        # OpenAI's clients know few codes here. More precise values stand beside the code.
        status = table.row_of(error).status
        self._error = {
            "code": "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status == 400 else "server_error",
            "message": detail["message"],
            "type": detail["type"],
            "param": detail["param"],
        }

    def cancel(self) -> None:
        self._output.stop()
        self.status = "cancelled"

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Ids of the output's items."""
        return self._output.item_ids

    def shown(self) -> ResponseObject:
        """The response as it is now, for orjson to write."""
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

    def _usage(self) -> ResponseUsage:
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

    def __init__(self, response: OpenResponse, keep: Callable[[OpenResponse], None]) -> None:
        """`keep` stores the response after a successful end."""
        self._response, self._keep = response, keep
        self._has_begun = False

    def begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._state("response.created") + self._state("response.in_progress")

    def event(self, event: Event) -> bytes:
        return self.begin() + b"".join(map(_written, self._response.feed(event)))

    def end(self, extra: Extra) -> bytes:
        del extra
        self._finish()
        is_whole = self._response.status == "completed"
        return self._state("response.completed" if is_whole else "response.incomplete")

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        """Two events, because some clients read the one and some the other."""
        detail = table.body_of(error)["error"]
        begun = self.begin()
        event: ErrorEvent = {
            "type": "error",
            "sequence_number": next(self._response.numbers),
            "code": detail["code"],
            "message": detail["message"],
            "param": detail["param"],
            "error": detail,
        }
        self._response.fail(error)
        return begun + _written(event) + self._state("response.failed")

    def add(self, event: Event) -> None:
        for _ in self._response.feed(event):
            pass

    def plain(self, extra: Extra) -> ResponseObject:
        del extra
        self._finish()
        return self._response.shown()

    def _finish(self) -> None:
        self._response.finish()
        self._keep(self._response)

    def _state(self, kind: ResponseEventType) -> bytes:
        """An event with the whole response."""
        event: ResponseEvent = {
            "type": kind,
            "sequence_number": next(self._response.numbers),
            "response": self._response.shown(),
        }
        return _written(event)


def _asked(
    body: ResponsesRequest, accepted: GenerateRequest, model: str, tools: bytes, fingerprint: str
) -> ResponseRequest:
    reasoning, text = body.reasoning, body.text or TextOption({"type": "text"}, None)
    return {
        "created_at": int(time.time()),
        "model": model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": None if body.max_output_tokens is None else min(body.max_output_tokens, _MAX_SHOWN),
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": accepted.params.temperature,
        "text": {"format": text.format, "verbosity": text.verbosity},
        "tool_choice": body.tool_choice.given if body.tool_choice is not None else "auto",
        "tools": cast("list[Mapping[str, object]]", orjson.Fragment(tools)),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": accepted.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "seed": accepted.seed,
        "system_fingerprint": fingerprint,
    }


def _written(event: StreamedEvent) -> bytes:
    return sse.event(orjson.dumps(event), event["type"])
