"""Anthropic's tools, thinking and output formats, each read into what chat calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, Tag, WithJsonSchema

from inferd.server.schema.chat import MAX_THINKING_TOKENS
from inferd.server.schema.model import Part
from inferd.server.schema.structured import AnswerFormat
from inferd.server.schema.tool_choice import Mode, ToolChoice
from inferd.server.schema.values import (
    Converted,
    Flag,
    JsonObject,
    Many,
    Matching,
    Only,
    Text,
    Typed,
    Whole,
    by_type,
    form,
)
from inferd.server.structured.schema import read_schema

Effort = Literal["low", "medium", "high", "xhigh", "max"]
ThinkingMode = Literal["enabled", "adaptive", "disabled"]

_CUSTOM = "Only 'custom' tools are served: the model asks for them and the caller runs them."
_DIRECT = 'Only ["direct"] is served: nothing else calls tools here.'
_ALL_SHOWN = "The model is shown every tool of 'tools'."
_NO_EXAMPLES = "Chat templates show no examples; put them into the tool's description."
_NOTHING_CUT = "Nothing is cut out of a conversation here; leave out what the model should not read."


# --- Tools -----------------------------------------------------------------------------------------------------------


class _CustomTool(Part):
    type: Annotated[object, WithJsonSchema({"enum": ["custom"]})] = "custom"
    name: Annotated[Text, Matching("[A-Za-z0-9_-]{1,128}", "Expected 1 to 128 letters, digits, '_' or '-'.")]
    description: Text | None = None
    input_schema: JsonObject
    strict: Flag | None = None
    allowed_callers: Annotated[object, Only((["direct"],), _DIRECT)] = None
    defer_loading: Annotated[object, Only((False,), _ALL_SHOWN)] = None
    input_examples: Annotated[object, Only(([],), _NO_EXAMPLES)] = None
    eager_input_streaming: Flag | None = None
    cache_control: JsonObject | None = None


def _function(tool: _CustomTool, where: str) -> Mapping[str, object]:
    del where
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


CustomTool = Annotated[
    Mapping[str, object], Converted(Annotated[_CustomTool, Typed(("custom",), _CUSTOM, is_optional=True)], _function)
]
"""A tool that the caller runs; read as the function that chat templates show."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Anthropic's `tool_choice`."""

    choice: ToolChoice
    is_parallel: bool
    """False: at most one call."""


class _AnyUse(Part):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: Flag = False


class _OneUse(Part):
    type: Literal["tool"]
    disable_parallel_tool_use: Flag = False
    name: Text = Field(min_length=1)


class _NoUse(Part):
    type: Literal["none"]


_Use = Annotated[
    Annotated[_AnyUse, Tag("<auto>")]
    | Annotated[_AnyUse, Tag("<any>")]
    | Annotated[_OneUse, Tag("<tool>")]
    | Annotated[_NoUse, Tag("<none>")],
    form("an object", by_type, ("auto", "any", "tool", "none")),
]
_MODES: Mapping[str, Mode] = {"auto": "auto", "any": "required", "none": "none"}


def _use(given: _AnyUse | _OneUse | _NoUse, where: str) -> ToolUse:
    if isinstance(given, _OneUse):
        return ToolUse(ToolChoice("required", ((given.name, f"{where}.name"),), is_single=True), is_parallel=False)
    is_single = isinstance(given, _AnyUse) and given.disable_parallel_tool_use
    return ToolUse(ToolChoice(_MODES[given.type]), is_parallel=not is_single)


ToolUseField = Annotated[ToolUse, Converted(_Use, _use)]


# --- Thinking --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thinking:
    """Anthropic's `thinking`."""

    mode: ThinkingMode
    budget: int | None = None
    """Most tokens of it."""
    is_shown: bool = True


class _Adaptive(Part):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] = "summarized"


class _Enabled(Part):
    type: Literal["enabled"]
    budget_tokens: Whole = Field(ge=1, le=MAX_THINKING_TOKENS)
    display: Literal["summarized", "omitted"] = "summarized"


class _Disabled(Part):
    type: Literal["disabled"]


_Thinking = Annotated[
    Annotated[_Enabled, Tag("<enabled>")]
    | Annotated[_Adaptive, Tag("<adaptive>")]
    | Annotated[_Disabled, Tag("<disabled>")],
    form("an object", by_type, ("enabled", "adaptive", "disabled")),
]


def _thinking(given: _Enabled | _Adaptive | _Disabled, where: str) -> Thinking:
    del where
    if isinstance(given, _Disabled):
        return Thinking("disabled", is_shown=False)
    budget = given.budget_tokens if isinstance(given, _Enabled) else None
    return Thinking(given.type, budget, given.display != "omitted")


ThinkingField = Annotated[Thinking, Converted(_Thinking, _thinking)]


# --- Output formats --------------------------------------------------------------------------------------------------


class _JsonFormat(Part):
    """An answer that follows a JSON schema, every keyword of which is enforced."""

    type: Literal["json_schema"]
    value: JsonObject = Field(alias="schema")


def _format(given: _JsonFormat, where: str) -> AnswerFormat:
    path = f"{where}.schema"
    return AnswerFormat(path, read_schema(given.value, path, is_strict=True))


JsonFormat = Annotated[AnswerFormat, Converted(_JsonFormat, _format)]


@dataclass(frozen=True, slots=True)
class Output:
    """Anthropic's `output_config`."""

    effort: Effort | None = None
    format: AnswerFormat | None = None


class _OutputConfig(Part):
    effort: Effort | None = None
    format: _JsonFormat | None = None


def _output(given: _OutputConfig, where: str) -> Output:
    return Output(given.effort, None if given.format is None else _format(given.format, f"{where}.format"))


OutputConfig = Annotated[Output, Converted(_OutputConfig, _output)]


# --- Edits of the context --------------------------------------------------------------------------------------------


class _ClearThinking(Part):
    """The edit that keeps all thinking, and so changes nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[object, Only(("all", {"type": "all"}), "All thinking that is sent is kept.")]


class ContextManagement(Part):
    """Edits of the conversation. Nothing is ever cut out of one here."""

    edits: Annotated[
        tuple[Annotated[_ClearThinking, Typed(("clear_thinking_20251015",), _NOTHING_CUT)], ...], Many(max_length=16)
    ] = ()
