"""The turns of an Anthropic conversation: content blocks, read into the plain messages that chat templates expect.

A turn may become several messages (each tool result is one) and several turns one (Anthropic joins neighbours of one
role). Roles and blocks are checked here with the path of what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from inferd.server.errors import table as errors
from inferd.server.schema.kinds import Boolean, Choice, Json, Schema, Text, check_array, check_properties, object_schema
from inferd.server.schema.messages import MAX_MESSAGES, Message

BILLING_LINE = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt. It changes with every request and says nothing to the
model: read by one, it would keep any two requests from sharing a prefix."""

ROLES = ("user", "assistant", "system")

_TEXT_ONLY = "This model reads text; send what it says in a text block."
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
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}

# What SDKs send back of an answer they were given, and what changes nothing here.
_MARKS = ("cache_control",)
_TOOL_MARKS = (*_MARKS, "caller", "toolset_name")

Block = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class System:
    """The system prompt: a text, or text blocks that are joined by newlines; without the billing line."""

    name: str = "one of a string or an array of objects"

    def accepts(self, value: object) -> bool:
        return isinstance(value, (str, list))

    def read(self, value: object, where: str) -> str:
        texts = [_text(block, path) for block, path in _blocks(value, where, ("text",))]
        if texts:
            line, _, rest = texts[0].partition("\n")
            texts[0] = rest if line.startswith(BILLING_LINE) else texts[0]
        return "\n".join(text for text in texts if text)

    def schema(self) -> Schema:
        return {"anyOf": [Text().schema(), {"type": "array", "items": _block_schema(("text",))}]}


@dataclass(frozen=True, slots=True)
class Turns:
    """At least one turn."""

    name: str = "an array of objects"

    def accepts(self, value: object) -> bool:
        return isinstance(value, list)

    def read(self, value: object, where: str) -> tuple[Message, ...]:
        check_array(value, where, self.name, 1, MAX_MESSAGES)
        assert isinstance(value, list)
        conversation = _Conversation()
        for i, turn in enumerate(value):
            conversation.add(turn, f"{where}[{i}]")
        return conversation.finished()

    def schema(self) -> Schema:
        kinds = tuple(dict.fromkeys(kind for some in _BLOCKS.values() for kind in some))
        content = {"anyOf": [Text().schema(), {"type": "array", "items": _block_schema(kinds)}]}
        turn = object_schema({"role": Choice(ROLES).schema(), "content": content}, ("role", "content"))
        return {"type": "array", "items": turn, "minItems": 1, "maxItems": MAX_MESSAGES}


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
class _Conversation:
    """Messages so far. What one says in several blocks is joined once, at the end."""

    messages: list[dict[str, object]] = field(default_factory=list)
    _functions: dict[str, str] = field(default_factory=dict)
    """Id of a call -> the function's name, for templates that show it with the result."""

    def add(self, value: object, where: str) -> None:
        turn = check_properties(value, where, ("role", "content"), ())
        role = Choice(ROLES).read(turn["role"], f"{where}.role")
        path = f"{where}.content"
        if turn["content"] == [] and role != "assistant":
            raise errors.empty_array(path)
        if turn["content"] == []:
            self._say(role, "")  # an answer without a word, sent back
        readers: dict[object, Callable[[str, Block, str], None]] = {
            "text": self._add_text,
            "thinking": self._add_thinking,
            "tool_use": self._add_call,
            "tool_result": self._add_result,
        }
        for block, place in _blocks(turn["content"], path, _BLOCKS[role]):
            readers[block["type"]](role, block, place)

    def _add_text(self, role: str, block: Block, where: str) -> None:
        self._say(role, _text(block, where))

    def _say(self, role: str, text: str) -> None:
        """More of what the last message says, where that has the same role."""
        _append(self._message(role), "content", text)

    def _message(self, role: str) -> dict[str, object]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role})
        return self.messages[-1]

    def _add_thinking(self, role: str, block: Block, where: str) -> None:
        """The signature proves nothing here: whoever calls may put any words into the model's mouth."""
        given = check_properties(block, where, ("type", "thinking"), ("signature",))
        thought = Text().read(given["thinking"], f"{where}.thinking")
        if given.get("signature") is not None:
            Text().read(given["signature"], f"{where}.signature")
        _append(self._message(role), "reasoning", thought)

    def _add_call(self, role: str, block: Block, where: str) -> None:
        given = check_properties(block, where, ("type", "id", "name", "input"), _TOOL_MARKS)
        call_id, name = _id(given["id"], f"{where}.id"), _id(given["name"], f"{where}.name")
        function = {"name": name, "arguments": Json().read(given["input"], f"{where}.input")}
        self._functions[call_id] = name
        calls = self._message(role).setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"type": "function", "id": call_id, "function": function})

    def _add_result(self, role: str, block: Block, where: str) -> None:
        given = check_properties(block, where, ("type", "tool_use_id"), ("content", "is_error", *_TOOL_MARKS))
        call_id = _id(given["tool_use_id"], f"{where}.tool_use_id")
        if given.get("is_error") is not None:
            Boolean().read(given["is_error"], f"{where}.is_error")
        content, path = given.get("content"), f"{where}.content"
        texts = [] if content is None else [_text(*part) for part in _blocks(content, path, ("text",))]
        message: dict[str, object] = {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
        if call_id in self._functions:
            message["name"] = self._functions[call_id]
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


def _blocks(value: object, where: str, kinds: tuple[str, ...]) -> Iterator[tuple[Block, str]]:
    """(block, path) of content; a string is one text block. Raises `RequestError` for blocks of other kinds."""
    if isinstance(value, str):
        yield {"type": "text", "text": value}, where
        return
    if not isinstance(value, list):
        raise errors.invalid_type(where, "one of a string or an array of objects", value)
    for i, item in enumerate(value):
        path = f"{where}[{i}]"
        block = Json().read(item, path)
        if block.get("type") is None:
            raise errors.missing(f"{path}.type")
        kind = Text().read(block["type"], f"{path}.type")
        if kind in _REFUSED_BLOCKS:
            raise errors.unsupported_value(f"{path}.type", kind, _REFUSED_BLOCKS[kind])
        Choice(kinds).read(kind, f"{path}.type")
        yield block, path


def _text(block: Block, where: str) -> str:
    given = check_properties(block, where, ("type", "text"), (*_MARKS, "citations"))
    return Text().read(given["text"], f"{where}.text")


def _id(value: object, where: str) -> str:
    return Text(1).read(value, where)


def _block_schema(kinds: tuple[str, ...]) -> Schema:
    return {"type": "object", "properties": {"type": {"enum": list(kinds)}}, "required": ["type"]}
