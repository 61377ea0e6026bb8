"""Anthropic's `tools` and `tool_choice`: which tools the caller runs, and the functions that the model is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema

from inferd.server.schema.caller_tool import CallerTool, function_tool
from inferd.server.schema.chat import MAX_TOOLS
from inferd.server.schema.request_model import Part, Row, key_of, tell
from inferd.server.schema.tool_choice import Mode, ToolChoice
from inferd.server.schema.values import (
    Converted,
    Flag,
    JsonObject,
    Many,
    Matching,
    Telling,
    Text,
    Whole,
    typed_object,
    union_of,
)

_SCREEN = "Its results are screenshots, which this model cannot see."
TOOLS: Mapping[str, Row] = {
    "custom": Row("enforced", "The model is shown a function with this name, description and `input_schema`."),
    "bash_20241022": Row("enforced", "The function `bash`: `command`, `restart`."),
    "bash_20250124": Row("enforced", "The function `bash`: `command`, `restart`."),
    "text_editor_20241022": Row("enforced", "The function `str_replace_editor`, with `undo_edit`."),
    "text_editor_20250124": Row("enforced", "The function `str_replace_editor`, with `undo_edit`."),
    "text_editor_20250429": Row("enforced", "The function `str_replace_based_edit_tool`."),
    "text_editor_20250728": Row("enforced", "The function `str_replace_based_edit_tool`. It says `max_characters`."),
    "memory_20250818": Row("enforced", "The function `memory`."),
    "tool_search_tool_*": Row(
        "offer", "This server does not search for tools, so the model is shown every tool of `tools`."
    ),
    "web_search_*": Row("offer", "This server does not search the web."),
    "web_fetch_*": Row("offer", "This server fetches no pages."),
    "code_execution_*": Row("offer", "This server runs no code."),
    "advisor_*": Row("offer", "This server asks no other model."),
    "mcp_toolset": Row("offer", "This server connects to no others."),
    "computer_*": Row("offer", _SCREEN),
    "browser_toolset_*": Row("offer", _SCREEN),
}
"""Type of a tool -> what is done with it. The caller runs those that are enforced."""

_UNKNOWN = f"Expected one of {', '.join(TOOLS)}. Declare a tool that you run yourself as 'custom'."

_TEXT: JsonObject = {"type": "string"}


@dataclass(frozen=True, slots=True)
class AnthropicTools:
    """The field `tools`."""

    callable: tuple[CallerTool, ...] = ()
    """In the order of the request."""
    deferred: frozenset[str] = frozenset()
    """Names of those that the model is shown only after a message has named them."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """Name of a tool that the model is never shown -> the reason."""
    is_searched: bool = False
    """Whether deferred tools are shown at once, because a hosted tool would search them."""


# --- Tools that the caller runs --------------------------------------------------------------------------------------


class _CallerTool(Part):
    strict: Flag | None = None
    allowed_callers: Annotated[tuple[Text, ...], Many(max_length=16)] | None = None
    defer_loading: Flag | None = None

    without_effect = ("cache_control", "eager_input_streaming")
    offered = {"input_examples": "chat templates show no examples; put them into the description"}  # noqa: RUF012

    @property
    def is_callable(self) -> bool:
        """Whether the model itself may call it, and not only code that Anthropic runs."""
        return self.allowed_callers is None or "direct" in self.allowed_callers

    def function(self) -> JsonObject:
        """Name, description and parameters."""
        raise NotImplementedError


class _CustomTool(_CallerTool):
    type: Annotated[object, WithJsonSchema({"enum": ["custom"]})] = "custom"
    name: Annotated[Text, Matching("[A-Za-z0-9_-]{1,128}", "Expected 1 to 128 letters, digits, '_' or '-'.")]
    description: Text | None = None
    input_schema: JsonObject

    refused = {"parameters": "Use 'input_schema' instead."}  # noqa: RUF012

    def function(self) -> JsonObject:
        function: JsonObject = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {**function, "parameters": self.input_schema}


class _Bash(_CallerTool):
    type: Literal["bash_20241022", "bash_20250124"]
    name: Literal["bash"]

    def function(self) -> JsonObject:
        fields: Mapping[str, tuple[JsonObject, str]] = {
            "command": (_TEXT, "The command to run. Required, unless `restart` is true."),
            "restart": ({"type": "boolean"}, "True restarts the shell."),
        }
        return _function(self.name, "Run a command in a bash shell that stays open between calls.", fields, ())


_EDITS: Mapping[str, tuple[JsonObject, str]] = {
    "view_range": (
        {"type": "array", "items": {"type": "integer"}},
        "For `view` of a file: its first and last line, from 1; -1 is the end of the file.",
    ),
    "file_text": (_TEXT, "For `create`: the content of the file."),
    "old_str": (_TEXT, "For `str_replace`: the text to replace. It must occur exactly once."),
    "new_str": (_TEXT, "For `str_replace`: the text in its place."),
    "insert_line": ({"type": "integer"}, "For `insert`: the line to insert behind; 0 is the beginning of the file."),
    "insert_text": (_TEXT, "For `insert`: the text to insert."),
}
"""Parameters of the commands that edit files."""
_EDIT = "View, create and edit text files."


class _OlderEditor(_CallerTool):
    type: Literal["text_editor_20241022", "text_editor_20250124"]
    name: Literal["str_replace_editor"]

    def function(self) -> JsonObject:
        commands = ("view", "create", "str_replace", "insert", "undo_edit")
        new = "For `str_replace`: the text in its place. For `insert`: the text to insert."
        fields = {name: about for name, about in _EDITS.items() if name != "insert_text"}
        return _commands(self.name, _EDIT, commands, {**fields, "new_str": (_TEXT, new)})


class _Editor(_CallerTool):
    type: Literal["text_editor_20250429", "text_editor_20250728"]
    name: Literal["str_replace_based_edit_tool"]
    max_characters: Whole | None = Field(default=None, ge=1)

    def function(self) -> JsonObject:
        most = self.max_characters
        about = _EDIT if most is None else f"{_EDIT} `view` shows at most {most} characters of a file."
        return _commands(self.name, about, ("view", "create", "str_replace", "insert"), _EDITS)


class _Memory(_CallerTool):
    type: Literal["memory_20250818"]
    name: Literal["memory"]

    def function(self) -> JsonObject:
        about = "Store and read what should be remembered, in files under `/memories`."
        commands = ("view", "create", "str_replace", "insert", "delete", "rename")
        paths: Mapping[str, tuple[JsonObject, str]] = {
            "old_path": (_TEXT, "For `rename`: the path until now."),
            "new_path": (_TEXT, "For `rename`: the path from now on."),
        }
        return _commands(self.name, about, commands, {**_EDITS, **paths}, required=("command",))


def _commands(
    name: str,
    about: str,
    commands: tuple[str, ...],
    fields: Mapping[str, tuple[JsonObject, str]],
    required: tuple[str, ...] = ("command", "path"),
) -> JsonObject:
    first: Mapping[str, tuple[JsonObject, str]] = {
        "command": ({"type": "string", "enum": list(commands)}, "What to do."),
        "path": (_TEXT, "Path of a file or a directory."),
    }
    return _function(name, about, {**first, **fields}, required)


def _function(
    name: str, about: str, fields: Mapping[str, tuple[JsonObject, str]], required: tuple[str, ...]
) -> JsonObject:
    properties = {field: {**schema, "description": words} for field, (schema, words) in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": about, "parameters": parameters}


CALLER_TOOLS: Mapping[str, type[Part]] = {
    "custom": _CustomTool,
    "bash_20241022": _Bash,
    "bash_20250124": _Bash,
    "text_editor_20241022": _OlderEditor,
    "text_editor_20250124": _OlderEditor,
    "text_editor_20250429": _Editor,
    "text_editor_20250728": _Editor,
    "memory_20250818": _Memory,
}
"""Type of a tool that the caller runs -> its fields."""

_hosted = {kind: typed_object(kind) for kind, row in TOOLS.items() if row.kind == "offer"}


def _name_of(given: JsonObject) -> object:
    """The type of a tool. One without a type is the caller's own."""
    return "custom" if given.get("type") is None else given["type"]


