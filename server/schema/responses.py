"""The wire types of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.schema.chat import MAX_THINKING_TOKENS
from inferd.server.schema.fields import RequestFields, wire
from inferd.server.schema.generation import OUTPUT, PROMPT, REQUEST, STOPPING, TOOLS, SharedFields
from inferd.server.schema.kinds import Anything, Array, Boolean, Choice, Integer, Json, Only, OrNotGiven, Text
from inferd.server.schema.response_items import Item, Items
from inferd.server.schema.response_options import (
    AskedChoice,
    Included,
    Metadata,
    ReasoningObject,
    ReasoningOption,
    TextObject,
    TextOption,
    ToolChoiceOption,
    Tools,
)

_FUNCTIONS_ALONE = "No hosted tools run here: functions are called by the caller."


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(SharedFields):
    """Items to be answered, after those of an earlier response where one is named."""

    input: tuple[Item, ...] = wire(
        Items(),
        "A text, or items: messages, function calls and their outputs, reasoning, and references to stored items by "
        "`id`. What an earlier answer gave in `output` can be sent back as it is.",
        required=True,
        area=PROMPT,
    )
    instructions: str | None = wire(
        Text(), "A system message before all items. Not carried over to later responses.", unset="none", area=PROMPT
    )
    previous_response_id: str | None = wire(
        Text(1, 256),
        "A stored response, whose input and output come before `input`. 400 `previous_response_not_found` where it is "
        "no longer, or was never, stored for this key.",
        unset="none",
        area=PROMPT,
    )
    max_output_tokens: int | None = wire(
        OrNotGiven(Integer(1), (-1,)),
        'Most tokens to generate, reasoning included; -1 is "not given". More than the context holds beside the prompt '
        "is refused.",
        unset="what the checkpoint recommends, else what the context holds",
        area=STOPPING,
    )
    text: TextOption | None = wire(  # noqa: RUF009  # it makes a dataclass field
        TextObject(),
        "`format`: `text`, `json_object` or `json_schema`, as `response_format` of chat, but flat. `verbosity` has "
        "no effect, and `x-inferd-warning` says so for any value but `medium`.",
        unset="text",
        area=OUTPUT,
    )
    include: tuple[str, ...] | None = wire(
        Array(Included(), max_length=16),
        "`message.output_text.logprobs`: log probabilities of the text's tokens; where the model reasons or calls, of "
        "those that came with text. `reasoning.encrypted_content`: the reasoning once more, in the form that clients "
        "pass back.",
        unset="neither",
        area=OUTPUT,
    )
    top_logprobs: int | None = wire(
        Integer(0, MAX_LOGPROBS),
        "With so many alternatives to each token; only where `include` asks for log probabilities.",
        unset="0",
        area=OUTPUT,
    )
    background: bool | None = wire(
        Boolean(),
        "true: answer at once with the status `queued`, and generate whether the caller stays or not; to be polled and "
        "cancelled. Not with `stream`, nor with `store` false.",
        unset="false",
        area=REQUEST,
    )
    store: bool | None = wire(
        Boolean(),
        "Keep the finished response for `previous_response_id` and GET, in memory, until newer ones need the room "
        "(`--stored-responses`) or its time is over (`--stored-responses-ttl-s`). The answer says whether it was kept.",
        unset="true",
        area=REQUEST,
    )
    metadata: Mapping[str, object] | None = wire(
        Metadata(), "Kept and returned with the response: keys of up to 64 characters.", unset="none", area=REQUEST
    )
    tools: tuple[Mapping[str, object], ...] | None = wire(
        Tools(),
        "Functions that the model may call; hosted tools are refused. A `web_search` with `external_web_access` false, "
        "which Codex sends, has no effect. `strict` as in chat, and false where not given.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: AskedChoice | None = wire(  # noqa: RUF009  # it makes a dataclass field
        ToolChoiceOption(), "As in chat; a function is named flat, by `type` and `name`.", unset="`auto`", area=TOOLS
    )
    parallel_tool_calls: bool | None = wire(
        Boolean(), "false: the answer ends with its first call.", unset="true", area=TOOLS
    )
    reasoning: ReasoningOption | None = wire(  # noqa: RUF009  # it makes a dataclass field
        ReasoningObject(),
        "`effort` as `reasoning_effort` of chat. `summary` is without effect: reasoning is shown whole, as the content "
        "of its item.",
        unset="the template's own default",
        area=TOOLS,
    )
    thinking_token_budget: int | None = wire(
        Integer(0, MAX_THINKING_TOKENS), "As in chat.", unset="no bound", area=TOOLS
    )
    chat_template_kwargs: Mapping[str, object] | None = wire(
        Json(), "Switches of the model's chat template, such as `enable_thinking`.", unset="none", area=PROMPT
    )
    truncation: str | None = wire(
        Choice(("auto", "disabled")), "What does not fit is refused: no item is ever dropped.", has_effect=False
    )
    stream_options: Mapping[str, object] | None = wire(
        Json(2), "Usage comes with every response, and no event is ever padded.", has_effect=False
    )
    background_options: object = wire(
        Anything(), "A response in the background runs until it ends or is cancelled.", has_effect=False
    )

    refused: ClassVar[Mapping[str, str]] = {
        **SharedFields.refused,
        "conversation": "Use 'previous_response_id', or send the items.",
        "prompt": "Prompts are not stored here; send 'instructions' and 'input'.",
        "max_tool_calls": _FUNCTIONS_ALONE,
        "context_management": "Nothing is compacted; what does not fit is refused.",
        "access_programs": "There are none.",
        "image": "This model reads text.",
        "messages": "Use 'input' instead.",
        "max_tokens": "Use 'max_output_tokens' instead.",
        "max_completion_tokens": "Use 'max_output_tokens' instead.",
        "response_format": "Use 'text' with a 'format' instead.",
        "reasoning_effort": "Use 'reasoning' with an 'effort' instead.",
        "logprobs": "Use 'include' with 'message.output_text.logprobs' instead.",
        "n": "Send the request again with another 'seed'.",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveQuery(RequestFields):
    """The query of a GET of one response."""

    include: tuple[str, ...] | None = wire(
        Array(Included(), max_length=16),
        "What a response shows was settled when it was made.",
        has_effect=False,
    )
    stream: object = wire(
        Only((False,), "A stored response is not streamed again."), "Only false is accepted.", has_effect=False
    )

    refused: ClassVar[Mapping[str, str]] = {
        "starting_after": "A stored response is not streamed again.",
        "include_obfuscation": "A stored response is not streamed again.",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class InputItemsQuery(RequestFields):
    """The query of a GET of a response's input items."""

    after: str | None = wire(Text(1, 128), "List the items that come after this one's id.", unset="from the first")
    limit: int | None = wire(Integer(1, 100), "Most items in one list.", unset="20")
    order: str | None = wire(Choice(("asc", "desc")), "Oldest or newest first.", unset="`desc`")
    include: tuple[str, ...] | None = wire(
        Array(Included(), max_length=16), "What an item shows was settled when it was made.", has_effect=False
    )
