"""A response's `input`: a text, or items that a conversation is made of.

Each item is read into one form, whatever shorthand it came in, so that it can be stored, shown and sent back as it is.
What items say to the model is not this file's business.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag, ValidationInfo, WithJsonSchema, WrapValidator

from inferd.server.errors import table as errors
from inferd.server.errors import validation
from inferd.server.schema.caller_tool import TEXT_KEY
from inferd.server.schema.kinds import Kind, Row
from inferd.server.schema.messages import MAX_MESSAGES, PART_WITHOUT_EFFECT, text_or_parts
from inferd.server.schema.model import Part, tell
from inferd.server.schema.response_tools import GivenTools
from inferd.server.schema.unread import NOUNS, SAY_IT, UnreadPart, left_out, omitted, part_tag
from inferd.server.schema.values import Converted, JsonObject, Kept, Many, Text, Typed, Whole, by_type, form
from inferd.server.schema.writable import check_writable

Item = Mapping[str, object]
"""{"type": str, ...} in OpenAI's form, with "id" if the client gave one."""

ITEM_WITHOUT_EFFECT: tuple[str, ...] = (
    "status", "phase", "caller", "created_by", "internal_chat_message_metadata_passthrough", "provider_specific_fields",
    "cache_control",
)  # fmt: skip
"""Keys that an item of an earlier answer has, or that clients add for other servers."""
_SEALED = "inferd:"
"""Begins every `encrypted_content` that this server made."""

_ItemId = Annotated[Text, Field(min_length=1, max_length=128)]
_NotEmpty = Annotated[Text, Field(min_length=1)]
_Count = Annotated[Whole, Field(ge=-(2**53), le=2**53)]

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
    "reasoning": Row("enforced", "Reasoning. `encrypted_content` that another server made is an offer."),
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

_TEXTS = dict.fromkeys(("input_text", "output_text", "refusal"), Row("enforced", "The model reads it."))
PARTS: Mapping[str, Mapping[str, Row]] = {
    "message with no answer behind it": {**_TEXTS, **dict.fromkeys(NOUNS, Row("demand", SAY_IT))},
    "older message, output of a call": {
        **_TEXTS,
        **dict.fromkeys(NOUNS, Row("offer", "The model reads that it was left out.")),
    },
}
"""Kind of item -> type of a part of its content -> what is done with it."""
WITHIN: Mapping[str, Row] = {
    "reasoning_text": Row("enforced", "The model reads it, if its template shows earlier reasoning."),
    "exec": Row("enforced", "The model reads its command."),
    "exit": Row("enforced", "The model reads a code other than 0."),
    "timeout": Row("enforced", "The model reads it."),
    **dict.fromkeys(("create_file", "update_file", "delete_file"), Row("enforced", "The model reads its edit.")),
}
"""Types of objects within items, besides parts of content."""


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


_AnyPart = Annotated[
    Annotated[_TextPart, Tag("<input_text>")]
    | Annotated[_TextPart, Tag("<output_text>")]
    | Annotated[_RefusalPart, Tag("<refusal>")]
    | Annotated[UnreadPart, Tag("<unread>")],
    form("an object", part_tag, (*_TEXTS, *(kind for kind in NOUNS if kind.startswith("input_")))),
]
_Content = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[tuple[_AnyPart, ...], Many(max_length=MAX_MESSAGES), Tag("<parts>")],
    form("one of a string or an array of objects", text_or_parts),
]


_ReadPart = _TextPart | _RefusalPart | UnreadPart


def _shown_part(part: _ReadPart) -> Item:
    if isinstance(part, UnreadPart):
        return _shown_text("input_text", omitted(NOUNS[part.type]))
    if isinstance(part, _RefusalPart):
        return {"type": part.type, "refusal": part.refusal}
    return _shown_text(part.type, part.text)


def _shown_text(kind: str, text: str) -> Item:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _shown_content(content: str | Sequence[_ReadPart], kind: str) -> list[Item]:
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


