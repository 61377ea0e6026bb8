"""The messages of a conversation: read from the wire into the plain mappings that chat templates expect.

Roles and parts are checked here. What a role looks like to the model is the template's business, not this file's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, ValidationInfo, field_validator

from inferd.server.errors import table as errors
from inferd.server.errors import validation
from inferd.server.schema import strict_json
from inferd.server.schema.caller_tool import TEXT_KEY
from inferd.server.schema.model import Context, Part
from inferd.server.schema.strict_json import Counts
from inferd.server.schema.values import Converted, Many, Text, Unsupported, by_type, form

Message = Mapping[str, object]
"""{"role": str, "content": str, ...} with None left out."""

Role = Literal["system", "developer", "user", "assistant", "tool"]

MAX_MESSAGES = 65_536
MAX_CALLS = 1_024

_REASONING = ("reasoning", "reasoning_content")
_TEXTS = ("name", "tool_call_id", *_REASONING)
_RULE = "Expected a JSON object, written as a string."

# What clients send back of an answer they were given, and marks of theirs for other servers. No template is given them.
MESSAGE_WITHOUT_EFFECT = (
    "id", "refusal", "annotations", "audio", "parsed", "phase", "cache_control", "reasoning_details", "thinking_blocks",
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
_ContentPart = Annotated[
    Annotated[_TextPart, Tag("<text>")] | Annotated[_RefusalPart, Tag("<refusal>")],
    form("an object", by_type, ("text", "refusal"), _TEXT_ALONE),
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
    def _read(cls, value: object, info: ValidationInfo) -> Mapping[str, object]:
        if value is not None and not isinstance(value, str):
            raise validation.wrong_type("a string")
        context: Context | None = info.context
        try:
            return parse_arguments(value or "", Counts() if context is None else context.counts)
        except ValueError as error:
            raise validation.invalid_value(str(error)) from None


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


def _call_tag(value: object) -> str:
    return "<custom>" if isinstance(value, dict) and value.get("type") == "custom" else "<function>"


_Call = Annotated[
    Annotated[_ToolCall, Tag("<function>")] | Annotated[_CustomCall, Tag("<custom>")], form("an object", _call_tag)
]


class _Message(Part):
    role: Role
    function_call: Annotated[object, Unsupported("Use 'tool_calls' instead.")] = None
    content: _Content | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[tuple[_Call, ...], Many(max_length=MAX_CALLS)] | None = None

    without_effect = MESSAGE_WITHOUT_EFFECT
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
                {
                    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
                    "required": ["tool_calls"],
                },
            ]
        }
    )

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """Only an assistant who calls tools may say nothing."""
        given = super().given(value, info)
        if given.get("role") != "assistant" or not given.get("tool_calls"):
            given.setdefault("content", validation.ABSENT)
        return given

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _check_role(cls, value: object, info: ValidationInfo) -> object:
        if info.data.get("role", "assistant") != "assistant":
            raise validation.invalid_value("Only messages of role 'assistant' carry tool calls.")
        return value


def _plain(given: _Message, where: str) -> Message:
    del where
    message: dict[str, object] = {"role": given.role}
    if given.content is not None:
        message["content"] = given.content if isinstance(given.content, str) else _joined(given.content)
    for key in _TEXTS:
        text = getattr(given, key)
        if text is not None:
            message[key] = text
    # An answer has both; templates read the one or the other.
    for key, other in (_REASONING, _REASONING[::-1]):
        if other in message:
            message.setdefault(key, message[other])
    if given.tool_calls is not None:
        message["tool_calls"] = [_plain_call(call) for call in given.tool_calls]
    return message


def _joined(parts: tuple[_TextPart | _RefusalPart, ...]) -> str:
    """By line breaks, as templates written for strings expect them."""
    return "\n".join(part.text if isinstance(part, _TextPart) else part.refusal for part in parts)


def _plain_call(call: _ToolCall | _CustomCall) -> Message:
    if isinstance(call, _CustomCall):
        function: Message = {"name": call.custom.name, "arguments": {TEXT_KEY: call.custom.input}}
    else:
        function = {"name": call.function.name, "arguments": call.function.arguments}
    plain: dict[str, object] = {"type": "function", "function": function}
    return plain if call.id is None else {**plain, "id": call.id}


Messages = Annotated[
    tuple[Annotated[Message, Converted(_Message, _plain)], ...], Many(min_length=1, max_length=MAX_MESSAGES)
]
"""At least one message."""


def read_arguments(text: str, where: str, counts: Counts) -> Mapping[str, object]:
    """As `parse_arguments`. Raises `RequestError`."""
    try:
        return parse_arguments(text, counts)
    except ValueError as error:
        raise errors.invalid_value(where, text, str(error)) from error


def parse_arguments(text: str, counts: Counts) -> Mapping[str, object]:
    """Arguments of a call. Templates print them themselves, so they get the object that the caller's string holds.

    `counts` is shared by all calls of a request: many strings may hold no more than one body may. Raises `ValueError`.
    """
    if not text:
        return {}
    try:
        parsed = strict_json.parse(text.encode(), counts)
    except ValueError as error:
        raise ValueError(f"{_RULE} The string cannot be read: {error}.") from error
    if not isinstance(parsed, dict):
        raise ValueError(_RULE)
    return parsed
