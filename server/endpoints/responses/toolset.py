"""The tools of a response as the model sees them: each is a function with a name of its own.

Tools come from the request, from `additional_tools`, and from what a search of the caller's has found. One with
`defer_loading` is kept out of the prompt until such a search finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors
from inferd.server.schema.caller_tool import CallerTool, ToolKind, custom_tool
from inferd.server.schema.response_options import AskedChoice, ToolName
from inferd.server.schema.response_parts import Item
from inferd.server.schema.response_tools import hosted_type, is_callable
from inferd.server.schema.tool_choice import ToolChoice
from inferd.server.structured.language import Syntax, TextFormat

Tool = Mapping[str, object]
"""A tool as the client wrote it."""
Identity = tuple[str | None, str]
"""(namespace, name) of a function or a custom tool, (None, type) of any other."""
Asked = tuple[str, str | None, str]
"""(type, namespace, name) of a tool as a choice names it. A tool of a namespace may be named without that. A namespace
and a type without names have an empty name."""

_MAX_NAME = 128
_MAX_NUMBERED = 120
"""Characters of a name before its number."""
_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}


def _string(about: str) -> Mapping[str, object]:
    return {"type": "string", "description": about}


def _object(required: Sequence[str], **properties: Mapping[str, object]) -> Mapping[str, object]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_STRINGS = {"type": "array", "items": {"type": "string"}}
_MILLISECONDS = {"type": "integer", "minimum": 0, "maximum": 86_400_000, "description": "Milliseconds."}
_CHARACTERS = {"type": "integer", "minimum": 0, "maximum": 10_000_000, "description": "Most characters of output."}
_BUILT_IN: Mapping[ToolKind, tuple[str, Mapping[str, object]]] = {
    "shell": (
        "Runs shell commands, one after the other, and returns what they print.",
        _object(["commands"], commands=_STRINGS, timeout_ms=_MILLISECONDS, max_output_length=_CHARACTERS),
    ),
    "local_shell": (
        "Runs one command, given as its words, and returns what it prints.",
        _object(
            ["command"],
            command=_STRINGS,
            working_directory=_string("The directory to run it in."),
            timeout_ms=_MILLISECONDS,
        ),
    ),
    "apply_patch": (
        "Creates, updates or deletes one file. `diff` holds the changes: lines that begin with ' ' are kept, with '-' "
        "removed, with '+' added; '@@' and the line of a function or a class say where. All lines of a new file begin "
        "with '+'. To delete a file, leave `diff` empty.",
        _object(
            ["type", "path", "diff"],
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_string("The file's path, relative to the workspace."),
            diff=_string("The changes."),
        ),
    ),
    "tool_search": (
        "Finds further tools by what they do. They can be called after that.",
        _object(["query"], query=_string("What the tool should do.")),
    ),
}
"""Tools that have no name and no schema in the request -> (description, parameters)."""


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of one response."""

    tools: tuple[CallerTool, ...]
    """Those that the model sees."""
    _names: Mapping[Identity, str]

    def name_of(self, namespace: str | None, name: str) -> str:
        """The name by which the model knows a tool, whether the request still lists it or not."""
        return self._names.get((namespace, name)) or self._names.get((None, name)) or joined(namespace, name)

    def choice(self, asked: AskedChoice | None) -> ToolChoice | None:
        """The choice by the model's names. Raises `RequestError` for tools that the model does not see."""
        if asked is None:
            return None
        if asked.names is None:
            return ToolChoice(asked.mode)
        if not self.tools:
            message = "The 'tool_choice' parameter can name a tool only if 'tools' has one that the caller runs."
            raise RequestError("invalid_value", message, "tool_choice")
        index = _index(self.tools)
        names = tuple((tool.name, one.path) for one in _each_once(asked.names) for tool in self._named(one, index))
        if not names:
            message = "None of the tools in 'tool_choice' is run by the caller, so no answer can call one of them."
            raise RequestError("unsupported_value", message, "tool_choice")
        return ToolChoice(asked.mode, names, is_single=asked.is_single)

    def _named(self, asked: ToolName, index: Mapping[Asked, Sequence[CallerTool]]) -> Sequence[CallerTool]:
        found = index.get(_key(asked))
        if found is None:
            known = [tool.given_name or tool.name for tool in self.tools]
            raise errors.not_among(asked.path, asked.name or asked.namespace or asked.kind, known[:10])
        return found


def _key(asked: ToolName) -> Asked:
    return asked.kind, asked.namespace, asked.name


def _each_once(asked: Iterable[ToolName]) -> Iterator[ToolName]:
    seen: set[Asked] = set()
    for one in asked:
        if _key(one) not in seen:
            seen.add(_key(one))
            yield one


def _index(tools: Iterable[CallerTool]) -> Mapping[Asked, Sequence[CallerTool]]:
    """A choice may have a thousand names, and a conversation many more tools."""
    index: dict[Asked, list[CallerTool]] = {}
    for tool in tools:
        has_name = tool.kind in ("function", "custom")
        keys: list[Asked] = [
            (tool.kind, space, name)
            for space in dict.fromkeys((None, tool.namespace))
            for name in (dict.fromkeys((tool.given_name, tool.name)) if has_name else ("",))
        ]
        if tool.namespace is not None:
            keys.append(("namespace", tool.namespace, ""))
        for key in keys:
            index.setdefault(key, []).append(tool)
    return index