class _CalledTool(Part):
    """Keys of calls and of their outputs."""

    id: _ItemId | None = None
    call_id: _NotEmpty

    without_effect = ITEM_WITHOUT_EFFECT


class _Call(_CalledTool):
    type: Literal["function_call"]
    name: _NotEmpty
    namespace: Text | None = None
    arguments: Text = ""

    without_effect = (*ITEM_WITHOUT_EFFECT, "async", "async_")

    def shown(self) -> Item:
        return {"call_id": self.call_id, **_named(self), "arguments": self.arguments or "{}"}


class _CustomCall(_CalledTool):
    type: Literal["custom_tool_call"]
    name: _NotEmpty
    namespace: Text | None = None
    input: Text

    without_effect = (*ITEM_WITHOUT_EFFECT, "async", "async_")

    def shown(self) -> Item:
        return {"call_id": self.call_id, **_named(self), "input": self.input}


def _named(call: _Call | _CustomCall) -> Item:
    return {"name": call.name, **({"namespace": call.namespace} if call.namespace else {})}


class _Result(Part):
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: _ItemId | None = None
    call_id: _NotEmpty | None = None
    """If it is not given, the last call before the output."""
    output: _Content

    without_effect = (*ITEM_WITHOUT_EFFECT, "name", "namespace")

    def shown(self) -> Item:
        output = self.output if isinstance(self.output, str) else _shown_content(self.output, "input_text")
        return {"call_id": self.call_id, "output": output}


