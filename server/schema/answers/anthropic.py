"""The answers of /v1/messages, in the format of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from inferd.server.errors.answer import Answer
from inferd.server.errors.anthropic import AnthropicError

# --- Content blocks --------------------------------------------------------------------------------------------------


class TextBlock(Answer):
    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """Reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Digest of the text, which the server never checks. Empty while the block grows."""


class ToolUseBlock(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: object
    """Arguments as the model wrote them. If they were cut off, their complete part."""


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]

# --- Messages --------------------------------------------------------------------------------------------------------

StopReason = Literal["end_turn", "tool_use", "stop_sequence", "max_tokens", "model_context_window_exceeded"]


class MessageStop(Answer):
    """The end of a message. Both fields are null until then."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    """Stop sequence that ended the message. Otherwise null."""


class OutputTokensDetails(Answer):
    thinking_tokens: int


class MessageUsage(Answer):
    """Number of tokens."""

    input_tokens: int
    """Number of prompt tokens that the prefix cache did not have."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Number of prompt tokens that the prefix cache had."""
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(MessageStop):
    """An answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    """Name of the model, as the request wrote it."""
    content: Sequence[ContentBlock]
    usage: MessageUsage
    seed: int
    """Seed of the answer, also if the server chose it."""
    system_fingerprint: str
    """Changes if the same request may get another answer."""


# --- Events of a stream ----------------------------------------------------------------------------------------------


class TextBlockDelta(Answer):
    type: Literal["text_delta"]
    text: str


class ThinkingBlockDelta(Answer):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(Answer):
    type: Literal["input_json_delta"]
    partial_json: str


class SignatureDelta(Answer):
    type: Literal["signature_delta"]
    signature: str


BlockDelta = Annotated[
    TextBlockDelta | ThinkingBlockDelta | InputJsonDelta | SignatureDelta, Field(discriminator="type")
]


class MessageStartEvent(Answer):
    type: Literal["message_start"]
    message: Message
    """The message without content."""


class BlockStartEvent(Answer):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock
    """The block without content."""


class BlockDeltaEvent(Answer):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class BlockStopEvent(Answer):
    type: Literal["content_block_stop"]
    index: int


class MessageDeltaEvent(Answer):
    type: Literal["message_delta"]
    delta: MessageStop
    usage: MessageUsage


class MessageStopEvent(Answer):
    type: Literal["message_stop"]


class PingEvent(Answer):
    """Sent behind `message_start`, and when nothing else was sent for some time."""

    type: Literal["ping"]


MessageEvent = (
    MessageStartEvent | BlockStartEvent | BlockDeltaEvent | BlockStopEvent | MessageDeltaEvent | MessageStopEvent
)
"""An event that a rendering makes of the answer."""
StreamedEvent = Annotated[MessageEvent | PingEvent | AnthropicError, Field(discriminator="type")]
"""Any event of a stream."""
