"""The common parts of the items of a conversation: ids, content, the texts that they say to the model, and keys that
say nothing.

Reasoning is an opaque text. `response_items` made each item of the client's, so that nothing in it has to be checked.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from inferd.server.schema.caller_tool import TEXT_KEY
from inferd.server.schema.chat_messages import MAX_MESSAGES, PART_WITHOUT_EFFECT, text_or_parts
from inferd.server.schema.request_model import Part, Row
from inferd.server.schema.unread import NOUNS, SAY_IT, UnreadPart, omitted, part_tag
from inferd.server.schema.values import JsonObject, Many, Text, form

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


ITEM_WITHOUT_EFFECT: tuple[str, ...] = (
    "status", "phase", "caller", "created_by", "internal_chat_message_metadata_passthrough", "provider_specific_fields",
    "cache_control",
)  # fmt: skip
"""Keys that an item of an earlier answer has, or that clients add for other servers."""

ItemId = Annotated[Text, Field(min_length=1, max_length=128)]
NotEmpty = Annotated[Text, Field(min_length=1)]

_TEXTS = dict.fromkeys(("input_text", "output_text", "refusal"), Row("enforced", "The model reads it."))
PARTS: Mapping[str, Mapping[str, Row]] = {
    "message with no answer behind it": {**_TEXTS, **dict.fromkeys(NOUNS, Row("demand", SAY_IT))},
    "older message, output of a call": {
        **_TEXTS,
        **dict.fromkeys(NOUNS, Row("offer", "The model reads that it was left out.")),
    },
}
"""Kind of item -> type of a part of its content -> what is done with it."""


class ItemPart(Part):
    """An item that the server reads."""

    type: str
    id: ItemId | None = None

    without_effect: ClassVar[tuple[str, ...]] = ITEM_WITHOUT_EFFECT

    @abstractmethod
    def shown(self) -> Item:
        """The keys besides its type, its id and its status, in the one form that items are kept in."""


class _TextPart(Part):
    type: Literal["input_text", "output_text"]
    text: Text

    without_effect = PART_WITHOUT_EFFECT


class _RefusalPart(Part):
    type: Literal["refusal"]
    refusal: Text

    without_effect = PART_WITHOUT_EFFECT


_AnyPart = Annotated[
    Annotated[_TextPart, Tag("<input_text>")]
    | Annotated[_TextPart, Tag("<output_text>")]
    | Annotated[_RefusalPart, Tag("<refusal>")]
    | Annotated[UnreadPart, Tag("<unread>")],
    form("an object", part_tag, tuple(_TEXTS)),
]
Content = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_AnyPart, ...], Many(max_length=MAX_MESSAGES), Tag("<parts>")],
    form("one of a string or an array of objects", text_or_parts),
]
_ReadPart = _TextPart | _RefusalPart | UnreadPart


def _shown_part(part: _ReadPart) -> Item:
    if isinstance(part, UnreadPart):
        return shown_text("input_text", omitted(NOUNS[part.type]))
    if isinstance(part, _RefusalPart):
        return {"type": part.type, "refusal": part.refusal}
    return shown_text(part.type, part.text)


def shown_text(kind: str, text: str) -> Item:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def shown_content(content: str | Sequence[_ReadPart], kind: str) -> list[Item]:
    """`kind`: of a part that is given as a string."""
    return [shown_text(kind, content)] if isinstance(content, str) else [_shown_part(part) for part in content]


_CONTENT_OF: Mapping[object, str] = {
    None: "content",
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
"""Type of an item with parts that the server reads -> the key that holds them. Other items may hold anything."""


def unread_parts(given: Sequence[JsonObject]) -> Iterator[tuple[int, int, str]]:
    """(item, part, type) of each part that the model cannot read. `given`: items that were read."""
    for i, item in enumerate(given):
        key = _CONTENT_OF.get(item.get("type"))
        content = None if key is None else item.get(key)
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] in NOUNS:
                yield i, j, part["type"]