def _as_dict(action: Part) -> dict[str, object]:
    """The keys of an action, for JSON."""
    given = {name: getattr(action, name) for name in action.names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


class _ShellAction(Part):
    commands: Annotated[tuple[Text, ...], Many(max_length=MAX_MESSAGES)]
    timeout_ms: _Count | None = None
    max_output_length: _Count | None = None


class _ShellCall(_CalledTool):
    type: Literal["shell_call"]
    action: _ShellAction

    without_effect = (*ITEM_WITHOUT_EFFECT, "environment")

    def shown(self) -> Item:
        return {"call_id": self.call_id, "action": _as_dict(self.action)}


class _ShellOutcome(Part):
    type: Literal["exit", "timeout"]
    exit_code: _Count | None = None


class _ShellOutput(Part):
    outcome: _ShellOutcome
    stdout: Text
    stderr: Text

    without_effect = ("created_by",)


class _ShellResult(_CalledTool):
    type: Literal["shell_call_output"]
    output: Annotated[tuple[_ShellOutput, ...], Many(max_length=MAX_MESSAGES)]
    max_output_length: _Count | None = None

    kinds: ClassVar[Mapping[str, Kind]] = {"max_output_length": "hint"}

    def shown(self) -> Item:
        output = [part.model_dump(exclude_none=True) for part in self.output]
        return {"call_id": self.call_id, "output": output, "max_output_length": self.max_output_length}


class _LocalAction(Part):
    type: Literal["exec"] = "exec"
    command: Annotated[tuple[Text, ...], Many(max_length=MAX_MESSAGES)]
    env: Annotated[JsonObject, AfterValidator(check_writable)] | None = None
    timeout_ms: _Count | None = None
    user: Text | None = None
    working_directory: Text | None = None

    kinds: ClassVar[Mapping[str, Kind]] = {"env": "hint", "user": "hint"}


class _LocalShellCall(_CalledTool):
    type: Literal["local_shell_call"]
    action: _LocalAction

    def shown(self) -> Item:
        return {"call_id": self.call_id, "action": {**_as_dict(self.action), "env": self.action.env or {}}}


class _LocalShellResult(Part):
    """Its `id` is the call's, as OpenAI has it; some clients send `call_id`."""

    type: Literal["local_shell_call_output"]
    id: _ItemId | None = None
    call_id: _NotEmpty | None = None
    output: Text

    without_effect = ITEM_WITHOUT_EFFECT

    def shown(self) -> Item:
        return {"call_id": self.call_id or self.id or "", "output": self.output}


class _Operation(Part):
    type: Literal["create_file", "update_file", "delete_file"]
    path: Text
    diff: Text | None = None


class _PatchCall(_CalledTool):
    type: Literal["apply_patch_call"]
    operation: _Operation

    def shown(self) -> Item:
        return {"call_id": self.call_id, "operation": self.operation.model_dump(exclude_none=True)}


class _PatchResult(_CalledTool):
    """Its `status` says how it ended."""

    type: Literal["apply_patch_call_output"]
    status: Literal["completed", "failed"] = "completed"
    output: Text | None = None

    without_effect = tuple(key for key in ITEM_WITHOUT_EFFECT if key != "status")

    def shown(self) -> Item:
        return {"call_id": self.call_id, "status": self.status, "output": self.output}


class _SearchCall(Part):
    type: Literal["tool_search_call"]
    id: _ItemId | None = None
    call_id: _NotEmpty | None = None
    arguments: Annotated[object, AfterValidator(check_writable)] = None
    execution: Literal["server", "client"] = "server"

    without_effect = ITEM_WITHOUT_EFFECT
    kinds: ClassVar[Mapping[str, Kind]] = {"execution": "hint"}

    def shown(self) -> Item:
        return {"call_id": self.call_id, "execution": self.execution, "arguments": self.arguments or {}}


class _SearchResult(Part):
    type: Literal["tool_search_output"]
    id: _ItemId | None = None
    call_id: _NotEmpty | None = None
    tools: GivenTools
    execution: Literal["server", "client"] = "server"

    without_effect = ITEM_WITHOUT_EFFECT
    kinds: ClassVar[Mapping[str, Kind]] = {"execution": "hint"}

    def shown(self) -> Item:
        return {"call_id": self.call_id, "execution": self.execution, "tools": list(self.tools)}


class _MoreTools(Part):
    type: Literal["additional_tools"]
    id: _ItemId | None = None
    role: Text = "developer"
    tools: GivenTools

    without_effect = ITEM_WITHOUT_EFFECT
    kinds: ClassVar[Mapping[str, Kind]] = {"role": "hint"}

    def shown(self) -> Item:
        return {"role": self.role, "tools": list(self.tools)}


def _own_seal(text: str, info: ValidationInfo) -> str | None:
    """None in place of what another server made."""
    try:
        _unsealed(text)
    except ValueError:
        tell(info, "omitted_content", "The model does not see 'encrypted_content', which another server made")
        return None
    return text


class _Reasoning(Part):
    type: Literal["reasoning"]
    id: _ItemId | None = None
    content: Annotated[
        tuple[Annotated[_ReasoningPart, Typed(("reasoning_text",))], ...],
        Many(max_length=MAX_MESSAGES),
    ] = ()
    encrypted_content: Annotated[Text, AfterValidator(_own_seal)] | None = None
    summary: Annotated[tuple[object, ...], Many(max_length=MAX_MESSAGES)] = ()
    """Reasoning is shown whole; a summary of it says nothing more."""

    without_effect = ITEM_WITHOUT_EFFECT
    kinds: ClassVar[Mapping[str, Kind]] = {"summary": "hint"}

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


def _told_unread(item: JsonObject, info: ValidationInfo) -> JsonObject:
    text = f"The model does not see items of type '{item['type']}', which OpenAI's servers write"
    tell(info, "omitted_content", text)
    return item


_UnreadItem = Annotated[
    JsonObject,
    AfterValidator(check_writable),
    AfterValidator(_told_unread),
    WithJsonSchema({"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}),
]
_AnyItem = (
    _Message | _Call | _CustomCall | _Result | _ShellCall | _ShellResult | _LocalShellCall | _LocalShellResult
    | _PatchCall | _PatchResult | _SearchCall | _SearchResult | _MoreTools | _Reasoning | _Reference | JsonObject
)  # fmt: skip


def _item_tag(value: object) -> str | None:
    """A message and a reference need no type."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        if "role" in value:
            return "<message>"
        return "<item_reference>" if value and set(value) <= {"id", "type"} else None
    row = ITEMS.get(kind) if isinstance(kind, str) else None
    tags = {"offer": "<unread>", "demand": "<refused>"}
    return by_type(value) if row is None else tags.get(row.kind) or by_type(value)


def _shown(item: _AnyItem, where: str) -> Item:
    del where
    if isinstance(item, dict):
        return item
    if isinstance(item, _Reference):
        return {"type": item.type, "id": item.id}
    identity = {} if item.id is None else {"id": item.id}
    return {"type": item.type, "status": "completed", **identity, **item.shown()}


def _refuse(item: JsonObject) -> JsonObject:
    raise validation.unsupported_type(str(item["type"]), ITEMS[str(item["type"])].about)


_Given = Annotated[
    Annotated[_Message, Tag("<message>")]
    | Annotated[_Call, Tag("<function_call>")]
    | Annotated[_CustomCall, Tag("<custom_tool_call>")]
    | Annotated[_Result, Tag("<function_call_output>")]
    | Annotated[_Result, Tag("<custom_tool_call_output>")]
    | Annotated[_ShellCall, Tag("<shell_call>")]
    | Annotated[_ShellResult, Tag("<shell_call_output>")]
    | Annotated[_LocalShellCall, Tag("<local_shell_call>")]
    | Annotated[_LocalShellResult, Tag("<local_shell_call_output>")]
    | Annotated[_PatchCall, Tag("<apply_patch_call>")]
    | Annotated[_PatchResult, Tag("<apply_patch_call_output>")]
    | Annotated[_SearchCall, Tag("<tool_search_call>")]
    | Annotated[_SearchResult, Tag("<tool_search_output>")]
    | Annotated[_MoreTools, Tag("<additional_tools>")]
    | Annotated[_Reasoning, Tag("<reasoning>")]
    | Annotated[_Reference, Tag("<item_reference>")]
    | Annotated[_UnreadItem, Tag("<unread>")]
    | Annotated[JsonObject, AfterValidator(_refuse), Tag("<refused>")],
    form("an object", _item_tag, tuple(ITEMS)),
]
_TextOrItems = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[tuple[Annotated[Item, Converted(_Given, _shown)], ...], Many(1, MAX_MESSAGES), Tag("<parts>")],
    form("one of a string or an array of objects", text_or_parts),
]


def _items(given: Any, items: Any, where: str) -> tuple[Item, ...]:
    if isinstance(items, str):
        return ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": items}]},)
    newest = _newest(given)
    for i, j, kind in _unread(given):
        if i >= newest and "output" not in given[i]:
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


def _unread(given: Sequence[JsonObject]) -> Iterator[tuple[int, int, str]]:
    """(item, part, type) of each part that the model cannot read."""
    for i, item in enumerate(given):
        content = item.get("content", item.get("output"))
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = str(part.get("type"))
            if kind in NOUNS:
                yield i, j, kind


def _telling(given: Any, read: Callable[[object], object], info: ValidationInfo) -> object:
    """Tells what is left out of items that are taken."""
    made = read(given)
    found = () if isinstance(given, str) else [NOUNS[kind] for _, _, kind in _unread(given)]
    if found:
        tell(info, "omitted_content", left_out(found))
    return made


Items = Annotated[tuple[Item, ...], Kept(_TextOrItems, _items), WrapValidator(_telling)]
"""At least one item; a text is a user's message."""


# --- What items say --------------------------------------------------------------------------------------------------


def sealed(reasoning: str) -> str:
    """A reasoning text as `encrypted_content`, which clients pass back unread; it is shown too, and no secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


CALLS = tuple(kind for kind, row in ITEMS.items() if row.kind == "enforced" and kind.endswith("_call"))
"""Types of calls of tools that the caller runs."""


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
            return _unsealed(str(item.get("encrypted_content") or ""))
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


def _unsealed(text: str) -> str:
    """The reasoning that `sealed` was given. Raises `ValueError` for anything else but an empty text."""
    if text and not text.startswith(_SEALED):
        raise ValueError("it was not made here")
    return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode("utf-8")
