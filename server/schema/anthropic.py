"""The request types of /v1/messages and /v1/messages/count_tokens, which are Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from inferd.server.schema.anthropic_parts import (
    ContextManagement,
    CustomTool,
    JsonFormat,
    OutputConfig,
    ThinkingField,
    ToolUseField,
)
from inferd.server.schema.anthropic_turns import System, Turns
from inferd.server.schema.generation import MAX_STOP_LENGTH, MAX_STOP_STRINGS, OUTPUT, PROMPT, SAMPLING, STOPPING, TOOLS
from inferd.server.schema.model import RequestModel, option, required
from inferd.server.schema.values import Flag, JsonObject, Many, Number, Only, Text, Whole

MAX_TOOLS = 1_024
"""Agents list the tools of every server that they are connected to."""

_RECOMMENDED = "the checkpoint's, else "
_NO_CONTAINER = "This server runs no code and keeps no files."
_NO_STATE = "No conversation is kept here; send all of it in 'messages'."


class CountTokensRequest(RequestModel):
    """A conversation, as the model would read it."""

    model: Text | None = option(
        "The name of the served model; any other is a 404.", unset="the served model", area=PROMPT
    )
    messages: Turns = required(
        "Turns of `user`, `assistant` and `system`: a text, or blocks of type `text`, `tool_use`, `tool_result` and "
        "`thinking`. Neighbours of one role are one turn. A `system` turn that the chat template does "
        "not read behind others becomes a `user` turn. A last turn of the assistant's is continued. "
        "`cache_control`, `signature`, `citations` and `is_error` have no effect.",
        area=PROMPT,
    )
    system: System | None = option(
        "The system prompt, a text or text blocks. A first line `x-anthropic-billing-header: ...`, which changes with "
        "every request of Claude Code's, is left out, so that prefixes are found again.",
        unset="none",
        area=PROMPT,
    )
    tools: Annotated[tuple[CustomTool, ...], Many(max_length=MAX_TOOLS)] | None = option(
        "Tools that the model may use and the caller runs. `strict` has the input follow `input_schema` token by "
        "token. Tools that Anthropic defines or runs are refused.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: ToolUseField | None = option(
        "`auto`, `any` (at least one tool is used), `tool` (the named one is, once) or `none`; what is required is "
        "enforced token by token. `disable_parallel_tool_use`: the answer ends with its first use of a tool.",
        unset="`auto`",
        area=TOOLS,
    )
    thinking: ThinkingField | None = option(
        "`enabled` and `adaptive` turn reasoning on if the chat template has a switch. A model that does not reason "
        "answers without. `budget_tokens` bounds the reasoning. `disabled` turns it off. If the template has no "
        "switch, it hides the reasoning, as `display: omitted` does.",
        unset="the template's own default",
        area=TOOLS,
    )
    output_config: OutputConfig | None = option(
        "`format`: a `json_schema` that the answer follows token by token. `effort` becomes the template's "
        "`reasoning_effort` (`max` becomes `xhigh`). It has no effect if the template has none.",
        unset="none",
        area=OUTPUT,
    )
    output_format: JsonFormat | None = option("The older name of `output_config.format`.", unset="none", area=OUTPUT)
    cache_control: JsonObject | None = option("Every prefix is cached, and found by its content.", has_effect=False)
    context_management: ContextManagement | None = option(
        "Only `clear_thinking_20251015` that keeps all is accepted.", has_effect=False
    )
    speed: Annotated[object, Only(("standard",), "There is one speed.")] | None = option(
        "Only `standard` is accepted.", has_effect=False
    )

    refused: ClassVar[Mapping[str, str]] = {
        "container": _NO_CONTAINER,
        "mcp_servers": "This server connects to no others; list the tools in 'tools' and run them yourself.",
        "diagnostics": "'usage.cache_read_input_tokens' says what was found in the cache.",
        "inference_geo": "This server stands in one place.",
        "user_profile_id": "Clients are identified by their key.",
        "workspace_id": "Clients are identified by their key.",
        "compaction": "Ask for a summary in a turn of its own.",
        "thread": _NO_STATE,
        "fallbacks": "One model is served.",
        "billing_policy": "Nothing is billed here.",
    }


class MessagesRequest(CountTokensRequest):
    """A conversation to answer, in Anthropic's form."""

    max_tokens: Whole = required(
        "Most tokens to generate; 0 reads the prompt into the cache. If the context holds fewer, the answer may end "
        "with `stop_reason` `model_context_window_exceeded`.",
        area=STOPPING,
        ge=0,
    )
    stop_sequences: (
        Annotated[
            tuple[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...],
            Many(max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = option("Strings that end the answer. `stop_sequence` names the string.", unset="none", area=STOPPING)
    stream: Flag | None = option(
        "Send the answer as server-sent events while it is generated.", unset="false", area=OUTPUT
    )
    temperature: Number | None = option(
        "0 always takes the likeliest token. A higher value makes the answer more random.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
        ge=0,
        le=1,
    )
    top_k: Whole | None = option(
        "Draw only among this many of the likeliest tokens. 0 means all.",
        unset=_RECOMMENDED + "0",
        area=SAMPLING,
        ge=0,
        le=2**31 - 1,
    )
    top_p: Number | None = option(
        "Draw only among the likeliest tokens whose probabilities add up to this value.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
        ge=0,
        le=1,
    )
    metadata: JsonObject | None = option("Clients are identified by their key.", has_effect=False)
    service_tier: Literal["auto", "standard_only"] | None = option("There is one tier.", has_effect=False)
