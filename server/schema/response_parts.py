"""The common parts of the items of a conversation: ids, content, and keys that say nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from inferd.server.schema.kinds import Row
from inferd.server.schema.messages import MAX_MESSAGES, PART_WITHOUT_EFFECT, text_or_parts
from inferd.server.schema.model import Part
from inferd.server.schema.response_texts import Item
from inferd.server.schema.unread import NOUNS, SAY_IT, UnreadPart, omitted, part_tag
from inferd.server.schema.values import JsonObject, Many, Text, form

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
