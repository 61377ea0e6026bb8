"""Turns a history's last attempt into fields that can be compared with those of another run.

Reads the protocol of each family by its own rules, even if an answer was cut off. Every broken rule is kept as a
sentence. Knows no due answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import Attempt, Event
from tests.reliability.asking import Json, flat, join


@dataclass(slots=True)
class AnswerFields:
    """Contents of an answer."""

    fields: dict[str, Any] = field(default_factory=dict)
    """"0.text" -> text so far, "0.token_ids" -> ids so far, "0.finish_reason" -> a word, and so on."""
    usage: tuple[int, int] | None = None
    """(prompt tokens, answer tokens)."""
    num_ids: int | None = None
    """Token ids received; None: the family sends none."""
    is_ended: bool = False
    """Whether its terminal event came, or all of an answer that is no stream."""
    error: Json | None = None
    breaks: list[str] = field(default_factory=list)
    """Broken rules of the protocol, in words."""


def read_answer(attempt: Attempt, path: str) -> AnswerFields:
    """The contents of the attempt's answer."""
    answer = AnswerFields()
    if attempt.body is not None:
        _read_body(attempt.body, answer)
        answer.is_ended = True
    elif path == "/v1/messages":
        _Messages(answer).read(attempt.events)
    elif path == "/v1/responses":
        _Responses(answer).read(attempt.events)
    else:
        _Chunks(answer).read(attempt.events)
    ids = [value for name, value in answer.fields.items() if name.endswith(".token_ids")]
    answer.num_ids = sum(map(len, ids)) if ids else None
    return answer


def _read_body(body: Json, answer: AnswerFields) -> None:
    answer.error = body.get("error")
    for choice in body.get("choices", ()):
        _spread(answer, choice["index"], _flat(choice))
    for number, block in enumerate(body.get("content", ())):
        _spread(answer, number, _block(block))
    for number, item in enumerate(body.get("output", ())):
        _spread(answer, number, _item(item))
    for name in ("data", "stop_reason", "status", "incomplete_details"):
        if body.get(name) is not None:
            answer.fields[name] = body[name]
    if body.get("usage"):
        answer.usage = usage_of(body["usage"])


def usage_of(usage: Json) -> tuple[int, int]:
    """(prompt tokens, answer tokens), cached ones included."""
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"]), int(usage.get("completion_tokens", 0))
    cached = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    return int(usage["input_tokens"] + cached), int(usage["output_tokens"])


def _spread(answer: AnswerFields, number: int, values: Json) -> None:
    answer.fields.update({f"{number}.{name}": value for name, value in values.items()})


def _flat(choice: Json) -> Json:
    ids = choice.get("prompt_token_ids")
    return {**flat(choice), **({"prompt_token_ids": ids} if ids else {})}


def _block(block: Json) -> Json:
    """One content block of a message."""
    if block["type"] == "tool_use":
        return {"name": block["name"], "input": json.dumps(block["input"])}
    return {"text": block.get("text", block.get("thinking", ""))}


def _item(item: Json) -> Json:
    """One output item of a response."""
    if item["type"] == "function_call":
        return {"name": item["name"], "arguments": item["arguments"]}
    return {"text": "".join(part.get("text", "") for part in item.get("content", ()))}


class _Stream:
    """Checks that there is one terminal event and nothing after it. Each family reads its events."""

    def __init__(self, answer: AnswerFields) -> None:
        self._answer = answer

    def read(self, events: list[Event]) -> None:
        for event in events:
            if self._answer.is_ended:
                self._broke(f"something came after the end: {event.data[:80]}")
            self._take(event)
        if self._answer.is_ended and self._answer.error is None:
            for rule in self._missing():
                self._broke(rule)

    def _broke(self, rule: str) -> None:
        self._answer.breaks.append(rule)

    def _add(self, name: str, piece: str) -> None:
        self._answer.fields[name] = self._answer.fields.get(name, "") + piece

    def _take(self, event: Event) -> None:
        raise NotImplementedError

    def _missing(self) -> Iterator[str]:
        """Check what must come before the end."""
        yield from ()


