"""`tool_choice` of a responses request: the tools that the model may or must call, named flat.

`toolset` finds the tools that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from inferd.server.errors import validation
from inferd.server.schema import tool_choice
from inferd.server.schema.json_bytes import check_repeated
from inferd.server.schema.kinds import Row
from inferd.server.schema.model import Part
from inferd.server.schema.response_tools import BESIDE_TYPE, CALLED, TOOLS, hosted_type
from inferd.server.schema.tool_choice import MAX_NAMED, MODES, Mode, word_or_type
from inferd.server.schema.values import JsonObject, Kept, Many, Text, form

_RUN_ELSEWHERE = "No answer can use it: name a tool that the caller runs, or leave the choice to the model."

CHOICES: Mapping[str, Row] = {
    **tool_choice.CHOICES,
    **dict.fromkeys(
        ("shell", "local_shell", "apply_patch", "tool_search"), Row("enforced", "The model calls this tool once.")
    ),
    **dict.fromkeys(
        (*(kind for kind, row in TOOLS.items() if row.kind == "offer"), "computer_use"), Row("demand", _RUN_ELSEWHERE)
    ),
}
"""A choice of tools, by its word or the type of its object -> what is done with it."""


class _NamedTool(Part):
    type: Literal["function", "custom"]
    name: Text = Field(min_length=1)
    namespace: Text | None = None

    refused = dict.fromkeys(("function", "custom"), BESIDE_TYPE)


class _TypedTool(Part):
    type: Literal["shell", "local_shell", "apply_patch", "tool_search"]


class _NamedSpace(Part):
    type: Literal["namespace"]
    name: Text = Field(min_length=1)


def _choice_tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    row = CHOICES.get(hosted_type(kind) or kind) if isinstance(kind, str) else None
    return "<hosted>" if row is not None and row.kind == "demand" else word_or_type(value)


def _refuse_hosted(value: JsonObject) -> JsonObject:
    raise validation.unsupported_type(str(value.get("type")), _RUN_ELSEWHERE)


_AllowedTool = Annotated[
    Annotated[_NamedTool, Tag("<function>")]
    | Annotated[_NamedTool, Tag("<custom>")]
    | Annotated[_NamedSpace, Tag("<namespace>")]
    | Annotated[_TypedTool, Tag("<shell>")]
    | Annotated[_TypedTool, Tag("<local_shell>")]
    | Annotated[_TypedTool, Tag("<apply_patch>")]
    | Annotated[_TypedTool, Tag("<tool_search>")]
    | Annotated[JsonObject, Tag("<hosted>")],
    form("an object", _choice_tag, tuple(TOOLS)),
]


class _AllowedTools(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[_AllowedTool, ...], Many(1, MAX_NAMED)]


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool that `tool_choice` names."""

    kind: str
    name: str
    """Empty for tools that have none."""
    namespace: str | None
    path: str


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """`tool_choice` as given, and what it means."""

    given: str | JsonObject
    mode: Mode
    names: tuple[ToolName, ...] | None = None
    """The tools that may be called; None: all."""
    is_single: bool = False
    """Whether it names the one tool to call."""


def _choice(given: str | JsonObject, choice: Any, where: str) -> AskedChoice:
    check_repeated(given, where)
    if choice in MODES:
        return AskedChoice(given, choice)
    if isinstance(choice, _AllowedTools):
        names = (_name(tool, f"{where}.tools[{i}]") for i, tool in enumerate(choice.tools))
        return AskedChoice(given, choice.mode, tuple(name for name in names if name is not None))
    name = _name(choice, where)
    assert name is not None, "hosted tools were refused"
    return AskedChoice(given, "required", (name,), is_single=True)


def _name(tool: _NamedTool | _TypedTool | _NamedSpace | JsonObject, path: str) -> ToolName | None:
    match tool:
        case _NamedTool():
            return ToolName(tool.type, tool.name, tool.namespace, f"{path}.name")
        case _NamedSpace():
            return ToolName("namespace", "", tool.name, f"{path}.name")
        case _TypedTool():
            return ToolName(tool.type, "", None, f"{path}.type")
    return None


_Choice = Annotated[
    Annotated[Mode, Tag("<word>")]
    | Annotated[_NamedTool, Tag("<function>")]
    | Annotated[_NamedTool, Tag("<custom>")]
    | Annotated[_TypedTool, Tag("<shell>")]
    | Annotated[_TypedTool, Tag("<local_shell>")]
    | Annotated[_TypedTool, Tag("<apply_patch>")]
    | Annotated[_TypedTool, Tag("<tool_search>")]
    | Annotated[_AllowedTools, Tag("<allowed_tools>")]
    | Annotated[JsonObject, AfterValidator(_refuse_hosted), Tag("<hosted>")],
    form("one of a string or an object", _choice_tag, (*CALLED, "allowed_tools")),
]
ToolChoiceOption = Annotated[AskedChoice, Kept(_Choice, _choice)]
