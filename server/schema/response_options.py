"""The parts of a responses request that are objects of their own: tools, their choice, `text`, `reasoning`, ...

The answer repeats what the caller said, so that is kept beside what it means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import orjson
from pydantic import AfterValidator, Field, Tag, ValidationInfo, WithJsonSchema, field_validator, model_validator

from inferd.server.errors import table as errors
from inferd.server.errors import validation
from inferd.server.schema.answers.responses import FunctionTool
from inferd.server.schema.chat import MAX_TOOLS, TOOL_WITHOUT_EFFECT, FunctionName, ReasoningEffort, Verbosity
from inferd.server.schema.model import Part
from inferd.server.schema.structured import AnswerFormat, NamedSchema, PlainFormat, format_of
from inferd.server.schema.tool_choice import MAX_NAMED, Mode, ToolChoice, word_or_type
from inferd.server.schema.values import Converted, Flag, JsonObject, Kept, Many, Text, Typed, Unsupported, by_type, form

LOGPROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDED = (LOGPROBS, SEALED_REASONING)
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

_ONLY_FUNCTIONS = "Only functions are served: the caller runs them."
_NOT_WRITABLE = "It holds a whole number of more than 64 bits."
_BY_TEMPLATE = "Reasoning is shown to the model where its chat template does so."


_Extra = Annotated[object, Unsupported("A function is shown to the model, and called.", (False, [], {}, "", 0))]


def _is_writable(value: object) -> bool:
    """Whether the answer can repeat it."""
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


# --- Tools -----------------------------------------------------------------------------------------------------------


class _FunctionTool(Part):
    """A function that the model may call, flat as this API has it."""

    type: Literal["function"]
    defer_loading: _Extra = None
    is_async: _Extra = Field(default=None, alias="async")
    allowed_callers: _Extra = None
    output_schema: _Extra = None
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None

    without_effect = TOOL_WITHOUT_EFFECT

    @model_validator(mode="after")
    def _check_writable(self) -> Self:
        if not _is_writable(self.parameters):
            raise validation.invalid_key("parameters", self.parameters, _NOT_WRITABLE)
        return self


def _tool_tag(value: object) -> str | None:
    """The tag of a tool. A web search that may only read a cache is idle: this server has no such cache."""
    tag = by_type(value)
    if tag == "<web_search>" and isinstance(value, dict) and value.get("external_web_access") is False:
        return "<idle>"
    return None if tag == "<idle>" else tag


_IDLE = {
    "type": "object",
    "properties": {"type": {"const": "web_search"}, "external_web_access": {"const": False}},
    "required": ["type", "external_web_access"],
}
_Tool = Annotated[
    Annotated[_FunctionTool, Tag("<function>")] | Annotated[JsonObject, WithJsonSchema(_IDLE), Tag("<idle>")],
    form("an object", _tool_tag, ("function",), _ONLY_FUNCTIONS),
]


def _tools(given: Sequence[_FunctionTool | JsonObject], where: str) -> tuple[FunctionTool, ...]:
    del where
    return tuple(_flat(tool) for tool in given if isinstance(tool, _FunctionTool))


def _flat(tool: _FunctionTool) -> FunctionTool:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters,
        "strict": tool.strict is True,
    }


Tools = Annotated[
    tuple[FunctionTool, ...],
    Converted(Annotated[tuple[_Tool, ...], Many(max_length=MAX_TOOLS)], _tools),
]


# --- tool_choice -----------------------------------------------------------------------------------------------------


class _NamedTool(Part):
    type: Literal["function"]
    name: Text = Field(min_length=1)


class _AllowedTools(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[Annotated[_NamedTool, Typed(("function",), _ONLY_FUNCTIONS)], ...], Many(1, MAX_NAMED)]


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """`tool_choice` as given, and what it means."""

    given: str | JsonObject
    means: ToolChoice


def _choice(given: str | JsonObject, choice: Mode | _NamedTool | _AllowedTools, where: str) -> AskedChoice:
    if isinstance(choice, str):
        return AskedChoice(given, ToolChoice(choice))
    if isinstance(choice, _NamedTool):
        return AskedChoice(given, ToolChoice("required", ((choice.name, f"{where}.name"),), is_single=True))
    names = ((tool.name, f"{where}.tools[{i}].name") for i, tool in enumerate(choice.tools))
    return AskedChoice(given, ToolChoice(choice.mode, tuple(names)))


_Choice = Annotated[
    Annotated[Mode, Tag("<word>")]
    | Annotated[_NamedTool, Tag("<function>")]
    | Annotated[_AllowedTools, Tag("<allowed_tools>")],
    form("one of a string or an object", word_or_type, ("function", "allowed_tools"), _ONLY_FUNCTIONS),
]
ToolChoiceOption = Annotated[AskedChoice, Kept(_Choice, _choice)]


# --- text ------------------------------------------------------------------------------------------------------------


class _FlatSchema(NamedSchema):
    type: Literal["json_schema"]

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        if not _is_writable(value.get("schema")):
            raise validation.invalid_key("schema", value.get("schema"), _NOT_WRITABLE)
        return super().given(value, info)


_Format = Annotated[
    Annotated[PlainFormat, Tag("<text>")]
    | Annotated[PlainFormat, Tag("<json_object>")]
    | Annotated[_FlatSchema, Tag("<json_schema>")],
    form("an object", by_type, ("text", "json_object", "json_schema")),
]


class _Text(Part):
    verbosity: Verbosity = "medium"
    format: _Format = PlainFormat(type="text")


@dataclass(frozen=True, slots=True)
class TextOption:
    """`text` as given, and what it asks of the answer; None: any text."""

    format: Mapping[str, object]
    means: AnswerFormat | None
    verbosity: Verbosity = "medium"


def _text(given: JsonObject, text: _Text, where: str) -> TextOption:
    asked = given.get("format")
    shown = asked if isinstance(asked, dict) else {"type": "text"}
    return TextOption(shown, format_of(text.format, f"{where}.format"), text.verbosity)


TextField = Annotated[TextOption, Kept(_Text, _text)]


# --- reasoning, include, metadata ------------------------------------------------------------------------------------


class ReasoningOption(Part):
    """`reasoning` as given; `effort` None: the model's own."""

    context: Annotated[object, WithJsonSchema({"enum": ["auto", None]})] = None
    mode: Annotated[object, WithJsonSchema({"enum": ["standard", None]})] = None
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """With the older name of `summary` in its place."""
        given = super().given(value, info)
        summary = given.pop("summary", None) or given.pop("generate_summary", None)
        given.pop("generate_summary", None)
        return given if summary is None else {**given, "summary": summary}

    @field_validator("context", "mode", mode="plain")
    @classmethod
    def _check(cls, value: object) -> object:
        if value not in ("auto", "standard"):
            raise validation.unsupported_parameter(_BY_TEMPLATE)
        return value


def _included(value: str) -> str:
    if value not in _INCLUDED:
        raise validation.unsupported_value(
            f"Served are {' and '.join(_INCLUDED)}: no hosted tools run here, and there is nothing more to show."
        )
    return value


Included = Annotated[
    tuple[Annotated[Text, AfterValidator(_included), WithJsonSchema({"type": "string", "enum": list(_INCLUDED)})], ...],
    Many(max_length=16),
]
"""The names in `include`."""


def _metadata(pairs: JsonObject, where: str) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    for key, text in pairs.items():
        if len(key) > MAX_METADATA_KEY:
            raise errors.string_too_long(f"{where}.{key}", MAX_METADATA_KEY, len(key))
        if not isinstance(text, str):
            raise errors.invalid_type(f"{where}.{key}", "a string", text)
        if len(text) > MAX_METADATA_VALUE:
            raise errors.string_too_long(f"{where}.{key}", MAX_METADATA_VALUE, len(text))
        texts[key] = text
    return texts


Metadata = Annotated[
    Mapping[str, str],
    Converted(Annotated[JsonObject, Field(max_length=MAX_METADATA)], _metadata),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
            "maxProperties": MAX_METADATA,
        }
    ),
]
"""Up to 16 texts under short names."""
