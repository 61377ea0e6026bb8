"""The requests of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.schema.chat import MAX_THINKING_TOKENS
from inferd.server.schema.generation import CUT, OUTPUT, PROMPT, REQUEST, STOPPING, TOOLS, SharedFields
from inferd.server.schema.request_model import RequestModel, option, required, tell
from inferd.server.schema.response_items import Items
from inferd.server.schema.response_options import Included, Metadata, ReasoningOption, TextField, ToolChoiceOption
from inferd.server.schema.response_tools import GivenTools
from inferd.server.schema.values import Besides, Flag, JsonObject, Only, Text, Whole


def _told_truncation(value: str, info: ValidationInfo) -> str:
    if value == "auto":
        tell(info, "no_effect", "'truncation' has no effect: items that do not fit the context are refused, not cut")
    return value


class ResponsesRequest(SharedFields):
    """Items to answer. The items of an earlier response come first if one is named."""

    input: Items = required(
        "A text, or items of the types [below](#tools-and-items-of-responses). What an earlier answer gave in `output` "
        "can be sent back as it is.",
        area=PROMPT,
    )
    instructions: Text | None = option(
        "A system message before all items. Not carried over to later responses.", unset="none", area=PROMPT
    )
    previous_response_id: Text | None = option(
        "A stored response whose input and output come before `input`. 400 `previous_response_not_found` if no such "
        "response is stored for this key.",
        unset="none",
        area=PROMPT,
        min_length=1,
        max_length=256,
    )
    max_output_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, None)] = option(
        'Most tokens to generate, reasoning included; -1 is "not given". ' + CUT,
        unset="what the checkpoint recommends, else what the context holds",
        area=STOPPING,
    )
    text: TextField | None = option(
        "`format`: `text`, `json_object` or `json_schema`, as `response_format` of chat, but flat. `verbosity` has "
        "no effect, and `x-inferd-warning` says so for any value but `medium`.",
        unset="text",
        area=OUTPUT,
    )
    include: Included | None = option(
        "`message.output_text.logprobs` adds the log probabilities of the text's tokens. Tokens of reasoning and of "
        "calls have none. `reasoning.encrypted_content` adds the reasoning in the form that clients send back.",
        unset="neither",
        area=OUTPUT,
    )
    top_logprobs: Whole | None = option(
        "Number of alternatives to each token. Only if `include` asks for log probabilities.",
        unset="0",
        area=OUTPUT,
        ge=0,
        le=MAX_LOGPROBS,
    )
    background: Flag | None = option(
        "true: answer at once with the status `queued`, and generate whether the caller stays or not; to be polled and "
        "cancelled. Not with `stream`, nor with `store` false.",
        unset="false",
        area=REQUEST,
    )
    store: Flag | None = option(
        "Keep the finished response for `previous_response_id` and GET, in memory, until newer ones need the room "
        "(`--stored-responses`) or its time is over (`--stored-responses-ttl-s`). The answer says whether it was kept.",
        unset="true",
        area=REQUEST,
    )
    metadata: Metadata | None = option(
        "Kept and returned with the response. Keys have up to 64 characters.", unset="none", area=REQUEST
    )
    tools: GivenTools | None = option(
        "Tools that the model may call and the caller runs, of the types [below](#tools-and-items-of-responses). Tools "
        "that OpenAI's servers run are offers. `strict` as in chat, but false if it is not given.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: ToolChoiceOption | None = option(
        "As in chat; a tool is named flat, by `type` and `name`, or by its `type` alone if it has no name.",
        unset="`auto`",
        area=TOOLS,
    )
    parallel_tool_calls: Flag | None = option(
        "If false, the answer ends after its first call.", unset="true", area=TOOLS
    )
    reasoning: ReasoningOption | None = option(
        "`effort` as `reasoning_effort` of chat. `summary` is without effect: reasoning is shown whole, as the content "
        "of its item.",
        unset="the template's own default",
        area=TOOLS,
    )
    thinking_token_budget: Whole | None = option(
        "As in chat.", unset="no bound", area=TOOLS, ge=0, le=MAX_THINKING_TOKENS
    )
    stop_in_reasoning: Flag | None = option("As in chat.", unset="false", area=STOPPING)
    chat_template_kwargs: JsonObject | None = option(
        "Variables of the model's chat template, such as `enable_thinking`. A notice names those that it never reads.",
        unset="none",
        area=PROMPT,
    )
    truncation: Annotated[Literal["auto", "disabled"], AfterValidator(_told_truncation)] | None = option(
        "The server refuses items that are too long together and never drops one. `x-inferd-warning` says so for "
        "`auto`.",
        has_effect=False,
        kind="offer",
    )
    stream_options: JsonObject | None = option(
        "Usage comes with every response, and no event is ever padded.", has_effect=False, max_length=2
    )
    max_tool_calls: Whole | None = option(
        "It bounds the calls of hosted tools, and no answer has one.", has_effect=False
    )
    image: object = option("It says how images are read, and the model reads none.", has_effect=False)
    background_options: object = option(
        "A response in the background runs until it ends or is cancelled.", has_effect=False
    )

    offered: ClassVar[Mapping[str, str]] = {
        **SharedFields.offered,
        "context_management": "nothing is compacted, and items that do not fit the context are refused",
        "access_programs": "the server has none",
    }
    refused: ClassVar[Mapping[str, str]] = {
        **SharedFields.refused,
        "conversation": "Use 'previous_response_id', or send the items.",
        "prompt": "Prompts are not stored here; send 'instructions' and 'input'.",
        "messages": "Use 'input' instead.",
        "max_tokens": "Use 'max_output_tokens' instead.",
        "max_completion_tokens": "Use 'max_output_tokens' instead.",
        "response_format": "Use 'text' with a 'format' instead.",
        "reasoning_effort": "Use 'reasoning' with an 'effort' instead.",
        "logprobs": "Use 'include' with 'message.output_text.logprobs' instead.",
        "n": "Send the request again with another 'seed'.",
    }


class RetrieveQuery(RequestModel):
    """Query of a GET of one response."""

    include: Included | None = option("A response shows what its creation asked for.", has_effect=False)
    stream: Annotated[object, Only((False,), "A stored response is not streamed again.")] | None = option(
        "Only false is accepted.", has_effect=False, kind="demand"
    )

    refused: ClassVar[Mapping[str, str]] = {
        "starting_after": "A stored response is not streamed again.",
        "include_obfuscation": "A stored response is not streamed again.",
    }


class InputItemsQuery(RequestModel):
    """Query of a GET of a response's input items."""

    after: Text | None = option(
        "List only items after the one with this id.", unset="from the first", min_length=1, max_length=128
    )
    limit: Whole | None = option("Most items in one list.", unset="20", ge=1, le=100)
    order: Literal["asc", "desc"] | None = option("`asc` lists the oldest first, `desc` the newest.", unset="`desc`")
    include: Included | None = option("An item shows what its creation asked for.", has_effect=False)
