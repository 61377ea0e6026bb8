"""Translates a request of /v1/responses into an equal chat request, and that one's refusals back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.responses.toolset import Toolset, toolset_of
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.chat_messages import Message, arguments_of
from inferd.server.schema.generation import SharedFields
from inferd.server.schema.response_items import CALLS, ITEMS
from inferd.server.schema.response_options import LOGPROBS
from inferd.server.schema.response_parts import Item, called, text_of
from inferd.server.schema.responses import ResponsesRequest
from inferd.server.schema.strict_json import Counts

_UNSEEN = {kind for kind, row in ITEMS.items() if row.kind == "offer"} | {"additional_tools"}
"""Types of items that are no part of the prompt's messages."""

Placed = tuple[Item, str]
"""(item, path of the field that it came from)."""


def chat_request(body: ResponsesRequest, items: Iterable[Placed]) -> ChatRequest:
    """The chat request. `items` is the whole conversation without references. Raises `RequestError`."""
    placed = list(items)
    toolset = toolset_of(body.tools or (), placed)
    messages = (*_instructions(body.instructions), *messages_of(placed, toolset))
    shows_logprobs = LOGPROBS in (body.include or ())
    choice = toolset.choice(body.tool_choice)
    has_choice = choice is not None and (bool(toolset.tools) or choice.mode == "required")
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in SharedFields.model_fields},
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=body.text.means if body.text is not None else None,
        logprobs=shows_logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=toolset.tools or None,
        tool_choice=choice if has_choice else None,
        parallel_tool_calls=body.parallel_tool_calls if toolset.tools else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        thinking_token_budget=body.thinking_token_budget,
        stop_in_reasoning=body.stop_in_reasoning,
        chat_template_kwargs=body.chat_template_kwargs,
        verbosity=body.text.verbosity if body.text is not None else None,
    )


def check(body: ResponsesRequest) -> None:
    """Raises `RequestError` if fields contradict each other."""
    for param, other, is_wrong in (
        ("background", "'stream' is disabled", bool(body.background and body.stream)),
        ("background", "'store' is enabled", bool(body.background and body.store is False)),
        (
            "top_logprobs",
            f"'include' has '{LOGPROBS}'",
            bool(body.top_logprobs) and LOGPROBS not in (body.include or ()),
        ),
    ):
        if is_wrong:
            raise RequestError("invalid_value", f"The '{param}' parameter is only allowed when {other}.", param)


def messages_of(items: Iterable[Placed], toolset: Toolset) -> list[Message]:
    """Items as messages. Consecutive reasoning, text and calls of the assistant become one message."""
    messages: list[Message] = []
    turn, counts = _Turn(), Counts()
    calls: dict[str, str] = {}
    """Id of a call, and of its item -> id of the call."""
    newest: str | None = None
    """Id of the last call."""
    for item, _ in items:
        kind = str(item["type"])
        is_assistant = kind in CALLS or kind == "reasoning" or item.get("role") == "assistant"
        if kind in _UNSEEN:
            continue
        if not is_assistant or turn.is_over_before(item):
            messages += turn.messages()
            turn = _Turn()
        if kind in CALLS:
            newest = call_id = str(item.get("call_id") or item.get("id") or f"call_{len(calls)}")
            calls |= {call_id: call_id, str(item.get("id") or call_id): call_id}
            turn.calls.append(_call(item, call_id, toolset, counts))
        elif is_assistant:
            turn.add(item)
        elif kind.endswith("_output"):
            given = item.get("call_id") or newest or f"call_{len(calls)}"
            call_id = calls.get(str(given), str(given))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text_of(item)})
        elif "role" in item and "content" in item:
            messages.append({"role": item["role"], "content": text_of(item)})
    return [*messages, *turn.messages()]


def _call(item: Item, call_id: str, toolset: Toolset, counts: Counts) -> Message:
    """A call as the function that the model called."""
    name, arguments = called(item)
    namespace = str(item["namespace"]) if item.get("namespace") else None
    if isinstance(arguments, str):
        arguments = arguments_of(arguments, counts)
    function = {"name": toolset.name_of(namespace, name), "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


@dataclass(slots=True)
class _Turn:
    """The assistant's items since the last message of another role."""

    reasoning: list[str] = field(default_factory=list)
    """Texts, which are joined at the end."""
    text: str | None = None
    calls: list[Message] = field(default_factory=list)

    def is_over_before(self, item: Item) -> bool:
        """Whether the item needs a new message."""
        has_spoken = self.text is not None or bool(self.calls)
        return has_spoken and item["type"] not in CALLS

    def add(self, item: Item) -> None:
        """Reasoning, or a text of the assistant."""
        match item["type"]:
            case "reasoning":
                text = text_of(item)
                self.reasoning += [text] if text or self.reasoning else []
            case _:
                self.text = text_of(item)

    def messages(self) -> Iterator[Message]:
        """The message of the turn, if it has content."""
        if self.text is None and not self.calls:
            return
        message: dict[str, object] = {"role": "assistant"}
        if self.text is not None:
            message["content"] = self.text
        if self.reasoning:
            reasoning = "\n".join(self.reasoning)
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.calls:
            message["tool_calls"] = self.calls
        yield message


def _instructions(text: str | None) -> Iterator[Message]:
    if text is not None:
        yield {"role": "system", "content": text}


_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_FUNCTION = re.compile(r"\b(tools\[\d+\])\.function\b")
_NAMED = re.compile(rf"(?:(?<=')|(?<=your )|(?<=the ))({'|'.join(_NAMES)})\b")


@contextmanager
def in_callers_words() -> Iterator[None]:
    """Rename fields in refusals of the chat request to the names of /v1/responses."""
    try:
        yield
    except RequestError as error:
        param = error.param
        if param is not None:
            param = _FUNCTION.sub(r"\1", _NAMES.get(param, param))
        raise error.reworded(callers_words(error.message), param) from error


def callers_words(text: str) -> str:
    """A text about the chat request, with the names of /v1/responses."""
    return _NAMED.sub(lambda match: _NAMES[match[1]], _FUNCTION.sub(r"\1", text))