Tool: Any = union_of(TOOLS, {**CALLER_TOOLS, **_hosted}, name_of=_name_of, rule=_UNKNOWN)


# --- All tools -------------------------------------------------------------------------------------------------------


def read_tool(given: Any, where: str, info: ValidationInfo, hide: Callable[[str, str], None]) -> CallerTool | None:
    """A tool that the model may be shown, or None. `hide` is called with the name of any other and the reason."""
    if isinstance(given, dict):
        kind = str(given["type"])
        reason = TOOLS[key_of(TOOLS, kind) or ""].about.replace("`", "'").rstrip(".")
        tell(info, "hosted_tool", f"'{where}' ({kind}) is not shown to the model: {reason[0].lower()}{reason[1:]}")
        hide(str(given.get("name", kind)), reason)
        return None
    assert isinstance(given, _CallerTool)
    function = given.function()
    if not given.is_callable:
        reason = "Its 'allowed_callers' are code that this server does not run"
        tell(info, "hosted_tool", f"'{where}' is not shown to the model: {reason[0].lower()}{reason[1:]}")
        hide(str(function["name"]), reason)
        return None
    if given.strict is not None:
        function["strict"] = given.strict
    return function_tool({"type": "function", "function": function}, where)


def _tools(given: tuple[Any, ...], info: ValidationInfo) -> AnthropicTools:
    found: list[CallerTool] = []
    deferred: set[str] = set()
    hidden: dict[str, str] = {}
    is_searched = False
    for i, tool in enumerate(given):
        made = read_tool(tool, f"tools[{i}]", info, hidden.__setitem__)
        if made is not None:
            found.append(made)
            deferred |= {made.name} if tool.defer_loading else set()
        elif isinstance(tool, dict):
            is_searched |= str(tool["type"]).startswith("tool_search_tool_")
    return AnthropicTools(tuple(found), frozenset(deferred), hidden, is_searched)


