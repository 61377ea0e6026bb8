"""The response object of /v1/responses, its items, and the answers about stored responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from inferd.server.errors.answer import Answer
from inferd.server.schema.answers.generation import CompletionTokensDetails, PromptTokensDetails, TokenLogprob
from inferd.server.schema.chat import ReasoningEffort, Verbosity

# --- Items of the output ---------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: Sequence[object]
    """Always empty."""
    logprobs: Sequence[TokenLogprob]
    """Log probabilities of the text's tokens. Empty unless `include` asks for them."""


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


ContentPart = Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: Sequence[OutputText]


class SealedReasoning(Answer, total=False):
    encrypted_content: str
    """The text in the form that clients send back. Only if `include` asks for it."""


class ReasoningItem(SealedReasoning):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Sequence[object]
    """Always empty, because the reasoning is shown whole."""
    content: Sequence[ReasoningText]


class FunctionCallItem(Answer):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    """The namespace of the function, if it has one."""
    arguments: str
    """Arguments as the model wrote them: JSON, unless the answer was cut off."""


class CustomCallItem(Answer):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str
    """The text for the tool. It follows the tool's grammar, unless the answer was cut off."""


class ShellAction(Answer):
    commands: Sequence[str]
    timeout_ms: int | None
    max_output_length: int | None


class ShellCallItem(Answer):
    """Commands for the caller to run."""

    id: str
    type: Literal["shell_call"]
    status: ItemStatus
    call_id: str
    action: ShellAction
    environment: None


class LocalShellAction(Answer):
    type: Literal["exec"]
    command: Sequence[str]
    env: Mapping[str, str]
    """Always empty."""
    timeout_ms: int | None
    user: None
    working_directory: str | None


class LocalShellCallItem(Answer):
    """A command for the caller to run."""

    id: str
    type: Literal["local_shell_call"]
    status: ItemStatus
    call_id: str
    action: LocalShellAction


class PatchOperation(Answer):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: NotRequired[str]
    """Absent if the file is deleted."""


class PatchCallItem(Answer):
    """A change of a file for the caller to make."""

    id: str
    type: Literal["apply_patch_call"]
    status: ItemStatus
    call_id: str
    operation: PatchOperation


class ToolSearchCallItem(Answer):
    """A search for tools, for the caller to make."""

    id: str
    type: Literal["tool_search_call"]
    status: ItemStatus
    call_id: str
    execution: Literal["client"]
    arguments: Mapping[str, object]


CallItem = FunctionCallItem | CustomCallItem | ShellCallItem | LocalShellCallItem | PatchCallItem | ToolSearchCallItem
OutputItem = Annotated[OutputMessage | ReasoningItem | CallItem, Field(discriminator="type")]

# --- The response ----------------------------------------------------------------------------------------------------

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseFailure(Answer):
    """The error of a response that failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str
    """Type of the error, as in the table of errors."""
    param: str | None


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseUsage(Answer):
    """Number of tokens."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseReasoning(Answer):
    effort: ReasoningEffort | None
    summary: Literal["auto", "concise", "detailed"] | None


class ResponseText(Answer):
    format: Mapping[str, object]
    """The format as the request wrote it."""
    verbosity: Verbosity


class ResponseRequest(Answer):
    """Fields of the request that the response repeats, with the defaults of those that were not given."""

    created_at: int
    """Unix time in seconds."""
    model: str
    """Name of the model, as the request wrote it."""
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: Mapping[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    temperature: float
    text: ResponseText
    tool_choice: str | Mapping[str, object]
    """The choice as the request wrote it."""
    tools: Sequence[Mapping[str, object]]
    """The tools as the request wrote them; a function with every key."""
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    seed: int
    """Seed of the answer, also if the server chose it."""
    system_fingerprint: str
    """Changes if the same request may get another answer."""


class ResponseObject(ResponseRequest):
    """A response as it is now."""

    id: str
    object: Literal["response"]
    status: ResponseStatus
    completed_at: int | None
    """Unix time of its end in seconds."""
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: Sequence[OutputItem]
    """Items of the answer. Empty until the response has ended."""
    usage: ResponseUsage | None
    """Null until the response has ended."""
    store: bool
    """Whether the response is stored, or will be."""
    stop_reason: str | int | None
    """Stop string or stop token id that ended the answer. Null if the model or a limit did."""


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


# --- Items before the output -----------------------------------------------------------------------------------------


class InputText(Answer):
    type: Literal["input_text"]
    text: str


class EarlierText(Answer):
    """Text of the assistant, as the request or an earlier response had it."""

    type: Literal["output_text"]
    text: str
    annotations: Sequence[object]
    logprobs: NotRequired[Sequence[TokenLogprob]]


class Refusal(Answer):
    type: Literal["refusal"]
    refusal: str


InputPart = Annotated[InputText | EarlierText | Refusal, Field(discriminator="type")]


class InputMessage(Answer):
    id: str
    type: Literal["message"]
    status: NotRequired[ItemStatus]
    """Absent if `input` was a text."""
    role: Literal["user", "assistant", "system", "developer"]
    content: Sequence[InputPart]


class FunctionOutput(Answer):
    """The result of a call."""

    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str | Sequence[InputPart]


@with_config(ConfigDict(extra="allow", use_attribute_docstrings=True))
class OtherItem(TypedDict):
    """An item of another type, as the request or an earlier response had it."""

    id: str
    type: str


InputItem = InputMessage | ReasoningItem | FunctionCallItem | FunctionOutput | OtherItem


class InputItemList(Answer):
    """A page of the items before a response's output."""

    object: Literal["list"]
    data: Sequence[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    """Whether more items follow."""
