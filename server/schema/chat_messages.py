"""The messages of a conversation: read from a body into the plain mappings that chat templates expect.

Roles and parts are checked here. What a role looks like to the model is the template's business, not this file's. What
a model wrote is taken back as it is, and what it cannot read is left out of results and of older messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, Tag, ValidationInfo, WithJsonSchema, field_validator

from inferd.server.errors import messages as errors
from inferd.server.errors import validation
from inferd.server.schema import strict_json
from inferd.server.schema.caller_tool import TEXT_KEY
from inferd.server.schema.request_model import Kind, Part, RequestContext, Row, tell
from inferd.server.schema.strict_json import Counts
from inferd.server.schema.unread import NOUNS, SAY_IT, UnreadPart, left_out, omitted, part_tag
from inferd.server.schema.values import Converted, Many, Text, form

Message = Mapping[str, object]
"""{"role": str, "content": str, ...} with None left out."""

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

MAX_MESSAGES = 65_536
MAX_CALLS = 1_024

_REASONING = ("reasoning", "reasoning_content")
_TEXTS = ("name", "tool_call_id", *_REASONING)

# What clients send back of an answer they were given, and marks of theirs for other servers. No template is given them.
MESSAGE_WITHOUT_EFFECT = (
    "id", "annotations", "parsed", "phase", "cache_control", "reasoning_details", "thinking_blocks",
    "provider_specific_fields", "extra_content",
)  # fmt: skip
PART_WITHOUT_EFFECT = (
    "id", "annotations", "cache_control", "citations", "logprobs", "prompt_cache_breakpoint", "reasoning_details",
    "provider_specific_fields",
)  # fmt: skip
CALL_WITHOUT_EFFECT = ("index", "cache_control", "provider_specific_fields", "extra_content")
CALLED_FUNCTION_WITHOUT_EFFECT = ("parsed_arguments", "provider_specific_fields")


class _TextPart(Part):
    type: Literal["text"]
    text: Text

    without_effect = PART_WITHOUT_EFFECT


class _RefusalPart(Part):
    type: Literal["refusal"]
    refusal: Text

    without_effect = PART_WITHOUT_EFFECT


_TEXT_ALONE = "Only 'text' parts are served: this server reads no images, audio or files."


_AnyPart = _TextPart | _RefusalPart | UnreadPart
_ContentPart = Annotated[
    Annotated[_TextPart, Tag("<text>")]
    | Annotated[_RefusalPart, Tag("<refusal>")]
    | Annotated[UnreadPart, Tag("<unread>")],
    form("an object", part_tag, ("text", "refusal"), _TEXT_ALONE),
]


def text_or_parts(value: object) -> str | None:
    """The tag of a member of a union of a text and a list."""
    return "<string>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


_Content = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_ContentPart, ...], Many(), Tag("<parts>")],
    form("one of a string or an array of objects", text_or_parts),
]


class _CalledFunction(Part):
    name: Text
    arguments: Any = Field(default=None, validate_default=True)

    without_effect = CALLED_FUNCTION_WITHOUT_EFFECT

    @field_validator("arguments", mode="plain", json_schema_input_type=Text)
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> Mapping[str, object] | str:
        if value is not None and not isinstance(value, str):
            raise validation.wrong_type("a string")
        context: RequestContext | None = info.context
        return arguments_of(value or "", Counts() if context is None else context.counts)


class _ToolCall(Part):
    type: Literal["function"] = "function"
    function: _CalledFunction
    id: Text | None = None

    without_effect = CALL_WITHOUT_EFFECT


class _CustomInput(Part):
    name: Text
    input: Text


class _CustomCall(Part):
    """A call of a custom tool."""

    type: Literal["custom"]
    custom: _CustomInput
    id: Text | None = None

    without_effect = CALL_WITHOUT_EFFECT


CALLS: Mapping[str, Row] = {
    "function": Row("enforced", "The model reads its own call."),
    "custom": Row("enforced", "The model reads its own call, of a function of one text."),
}
"""Type of a call in the history -> what is done with it."""


def _call_tag(value: object) -> str:
    return "<custom>" if isinstance(value, dict) and value.get("type") == "custom" else "<function>"


_Call = Annotated[
    Annotated[_ToolCall, Tag("<function>")] | Annotated[_CustomCall, Tag("<custom>")], form("an object", _call_tag)
]


class _Message(Part):
    role: Role
    content: _Content | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[tuple[_Call, ...], Many(max_length=MAX_CALLS)] | None = None
    function_call: _CalledFunction | None = None
    """The older form of a call."""
    refusal: Annotated[object, WithJsonSchema({"type": "string"})] = None
    audio: Annotated[object, WithJsonSchema({"type": "object"})] = None
    """The spoken form of an earlier answer."""

    kinds: ClassVar[Mapping[str, Kind]] = {"audio": "offer"}
    without_effect = MESSAGE_WITHOUT_EFFECT
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
                {"properties": {"role": {"enum": ["assistant", "function"]}}},
            ]
        }
    )

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """Only an assistant or a function may say nothing."""
        given = super().given(value, info)
        if given.get("role") not in ("assistant", "function"):
            given.setdefault("content", validation.ABSENT)
        return given

    @field_validator("tool_calls", "function_call", mode="before")
    @classmethod
    def _check_role(cls, value: object, info: ValidationInfo) -> object:
        if info.data.get("role", "assistant") != "assistant":
            raise validation.invalid_value("Only messages of role 'assistant' carry tool calls.")
        return value

    def unread(self) -> dict[int, str]:
        """The type of each part that the model cannot read, by its index."""
        parts = () if isinstance(self.content, str) else self.content or ()
        return {i: part.type for i, part in enumerate(parts) if isinstance(part, UnreadPart)}


@dataclass(slots=True)
class _Conversation:
    """Messages so far, as templates expect them."""

    messages: list[Message] = field(default_factory=list)
    omitted: list[str] = field(default_factory=list)
    """Kinds of content that were left out of them."""
    _functions: dict[str, str] = field(default_factory=dict)
    """Function -> id of its last call in the older form, which has none."""

    def add(self, given: _Message) -> None:
        message: dict[str, object] = {"role": "tool" if given.role == "function" else given.role}
        calls = self._calls(given)
        content = self._content(given)
        if content is not None or not calls:
            message["content"] = content or ""
        for key in _TEXTS:
            text = getattr(given, key)
            if text is not None:
                message[key] = text
        # An answer has both; templates read the one or the other.
        for key, other in (_REASONING, _REASONING[::-1]):
            if other in message:
                message.setdefault(key, message[other])
        if given.role == "function" and given.name in self._functions:
            message["tool_call_id"] = self._functions[given.name]
        if given.tool_calls is not None or calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _content(self, given: _Message) -> str | None:
        """Parts are joined by line breaks, as templates written for strings expect them."""
        self.omitted += (NOUNS[kind] for kind in given.unread().values())
        content = given.content
        if content is not None and not isinstance(content, str):
            content = "\n".join(map(_text_of, content))
        if content:
            return content
        if isinstance(given.refusal, str) and given.refusal:
            return given.refusal
        if given.audio:
            self.omitted.append("audio")
            return omitted("audio")
        return content

    def _calls(self, given: _Message) -> list[Message]:
        if given.function_call is None or given.tool_calls:
            return [_plain_call(call) for call in given.tool_calls or ()]
        function = given.function_call
        # Some templates take ids of nine letters and digits alone.
        call_id = f"call{len(self.messages):05}"
        self._functions[function.name] = call_id
        plain = {"name": function.name, "arguments": function.arguments}
        return [{"type": "function", "function": plain, "id": call_id}]


def _text_of(part: _AnyPart) -> str:
    match part:
        case _TextPart():
            return part.text
        case _RefusalPart():
            return part.refusal
        case UnreadPart():
            return omitted(NOUNS[part.type])


def _conversation(given: Sequence[_Message], info: ValidationInfo) -> tuple[Message, ...]:
    """All messages, without the parts that the model cannot read. Such a part of a message that is still to be answered
    is refused: the answer depends on it. What follows a tool's result belongs to that: some clients put its images into
    a message of the user."""
    turns = ("assistant", "tool", "function")
    last = max((i for i, message in enumerate(given) if message.role in turns), default=-1)
    follows_result = last >= 0 and given[last].role != "assistant"
    conversation = _Conversation()
    for i, message in enumerate(given):
        is_read = message.role in ("system", "developer") or (
            message.role == "user" and i > last and not follows_result
        )
        if is_read and (unread := message.unread()):
            part, kind = next(iter(unread.items()))
            where = f"{info.field_name}[{i}].content[{part}].type"
            raise validation.refused(errors.unsupported_value(where, kind, SAY_IT))
        conversation.add(message)
    if conversation.omitted:
        tell(info, "omitted_content", left_out(conversation.omitted))
    return tuple(conversation.messages)


def _plain_call(call: _ToolCall | _CustomCall) -> Message:
    if isinstance(call, _CustomCall):
        function: Message = {"name": call.custom.name, "arguments": {TEXT_KEY: call.custom.input}}
    else:
        function = {"name": call.function.name, "arguments": call.function.arguments}
    plain: dict[str, object] = {"type": "function", "function": function}
    return plain if call.id is None else {**plain, "id": call.id}


_Given = Annotated[tuple[_Message, ...], Many(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_conversation)]
Messages = Annotated[tuple[Message, ...], Converted(_Given, lambda read, where: read)]
"""At least one message."""


def arguments_of(text: str, counts: Counts) -> Mapping[str, object] | str:
    """Arguments of a call: the JSON object that the caller's string holds, because templates print it themselves.

    Any other text stays a text: models write what is no object, and an answer may be cut off. `counts` is shared by all
    calls of a request: many strings are parsed only as far as one body may be.
    """
    if not text:
        return {}
    try:
        parsed = strict_json.parse(text.encode(), counts)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text
