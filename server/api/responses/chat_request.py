"""Translates a request of /v1/responses into an equal chat request, and that one's refusals back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.schema.caller_tool import functions
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.generation import SharedFields
from inferd.server.schema.messages import Message, read_arguments
from inferd.server.schema.response_items import Item, text_of
from inferd.server.schema.response_options import LOGPROBS
from inferd.server.schema.responses import ResponsesRequest
from inferd.server.schema.strict_json import Counts

Placed = tuple[Item, str]
"""(item, path of the field that it came from)."""


def chat_request(wire: ResponsesRequest, items: Iterable[Placed]) -> ChatRequest:
    """The chat request. `items` is the whole conversation without references. Raises `RequestError`."""
    messages = (*_instructions(wire.instructions), *messages_of(items))
    shows_logprobs = LOGPROBS in (wire.include or ())
    choice = wire.tool_choice.means if wire.tool_choice is not None else None
    has_choice = choice is not None and (bool(wire.tools) or choice.mode == "required")
    return ChatRequest.model_construct(
        **{name: getattr(wire, name) for name in SharedFields.model_fields},
        messages=messages,
        max_completion_tokens=wire.max_output_tokens,
        response_format=wire.text.means if wire.text is not None else None,
        logprobs=shows_logprobs or None,
        top_logprobs=wire.top_logprobs,
        tools=functions(map(_chat_tool, wire.tools)) if wire.tools else None,
        tool_choice=choice if has_choice else None,
        parallel_tool_calls=wire.parallel_tool_calls if wire.tools else None,
        reasoning_effort=wire.reasoning.effort if wire.reasoning is not None else None,
        thinking_token_budget=wire.thinking_token_budget,
        chat_template_kwargs=wire.chat_template_kwargs,
        verbosity=wire.text.verbosity if wire.text is not None else None,
    )


def check(wire: ResponsesRequest) -> None:
    """Raises `RequestError` if fields contradict each other."""
    for param, other, is_wrong in (
        ("background", "'stream' is disabled", bool(wire.background and wire.stream)),
        ("background", "'store' is enabled", bool(wire.background and wire.store is False)),
        (
            "top_logprobs",
            f"'include' has '{LOGPROBS}'",
            bool(wire.top_logprobs) and LOGPROBS not in (wire.include or ()),
        ),
    ):
        if is_wrong:
            raise RequestError("invalid_value", f"The '{param}' parameter is only allowed when {other}.", param)


def messages_of(items: Iterable[Placed]) -> list[Message]:
    """Items as messages. Consecutive reasoning, text and calls of the assistant become one message.

    Raises `RequestError` for an output without its call, and for a stored call that was cut off.
    """
    messages: list[Message] = []
    turn, counts = _Turn(), Counts()
    call_ids: set[str] = set()
    for item, where in items:
        is_assistant = item["type"] in ("function_call", "reasoning") or item.get("role") == "assistant"
        if not is_assistant or turn.is_over_before(item):
            messages += turn.messages()
            turn = _Turn()
        if is_assistant:
            turn.add(item, where, counts)
            call_ids |= {str(call["id"]) for call in turn.calls[-1:]}
        elif item["type"] == "function_call_output":
            call_id = str(item["call_id"])
            if call_id not in call_ids:
                rule = "No function call before it has this id; send the call too, or 'previous_response_id'."
                raise errors.invalid_value(f"{where}.call_id", call_id, rule)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text_of(item)})
        else:
            messages.append({"role": item["role"], "content": text_of(item)})
    return [*messages, *turn.messages()]


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
        return has_spoken if item["type"] != "function_call" else False

    def add(self, item: Item, where: str, counts: Counts) -> None:
        match item["type"]:
            case "reasoning":
                text = text_of(item)
                self.reasoning += [text] if text or self.reasoning else []
            case "function_call":
                arguments = read_arguments(str(item["arguments"]), where, counts)
                function = {"name": item["name"], "arguments": arguments}
                self.calls.append({"type": "function", "id": item["call_id"], "function": function})
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


def _chat_tool(tool: Item) -> Message:
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    # Templates print all keys. Without this one, a function looks like one in a chat request.
    if function["strict"] is False:
        del function["strict"]
    return {"type": "function", "function": function}


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
        message = _NAMED.sub(lambda match: _NAMES[match[1]], _FUNCTION.sub(r"\1", error.message))
        raise error.reworded(message, param) from error
