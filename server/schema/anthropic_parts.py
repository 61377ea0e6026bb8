"""The wire kinds of Anthropic's tools, thinking and output formats, each read into what chat calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from inferd.server.errors import table as errors
from inferd.server.schema.chat import MAX_THINKING_TOKENS
from inferd.server.schema.kinds import (
    Array,
    Boolean,
    Choice,
    Integer,
    Json,
    Kind,
    Only,
    Schema,
    Text,
    check_array,
    check_properties,
    object_schema,
)
from inferd.server.schema.structured import AnswerFormat
from inferd.server.schema.tool_choice import ToolChoice
from inferd.server.structured.schema import read_schema

EFFORTS = ("low", "medium", "high", "xhigh", "max")

ThinkingMode = Literal["enabled", "adaptive", "disabled"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CUSTOM = "Only 'custom' tools are served: the model asks for them and the caller runs them."
_DISPLAYS = Choice(("summarized", "omitted"))


@dataclass(frozen=True, slots=True)
class CustomTool:
    """A tool that the caller runs; read as the function that chat templates show."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> Mapping[str, object]:
        kind = Json().read(value, where).get("type")
        if kind is not None and kind != "custom":
            raise errors.unsupported_value(f"{where}.type", Text().read(kind, f"{where}.type"), _CUSTOM)
        without_effect = ("type", "cache_control", "eager_input_streaming", "allowed_callers", "defer_loading")
        tool = check_properties(
            value, where, ("name", "input_schema"), ("description", "strict", "input_examples", *without_effect)
        )
        name = Text().read(tool["name"], f"{where}.name")
        if not _NAME.fullmatch(name):
            raise errors.invalid_value(f"{where}.name", name, "Expected 1 to 128 letters, digits, '_' or '-'.")
        function: dict[str, object] = {"name": name}
        if tool.get("description") is not None:
            function["description"] = Text().read(tool["description"], f"{where}.description")
        function["parameters"] = Json().read(tool["input_schema"], f"{where}.input_schema")
        if tool.get("strict") is not None:
            function["strict"] = Boolean().read(tool["strict"], f"{where}.strict")
        _check_extras(tool, where)
        return {"type": "function", "function": function}

    def schema(self) -> Schema:
        return object_schema(
            {
                "type": {"enum": ["custom", None]},
                "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                "description": Text().schema(),
                "input_schema": Json().schema(),
                "strict": Boolean().schema(),
                "cache_control": Json().schema(),
                "eager_input_streaming": Boolean().schema(),
                "allowed_callers": {"enum": [["direct"]]},
                "defer_loading": {"enum": [False]},
                "input_examples": {"enum": [[]]},
            },
            ("name", "input_schema"),
        )


