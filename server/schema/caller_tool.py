"""The tools that the caller runs, in one form for all APIs: what the model sees of a tool, and what its calls are.

Chat templates show functions alone. A tool of another kind is shown as a function, and its calls are translated back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from inferd.server.structured.language import TextFormat

ToolKind = Literal["function", "custom", "shell", "local_shell", "apply_patch", "tool_search"]

_BUILT_IN: frozenset[ToolKind] = frozenset(("shell", "local_shell", "apply_patch"))
"""Kinds whose schema is the API's own. Its clients read no other arguments."""

TEXT_KEY = "input"
"""The only parameter of a custom tool, as the model sees it."""

_TEXT_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {TEXT_KEY: {"type": "string", "description": "The input of the tool, as plain text."}},
    "required": [TEXT_KEY],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class CallerTool:
    """One tool of a request."""

    name: str
    """The name by which the model calls it. No other tool of the request has it."""
    shown: Mapping[str, object]
    """{"type": "function", "function": {...}}, for chat templates."""
    path: str
    """Path in the request, for refusals."""
    kind: ToolKind = "function"
    given_name: str = ""
    """The caller's name of it, if it differs from `name`."""
    namespace: str | None = None
    text: TextFormat | None = None
    """The format of a custom tool's input; None for other kinds."""

    @property
    def function(self) -> Mapping[str, object]:
        function = self.shown["function"]
        assert isinstance(function, Mapping)
        return function

    @property
    def is_strict(self) -> bool:
        """Whether calls must follow the tool's schema or grammar."""
        if self.text is not None:
            return self.text.syntax != "text"
        return self.kind in _BUILT_IN or self.function.get("strict") is True


def functions(tools: Iterable[Mapping[str, object]]) -> tuple[CallerTool, ...]:
    """Functions as chat templates show them."""
    return tuple(function_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def function_tool(shown: Mapping[str, object], path: str) -> CallerTool:
    function = shown["function"]
    assert isinstance(function, Mapping)
    return CallerTool(str(function["name"]), shown, path)


def custom_tool(
    name: str, description: str | None, text: TextFormat, path: str, given_name: str = "", namespace: str | None = None
) -> CallerTool:
    """A custom tool, shown as a function of one text. Its description names the grammar."""
    about = description or ""
    if text.syntax != "text":
        word = "Lark grammar" if text.syntax == "lark" else "regular expression"
        about = f"{about}\n\nThe text of `{TEXT_KEY}` must match this {word}:\n{text.definition}".lstrip()
    function = {"name": name, "description": about, "parameters": _TEXT_PARAMETERS}
    return CallerTool(name, {"type": "function", "function": function}, path, "custom", given_name, namespace, text)
