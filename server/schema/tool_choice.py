"""`tool_choice`: whether calls may, must or must not be made, and of which tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Tag

from inferd.server.schema.request_model import Part, Row
from inferd.server.schema.values import Converted, Many, Text, by_type, form, union_of

Mode = Literal["none", "auto", "required"]
MODES: tuple[Mode, ...] = get_args(Mode)

MAX_NAMED = 1_024


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that the model may or must call."""

    mode: Mode
    names: tuple[tuple[str, str], ...] | None = None
    """(tool, its path in the request) of the tools that may be called; None: all."""
    is_single: bool = False
    """One named tool: exactly one call."""


class _Name(Part):
    name: Text = Field(min_length=1)


class _NamedFunction(Part):
    type: Literal["function"]
    function: _Name

    refused = {"name": "Put it into 'function'."}  # noqa: RUF012


class _NamedCustom(Part):
    type: Literal["custom"]
    custom: _Name

    refused = {"name": "Put it into 'custom'."}  # noqa: RUF012


CHOICES: Mapping[str, Row] = {
    "none": Row("enforced", "The model is shown no tools."),
    "auto": Row("enforced", "The model decides."),
    "required": Row("enforced", "The model calls at least one tool."),
    "function": Row("enforced", "The model calls this function once."),
    "custom": Row("enforced", "The model calls this tool once."),
    "allowed_tools": Row("enforced", "The model calls none but these."),
}
"""A choice of tools, by its word or the type of its object -> what is done with it."""

_Named = _NamedFunction | _NamedCustom
_NAMED: Mapping[str, type[Part]] = {"function": _NamedFunction, "custom": _NamedCustom}
_NamedTool: Any = union_of({kind: CHOICES[kind] for kind in _NAMED}, _NAMED)


class _Allowed(Part):
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[_NamedTool, ...], Many(1, MAX_NAMED)]


class _AllowedTools(Part):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


def word_or_type(value: object) -> str | None:
    """The tag of a member of a union of words and objects."""
    return "<word>" if isinstance(value, str) else by_type(value)


_Given = Annotated[
    Annotated[Mode, Tag("<word>")]
    | Annotated[_NamedFunction, Tag("<function>")]
    | Annotated[_NamedCustom, Tag("<custom>")]
    | Annotated[_AllowedTools, Tag("<allowed_tools>")],
    form("one of a string or an object", word_or_type, ("function", "custom", "allowed_tools")),
]


def _read(given: Mode | _Named | _AllowedTools, where: str) -> ToolChoice:
    if isinstance(given, str):
        return ToolChoice(given)
    if not isinstance(given, _AllowedTools):
        return ToolChoice("required", (_named(given, where),), is_single=True)
    allowed, path = given.allowed_tools, f"{where}.allowed_tools.tools"
    return ToolChoice(allowed.mode, tuple(_named(tool, f"{path}[{i}]") for i, tool in enumerate(allowed.tools)))


def _named(tool: _Named, where: str) -> tuple[str, str]:
    """(name, its path)."""
    if isinstance(tool, _NamedCustom):
        return tool.custom.name, f"{where}.custom.name"
    return tool.function.name, f"{where}.function.name"


ToolChoiceField = Annotated[ToolChoice, Converted(_Given, _read)]
