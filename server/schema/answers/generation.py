"""The answers of /v1/chat/completions and /v1/completions, and the parts that they share: the head, usage, log
probabilities, timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from inferd.server.errors.answer import Answer, TokenIds

EndReason = Literal["stop", "length", "repetition", "tool_calls"]
"""Why a choice ended. The server, not the engine, finds repetitions and tool calls."""


class AnswerHead(Answer):
    """Fields that an answer shares with all of its chunks."""

    created: int
    """Unix time in seconds."""
    model: str
    """Name of the model, as the request wrote it."""
    system_fingerprint: str
    """Changes if the same request may get another answer."""
    seed: int
    """Seed of the answer, also if the server chose it."""


class PromptTokensDetails(Answer):
    cached_tokens: int
    """Number of prompt tokens that the prefix cache had."""


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    """Number of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RequestTiming(Answer):
    """Timing of one choice, under vLLM's names. A value is null if its event did not happen."""

    time_to_first_token_ms: float | None
    """Milliseconds from the first step of the prompt to the first token."""
    queue_time_ms: float | None
    generation_time_ms: float | None
    """Milliseconds from the first token to the last."""
    mean_itl_ms: float | None
    """Mean milliseconds between two tokens."""
    tokens_per_second: float | None
    draft_tokens: int
    """Number of guessed tokens that steps verified for the answer."""
    accepted_draft_tokens: int
    """Number of these that were accepted, and so are in the answer."""
    not_speculated: str | None
    """The reason why nothing was guessed for the answer. Null if something might be."""
    cached_tokens: int
    """Number of prompt tokens that the prefix cache had."""
    not_cached: str | None
    """The reason why it had no more of the prompt. Null if no more could be used."""
    pool_tokens: int
    """Number of the cached tokens that were in memory when the request came."""
    loaded_tokens: int
    """Number of the cached tokens that were loaded from the KV directory for this request."""
    computed_tokens: int | None
    """Number of prompt tokens that were computed. Null if the answer has no token."""
    restarts: int
    """Number of times that the engine with the request died. Another engine then continued the answer."""


class Extra(Answer):
    """Fields of the whole answer, which only a finished request has."""

    metrics: NotRequired[RequestTiming | None]
    """Only if `include_metrics` is true. Null if the request has several choices."""


class ChunkTail(Extra):
    """Fields that follow the choices of a chunk."""

    usage: NotRequired[Usage | None]
    """Only if the stream includes usage. Null in each chunk but the last, except with `continuous_usage_stats`."""


class TopLogprob(Answer):
    """A likely token. Log probabilities have the natural logarithm as their base, and are at least -9999."""

    token: str
    logprob: float
    bytes: Sequence[int]
    """The token's UTF-8 bytes. A token may be a part of a character."""


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: Sequence[TopLogprob]
    """The most likely tokens in its place, likeliest first."""


class ChatLogprobs(Answer):
    """Log probabilities in the form of chat."""

    content: Sequence[TokenLogprob]
    refusal: None


class TextLogprobs(Answer):
    """Log probabilities in the form of completions: four lists of one length."""

    tokens: Sequence[str]
    """Texts of the tokens. A token that is a part of a character is written as in "bytes:\\xe2\\x96"."""
    token_logprobs: Sequence[float | None]
    """Null for the first token of an echoed prompt, which has no log probability."""
    top_logprobs: Sequence[dict[str, float] | None]
    """The most likely tokens in each place, and the token itself."""
    text_offset: Sequence[int]
    """Number of characters before each token."""


class RankedLogprob(Answer):
    """A token of a prompt, or a likely one in its place."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str


PromptLogprobs = Sequence[dict[str, RankedLogprob] | None]
"""For each prompt token: token id -> its log probability. Null for the first token."""


class TextTokens(Answer, total=False):
    """Token ids of a choice. Absent unless `return_token_ids` is true."""

    token_ids: TokenIds
    prompt_token_ids: TokenIds
    """In a stream only in the first chunk of the choice."""


class TextChoice(TextTokens):
    index: int
    """Choices are numbered from 0, first those of the first prompt."""
    text: str
    """Text of the answer, after that of the prompt if `echo` is true."""
    logprobs: TextLogprobs | None
    finish_reason: EndReason
    stop_reason: str | int | None
    """Stop string or stop token id that ended the choice. Null if the model or a limit did."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Only if the request asks for them."""


class TextHead(AnswerHead):
    """Fields that an answer shares with all of its chunks."""

    id: str
    object: Literal["text_completion"]


class Completion(TextHead, Extra):
    """Texts that continue the prompts."""

    choices: Sequence[TextChoice]
    usage: Usage


class TextChunkChoice(TextTokens):
    index: int
    text: str
    """New text."""
    logprobs: TextLogprobs | None
    finish_reason: EndReason | None
    """Null in each chunk of the choice but the last."""
    stop_reason: NotRequired[str | int | None]
    """Only in the last chunk of the choice."""


class CompletionChunk(TextHead, ChunkTail):
    """One event of a streamed answer."""

    choices: Sequence[TextChunkChoice]
    """One choice. Empty in the last chunk, which has the usage."""


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
