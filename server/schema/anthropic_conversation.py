"""An Anthropic conversation: its turns, the plain messages that chat templates expect, and which tools it shows.

A turn may become several messages (each tool result is one) and several turns one (Anthropic joins neighbours of one
role). `anthropic_blocks` says what there may be in a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationInfo, field_validator

from inferd.server.errors import messages as errors
from inferd.server.errors import validation
from inferd.server.schema.anthropic_blocks import (
    CONTENT,
    CompactionBlock,
    DefinedTool,
    DocumentBlock,
    ImageBlock,
    NamedTool,
    SearchResultBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from inferd.server.schema.anthropic_parts import Effort
from inferd.server.schema.anthropic_tools import AnthropicTools, read_tool
from inferd.server.schema.caller_tool import CallerTool
from inferd.server.schema.chat import MAX_TOOLS
from inferd.server.schema.chat_messages import MAX_MESSAGES, Message
from inferd.server.schema.request_model import Part, tell
from inferd.server.schema.unread import SAY_IT, left_out, omitted
from inferd.server.schema.values import Converted, Many, Telling

BILLING_LINE = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt. It changes with every request and says nothing to the
model: read by one, it would keep any two requests from sharing a prefix."""

_CONTENT: Mapping[str, TypeAdapter[Any]] = {role: TypeAdapter(content) for role, content in CONTENT.items()}
_FOR_SYSTEM = "Only turns of the system have it."


class _TurnOutput(Part):
    effort: Effort | None = None


class Turn(Part):
    role: Literal["user", "assistant", "system"]
    content: Any = ""
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: _TurnOutput | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
                {
                    "properties": {"role": {"const": "system"}, "output_config": {"type": "object"}},
                    "required": ["output_config"],
                },
            ]
        }
    )

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """Only a turn of the system that sets the effort may say nothing."""
        given = super().given(value, info)
        sets_effort = given.get("role") == "system" and "output_config" in given
        if "role" in given and "content" not in given and not sets_effort:
            raise validation.missing_key("content")
        return given

    @field_validator("content", mode="plain", json_schema_input_type=CONTENT["user"] | CONTENT["assistant"])
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> Any:
        """The role says which blocks there may be."""
        if "role" not in info.data:
            return ""  # it is refused
        return _CONTENT[info.data["role"]].validate_python(value, context=info.context)

    @field_validator("clear_at", "output_config", mode="before")
    @classmethod
    def _check_role(cls, value: object, info: ValidationInfo) -> object:
        if info.data.get("role", "system") != "system":
            raise validation.invalid_value(_FOR_SYSTEM)
        return value


def _system(content: str | tuple[TextBlock, ...], where: str) -> str:
    """The system prompt, its texts joined by newlines, without the billing line."""
    del where
    texts = plain(content)
    if texts:
        line, _, rest = texts[0].partition("\n")
        texts[0] = rest if line.startswith(BILLING_LINE) else texts[0]
    return "\n".join(text for text in texts if text)


System = Annotated[str, Converted(Texts, _system)]


def plain(content: str | tuple[TextBlock, ...]) -> list[str]:
    """The texts of content that holds nothing else."""
    return [content] if isinstance(content, str) else [block.text for block in content]


_SAID = frozenset(
    ("title", "url", "path", "text", "content", "source", "data", "stdout", "stderr", "lines", "tabs", "state_changes",
     "error_code", "error_message", "error")
)  # fmt: skip


