"""Anthropic's content blocks: what a turn of each role may hold, and what the model reads of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from inferd.server.schema.anthropic_tools import Tool
from inferd.server.schema.chat_messages import text_or_parts
from inferd.server.schema.request_model import Part, Row
from inferd.server.schema.values import JsonObject, Many, Text, form, typed_object, union_of

_PLACED = (
    "In the newest message of the user it is refused, unless a tool's result is there too. Elsewhere it is left out."
)
SOURCES: Mapping[str, Row] = {
    "text": Row("enforced", "The model reads `data`."),
    "content": Row("enforced", "The model reads the texts of `content`."),
    "base64": Row("demand", _PLACED),
    "url": Row("demand", _PLACED),
    "file": Row("demand", _PLACED),
}
"""Type of a document's or an image's source -> what is done with it."""

_SAYS = "The model reads the text that it holds."
_UNREADABLE = "It holds no text for the model, and is left out."
_SERVERS: Mapping[str, Row] = {
    "server_tool_use": Row("offer", _UNREADABLE),
    "mcp_tool_use": Row("offer", _UNREADABLE),
    "redacted_thinking": Row("offer", _UNREADABLE),
    "container_upload": Row("offer", _UNREADABLE),
    "web_search_tool_result": Row("enforced", _SAYS),
    "web_fetch_tool_result": Row("enforced", _SAYS),
    "advisor_tool_result": Row("enforced", _SAYS),
    "code_execution_tool_result": Row("enforced", _SAYS),
    "bash_code_execution_tool_result": Row("enforced", _SAYS),
    "text_editor_code_execution_tool_result": Row("enforced", _SAYS),
    "mcp_tool_result": Row("enforced", _SAYS),
    "tool_search_tool_result": Row("enforced", "The tools that it names are shown to the model."),
    "compaction": Row("enforced", "The model reads the summary. Its `tool_changes` hold."),
    "fallback": Row("hint", "No model reads it at Anthropic either."),
    "mcp_tool_listing": Row("hint", "No model reads it at Anthropic either."),
}
"""Blocks that Anthropic's servers wrote, and that clients send back."""

_SHARED: Mapping[str, Row] = {
    "text": Row("enforced", "The model reads it."),
    "document": Row("enforced", "The model reads its title, its context and its text. `source` says more."),
    "search_result": Row("enforced", "The model reads its title, its source and its text."),
    "tool_reference": Row("enforced", "The model is shown the tool from here on, and reads that it was loaded."),
    "tool_addition": Row("enforced", "The model is shown the tool from here on, and reads that it was loaded."),
    "tool_removal": Row("enforced", "The model is no longer shown the tool, and reads that it was removed."),
    **_SERVERS,
}
_ASSISTANT_ALONE = "Only the assistant writes it. Put it into a turn of the assistant's."
USER_BLOCKS: Mapping[str, Row] = {
    **_SHARED,
    "tool_result": Row("enforced", "The model reads it as the answer of the tool."),
    "image": Row("demand", _PLACED),
    "tool_use": Row("demand", _ASSISTANT_ALONE),
    "thinking": Row("demand", _ASSISTANT_ALONE),
}
ASSISTANT_BLOCKS: Mapping[str, Row] = {
    **_SHARED,
    "thinking": Row("enforced", "The model reads it as its reasoning, if the chat template shows earlier reasoning."),
    "tool_use": Row("enforced", "The model reads it as its call."),
    "image": Row("offer", "The model reads that it was left out."),
    "tool_result": Row("demand", "Only the user answers for tools. Put it into a turn of the user's."),
}
SYSTEM_BLOCKS: Mapping[str, Row] = {
    "text": _SHARED["text"],
    "tool_addition": _SHARED["tool_addition"],
    "tool_removal": _SHARED["tool_removal"],
}
RESULT_BLOCKS: Mapping[str, Row] = {
    "text": _SHARED["text"],
    "document": _SHARED["document"],
    "search_result": _SHARED["search_result"],
    "tool_reference": _SHARED["tool_reference"],
    "image": Row("offer", "The model reads that it was left out."),
    "browser_state": Row("enforced", _SAYS),
}
"""Type of a block -> what is done with it, in a turn of the user, the assistant, the system, and in a `tool_result`."""

# What SDKs send back of an answer they were given, and what changes nothing here.
_TOOL_MARKS = ("cache_control", "caller", "toolset_name")
_FORMS = "one of a string or an array of objects"

NotEmpty = Annotated[Text, Field(min_length=1)]


def content_of(block: Any, min_length: int = 0) -> Any:
    """A text, or blocks."""
    blocks = Annotated[tuple[block, ...], Many(min_length), Tag("<parts>")]
    return Annotated[Annotated[Text, Tag("<string>")] | blocks, form(_FORMS, text_or_parts)]


# --- Blocks ----------------------------------------------------------------------------------------------------------