def _check_extras(tool: Mapping[str, object], where: str) -> None:
    """What may be said only as it holds anyway. Raises `RequestError`."""
    only: dict[str, Kind] = {
        "allowed_callers": Only((["direct"],), 'Only ["direct"] is served: nothing else calls tools here.'),
        "defer_loading": Only((False,), "The model is shown every tool of 'tools'."),
        "input_examples": Only(([],), "Chat templates show no examples; put them into the tool's description."),
        "eager_input_streaming": Boolean(),
    }
    for key, kind in only.items():
        if tool.get(key) is not None:
            kind.read(tool[key], f"{where}.{key}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Anthropic's `tool_choice`."""

    choice: ToolChoice
    is_parallel: bool
    """False: at most one call."""


@dataclass(frozen=True, slots=True)
class ToolUseKind:
    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> ToolUse:
        given = Json().read(value, where)
        if given.get("type") is None:
            raise errors.missing(f"{where}.type")
        kind = Choice(("auto", "any", "tool", "none")).read(given["type"], f"{where}.type")
        flag = "disable_parallel_tool_use"
        check_properties(
            value, where, ("type", "name") if kind == "tool" else ("type",), () if kind == "none" else (flag,)
        )
        is_single = given.get(flag) is not None and Boolean().read(given[flag], f"{where}.{flag}")
        if kind == "tool":
            name = (Text(1).read(given["name"], f"{where}.name"), f"{where}.name")
            return ToolUse(ToolChoice("required", (name,), is_single=True), is_parallel=False)
        modes: dict[str, Literal["none", "auto", "required"]] = {"auto": "auto", "any": "required", "none": "none"}
        return ToolUse(ToolChoice(modes[kind]), is_parallel=not is_single)

    def schema(self) -> Schema:
        flag = {"disable_parallel_tool_use": Boolean().schema()}
        return {
            "anyOf": [
                object_schema({"type": {"enum": ["auto", "any"]}, **flag}, ("type",)),
                object_schema({"type": {"const": "tool"}, "name": Text(1).schema(), **flag}, ("type", "name")),
                object_schema({"type": {"const": "none"}}, ("type",)),
            ]
        }


@dataclass(frozen=True, slots=True)
class Thinking:
    """Anthropic's `thinking`."""

    mode: ThinkingMode
    budget: int | None = None
    """Most tokens of it."""
    is_shown: bool = True


@dataclass(frozen=True, slots=True)
class ThinkingConfig:
    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> Thinking:
        given = Json().read(value, where)
        if given.get("type") is None:
            raise errors.missing(f"{where}.type")
        mode = cast("ThinkingMode", Choice(("enabled", "adaptive", "disabled")).read(given["type"], f"{where}.type"))
        if mode == "disabled":
            check_properties(value, where, ("type",), ())
            return Thinking(mode, is_shown=False)
        check_properties(value, where, ("type", "budget_tokens") if mode == "enabled" else ("type",), ("display",))
        budget = None
        if mode == "enabled":
            budget = Integer(1, MAX_THINKING_TOKENS).read(given["budget_tokens"], f"{where}.budget_tokens")
        display = given.get("display")
        is_shown = display is None or _DISPLAYS.read(display, f"{where}.display") != "omitted"
        return Thinking(mode, budget, is_shown)

    def schema(self) -> Schema:
        display, budget = {"display": _DISPLAYS.schema()}, Integer(1, MAX_THINKING_TOKENS).schema()
        return {
            "anyOf": [
                object_schema(
                    {"type": {"const": "enabled"}, "budget_tokens": budget, **display}, ("type", "budget_tokens")
                ),
                object_schema({"type": {"const": "adaptive"}, **display}, ("type",)),
                object_schema({"type": {"const": "disabled"}}, ("type",)),
            ]
        }


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """An answer that follows a JSON schema, every keyword of which is enforced."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> AnswerFormat:
        given = check_properties(value, where, ("type", "schema"), ())
        Choice(("json_schema",)).read(given["type"], f"{where}.type")
        path = f"{where}.schema"
        return AnswerFormat(path, read_schema(Json().read(given["schema"], path), path, is_strict=True))

    def schema(self) -> Schema:
        return object_schema({"type": {"const": "json_schema"}, "schema": Json().schema()}, ("type", "schema"))


@dataclass(frozen=True, slots=True)
class Output:
    """Anthropic's `output_config`."""

    effort: str | None = None
    format: AnswerFormat | None = None


@dataclass(frozen=True, slots=True)
class OutputConfig:
    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> Output:
        given = check_properties(value, where, (), ("effort", "format"))
        effort, form = given.get("effort"), given.get("format")
        return Output(
            None if effort is None else Choice(EFFORTS).read(effort, f"{where}.effort"),
            None if form is None else JsonFormat().read(form, f"{where}.format"),
        )

    def schema(self) -> Schema:
        return object_schema({"effort": Choice(EFFORTS).schema(), "format": JsonFormat().schema()})


@dataclass(frozen=True, slots=True)
class ContextManagement:
    """Edits of the conversation. Nothing is ever cut out of one here, so that the edit that keeps all is taken."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> None:
        edits = check_properties(value, where, (), ("edits",)).get("edits")
        if edits is None:
            return
        check_array(edits, f"{where}.edits", Array(Json()).name, 0, 16)
        assert isinstance(edits, list)
        for i, edit in enumerate(edits):
            path = f"{where}.edits[{i}]"
            given = Json().read(edit, path)
            if given.get("type") is None:
                raise errors.missing(f"{path}.type")
            kind = Text().read(given["type"], f"{path}.type")
            if kind != "clear_thinking_20251015":
                rule = "Nothing is cut out of a conversation here; leave out what the model should not read."
                raise errors.unsupported_value(f"{path}.type", kind, rule)
            check_properties(given, path, ("type", "keep"), ())
            Only(("all", {"type": "all"}), "All thinking that is sent is kept.").read(given["keep"], f"{path}.keep")

    def schema(self) -> Schema:
        keep = {"enum": ["all", {"type": "all"}]}
        edit = object_schema({"type": {"const": "clear_thinking_20251015"}, "keep": keep}, ("type", "keep"))
        return object_schema({"edits": {"type": "array", "items": edit, "maxItems": 16}})
