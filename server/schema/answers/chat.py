"""The answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from inferd.server.errors.answer import Answer, TokenIds
from inferd.server.schema.answers.generation import (
    AnswerHead,
    ChatLogprobs,
    ChunkTail,
    EndReason,
    Extra,
    PromptLogprobs,
    Usage,
)


class CalledFunction(Answer):
    name: str
    arguments: str
    """Arguments as the model wrote them: JSON, unless the answer was cut off."""


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CustomInput(Answer):
    name: str
    input: str
    """The text for the tool. It follows the tool's grammar, unless the answer was cut off."""


class CustomToolCall(Answer):
    """A call of a `custom` tool."""

    id: str
    type: Literal["custom"]
    custom: CustomInput


class Reasoning(Answer, total=False):
    """The reasoning before an answer, under both names that clients read. Absent if there is none."""

    reasoning: str
    reasoning_content: str


class ChatMessage(Reasoning):
    role: Literal["assistant"]
    content: str | None
    """Null if the message has only calls."""
    refusal: None
    tool_calls: NotRequired[Sequence[ToolCall | CustomToolCall]]


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason
    stop_reason: str | int | None
    """Stop string or stop token id that ended the choice. Null if the model or a limit did."""
    token_ids: NotRequired[TokenIds]
    """Only if `return_token_ids` is true."""


class ChatPrompt(Answer, total=False):
    """Parts of the prompt. Absent unless the request asks for them."""

    prompt_token_ids: TokenIds
    """Only if `return_token_ids` is true."""
    prompt_logprobs: PromptLogprobs


class ChatCompletion(AnswerHead, ChatPrompt, Extra):
    """An answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    choices: Sequence[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    name: NotRequired[str]
    """Only in the first chunk of a call."""
    arguments: str
    """New text of the arguments."""


class ToolCallDelta(Answer):
    index: int
    """Index among the calls of the choice."""
    id: NotRequired[str]
    """Only in the first chunk of a call, as `type`."""
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class CustomInputDelta(Answer):
    name: NotRequired[str]
    """Only in the first chunk of a call."""
    input: str
    """New text of the input."""


class CustomToolCallDelta(Answer):
    """New text of a call of a `custom` tool."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["custom"]]
    custom: CustomInputDelta


class ChatDelta(Reasoning, total=False):
    """New parts of the message."""

    role: Literal["assistant"]
    """Only in the first chunk of a choice, as `refusal`."""
    content: str | None
    refusal: None
    tool_calls: Sequence[ToolCallDelta | CustomToolCallDelta]


class ChatChunkChoice(Answer):
    index: int
    logprobs: ChatLogprobs | None
    delta: ChatDelta
    finish_reason: EndReason | None
    """Null in each chunk of the choice but the last."""
    stop_reason: NotRequired[str | int | None]
    """Only in the last chunk of the choice."""
    token_ids: NotRequired[TokenIds]
    """Only if `return_token_ids` is true."""


class ChatChunkHead(AnswerHead):
    """Fields that all chunks of a stream share."""

    id: str
    object: Literal["chat.completion.chunk"]


class ChatChunkTail(ChunkTail):
    """Fields that follow the choices of a chunk."""

    prompt_token_ids: NotRequired[TokenIds]
    """Only in the first chunk, if `return_token_ids` is true."""


class ChatCompletionChunk(ChatChunkHead, ChatChunkTail):
    """One event of a streamed answer."""

    choices: Sequence[ChatChunkChoice]
    """One choice. Empty in the last chunk, which has the usage."""
