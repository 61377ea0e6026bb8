"""The tools of a responses request: checked, and told apart by who runs them.

Tools stand in `tools`, and in the items `additional_tools` and `tool_search_output`. All are kept as the client wrote
them. `toolset` makes of them what the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, model_validator

from inferd.server.schema.chat import MAX_TOOLS, TEXT_FORMATS, TOOL_WITHOUT_EFFECT, AnyText, FunctionName, GrammarText
from inferd.server.schema.request_model import Part, Row, tell
from inferd.server.schema.strict_json import check_repeated, check_writable
from inferd.server.schema.values import Flag, JsonObject, Kept, Many, Text, typed_object, union_of

BESIDE_TYPE = "Put its keys beside 'type': objects are flat here, other than in chat."
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
CALLED = tuple(kind for kind, row in TOOLS.items() if row.kind == "enforced")
"""Types of tools that the caller runs."""
_ASYNC = "the model waits for the result of every call"


def hosted_type(kind: object) -> str | None:
    """The row of `TOOLS` for a tool that the caller does not run; None for any other type."""
    if not isinstance(kind, str) or kind in CALLED:
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

    refused = {"function": BESIDE_TYPE}  # noqa: RUF012


class _Grammar(GrammarText):
    type: Literal["grammar"]

    refused = {"grammar": BESIDE_TYPE}  # noqa: RUF012


class _Custom(_Callable):
    type: Literal["custom"]
    format: union_of(TEXT_FORMATS, {"text": AnyText, "grammar": _Grammar}) | None = None  # type: ignore[valid-type]

    refused = {"custom": BESIDE_TYPE}  # noqa: RUF012


_MEMBERS = ("function", "custom")
_Member: Any = union_of({kind: TOOLS[kind] for kind in _MEMBERS}, {"function": _Function, "custom": _Custom})


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


_CONTAINERS = ("container_auto", "container_reference")
_Container: Any = Annotated[
    typed_object(*_CONTAINERS), AfterValidator(check_writable), AfterValidator(_tell_of_container)
]
_ENVIRONMENTS: Mapping[str, Any] = {"local": _LocalEnvironment, **dict.fromkeys(_CONTAINERS, _Container)}


class _Shell(_Tool):
    type: Literal["shell"]
    environment: union_of(ENVIRONMENTS, _ENVIRONMENTS) | None = None  # type: ignore[valid-type]


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
    tell(info, "hosted_tool", f"The model does not see the tool '{tool['type']}', which only OpenAI's servers run")
    return tool


_HOSTED_TYPES = [kind for kind, row in TOOLS.items() if row.kind == "offer"]
_HostedTool: Any = Annotated[
    typed_object(*(f"{kind}*" for kind in _HOSTED_TYPES)), AfterValidator(check_writable), AfterValidator(_told)
]


def _name_of(tool: JsonObject) -> object:
    """The type of a tool, a hosted one's without its version."""
    return hosted_type(tool.get("type")) or tool.get("type")


_AnyTool: Any = union_of(
    TOOLS,
    {
        "function": _Function,
        "namespace": _Namespace,
        "custom": _Custom,
        "shell": _Shell,
        "local_shell": _PlainTool,
        "apply_patch": _PlainTool,
        "tool_search": _ToolSearch,
        **dict.fromkeys(_HOSTED_TYPES, _HostedTool),
    },
    name_of=_name_of,
)


def _as_given(given: list[JsonObject], checked: object, where: str) -> tuple[JsonObject, ...]:
    """Raises `RequestError` for a tool that the answer could not repeat."""
    del checked
    for i, tool in enumerate(given):
        check_repeated(tool, f"{where}[{i}]")
    return tuple(given)


GivenTools = Annotated[
    tuple[JsonObject, ...], Kept(Annotated[tuple[_AnyTool, ...], Many(max_length=MAX_TOOLS)], _as_given)
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
