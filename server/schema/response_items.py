"""A response's `input`: a text, or items that a conversation is made of.

Each item is read into one form, whatever shorthand it came in, so that it can be stored, shown and sent back as it is.
What items say to the model is not this file's business.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, ValidationInfo

from inferd.server.errors import validation
from inferd.server.schema.messages import MAX_MESSAGES, PART_WITHOUT_EFFECT, parse_arguments, text_or_parts
from inferd.server.schema.model import Part
from inferd.server.schema.strict_json import Counts
from inferd.server.schema.values import Converted, Many, Text, Typed, Unsupported, by_type, form

Item = Mapping[str, object]
"""{"type": str, ...} in OpenAI's form, with "id" if the client gave one."""

ITEM_WITHOUT_EFFECT = (
    "status", "phase", "caller", "created_by", "internal_chat_message_metadata_passthrough", "provider_specific_fields",
    "cache_control",
)  # fmt: skip
"""Keys that an item of an earlier answer has, or that clients add for other servers."""
_SEALED = "inferd:"
"""Begins every `encrypted_content` that this server made."""

_ItemId = Annotated[Text, Field(min_length=1, max_length=128)]
_NotEmpty = Annotated[Text, Field(min_length=1)]
_OneWay = Annotated[object, Unsupported("Functions have names alone, and are called one way.", (False, 0, "", [], {}))]


# --- Parts -----------------------------------------------------------------------------------------------------------


class _TextPart(Part):
    type: Literal["input_text", "output_text"]
    text: Text

    without_effect = PART_WITHOUT_EFFECT


class _RefusalPart(Part):
    type: Literal["refusal"]
    refusal: Text

    without_effect = PART_WITHOUT_EFFECT


class _ReasoningPart(Part):
    type: Literal["reasoning_text"]
    text: Text

    without_effect = PART_WITHOUT_EFFECT


def _expected(types: Sequence[str]) -> str:
    return f"Expected {' or '.join(repr(known) for known in types)}: this server reads no images, audio or files."


_PARTS = ("input_text", "output_text", "refusal")
_AnyPart = Annotated[
    Annotated[_TextPart, Tag("<input_text>")]
    | Annotated[_TextPart, Tag("<output_text>")]
    | Annotated[_RefusalPart, Tag("<refusal>")],
    form("an object", by_type, _PARTS, _expected(_PARTS)),
]
_Content = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_AnyPart, ...], Many(max_length=MAX_MESSAGES), Tag("<parts>")],
    form("one of a string or an array of objects", text_or_parts),
]


def _shown_part(part: _TextPart | _RefusalPart) -> Item:
    if isinstance(part, _RefusalPart):
        return {"type": part.type, "refusal": part.refusal}
    return _shown_text(part.type, part.text)


def _shown_text(kind: str, text: str) -> Item:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _shown_content(content: str | Sequence[_TextPart | _RefusalPart], kind: str) -> list[Item]:
    """`kind`: of a part that is given as a string."""
    return [_shown_text(kind, content)] if isinstance(content, str) else [_shown_part(part) for part in content]


# --- Items -----------------------------------------------------------------------------------------------------------


class _Message(Part):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    id: _ItemId | None = None
    content: _Content

    without_effect = ITEM_WITHOUT_EFFECT

    def shown(self) -> Item:
        kind = "output_text" if self.role == "assistant" else "input_text"
        return {"role": self.role, "content": _shown_content(self.content, kind)}


def _check_arguments(text: str) -> str:
    try:
        parse_arguments(text, Counts())
    except ValueError as error:
        raise validation.invalid_value(str(error)) from None
    return text


class _Call(Part):
    type: Literal["function_call"]
    namespace: _OneWay = None
    is_async: _OneWay = Field(default=None, alias="async")
    async_: _OneWay = None
    """openai-python's name of "async"."""
    arguments: Annotated[Text, AfterValidator(_check_arguments)] = ""
    id: _ItemId | None = None
    call_id: _NotEmpty
    name: _NotEmpty

    without_effect = ITEM_WITHOUT_EFFECT

    def shown(self) -> Item:
        return {"call_id": self.call_id, "name": self.name, "arguments": self.arguments or "{}"}


