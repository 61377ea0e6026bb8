"""The tools of a responses request, and `tool_choice`: checked, and told apart by who runs them.

Tools stand in `tools`, and in the items `additional_tools` and `tool_search_output`. All are kept as the client wrote
them. `response_toolset` makes of them what the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from inferd.server.errors import validation
from inferd.server.schema import tool_choice
from inferd.server.schema.chat import MAX_GRAMMAR_CHARS, MAX_TOOLS, TOOL_WITHOUT_EFFECT, FunctionName
from inferd.server.schema.kinds import Row
from inferd.server.schema.model import Part, tell
from inferd.server.schema.tool_choice import MAX_NAMED, Mode, word_or_type
from inferd.server.schema.values import Flag, JsonObject, Kept, Many, Text, by_type, form
from inferd.server.schema.writable import check_repeated, check_writable

_HOSTED = "Only OpenAI's servers run it. The model does not see it."

TOOLS: Mapping[str, Row] = {
    "function": Row("enforced", "A function. `strict` has its arguments follow the schema token by token."),
    "namespace": Row("enforced", "Functions and custom tools under one name. Calls come with `namespace` and `name`."),
    "custom": Row("enforced", "A tool that takes a text, which follows the grammar in `format` token by token."),
    "shell": Row(
        "enforced", "Commands that the caller runs. A container of OpenAI's as its `environment` is an offer."
    ),
    "local_shell": Row("enforced", "One command that the caller runs."),
    "apply_patch": Row("enforced", "Edits of files that the caller makes."),
    "tool_search": Row(
        "enforced",
        "With `execution` `client`, a search that the caller runs: it finds tools with `defer_loading`, which the "
        "model does not see before. Any other search is an offer: the model sees all tools at once.",
    ),
    "web_search": Row("offer", _HOSTED),
    "web_search_preview": Row("offer", _HOSTED),
    "file_search": Row("offer", _HOSTED),
    "computer": Row("offer", "It shows pictures of a screen, which this model cannot read. The model does not see it."),
    "computer_use_preview": Row("offer", "As `computer`."),
    "code_interpreter": Row("offer", _HOSTED),
    "image_generation": Row("offer", _HOSTED),
    "mcp": Row("offer", "The server connects to no others. List the tools of the MCP server as functions instead."),
    "programmatic_tool_calling": Row("offer", _HOSTED),
}
"""Types of tools. A version at the end of a type, as in `web_search_2025_08_26`, changes nothing."""

ENVIRONMENTS: Mapping[str, Row] = {
    "local": Row("enforced", "The caller's machine. The model reads of its `skills` in the description of the tool."),
    "container_auto": Row("offer", _HOSTED),
    "container_reference": Row("offer", _HOSTED),
}
"""Type of the `environment` of a shell -> what is done with it."""
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

_CALLED = tuple(kind for kind, row in TOOLS.items() if row.kind == "enforced")
_ASYNC = "the model waits for the result of every call"


def hosted_type(kind: object) -> str | None:
    """The row of `TOOLS` for a tool that the caller does not run; None for any other type."""
    if not isinstance(kind, str) or kind in _CALLED:
        return None
    return next((name for name in TOOLS if kind == name or kind.startswith((f"{name}_20", f"{name}_2_"))), None)


# --- Tools -----------------------------------------------------------------------------------------------------------


class _Tool(Part):
    allowed_callers: Annotated[tuple[Text, ...], Many(max_length=16)] | None = None

    @model_validator(mode="after")
    def _tell_of_callers(self, info: ValidationInfo) -> Self:
        if not is_callable(self.allowed_callers):
            name = getattr(self, "name", None) or getattr(self, "type", None)
            text = f"The model does not see '{name}': its 'allowed_callers' are programs that OpenAI's servers run"
            tell(info, "hosted_tool", text)
        return self


def is_callable(allowed_callers: object) -> bool:
    """Whether the model itself may call a tool, and not only a program that it writes."""
    return not isinstance(allowed_callers, (list, tuple)) or "direct" in allowed_callers


class _Callable(_Tool):
    """Keys of functions and custom tools."""

    name: FunctionName
    description: Text | None = None
    defer_loading: Flag = False

    without_effect = (*TOOL_WITHOUT_EFFECT, "output_schema")
    offered = {"async": _ASYNC, "async_": _ASYNC}  # noqa: RUF012 -- a table, not a field


class _Function(_Callable):
    type: Literal["function"]
    parameters: Annotated[JsonObject, BeforeValidator(check_writable)] | None = None
    strict: Flag | None = None


class _AnyText(Part):
    type: Literal["text"]


class _Grammar(Part):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[Text, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class _Custom(_Callable):
    type: Literal["custom"]
    format: (
        Annotated[
            Annotated[_AnyText, Tag("<text>")] | Annotated[_Grammar, Tag("<grammar>")],
            form("an object", by_type, ("text", "grammar")),
        ]
        | None
    ) = None


_Member = Annotated[
    Annotated[_Function, Tag("<function>")] | Annotated[_Custom, Tag("<custom>")],
    form("an object", by_type, ("function", "custom")),
]


class _Namespace(Part):
    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[tuple[_Member, ...], Many(max_length=MAX_TOOLS)]


class _Skill(Part):
    name: Text
    description: Text
    path: Text


class _LocalEnvironment(Part):
    type: Literal["local"]
    skills: Annotated[tuple[_Skill, ...], Many(max_length=MAX_TOOLS)] | None = None


def _tell_of_container(environment: JsonObject, info: ValidationInfo) -> JsonObject:
    text = f"The model does not see the tool 'shell' with the environment '{environment['type']}'"
    tell(info, "hosted_tool", f"{text}, which only OpenAI's servers have")
    return environment


_Container = Annotated[JsonObject, AfterValidator(check_writable), AfterValidator(_tell_of_container)]


class _Shell(_Tool):
    type: Literal["shell"]
    environment: (
        Annotated[
            Annotated[_LocalEnvironment, Tag("<local>")]
            | Annotated[_Container, Tag("<container_auto>")]
            | Annotated[_Container, Tag("<container_reference>")],
            form("an object", by_type, tuple(ENVIRONMENTS)),
        ]
        | None
    ) = None


class _PlainTool(_Tool):
    type: Literal["local_shell", "apply_patch"]


class _ToolSearch(Part):
    type: Literal["tool_search"]
    description: Text | None = None
    execution: Literal["server", "client"] = "server"
    parameters: Annotated[JsonObject, BeforeValidator(check_writable)] | None = None

    @model_validator(mode="after")
    def _tell(self, info: ValidationInfo) -> Self:
        if self.execution == "server":
            tell(info, "hosted_tool", "Only OpenAI's servers run 'tool_search': the model sees all tools at once")
        return self


def _told(tool: JsonObject, info: ValidationInfo) -> JsonObject:
    kind = str(tool["type"])
    if kind == "web_search" and tool.get("external_web_access") is False:
        return tool  # it may only read a cache, and there is none
    tell(info, "hosted_tool", f"The model does not see the tool '{kind}', which only OpenAI's servers run")
    return tool


_HostedTool = Annotated[
    JsonObject,
    AfterValidator(check_writable),
    AfterValidator(_told),
    WithJsonSchema({"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}),
]


def _tool_tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<hosted>" if hosted_type(kind) else by_type(value)


_AnyTool = Annotated[
    Annotated[_Function, Tag("<function>")]
    | Annotated[_Namespace, Tag("<namespace>")]
    | Annotated[_Custom, Tag("<custom>")]
    | Annotated[_Shell, Tag("<shell>")]
    | Annotated[_PlainTool, Tag("<local_shell>")]
    | Annotated[_PlainTool, Tag("<apply_patch>")]
    | Annotated[_ToolSearch, Tag("<tool_search>")]
    | Annotated[_HostedTool, Tag("<hosted>")],
    form("an object", _tool_tag, tuple(TOOLS)),
]


def _as_given(given: list[JsonObject], checked: object, where: str) -> tuple[JsonObject, ...]:
    """Raises `RequestError` for a tool that the answer could not repeat."""
    del checked
    for i, tool in enumerate(given):
        check_repeated(tool, f"{where}[{i}]")
    return tuple(given)


GivenTools = Annotated[
    tuple[JsonObject, ...],
    Kept(Annotated[tuple[_AnyTool, ...], Many(max_length=MAX_TOOLS)], _as_given),
]
"""Tools as the client wrote them."""


def shown_tool(tool: JsonObject) -> Mapping[str, object]:
    """A tool as the response repeats it: a function with every key, any other as it is."""
    if tool["type"] != "function":
        return tool
    parameters = tool.get("parameters")
    return {
        **{key: value for key, value in tool.items() if value is not None},
        "description": tool.get("description"),
        "parameters": {"type": "object", "properties": {}} if parameters is None else parameters,
        "strict": tool.get("strict") is True,
    }


# --- tool_choice -----------------------------------------------------------------------------------------------------


class _NamedTool(Part):
    type: Literal["function", "custom"]
    name: Text = Field(min_length=1)
    namespace: Text | None = None


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
    if isinstance(choice, str):
        return AskedChoice(given, _mode(choice))
    if isinstance(choice, _AllowedTools):
        names = (_name(tool, f"{where}.tools[{i}]") for i, tool in enumerate(choice.tools))
        return AskedChoice(given, choice.mode, tuple(name for name in names if name is not None))
    name = _name(choice, where)
    assert name is not None, "hosted tools were refused"
    return AskedChoice(given, "required", (name,), is_single=True)


def _mode(word: str) -> Mode:
    modes: Mapping[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}
    return modes[word]


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
    form("one of a string or an object", _choice_tag, (*_CALLED, "allowed_tools")),
]
ToolChoiceOption = Annotated[AskedChoice, Kept(_Choice, _choice)]