class _Chunks(_Stream):
    """Completions and chat: chunks of choices, usage, [DONE]; after an error nothing."""

    def __init__(self, answer: AnswerFields) -> None:
        super().__init__(answer)
        self._choices: dict[int, Json] = {}

    def _take(self, event: Event) -> None:
        if event.data == "[DONE]":
            self._answer.is_ended = True
            return
        chunk = json.loads(event.data)
        if "error" in chunk:
            self._answer.error, self._answer.is_ended = chunk["error"], True
            return
        for choice in chunk.get("choices", ()):
            self._join(choice)
        if chunk.get("usage"):
            if self._answer.usage is not None:
                self._broke("usage came twice")
            self._answer.usage = usage_of(chunk["usage"])

    def _join(self, choice: Json) -> None:
        number = choice["index"]
        whole = self._choices.setdefault(number, {})
        if "finish_reason" in whole:
            self._broke(f"choice {number} went on after its finish_reason")
        if self._answer.usage is not None:
            self._broke(f"choice {number} went on after usage")
        join(whole, _flat(choice))
        _spread(self._answer, number, whole)

    def _missing(self) -> Iterator[str]:
        for number, whole in self._choices.items():
            if "finish_reason" not in whole:
                yield f"choice {number} has no finish_reason"
        if not self._choices:
            yield "the stream ended without a choice"


class _Messages(_Stream):
    """Anthropic's: message_start, one content block after another, message_delta, message_stop."""

    def __init__(self, answer: AnswerFields) -> None:
        super().__init__(answer)
        self._num_started = self._num_stopped = 0

    def _take(self, event: Event) -> None:
        said = json.loads(event.data)
        if said["type"] != event.name:
            self._broke(f"an event is {event.name} and says {said['type']}")
        match said["type"]:
            case "content_block_start":
                self._at(said["index"], self._num_started)
                if self._num_started != self._num_stopped:
                    self._broke("two content blocks are open")
                self._num_started += 1
                block = said["content_block"]
                if block["type"] == "tool_use":
                    self._answer.fields[f"{said['index']}.name"] = block["name"]
            case "content_block_delta":
                self._at(said["index"], self._num_started - 1)
                self._delta(said)
            case "content_block_stop":
                self._at(said["index"], self._num_stopped)
                self._num_stopped += 1
            case "message_delta":
                self._answer.fields["stop_reason"] = said["delta"]["stop_reason"]
                self._answer.usage = usage_of(said["usage"])
            case "message_stop":
                self._answer.is_ended = True
            case "error":
                self._answer.error, self._answer.is_ended = said["error"], True

    def _at(self, number: int, due: int) -> None:
        if number != due:
            self._broke(f"content block {number} where {due} was due")

    def _delta(self, said: Json) -> None:
        delta = said["delta"]
        kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[delta["type"]]
        name = "input" if kind == "partial_json" else "text"
        self._add(f"{said['index']}.{name}", delta[kind])

    def _missing(self) -> Iterator[str]:
        if self._num_started != self._num_stopped:
            yield "a content block was left open"
        if "stop_reason" not in self._answer.fields:
            yield "message_stop came without message_delta"


class _Responses(_Stream):
    """OpenAI's responses: numbered events; the last carries the whole answer, which is that of the deltas."""

    _ENDS = ("response.completed", "response.incomplete", "response.failed")

    def __init__(self, answer: AnswerFields) -> None:
        super().__init__(answer)
        self._num_events = 0

    def _take(self, event: Event) -> None:
        said = json.loads(event.data)
        if said["sequence_number"] != self._num_events:
            self._broke(f"event {said['sequence_number']} where {self._num_events} was due")
        self._num_events += 1
        match said["type"]:
            case "response.output_text.delta":
                self._add(f"{said['output_index']}.text", said["delta"])
            case "response.function_call_arguments.delta":
                self._add(f"{said['output_index']}.arguments", said["delta"])
            case "error":
                self._answer.error, self._answer.is_ended = said, True
            case kind if kind in self._ENDS:
                self._finish(said["response"])

    def _finish(self, response: Json) -> None:
        streamed = dict(self._answer.fields)
        self._answer.is_ended = True
        _read_body(response, self._answer)
        for name, value in streamed.items():
            if self._answer.fields.get(name) != value:
                self._broke(f"the deltas of {name} are not what the last event says")