class _Result(Part):
    type: Literal["function_call_output"]
    id: _ItemId | None = None
    call_id: _NotEmpty
    output: _Content

    without_effect = (*ITEM_WITHOUT_EFFECT, "name", "namespace")

    def shown(self) -> Item:
        output = self.output if isinstance(self.output, str) else _shown_content(self.output, "input_text")
        return {"call_id": self.call_id, "output": output}


def _check_sealed(text: str) -> str:
    try:
        _unsealed(text)
    except ValueError:
        raise validation.invalid_value("It was not made by this server; leave the item out.") from None
    return text


class _Reasoning(Part):
    type: Literal["reasoning"]
    id: _ItemId | None = None
    content: Annotated[
        tuple[Annotated[_ReasoningPart, Typed(("reasoning_text",), _expected(("reasoning_text",)))], ...],
        Many(max_length=MAX_MESSAGES),
    ] = ()
    encrypted_content: Annotated[Text, AfterValidator(_check_sealed)] | None = None
    summary: Annotated[tuple[object, ...], Many(max_length=MAX_MESSAGES)] = ()
    """Reasoning is shown whole; a summary of it says nothing more."""

    without_effect = ITEM_WITHOUT_EFFECT

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """Clients write "no content" in many ways."""
        given = super().given(value, info)
        if not given.get("content"):
            given.pop("content", None)
        return given

    def shown(self) -> Item:
        content = [_shown_text(part.type, part.text) for part in self.content]
        sealed_text = {} if self.encrypted_content is None else {"encrypted_content": self.encrypted_content}
        return {"summary": [], "content": content, **sealed_text}


class _Reference(Part):
    type: Literal["item_reference"] = "item_reference"
    id: _NotEmpty


_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_AnyItem = _Message | _Call | _Result | _Reasoning | _Reference


def _item_tag(value: object) -> str | None:
    """A message and a reference need no type."""
    if isinstance(value, dict) and value.get("type") is None:
        if "role" in value:
            return "<message>"
        return "<item_reference>" if value and set(value) <= {"id", "type"} else None
    return by_type(value)


def _shown(item: _AnyItem, where: str) -> Item:
    del where
    if isinstance(item, _Reference):
        return {"type": item.type, "id": item.id}
    identity = {} if item.id is None else {"id": item.id}
    return {"type": item.type, "status": "completed", **identity, **item.shown()}


_Given = Annotated[
    Annotated[_Message, Tag("<message>")]
    | Annotated[_Call, Tag("<function_call>")]
    | Annotated[_Result, Tag("<function_call_output>")]
    | Annotated[_Reasoning, Tag("<reasoning>")]
    | Annotated[_Reference, Tag("<item_reference>")],
    form(
        "an object",
        _item_tag,
        _TYPES,
        f"Items may be {', '.join(_TYPES)}: only functions are called, and this server reads text alone.",
    ),
]
_TextOrItems = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[tuple[Annotated[Item, Converted(_Given, _shown)], ...], Many(1, MAX_MESSAGES), Tag("<parts>")],
    form("one of a string or an array of objects", text_or_parts),
]


def _items(given: Any, where: str) -> tuple[Item, ...]:
    del where
    if isinstance(given, str):
        return ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]},)
    items: tuple[Item, ...] = given
    return items


Items = Annotated[tuple[Item, ...], Converted(_TextOrItems, _items)]
"""At least one item; a text is a user's message."""


# --- What items say --------------------------------------------------------------------------------------------------


def sealed(reasoning: str) -> str:
    """A reasoning text as `encrypted_content`, which clients pass back unread; it is shown too, and no secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def text_of(item: Item) -> str:
    """The text of a message, a result or a piece of reasoning."""
    content = item.get("output") if item["type"] == "function_call_output" else item.get("content")
    if isinstance(content, list) and content:
        return "\n".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    if item["type"] == "reasoning":
        return _unsealed(str(item.get("encrypted_content") or ""))
    return content if isinstance(content, str) else ""


def _unsealed(text: str) -> str:
    """The reasoning that `sealed` was given. Raises `ValueError` for anything else but an empty text."""
    if text and not text.startswith(_SEALED):
        raise ValueError("it was not made here")
    return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode("utf-8")
