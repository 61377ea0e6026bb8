"""The events of a streamed response of /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from inferd.server.errors.answer import Answer
from inferd.server.errors.table import ErrorDetail
from inferd.server.schema.answers.generation import TokenLogprob
from inferd.server.schema.answers.responses import ContentPart, OutputItem, ResponseObject


class NumberedEvent(Answer):
    sequence_number: int
    """Number of events before this one."""


ResponseEventType = Literal[
    "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
]


class ResponseEvent(NumberedEvent):
    """The whole response as it is now."""

    type: ResponseEventType
    response: ResponseObject


class ErrorEvent(NumberedEvent):
    """An error, before the event of the failed response. Some clients read the one and some the other."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    error: ErrorDetail


class ItemEvent(NumberedEvent):
    """An item begins or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class GrowthEvent(NumberedEvent):
    """An item grows."""

    item_id: str
    output_index: int


class PartGrowthEvent(GrowthEvent):
    """A part of an item grows."""

    content_index: Literal[0]


class PartEvent(PartGrowthEvent):
    """A part begins or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: ContentPart


class TextDeltaEvent(PartGrowthEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: Sequence[TokenLogprob]
    """Log probabilities of the tokens since the last event. Empty unless `include` asks for them."""


class TextDoneEvent(PartGrowthEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: Sequence[TokenLogprob]


class ReasoningDeltaEvent(PartGrowthEvent):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(PartGrowthEvent):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(GrowthEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(GrowthEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDeltaEvent(GrowthEvent):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDoneEvent(GrowthEvent):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class CommandEvent(NumberedEvent):
    """A command of a `shell_call` begins or is done."""

    type: Literal["response.shell_call_command.added", "response.shell_call_command.done"]
    output_index: int
    command_index: int
    command: str


class CommandDeltaEvent(NumberedEvent):
    type: Literal["response.shell_call_command.delta"]
    output_index: int
    command_index: int
    delta: str


OutputEvent = (
    ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | InputDeltaEvent
    | InputDoneEvent
    | CommandEvent
    | CommandDeltaEvent
)
"""An event about the items of the output."""
StreamedEvent = Annotated[ResponseEvent | ErrorEvent | OutputEvent, Field(discriminator="type")]
"""Any event of a stream."""