def toolset_of(tools: Sequence[Tool], items: Iterable[tuple[Item, str]]) -> Toolset:
    """`tools`: those of the request. `items`: (item, its path) of the whole conversation."""
    shows_all = any(tool["type"] == "tool_search" and tool.get("execution") != "client" for tool in tools)
    given = list(_each(tools, "tools"))
    found: set[Identity] = set()
    for item, path in items:
        if item["type"] in ("additional_tools", "tool_search_output"):
            more = list(_each(_list(item["tools"]), f"{path}.tools"))
            given += more
            if item["type"] == "tool_search_output":
                found |= {one.identity for one in more}
    builder = _Builder()
    for one in given:
        builder.add(one, is_seen=shows_all or not one.tool.get("defer_loading") or one.identity in found)
    return Toolset(tuple(builder.tools), builder.names)


def joined(namespace: str | None, name: str) -> str:
    """A name of letters that all templates and clients take."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{namespace}__{name}" if namespace else name)[:_MAX_NAME]


@dataclass(frozen=True, slots=True)
class _Given:
    """A tool, or a member of a namespace."""

    tool: Tool
    path: str
    namespace: str | None = None
    about: str = ""
    """Description of the namespace, for a member without one."""

    @property
    def identity(self) -> Identity:
        return self.namespace, str(self.tool.get("name") or self.tool["type"])


def _list(tools: object) -> Sequence[Tool]:
    assert isinstance(tools, (list, tuple)), "checked when the item was read"
    return tools


def _each(tools: Sequence[Tool], path: str) -> Iterator[_Given]:
    """The tools that the caller runs, those of namespaces one by one."""
    for i, tool in enumerate(tools):
        where = f"{path}[{i}]"
        if tool["type"] == "namespace":
            about = str(tool.get("description") or "")
            for member in _each(_list(tool["tools"]), f"{where}.tools"):
                yield _Given(member.tool, member.path, str(tool["name"]), about)
        elif hosted_type(tool["type"]) is None and not _is_hosted(tool):
            yield _Given(tool, where)


def _is_hosted(tool: Tool) -> bool:
    """Whether OpenAI's servers would run a tool of a type that a caller can run, too, or would alone call it."""
    if not is_callable(tool.get("allowed_callers")):
        return True
    if tool["type"] == "tool_search":
        return tool.get("execution") != "client"
    environment = tool.get("environment")
    return isinstance(environment, Mapping) and environment.get("type") != "local"


class _Builder:
    """Gives each tool a name of its own. Of two with one identity the first is taken."""

    def __init__(self) -> None:
        self.tools: list[CallerTool] = []
        self.names: dict[Identity, str] = {}
        self._taken: set[str] = set()
        self._numbers: dict[str, int] = {}
        """Beginning of a name -> the last number that was tried behind it: thousands of names may begin in one way."""

    def add(self, given: _Given, *, is_seen: bool) -> None:
        if not is_seen or given.identity in self.names:
            return
        name = self._unused(joined(*given.identity))
        self.names[given.identity] = name
        self.tools.append(_made(given, name))

    def _unused(self, name: str) -> str:
        unused, stem = name, name[:_MAX_NUMBERED]
        while unused in self._taken:
            self._numbers[stem] = number = self._numbers.get(stem, 1) + 1
            unused = f"{stem}_{number}"
        self._taken.add(unused)
        return unused


def _made(given: _Given, name: str) -> CallerTool:
    tool, kind = given.tool, str(given.tool["type"])
    about = str(tool.get("description") or given.about)
    given_name = str(tool.get("name") or "")
    match kind:
        case "custom":
            return custom_tool(name, about, _text_format(tool, given.path), given.path, given_name, given.namespace)
        case "function":
            return CallerTool(name, _function(tool, name, about), given.path, "function", given_name, given.namespace)
        case "shell" | "local_shell" | "apply_patch" | "tool_search":
            description, parameters = _BUILT_IN[kind]
            description += _skills(tool)
            shown = {
                "name": name,
                "description": about or description,
                "parameters": tool.get("parameters") or parameters,
            }
            return CallerTool(name, {"type": "function", "function": shown}, given.path, kind)
    raise AssertionError(f"{kind} is no type of a caller's tool")


def _skills(tool: Tool) -> str:
    """The skills of a local shell, as the model reads them: directories of instructions."""
    environment = tool.get("environment")
    skills = environment.get("skills") if isinstance(environment, Mapping) else None
    listed = (f"\n- {skill['name']} ({skill['path']}): {skill['description']}" for skill in skills or ())
    return f" Skills, each a directory of instructions:{''.join(listed)}" if skills else ""


def _function(tool: Tool, name: str, about: str) -> Mapping[str, object]:
    function: dict[str, object] = {"name": name}
    if about:
        function["description"] = about
    parameters = tool.get("parameters")
    function["parameters"] = _NO_PARAMETERS if parameters is None else parameters
    # Templates print all keys. Without this one, a function looks like one in a chat request.
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _text_format(tool: Tool, path: str) -> TextFormat:
    given = tool.get("format")
    if not isinstance(given, Mapping) or given["type"] == "text":
        return TextFormat()
    syntax: Syntax = "lark" if given["syntax"] == "lark" else "regex"
    return TextFormat(syntax, str(given["definition"]), f"{path}.format.definition")