ToolsField = Annotated[AnthropicTools, Telling(Annotated[tuple[Tool, ...], Many(max_length=MAX_TOOLS)], _tools)]


# --- tool_choice -----------------------------------------------------------------------------------------------------

CHOICES: Mapping[str, Row] = {
    "auto": Row("enforced", "The model decides."),
    "any": Row("enforced", "At least one tool is used. Refused if the model is shown none."),
    "tool": Row("enforced", "This tool is used once. Refused if the model is not shown it."),
    "none": Row("enforced", "The model is shown no tools."),
}
"""Type of a `tool_choice` -> what is done with it."""


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
    name: Text = Field(min_length=1)

    without_effect = ("disable_parallel_tool_use",)


class _NoUse(Part):
    type: Literal["none"]

    without_effect = ("disable_parallel_tool_use",)


USES: Mapping[str, type[Part]] = {"auto": _AnyUse, "any": _AnyUse, "tool": _OneUse, "none": _NoUse}
_MODES: Mapping[str, Mode] = {"auto": "auto", "any": "required", "none": "none"}


def _use(given: _AnyUse | _OneUse | _NoUse, where: str) -> ToolUse:
    if isinstance(given, _OneUse):
        return ToolUse(ToolChoice("required", ((given.name, f"{where}.name"),), is_single=True), is_parallel=False)
    is_single = isinstance(given, _AnyUse) and given.disable_parallel_tool_use
    return ToolUse(ToolChoice(_MODES[given.type]), is_parallel=not is_single)


ToolUseField = Annotated[ToolUse, Converted(union_of(CHOICES, USES), _use)]
