"""The turns of an Anthropic conversation: content blocks, read into the plain messages that chat templates expect.

A turn may become several messages (each tool result is one) and several turns one (Anthropic joins neighbours of one
role).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, TypeAdapter, ValidationInfo, field_validator

from inferd.server.errors import validation
from inferd.server.schema.messages import MAX_MESSAGES, Message, text_or_parts
from inferd.server.schema.model import Part
from inferd.server.schema.values import Converted, Flag, JsonObject, Many, Text, Typed, by_type, form

BILLING_LINE = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt. It changes with every request and says nothing to the
model: read by one, it would keep any two requests from sharing a prefix."""

_TEXT_ONLY = "This server reads text alone; send what it says in a text block."
_NO_SERVER_TOOLS = "This server runs no tools; leave the block out."
_REFUSED_BLOCKS = {
    "image": _TEXT_ONLY,
    "document": _TEXT_ONLY,
    "search_result": _TEXT_ONLY,
    "tool_reference": "Tools are not searched for; list them in 'tools'.",
    "redacted_thinking": "Only the model that wrote it can read it; leave the block out.",
    "server_tool_use": _NO_SERVER_TOOLS,
    "web_search_tool_result": _NO_SERVER_TOOLS,
    "web_fetch_tool_result": _NO_SERVER_TOOLS,
    "code_execution_tool_result": _NO_SERVER_TOOLS,
    "container_upload": _NO_SERVER_TOOLS,
}

# What SDKs send back of an answer they were given, and what changes nothing here.
_TOOL_MARKS = ("cache_control", "caller", "toolset_name")

_NotEmpty = Annotated[Text, Field(min_length=1)]
_FORMS = "one of a string or an array of objects"


def _check_block(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _REFUSED_BLOCKS:
        raise validation.unsupported_type(kind, _REFUSED_BLOCKS[kind])
    return value


_IsServed = BeforeValidator(_check_block)


# --- Blocks ----------------------------------------------------------------------------------------------------------


class TextBlock(Part):
    type: Literal["text"]
    text: Text

    without_effect = ("cache_control", "citations")


class ThinkingBlock(Part):
    """The signature proves nothing here: any client may write what the model said."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: _NotEmpty
    name: _NotEmpty
    input: JsonObject

    without_effect = _TOOL_MARKS


_OneText = Annotated[TextBlock, Typed(("text",)), _IsServed]
_Texts = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_OneText, ...], Many(), Tag("<parts>")],
    form(_FORMS, text_or_parts),
]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: _NotEmpty
    is_error: Flag | None = None
    content: _Texts = ()

    without_effect = _TOOL_MARKS


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
Content = str | tuple[Block, ...]

_UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    form("an object", by_type, ("text", "tool_result")),
    _IsServed,
]
_AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    form("an object", by_type, ("text", "thinking", "tool_use")),
    _IsServed,
]
_UserContent = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_UserBlock, ...], Many(1), Tag("<parts>")],
    form(_FORMS, text_or_parts),
]
_AssistantContent = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_AssistantBlock, ...], Many(), Tag("<parts>")],
    form(_FORMS, text_or_parts),
]
_SystemContent = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_OneText, ...], Many(1), Tag("<parts>")],
    form(_FORMS, text_or_parts),
]
_CONTENT: Mapping[str, TypeAdapter[Any]] = {
    "user": TypeAdapter(_UserContent),
    "assistant": TypeAdapter(_AssistantContent),
    "system": TypeAdapter(_SystemContent),
}


class Turn(Part):
    role: Literal["user", "assistant", "system"]
    content: Any

    @field_validator("content", mode="plain", json_schema_input_type=_UserContent | _AssistantContent)
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> Content:
        """The role says which blocks there may be."""
        if "role" not in info.data:
            return ""  # it is refused
        content: Content = _CONTENT[info.data["role"]].validate_python(value, context=info.context)
        return content


# --- Messages --------------------------------------------------------------------------------------------------------


def _texts(content: str | tuple[TextBlock, ...]) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def _system(content: str | tuple[TextBlock, ...], where: str) -> str:
    """The system prompt, its texts joined by newlines, without the billing line."""
    del where
    texts = _texts(content)
    if texts:
        line, _, rest = texts[0].partition("\n")
        texts[0] = rest if line.startswith(BILLING_LINE) else texts[0]
    return "\n".join(text for text in texts if text)


System = Annotated[str, Converted(_Texts, _system)]


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Neighbours that say something as the user, or as the system, become one message."""
    result: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        first, *others = group
        if role in ("user", "system") and others:
            result.append({**first, "content": "\n".join(str(message["content"]) for message in (first, *others))})
        else:
            result += [first, *others]
    return tuple(result)


@dataclass(slots=True)
class Conversation:
    """Messages so far. What one says in several blocks is joined once, at the end."""

    messages: list[dict[str, object]] = field(default_factory=list)
    _functions: dict[str, str] = field(default_factory=dict)
    """Id of a call -> the function's name, for templates that show it with the result."""

    def add(self, turn: Turn) -> None:
        if isinstance(turn.content, str) or not turn.content:
            # Without blocks it is an answer without a word, sent back.
            _append(self._message(turn.role), "content", turn.content or "")
            return
        for block in turn.content:
            self._add(turn.role, block)

    def _add(self, role: str, block: Block) -> None:
        match block:
            case TextBlock():
                _append(self._message(role), "content", block.text)
            case ThinkingBlock():
                _append(self._message(role), "reasoning", block.thinking)
            case ToolUseBlock():
                self._add_call(role, block)
            case ToolResultBlock():
                self._add_result(block)

    def _message(self, role: str) -> dict[str, object]:
        """The last message, if it has the same role, or a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role})
        return self.messages[-1]

    def _add_call(self, role: str, block: ToolUseBlock) -> None:
        self._functions[block.id] = block.name
        calls = self._message(role).setdefault("tool_calls", [])
        assert isinstance(calls, list)
        function = {"name": block.name, "arguments": block.input}
        calls.append({"type": "function", "id": block.id, "function": function})

    def _add_result(self, block: ToolResultBlock) -> None:
        content = "\n".join(_texts(block.content))
        message: dict[str, object] = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if block.tool_use_id in self._functions:
            message["name"] = self._functions[block.tool_use_id]
        self.messages.append(message)

    def finished(self) -> tuple[Message, ...]:
        """Every message, with its texts joined."""
        for message in self.messages:
            for name in ("content", "reasoning"):
                if isinstance(texts := message.get(name), list):
                    message[name] = "\n".join(texts)
            if "reasoning" in message:
                message["reasoning_content"] = message["reasoning"]  # templates read the one name or the other
        return tuple(self.messages)


def _append(message: dict[str, object], name: str, text: str) -> None:
    """One more text, on a line of its own behind what is there."""
    texts = message.setdefault(name, [])
    assert isinstance(texts, list)
    if texts == [""]:
        texts.clear()
    texts.append(text)


def _messages(turns: tuple[Turn, ...], where: str) -> tuple[Message, ...]:
    del where
    conversation = Conversation()
    for turn in turns:
        conversation.add(turn)
    return conversation.finished()


Turns = Annotated[tuple[Message, ...], Converted(Annotated[tuple[Turn, ...], Many(1, MAX_MESSAGES)], _messages)]
"""At least one turn."""