class TextBlock(Part):
    type: Literal["text"]
    text: Text

    without_effect = ("cache_control", "citations")


Texts = content_of(union_of({"text": _SHARED["text"]}, {"text": TextBlock}, rule="Only texts are taken here."))


class ThinkingBlock(Part):
    """The signature proves nothing here: any client may write what the model said."""

    type: Literal["thinking"]
    thinking: Text

    without_effect = ("signature",)


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: NotEmpty
    name: NotEmpty
    input: JsonObject

    without_effect = _TOOL_MARKS


class _TextSource(Part):
    type: Literal["text"]
    data: Text

    without_effect = ("media_type",)


class ImageBlock(Part):
    type: Literal["image"]
    source: JsonObject

    without_effect = ("cache_control", "transformations")


class _ContentSource(Part):
    type: Literal["content"]
    content: content_of(  # type: ignore[valid-type]
        union_of({"text": _SHARED["text"], "image": Row("demand", _PLACED)}, {"text": TextBlock, "image": ImageBlock})
    )


SOURCE_PARTS: Mapping[str, Any] = {
    "text": _TextSource,
    "content": _ContentSource,
    **{kind: typed_object(kind) for kind in ("base64", "url", "file")},
}


class _Cited(Part):
    """A block whose `citations.enabled` asks for an answer that cites it."""

    offered = {"citations": "answers cite nothing"}  # noqa: RUF012
    without_effect = ("cache_control",)

    @classmethod
    def is_asked(cls, offered: object) -> bool:
        return bool(offered.get("enabled") if isinstance(offered, dict) else offered)


class DocumentBlock(_Cited):
    type: Literal["document"]
    source: union_of(SOURCES, SOURCE_PARTS)  # type: ignore[valid-type]
    title: Text | None = None
    context: Text | None = None


class SearchResultBlock(_Cited):
    type: Literal["search_result"]
    source: Text
    title: Text
    content: Texts  # type: ignore[valid-type]


class ToolReferenceBlock(Part):
    type: Literal["tool_reference"]
    tool_name: NotEmpty

    without_effect = ("cache_control",)


class NamedTool(Part):
    type: Literal["tool_reference"]
    name: NotEmpty


class DefinedTool(Part):
    type: Literal["tool_definition"]
    definition: Tool


_ON_SERVER = Row("offer", "This server connects to no others.")
TOOL_CHANGES: Mapping[str, Row] = {
    "tool_reference": Row("enforced", "A tool of `tools`, or one that a message has defined."),
    "tool_definition": Row("enforced", "A tool as in `tools`."),
    "mcp_tool_reference": _ON_SERVER,
    "mcp_toolset_reference": _ON_SERVER,
}
"""Type of the `tool` of a `tool_addition` or a `tool_removal` -> what is done with it."""


CHANGE_PARTS: Mapping[str, Any] = {
    "tool_reference": NamedTool,
    "tool_definition": DefinedTool,
    **{kind: typed_object(kind) for kind in ("mcp_tool_reference", "mcp_toolset_reference")},
}


class ToolChangeBlock(Part):
    type: Literal["tool_addition", "tool_removal"]
    tool: union_of(TOOL_CHANGES, CHANGE_PARTS)  # type: ignore[valid-type]

    without_effect = ("cache_control",)


class CompactionBlock(Part):
    type: Literal["compaction"]
    content: Text | None = None
    tool_changes: Annotated[tuple[ToolChangeBlock, ...], Many()] = ()

    without_effect = ("cache_control", "encrypted_content", "signature")


_RESULTS = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_reference": ToolReferenceBlock,
    "image": ImageBlock,
    "browser_state": typed_object("browser_state"),
}


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: NotEmpty
    content: content_of(union_of(RESULT_BLOCKS, _RESULTS)) = ()  # type: ignore[valid-type]

    without_effect = (*_TOOL_MARKS, "is_error")


BLOCKS: Mapping[str, Any] = {
    **{kind: typed_object(kind) for kind in _SERVERS},
    "compaction": CompactionBlock,
    "browser_state": typed_object("browser_state"),
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_reference": ToolReferenceBlock,
    "tool_addition": ToolChangeBlock,
    "tool_removal": ToolChangeBlock,
}
"""Type of a block -> what it is read as. What Anthropic's servers wrote is any object."""


def _union(rows: Mapping[str, Row], *refused: str, rule: str = "") -> Any:
    return union_of(rows, {kind: BLOCKS[kind] for kind in rows if kind not in refused}, rule=rule)


CONTENT: Mapping[str, Any] = {
    "user": content_of(_union(USER_BLOCKS, "tool_use", "thinking"), 1),
    "assistant": content_of(_union(ASSISTANT_BLOCKS, "tool_result")),
    "system": content_of(_union(SYSTEM_BLOCKS, rule="Only texts and changes of tools are taken here."), 1),
}
"""Role of a turn -> its content."""
