"""The texts that the items of a conversation say to the model, and reasoning as an opaque text.

An item is what `response_items` made of the client's, so that nothing in it has to be checked.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inferd.server.schema.caller_tool import TEXT_KEY

Item = Mapping[str, object]
"""{"type": str, ...} in OpenAI's form, with "id" if the client gave one."""

_SEALED = "inferd:"
"""Begins every `encrypted_content` that this server made."""


def sealed(reasoning: str) -> str:
    """A reasoning text as `encrypted_content`, which clients pass back unread; it is shown too, and no secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unsealed(text: str) -> str:
    """The reasoning that `sealed` was given. Raises `ValueError` for anything else but an empty text."""
    if text and not text.startswith(_SEALED):
        raise ValueError("it was not made here")
    return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode("utf-8")


def called(item: Item) -> tuple[str, Any]:
    """(name, arguments) of a call. The arguments are an object, or a string that should hold one as JSON."""
    match item["type"]:
        case "function_call":
            return str(item["name"]), str(item["arguments"])
        case "custom_tool_call":
            return str(item["name"]), {TEXT_KEY: item["input"]}
        case "tool_search_call":
            return "tool_search", item["arguments"]
        case "apply_patch_call":
            return "apply_patch", item["operation"]
    action = item["action"]
    assert isinstance(action, Mapping)
    given = {key: value for key, value in action.items() if value is not None and key not in ("type", "env", "user")}
    return str(item["type"]).removesuffix("_call"), given


def text_of(item: Item) -> str:
    """The text of a message, an output or a piece of reasoning."""
    match item["type"]:
        case "reasoning" if not item.get("content"):
            return unsealed(str(item.get("encrypted_content") or ""))
        case "shell_call_output":
            return "\n".join(_printed(part) for part in _parts(item["output"]))
        case "apply_patch_call_output":
            return str(item.get("output") or item["status"])
        case "tool_search_output":
            return f"Found: {', '.join(_names(_parts(item['tools']))) or 'no tool'}."
    content = item.get("output") if "output" in item else item.get("content")
    return content if isinstance(content, str) else "\n".join(map(_text, _parts(content)))


def _parts(value: object) -> Sequence[Item]:
    return value if isinstance(value, (list, tuple)) else ()


def _text(part: Item) -> str:
    return str(part.get("text", part.get("refusal", "")))


def _printed(part: Item) -> str:
    """The output of a command, and how it ended if it failed."""
    outcome = part["outcome"]
    assert isinstance(outcome, Mapping)
    code = outcome.get("exit_code")
    ending = "timed out" if outcome["type"] == "timeout" else "" if not code else f"exit code {code}"
    return "\n".join(text for text in (str(part["stdout"]), str(part["stderr"]), ending) if text)


def _names(tools: Sequence[Item]) -> Iterator[str]:
    for tool in tools:
        members = _parts(tool["tools"]) if tool["type"] == "namespace" else ()
        if members:
            yield from (f"{tool['name']}.{name}" for name in _names(members))
        else:
            yield str(tool.get("name") or tool["type"])
