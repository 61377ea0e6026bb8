"""The request types of /v1/messages and /v1/messages/count_tokens, which are Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.server.schema.anthropic_parts import (
    ContextManagement,
    CustomTool,
    JsonFormat,
    Output,
    OutputConfig,
    Thinking,
    ThinkingConfig,
    ToolUse,
    ToolUseKind,
)
from inferd.server.schema.anthropic_turns import System, Turns
from inferd.server.schema.fields import RequestFields, wire
from inferd.server.schema.generation import MAX_STOP_LENGTH, MAX_STOP_STRINGS, OUTPUT, PROMPT, SAMPLING, STOPPING, TOOLS
from inferd.server.schema.kinds import Array, Boolean, Choice, Decimal, Integer, Json, Only, Text
from inferd.server.schema.messages import Message
from inferd.server.schema.structured import AnswerFormat

MAX_TOOLS = 1_024
"""Agents list the tools of every server that they are connected to."""

_RECOMMENDED = "the checkpoint's, else "
_NO_CONTAINER = "This server runs no code and keeps no files."
_NO_STATE = "No conversation is kept here; send all of it in 'messages'."


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokensRequest(RequestFields):
    """A conversation as the model would read it."""

    model: str | None = wire(
        Text(), "The name of the served model; any other is a 404.", unset="the served model", area=PROMPT
    )
    messages: tuple[Message, ...] = wire(
        Turns(),
        "Turns of `user`, `assistant` and `system`: a text, or blocks of type `text`, `tool_use`, `tool_result` and "
        "`thinking`. Neighbours of one role are one turn. A `system` turn that the chat template does "
        "not read behind others is said by the user. A last turn of the assistant's is continued. "
        "`cache_control`, `signature`, `citations` and `is_error` have no effect.",
        required=True,
        area=PROMPT,
    )
    system: str | None = wire(
        System(),
        "The system prompt, a text or text blocks. A first line `x-anthropic-billing-header: ...`, which changes with "
        "every request of Claude Code's, is left out, so that prefixes are found again.",
        unset="none",
        area=PROMPT,
    )
    tools: tuple[Mapping[str, object], ...] | None = wire(
        Array(CustomTool(), max_length=MAX_TOOLS),
        "Tools that the model may use and the caller runs. `strict` has the input follow `input_schema` token by "
        "token. Tools that Anthropic defines or runs are refused.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: ToolUse | None = wire(  # noqa: RUF009  # it makes a dataclass field
        ToolUseKind(),
        "`auto`, `any` (at least one tool is used), `tool` (the named one is, once) or `none`; what is required is "
        "enforced token by token. `disable_parallel_tool_use`: the answer ends with its first use of a tool.",
        unset="`auto`",
        area=TOOLS,
    )
    thinking: Thinking | None = wire(  # noqa: RUF009
        ThinkingConfig(),
        "`enabled` and `adaptive` turn reasoning on where the chat template has a switch, and a model that does not "
        "reason answers without; `budget_tokens` is the most that it reasons. `disabled` turns it off or, where there "
        "is no switch, hides it, as `display: omitted` does.",
        unset="the template's own default",
        area=TOOLS,
    )
    output_config: Output | None = wire(  # noqa: RUF009
        OutputConfig(),
        "`format`: a `json_schema` that the answer follows token by token. `effort`: the template's "
        "`reasoning_effort`, where it has one (`max` is its `xhigh`); else it has no effect.",
        unset="none",
        area=OUTPUT,
    )
    output_format: AnswerFormat | None = wire(  # noqa: RUF009
        JsonFormat(), "The older name of `output_config.format`.", unset="none", area=OUTPUT
    )
    cache_control: Mapping[str, object] | None = wire(
        Json(), "Every prefix is cached, and found by its content.", has_effect=False
    )
    context_management: None = wire(
        ContextManagement(), "Only `clear_thinking_20251015` that keeps all is accepted.", has_effect=False
    )
    speed: object = wire(Only(("standard",), "There is one speed."), "Only `standard` is accepted.", has_effect=False)

    refused: ClassVar[Mapping[str, str]] = {
        "container": _NO_CONTAINER,
        "mcp_servers": "This server connects to no others; list the tools in 'tools' and run them yourself.",
        "diagnostics": "'usage.cache_read_input_tokens' says what was found in the cache.",
        "inference_geo": "This server stands in one place.",
        "user_profile_id": "Callers are told apart by their key.",
        "workspace_id": "Callers are told apart by their key.",
        "compaction": "Ask for a summary in a turn of its own.",
        "thread": _NO_STATE,
        "fallbacks": "One model is served.",
        "billing_policy": "Nothing is billed here.",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(CountTokensRequest):
    """A conversation to be answered, in Anthropic's words."""

    max_tokens: int = wire(
        Integer(0),
        "Most tokens to generate; 0 reads the prompt into the cache. Where the context holds fewer, the answer may end "
        "with `stop_reason` `model_context_window_exceeded`.",
        required=True,
        area=STOPPING,
    )
    stop_sequences: tuple[str, ...] | None = wire(
        Array(Text(1, MAX_STOP_LENGTH), max_length=MAX_STOP_STRINGS),
        "Texts that end the answer; `stop_sequence` says which.",
        unset="none",
        area=STOPPING,
    )
    stream: bool | None = wire(
        Boolean(), "Answer as server-sent events, as it is generated.", unset="false", area=OUTPUT
    )
    temperature: float | None = wire(
        Decimal(0, 1), "0 takes the likeliest token; more is more random.", unset=_RECOMMENDED + "1", area=SAMPLING
    )
    top_k: int | None = wire(
        Integer(0, 2**31 - 1),
        "Only the so many likeliest tokens; 0 is all of them.",
        unset=_RECOMMENDED + "0",
        area=SAMPLING,
    )
    top_p: float | None = wire(
        Decimal(0, 1),
        "Only the likeliest tokens that together have this probability.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
    )
    metadata: Mapping[str, object] | None = wire(Json(), "Callers are told apart by their key.", has_effect=False)
    service_tier: str | None = wire(Choice(("auto", "standard_only")), "There is one tier.", has_effect=False)