def said(value: object) -> Iterator[str]:
    """The texts in an object that one of Anthropic's servers wrote, in its order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from said(item)
    elif isinstance(value, dict) and value.get("type") != "base64":
        for key, item in value.items():
            if key in _SAID:
                yield from said(item)


def tagged(tag: str, heads: Mapping[str, str | None], text: str) -> str:
    """A text between tags, with its heads, such as a title, in tags of their own."""
    lines = [f"<{name}>{value}</{name}>" for name, value in heads.items() if value]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])


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


@dataclass(frozen=True, slots=True)
class AnthropicConversation:
    """The field `messages`."""

    messages: tuple[Message, ...]
    is_shown: Mapping[str, bool] = field(default_factory=dict)
    """Name of a tool -> whether the newest message that loads, adds or removes it leaves it to the model."""
    defined: tuple[CallerTool, ...] = ()
    """Tools that messages define."""
    effort: Effort | None = None
    """Effort that a turn of the system asks for, since the last one of the assistant."""


@dataclass(slots=True)
class ConversationReader:
    """A conversation so far. What one says in several blocks is joined once, at the end."""

    tools: AnthropicTools = field(default_factory=AnthropicTools)
    info: Any = None
    """The validator's, for notices."""
    messages: list[dict[str, object]] = field(default_factory=list)
    is_shown: dict[str, bool] = field(default_factory=dict)
    defined: dict[str, CallerTool] = field(default_factory=dict)
    effort: Effort | None = None
    omitted: Counter[str] = field(default_factory=Counter)
    """Type of a block -> how many of them are left out."""
    unknown: list[str] = field(default_factory=list)
    """Names of tools that a block loads and that nothing defines."""
    _functions: dict[str, str] = field(default_factory=dict)
    """Id of a call -> the function's name, for templates that show it with the result."""
    _names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._names = frozenset(tool.name for tool in self.tools.callable)

    def add(self, turn: Turn, where: str = "", *, is_newest: bool = False) -> None:
        """`is_newest`: it is the newest of the user, whose images and files the caller wants to be seen, unless it has
        tools' results."""
        if turn.role == "system" and turn.output_config is not None:
            self.effort = turn.output_config.effort
            if not turn.content:
                return
        elif turn.role == "assistant":
            self.effort = None
        if isinstance(turn.content, str) or not turn.content:
            # Without blocks it is an answer without a word, sent back.
            _append(self._message(turn.role), "content", turn.content or "")
            return
        # Blocks beside a tool's result belong to it: clients put the pages of a file that was read there.
        is_newest &= not any(isinstance(block, ToolResultBlock) for block in turn.content)
        is_silent = True
        for i, block in enumerate(turn.content):
            is_silent &= not self._adds(turn.role, block, f"{where}.content[{i}]", is_newest)
        if is_silent:
            self._message(turn.role).setdefault("content", [""])

    def _adds(self, role: str, block: Any, where: str, is_newest: bool) -> bool:
        """Adds a block. Whether the model reads anything of it."""
        match block:
            case ThinkingBlock():
                _append(self._message(role), "reasoning", block.thinking)
            case ToolUseBlock():
                self._add_call(role, block)
            case ToolResultBlock():
                self._add_result(block, where)
            case _:
                texts = list(self._texts(block, where, is_newest))
                for text in texts:
                    _append(self._message(role), "content", text)
                return bool(texts)
        return True

    def _texts(self, block: Any, where: str, is_newest: bool) -> Iterator[str]:
        """Texts that the model reads of a block. Raises `RequestError` for one that may not be left out."""
        match block:
            case TextBlock():
                yield block.text
            case ImageBlock():
                yield self._left_out("image", f"{where}.type", is_newest)
            case DocumentBlock():
                heads = {"title": block.title, "context": block.context}
                yield tagged("document", heads, self._document(block, f"{where}.source", is_newest))
            case SearchResultBlock():
                heads = {"title": block.title, "source": block.source}
                yield tagged("search_result", heads, "\n".join(plain(block.content)))
            case ToolReferenceBlock():
                yield self._loaded(block.tool_name)
            case ToolChangeBlock():
                yield from self._changed(block, where)
            case CompactionBlock():
                yield from () if block.content is None else (block.content,)
                for i, change in enumerate(block.tool_changes):
                    yield from self._changed(change, f"{where}.tool_changes[{i}]")
            case dict():
                yield from self._servers(block)

    def _servers(self, block: dict[str, Any]) -> Iterator[str]:
        """The texts of a block that Anthropic's servers wrote."""
        kind, content = str(block["type"]), block.get("content")
        if kind in ("fallback", "mcp_tool_listing"):
            return
        references = content.get("tool_references") if isinstance(content, dict) else None
        listed = references if isinstance(references, list) else ()
        names = [item.get("tool_name") for item in listed if isinstance(item, dict)]
        texts = [self._loaded(name) for name in names if isinstance(name, str)]
        texts += said(block) if kind == "browser_state" else said(content)
        if not texts:
            self.omitted[kind] += 1
        yield from texts

    def _document(self, block: DocumentBlock, where: str, is_newest: bool) -> str:
        source = block.source
        if isinstance(source, dict):
            return self._left_out("document", f"{where}.type", is_newest)
        if source.type == "text":
            return str(source.data)
        if isinstance(source.content, str):
            return source.content
        parts = enumerate(source.content)
        return "\n".join(text for i, part in parts for text in self._texts(part, f"{where}.content[{i}]", is_newest))

    def _left_out(self, kind: str, where: str, is_newest: bool) -> str:
        if is_newest:
            raise errors.unsupported_value(where, kind, SAY_IT)
        self.omitted[kind] += 1
        return omitted(kind)

    def _loaded(self, name: str) -> str:
        if name in self._names or name in self.defined:
            self.is_shown[name] = True
            return f"Tool loaded: {name}"
        self.unknown.append(name)
        return f"Tool not found: {name}"

    def _changed(self, block: ToolChangeBlock, where: str) -> Iterator[str]:
        """Adds or removes a tool."""
        tool = block.tool
        if isinstance(tool, NamedTool):
            name = tool.name
        elif isinstance(tool, DefinedTool):
            name = self._defined_name(tool, f"{where}.tool.definition")
        else:
            name = ""
            self.omitted[str(tool["type"])] += 1
        if name and block.type == "tool_addition":
            yield self._loaded(name)
        elif name:
            self.is_shown[name] = False
            yield f"Tool removed: {name}"

    def _defined_name(self, tool: DefinedTool, where: str) -> str:
        """The name of a tool that is defined here; empty if the model is not shown it."""
        found = read_tool(tool.definition, where, self.info, lambda name, reason: None)
        if found is None:
            return ""
        self.defined[found.name] = found
        if len(self.defined) > MAX_TOOLS:
            raise errors.invalid_value(where, found.name, f"Messages may define at most {MAX_TOOLS} tools.")
        return found.name

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

    def _add_result(self, block: ToolResultBlock, where: str) -> None:
        if isinstance(block.content, str):
            texts = [block.content]
        else:
            parts = enumerate(block.content)
            texts = [text for i, part in parts for text in self._texts(part, f"{where}.content[{i}]", False)]
        message: dict[str, object] = {"role": "tool", "tool_call_id": block.tool_use_id, "content": "\n".join(texts)}
        if block.tool_use_id in self._functions:
            message["name"] = self._functions[block.tool_use_id]
        self.messages.append(message)

    def finished(self) -> AnthropicConversation:
        """Every message, with its texts joined."""
        for message in self.messages:
            for name in ("content", "reasoning"):
                if isinstance(texts := message.get(name), list):
                    message[name] = "\n".join(texts)
            if "reasoning" in message:
                message["reasoning_content"] = message["reasoning"]  # templates read the one name or the other
        self._tell_what_is_left_out()
        return AnthropicConversation(tuple(self.messages), self.is_shown, tuple(self.defined.values()), self.effort)

    def _tell_what_is_left_out(self) -> None:
        if self.info is None:
            return
        if self.omitted:
            tell(self.info, "omitted_content", left_out(self.omitted.elements()))
        if self.unknown:
            first = ", ".join(f"'{errors.clip(name, 64)}'" for name in self.unknown[:3])
            tell(
                self.info,
                "no_effect",
                f"'messages' loads {len(self.unknown)} tools that are not known, such as {first}",
            )


def _append(message: dict[str, object], name: str, text: str) -> None:
    """One more text, on a line of its own behind what is there."""
    texts = message.setdefault(name, [])
    assert isinstance(texts, list)
    if texts == [""]:
        texts.clear()
    texts.append(text)


def _conversation(turns: tuple[Turn, ...], info: ValidationInfo) -> AnthropicConversation:
    reader = ConversationReader(info.data.get("tools") or AnthropicTools(), info)
    newest = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for i, turn in enumerate(turns):
        if turn.clear_at != "next_user_message" or i > newest:
            reader.add(turn, f"messages[{i}]", is_newest=i == newest)
    if not reader.messages:
        raise errors.invalid_value("messages", "system", "Expected a turn with content.")
    return reader.finished()


Turns = Annotated[AnthropicConversation, Telling(Annotated[tuple[Turn, ...], Many(1, MAX_MESSAGES)], _conversation)]
"""At least one turn. The field `tools` has to be read before."""
