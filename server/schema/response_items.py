"""A response's `input`: a text, or items that a conversation is made of.

Each item is read into one form, whatever shorthand it came in, so that it can be stored, shown and sent back as it is.
What items say to the model is not this file's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Tag, ValidationInfo, WrapValidator

from inferd.server.errors import messages as errors
from inferd.server.schema.chat_messages import MAX_MESSAGES, PART_WITHOUT_EFFECT, text_or_parts
from inferd.server.schema.request_model import Kind, Part, Row, tell
from inferd.server.schema.response_calls import CALL_ITEMS
from inferd.server.schema.response_parts import (
    Content,
    Item,
    ItemPart,
    NotEmpty,
    shown_content,
    shown_text,
    unread_parts,
    unsealed,
)
from inferd.server.schema.response_tools import GivenTools
from inferd.server.schema.strict_json import check_writable
from inferd.server.schema.unread import NOUNS, SAY_IT, left_out
from inferd.server.schema.values import Converted, JsonObject, Kept, Many, Text, Typed, form, typed_object, union_of

ITEMS: Mapping[str, Row] = {
    "message": Row("enforced", "A message. An image or a file in an older one is left out, and the model reads so."),
    "function_call": Row("enforced", "A call of a function, with its `namespace` if it has one."),
    "function_call_output": Row("enforced", "Its output. The model reads in place of an image that it is left out."),
    "custom_tool_call": Row("enforced", "A call of a custom tool."),
    "custom_tool_call_output": Row("enforced", "As `function_call_output`."),
    "shell_call": Row("enforced", "A call of `shell`."),
    "shell_call_output": Row("enforced", "What its commands printed, and how they ended."),
    "local_shell_call": Row("enforced", "A call of `local_shell`."),
    "local_shell_call_output": Row("enforced", "What its command printed."),
    "apply_patch_call": Row("enforced", "A call of `apply_patch`."),
    "apply_patch_call_output": Row("enforced", "How it ended."),
    "tool_search_call": Row("enforced", "A search for tools."),
    "tool_search_output": Row("enforced", "The tools that it found. The model sees them from then on."),
    "additional_tools": Row("enforced", "Further tools."),
    "reasoning": Row("enforced", "Reasoning. `encrypted_content` of another server and a `summary` alone are offers."),
    "item_reference": Row("enforced", "A stored item, by its `id`."),
    **dict.fromkeys(
        (
            "file_search_call", "computer_call", "computer_call_output", "web_search_call", "image_generation_call",
            "code_interpreter_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
            "program", "program_output", "compaction",
        ),
        Row("offer", "Only OpenAI's servers write and read it. The model does not see it."),
    ),
    "compaction_trigger": Row("demand", "Nothing is compacted here: ask for a summary in a message."),
    "configuration_update": Row("demand", "Use 'reasoning' and 'text' of the request instead."),
}  # fmt: skip
"""Types of items."""
WITHIN: Mapping[str, Row] = {
    "reasoning_text": Row("enforced", "The model reads it, if its template shows earlier reasoning."),
    "exec": Row("enforced", "The model reads its command."),
    "exit": Row("enforced", "The model reads a code other than 0."),
    "timeout": Row("enforced", "The model reads it."),
    **dict.fromkeys(("create_file", "update_file", "delete_file"), Row("enforced", "The model reads its edit.")),
}
"""Types of objects within items, besides parts of content."""

CALLS = tuple(kind for kind in CALL_ITEMS if kind.endswith("_call"))
"""Types of calls of tools that the caller runs."""


class _Message(ItemPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def shown(self) -> Item:
        kind = "output_text" if self.role == "assistant" else "input_text"
        return {"role": self.role, "content": shown_content(self.content, kind)}


class _MoreTools(ItemPart):
    type: Literal["additional_tools"]
    role: Text = "developer"
    tools: GivenTools

    kinds: ClassVar[Mapping[str, Kind]] = {"role": "hint"}

    def shown(self) -> Item:
        return {"role": self.role, "tools": list(self.tools)}


def _own_seal(text: str, info: ValidationInfo) -> str | None:
    """None in place of what another server made."""
    try:
        unsealed(text)
    except ValueError:
        tell(info, "omitted_content", "The model does not see 'encrypted_content', which another server made")
        return None
    return text


class _ReasoningPart(Part):
    type: Literal["reasoning_text"]
    text: Text

    without_effect = PART_WITHOUT_EFFECT


class _Reasoning(ItemPart):
    type: Literal["reasoning"]
    content: Annotated[
        tuple[Annotated[_ReasoningPart, Typed(("reasoning_text",))], ...], Many(max_length=MAX_MESSAGES)
    ] = ()
    encrypted_content: Annotated[Text, AfterValidator(_own_seal)] | None = None
    summary: Annotated[tuple[object, ...], Many(max_length=MAX_MESSAGES)] = ()
    """Beside reasoning that is shown whole, a summary of it says nothing more."""

    kinds: ClassVar[Mapping[str, Kind]] = {"summary": "offer"}

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """Clients write "no content" in many ways."""
        given = super().given(value, info)
        if not given.get("content"):
            given.pop("content", None)
            if given.get("summary") and not given.get("encrypted_content"):
                tell(info, "omitted_content", "The model does not see a 'summary' of reasoning, which is sent alone")
        return given

    def shown(self) -> Item:
        content = [shown_text(part.type, part.text) for part in self.content]
        sealed_text = {} if self.encrypted_content is None else {"encrypted_content": self.encrypted_content}
        return {"summary": [], "content": content, **sealed_text}


class _Reference(Part):
    type: Literal["item_reference"] = "item_reference"
    id: NotEmpty


def _told_unread(item: JsonObject, info: ValidationInfo) -> JsonObject:
    text = f"The model does not see items of type '{item['type']}', which OpenAI's servers write"
    tell(info, "omitted_content", text)
    return item


_UNREAD = [kind for kind, row in ITEMS.items() if row.kind == "offer"]
_UnreadItem: Any = Annotated[typed_object(*_UNREAD), AfterValidator(check_writable), AfterValidator(_told_unread)]
_READ: Mapping[str, type[Part]] = {
    **CALL_ITEMS,
    "message": _Message,
    "additional_tools": _MoreTools,
    "reasoning": _Reasoning,
    "item_reference": _Reference,
}


def _name_of(value: JsonObject) -> object:
    """The type of an item. A message and a reference need none."""
    if value.get("type") is not None:
        return value["type"]
    return "message" if "role" in value else "item_reference" if value and set(value) <= {"id", "type"} else None


def _shown(item: ItemPart | _Reference | JsonObject, where: str) -> Item:
    del where
    if isinstance(item, dict):
        return item
    if isinstance(item, _Reference):
        return {"type": item.type, "id": item.id}
    identity = {} if item.id is None else {"id": item.id}
    return {"type": item.type, "status": "completed", **identity, **item.shown()}


_Given = union_of(ITEMS, {**_READ, **dict.fromkeys(_UNREAD, _UnreadItem)}, name_of=_name_of)
_TextOrItems = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[tuple[Annotated[Item, Converted(_Given, _shown)], ...], Many(1, MAX_MESSAGES), Tag("<parts>")],
    form("one of a string or an array of objects", text_or_parts),
]


def _items(given: Any, items: Any, where: str) -> tuple[Item, ...]:
    if isinstance(items, str):
        return ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": items}]},)
    newest = _newest(given)
    for i, j, kind in unread_parts(given):
        if i >= newest:
            raise errors.unsupported_value(f"{where}[{i}].content[{j}].type", kind, SAY_IT)
    made: tuple[Item, ...] = items
    return made


def _newest(given: Sequence[JsonObject]) -> int:
    """Index of the first item that is still to be answered. What follows a tool's output belongs to that."""
    for i in range(len(given) - 1, -1, -1):
        item = given[i]
        kind = str(item.get("type"))
        if kind.endswith("_output"):
            return len(given)
        if item.get("role") == "assistant" or kind.endswith("_call"):
            return i + 1
    return 0


def _telling(given: Any, read: Callable[[object], object], info: ValidationInfo) -> object:
    """Tells what is left out of items that are taken."""
    made = read(given)
    found = () if isinstance(given, str) else [NOUNS[kind] for _, _, kind in unread_parts(given)]
    if found:
        tell(info, "omitted_content", left_out(found))
    return made


Items = Annotated[tuple[Item, ...], Kept(_TextOrItems, _items), WrapValidator(_telling)]
"""At least one item; a text is a user's message."""
