"""Anthropic's thinking, output formats and edits of the context, each read into what chat calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo

from inferd.server.schema.chat import MAX_THINKING_TOKENS
from inferd.server.schema.request_model import Part, Row, tell
from inferd.server.schema.structured import AnswerFormat
from inferd.server.schema.values import Converted, JsonObject, Many, Telling, Whole, typed_object, union_of
from inferd.server.structured.schema import read_schema

Effort = Literal["low", "medium", "high", "xhigh", "max"]


# --- Thinking --------------------------------------------------------------------------------------------------------


THINKING: Mapping[str, Row] = {
    "enabled": Row("enforced", "The model reasons, for at most `budget_tokens` tokens."),
    "adaptive": Row("enforced", "The model reasons."),
    "disabled": Row("enforced", "The model does not reason, or its reasoning is hidden if it cannot be turned off."),
    "between_tools": Row("enforced", "As `disabled`: no model here writes progress updates between its tool calls."),
}
"""Type of `thinking` -> what is done with it."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Anthropic's `thinking`."""

    is_on: bool
    budget: int | None = None
    """Most tokens of it."""
    is_shown: bool = True


class _Adaptive(Part):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted", "updates"] = "summarized"

    without_effect = ("block_binding",)


class _Enabled(Part):
    type: Literal["enabled"]
    budget_tokens: Whole = Field(ge=1, le=MAX_THINKING_TOKENS)
    display: Literal["summarized", "omitted", "updates"] = "summarized"

    without_effect = ("block_binding",)


class _Disabled(Part):
    type: Literal["disabled", "between_tools"]


THOUGHTS: Mapping[str, type[Part]] = {
    "enabled": _Enabled,
    "adaptive": _Adaptive,
    "disabled": _Disabled,
    "between_tools": _Disabled,
}


def _thinking(given: _Enabled | _Adaptive | _Disabled, where: str) -> Thinking:
    del where
    if isinstance(given, _Disabled):
        return Thinking(is_on=False, is_shown=False)
    budget = given.budget_tokens if isinstance(given, _Enabled) else None
    # `updates` shows the progress updates that a model writes between tool calls, and no reasoning.
    return Thinking(is_on=True, budget=budget, is_shown=given.display == "summarized")


ThinkingField = Annotated[Thinking, Converted(union_of(THINKING, THOUGHTS), _thinking)]


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

    offered = {"task_budget": "no model here is told of a budget; bound the answer with 'max_tokens'"}  # noqa: RUF012


def _output(given: _OutputConfig, where: str) -> Output:
    return Output(given.effort, None if given.format is None else _format(given.format, f"{where}.format"))


OutputConfig = Annotated[Output, Converted(_OutputConfig, _output)]


# --- Edits of the context --------------------------------------------------------------------------------------------

_NOTHING_CUT = "Nothing is cut out of a conversation here, and one that is too long is refused."
EDITS: Mapping[str, Row] = {
    "clear_thinking_*": Row("offer", f"{_NOTHING_CUT} `keep` `all` is a hint."),
    "clear_tool_uses_*": Row("offer", _NOTHING_CUT),
    "compact_*": Row("offer", "No summary is made here, and a conversation that is too long is refused."),
}
"""Type of an edit of the context -> what is done with it."""

_EDITS = {kind: typed_object(kind) for kind in EDITS}
_ALL = ("all", {"type": "all"}, None)


class _ContextManagement(Part):
    edits: Annotated[tuple[union_of(EDITS, _EDITS), ...], Many(max_length=16)] = ()  # type: ignore[valid-type]


def _managed(given: _ContextManagement, info: ValidationInfo) -> None:
    for i, edit in enumerate(given.edits):
        kind = str(edit["type"])
        if not (kind.startswith("clear_thinking_") and edit.get("keep") in _ALL):
            text = f"'{info.field_name}.edits[{i}]' ({kind}) has no effect: nothing is cut out of a conversation here"
            tell(info, "no_effect", text)


ContextManagement = Annotated[None, Telling(_ContextManagement, _managed)]
