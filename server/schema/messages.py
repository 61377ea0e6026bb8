"""The messages of a conversation: read from the wire into the plain mappings that chat templates expect.

Roles and parts are checked here with the path of what is wrong. What a role looks like to the model is the template's
business, not this file's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.server.errors import table as errors
from inferd.server.schema import strict_json
from inferd.server.schema.kinds import Choice, Json, Schema, Text, check_array, check_properties, object_schema
from inferd.server.schema.strict_json import Counts

Message = Mapping[str, object]
"""{"role": str, "content": str, ...} with None left out."""

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_MESSAGES = 65_536

_REASONING = ("reasoning", "reasoning_content")
_TEXTS = ("name", "tool_call_id", *_REASONING)
_RULE = "Expected a JSON object, written as a string."
_OPTIONAL = ("content", "tool_calls", "function_call", *_TEXTS)

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


@dataclass(frozen=True, slots=True)
class Messages:
    """At least one message."""

    name: str = "an array of objects"

    def accepts(self, value: object) -> bool:
        return isinstance(value, list)

    def read(self, value: object, where: str) -> tuple[Message, ...]:
        check_array(value, where, self.name, 1, MAX_MESSAGES)
        assert isinstance(value, list)
        counts = Counts()
        return tuple(_message(item, f"{where}[{i}]", counts) for i, item in enumerate(value))

    def schema(self) -> Schema:
        text = Text().schema()
        parts = [
            object_schema({"type": {"const": kind}, kind: text}, ("type", kind), PART_WITHOUT_EFFECT)
            for kind in ("text", "refusal")
        ]
        content = {"anyOf": [text, {"type": "array", "items": {"anyOf": parts}}, {"type": "null"}]}
        function = object_schema({"name": text, "arguments": text}, ("name",), CALLED_FUNCTION_WITHOUT_EFFECT)
        call = {"function": function, "id": text, "type": {"const": "function"}}
        items = object_schema(call, ("function",), CALL_WITHOUT_EFFECT)
        calls = {"type": "array", "items": items, "maxItems": 1_024}
        properties: dict[str, Schema] = {"role": Choice(ROLES).schema(), "content": content, "tool_calls": calls}
        properties |= dict.fromkeys(_TEXTS, text)
        properties["function_call"] = {"type": "null"}
        says = {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]}
        calls_only = {
            "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
            "required": ["tool_calls"],
        }
        message = {**object_schema(properties, ("role",), MESSAGE_WITHOUT_EFFECT), "anyOf": [says, calls_only]}
        return {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES}


def _message(value: object, where: str, counts: Counts) -> Message:
    given = check_properties(value, where, ("role",), _OPTIONAL, MESSAGE_WITHOUT_EFFECT)
    role = Choice(ROLES).read(given["role"], f"{where}.role")
    if given.get("function_call") is not None:
        raise errors.unsupported_parameter(f"{where}.function_call", "Use 'tool_calls' instead.")
    message: dict[str, object] = {"role": role}
    if given.get("content") is not None:
        message["content"] = _content(given["content"], f"{where}.content")
    elif role != "assistant" or not given.get("tool_calls"):
        raise errors.missing(f"{where}.content")
    for key in _TEXTS:
        if given.get(key) is not None:
            message[key] = Text().read(given[key], f"{where}.{key}")
    # An answer has both; templates read the one or the other.
    for key, other in (_REASONING, _REASONING[::-1]):
        if other in message:
            message.setdefault(key, message[other])
    if given.get("tool_calls") is not None:
        message["tool_calls"] = _tool_calls(given["tool_calls"], f"{where}.tool_calls", role, counts)
    return message


def _content(value: object, where: str) -> str:
    """A string, or text parts joined by newlines, as templates written for strings expect them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise errors.invalid_type(where, "one of a string or an array of objects", value)
    return "\n".join(_text_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _text_part(value: object, where: str) -> str:
    part = Json().read(value, where)
    if part.get("type") is None:
        raise errors.missing(f"{where}.type")
    kind = Text().read(part["type"], f"{where}.type")
    if kind not in ("text", "refusal"):
        raise errors.unsupported_value(f"{where}.type", kind, "Only 'text' parts are served: this model reads text.")
    check_properties(part, where, ("type", kind), (), PART_WITHOUT_EFFECT)
    return Text().read(part[kind], f"{where}.{kind}")


def _tool_calls(value: object, where: str, role: str, counts: Counts) -> list[Mapping[str, object]]:
    if role != "assistant":
        raise errors.invalid_value(where, role, "Only messages of role 'assistant' carry tool calls.")
    check_array(value, where, "an array of objects", 0, 1_024)
    assert isinstance(value, list)
    return [_tool_call(item, f"{where}[{i}]", counts) for i, item in enumerate(value)]


def _tool_call(value: object, where: str, counts: Counts) -> Mapping[str, object]:
    call = check_properties(value, where, ("function",), ("id", "type"), CALL_WITHOUT_EFFECT)
    if call.get("type") is not None:
        Choice(("function",)).read(call["type"], f"{where}.type")
    path = f"{where}.function"
    function = check_properties(call["function"], path, ("name",), ("arguments",), CALLED_FUNCTION_WITHOUT_EFFECT)
    read: dict[str, object] = {
        "type": "function",
        "function": {
            "name": Text().read(function["name"], f"{path}.name"),
            "arguments": read_arguments(function.get("arguments"), f"{path}.arguments", counts),
        },
    }
    if call.get("id") is not None:
        read["id"] = Text().read(call["id"], f"{where}.id")
    return read


def read_arguments(value: object, where: str, counts: Counts) -> Mapping[str, object]:
    """Arguments of a call. Templates print them themselves, so they get the object that the caller's string holds.

    `counts` is shared by all calls of a request: many strings may hold no more than one body may.
    """
    if value is None or value == "":
        return {}
    text = Text().read(value, where)
    try:
        parsed = strict_json.parse(text.encode(), counts)
    except ValueError as error:
        raise errors.invalid_value(where, text, f"{_RULE} The string cannot be read: {error}.") from error
    if not isinstance(parsed, dict):
        raise errors.invalid_value(where, text, _RULE)
    return parsed
