"""The wire kind of `tool_choice`: whether calls may, must or must not be made, and of which tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from inferd.server.errors import table as errors
from inferd.server.schema.kinds import Choice, Schema, Text, check_array, check_properties, object_schema

Mode = Literal["none", "auto", "required"]
MODES = ("none", "auto", "required")
_TYPES = ("function", "allowed_tools")
_FUNCTION = Choice(("function",))

MAX_NAMED = 128


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the caller wants called."""

    mode: Mode
    names: tuple[tuple[str, str], ...] | None = None
    """(function, where it was named) of the tools that may be called; None: all."""
    is_single: bool = False
    """One named function: exactly one call."""


@dataclass(frozen=True, slots=True)
class ToolChoiceKind:
    """A word, one function, or OpenAI's `allowed_tools`."""

    name: str = "one of a string or an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, (str, dict))

    def read(self, value: object, where: str) -> ToolChoice:
        if isinstance(value, str):
            return ToolChoice(_mode(value, where, MODES))
        if not isinstance(value, dict):
            raise errors.invalid_type(where, self.name, value)
        if value.get("type") is None:
            raise errors.missing(f"{where}.type")
        if Choice(_TYPES).read(value["type"], f"{where}.type") == "allowed_tools":
            return _allowed(value, where)
        return ToolChoice("required", (_function(value, where),), is_single=True)

    def schema(self) -> Schema:
        tool = object_schema(
            {"type": {"const": "function"}, "function": object_schema({"name": Text(1).schema()}, ("name",))},
            ("type", "function"),
        )
        allowed = object_schema(
            {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": tool, "minItems": 1, "maxItems": MAX_NAMED},
            },
            ("mode", "tools"),
        )
        return {
            "anyOf": [
                {"enum": list(MODES)},
                tool,
                object_schema(
                    {"type": {"const": "allowed_tools"}, "allowed_tools": allowed}, ("type", "allowed_tools")
                ),
            ]
        }


def _mode(value: object, where: str, modes: tuple[str, ...]) -> Mode:
    return cast("Mode", Choice(modes).read(value, where))


def _function(value: object, where: str) -> tuple[str, str]:
    given = check_properties(value, where, ("type", "function"), ())
    _FUNCTION.read(given["type"], f"{where}.type")
    function = check_properties(given["function"], f"{where}.function", ("name",), ())
    path = f"{where}.function.name"
    return Text(1).read(function["name"], path), path


def _allowed(value: Mapping[str, object], where: str) -> ToolChoice:
    given = check_properties(value, where, ("type", "allowed_tools"), ())
    where = f"{where}.allowed_tools"
    allowed = check_properties(given["allowed_tools"], where, ("mode", "tools"), ())
    mode = _mode(allowed["mode"], f"{where}.mode", ("auto", "required"))
    tools = allowed["tools"]
    check_array(tools, f"{where}.tools", "an array of objects", 1, MAX_NAMED)
    assert isinstance(tools, list)
    return ToolChoice(mode, tuple(_function(tool, f"{where}.tools[{i}]") for i, tool in enumerate(tools)))
