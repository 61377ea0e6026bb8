"""The request types of /v1/messages and /v1/messages/count_tokens, which are Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from inferd.server.schema.anthropic_conversation import System, Turns
from inferd.server.schema.anthropic_parts import ContextManagement, JsonFormat, OutputConfig, ThinkingField
from inferd.server.schema.anthropic_tools import ToolsField, ToolUseField
from inferd.server.schema.generation import (
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    OUTPUT,
    PROMPT,
    SAMPLING,
    SEED,
    STOPPING,
    TOOLS,
    Seed,
)
from inferd.server.schema.request_model import RequestModel, option, required
from inferd.server.schema.values import Flag, JsonObject, Many, Number, Only, Text, Whole

_RECOMMENDED = "the checkpoint's, else "
_NO_STATE = "No conversation is kept here; send all of it in 'messages'."
_NO_BILLS = "Nothing is billed here."
_BY_KEY = "Clients are identified by their key."
_REFUSED = {
    "compaction": "Ask for a summary in a turn of its own.",
    "thread": _NO_STATE,
    "response_format": "Use 'output_config' with a 'format' instead.",
    "reasoning_effort": "Use 'output_config' with an 'effort' instead.",
    "parallel_tool_calls": "Use 'tool_choice' with 'disable_parallel_tool_use' instead.",
}
"""Fields that neither route serves."""


class CountTokensRequest(RequestModel):
    """A conversation, as the model would read it."""

    model: Text | None = option(
        "The name of the served model; any other is a 404.", unset="the served model", area=PROMPT
    )
    # Before `messages`, whose blocks name tools.
    tools: ToolsField | None = option(
        "Tools that the model may use. It is shown those that the caller runs, which the table of tools lists. "
        "`strict` has the input follow `input_schema` token by token. A tool with `defer_loading` is shown once a "
        "`tool_reference` or a `tool_addition` names it.",
        unset="none",
        area=TOOLS,
    )
    messages: Turns = required(
        "Turns of `user`, `assistant` and `system`: a text, or blocks, which the table of blocks lists. Neighbours of "
        "one role are one turn. A `system` turn that the chat template does not read behind others becomes a `user` "
        "turn, and a notice says so. `clear_at` and `output_config.effort` of a `system` turn hold. A last turn of the "
        "assistant's is continued. `cache_control`, `signature` and `is_error` have no effect.",
        area=PROMPT,
    )
    system: System | None = option(
        "The system prompt, a text or text blocks. A first line `x-anthropic-billing-header: ...`, which changes with "
        "every request of Claude Code's, is left out, so that prefixes are found again.",
        unset="none",
        area=PROMPT,
    )
    tool_choice: ToolUseField | None = option(
        "`auto`, `any` (at least one tool is used), `tool` (the named one is, once) or `none`; what is required is "
        "enforced token by token. `disable_parallel_tool_use`: the answer ends with its first use of a tool.",
        unset="`auto`",
        area=TOOLS,
    )
    thinking: ThinkingField | None = option(
        "`enabled` and `adaptive` turn reasoning on if the chat template has a switch. A model that does not reason "
        "answers without. `budget_tokens` bounds the reasoning, if a special token ends it. `disabled` turns it off. "
        "If the template has no switch, it hides the reasoning, as `display` `omitted` and `updates` do. A notice says "
        "what has no effect.",
        unset="the template's own default",
        area=TOOLS,
    )
    output_config: OutputConfig | None = option(
        "`format`: a `json_schema` that the answer follows token by token. `effort` becomes the template's "
        "`reasoning_effort` (`max` becomes `xhigh`). It has no effect if the template has none, and a notice says so.",
        unset="none",
        area=OUTPUT,
    )
    output_format: JsonFormat | None = option("The older name of `output_config.format`.", unset="none", area=OUTPUT)
    cache_control: JsonObject | None = option("Every prefix is cached, and found by its content.", has_effect=False)
    context_management: ContextManagement | None = option(
        "Nothing is cut out of a conversation. A notice says so, except for `clear_thinking_20251015` that keeps all.",
        has_effect=False,
        kind="offer",
    )
    speed: Literal["standard", "fast"] | None = option("There is one speed.", has_effect=False)
    inference_geo: Annotated[object, Only(("global",), "This server stands in one place; leave it out.")] | None = (
        option("Only `global` is accepted.", has_effect=False, kind="demand")
    )
    fallbacks: object = option("This server declines no request by policy.", has_effect=False)
    fallback_credit_token: object = option(_NO_BILLS, has_effect=False)
    billing_policy: object = option(_NO_BILLS, has_effect=False)
    diagnostics: object = option("`usage.cache_read_input_tokens` says what was cached.", has_effect=False)
    user_profile_id: Text | None = option(_BY_KEY, has_effect=False)
    workspace_id: Text | None = option(_BY_KEY, has_effect=False)
    betas: object = option("As the header `anthropic-beta`.", has_effect=False)
    anthropic_beta: object = option("As the header.", has_effect=False)
    anthropic_version: object = option("As the header.", has_effect=False)

    offered: ClassVar[Mapping[str, str]] = {
        "container": "this server runs no code and keeps no files",
        "mcp_servers": "this server connects to no others",
    }
    refused: ClassVar[Mapping[str, str]] = {**_REFUSED, "seed": "No token is drawn here."}


class MessagesRequest(CountTokensRequest):
    """A conversation to answer, in Anthropic's form."""

    max_tokens: Whole = required(
        "Most tokens to generate; 0 reads the prompt into the cache. If the context holds fewer, a notice says so, and "
        "the answer may end with `stop_reason` `model_context_window_exceeded`.",
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
    seed: Seed = option(f"This server's own field. {SEED}", unset="chosen at random", area=SAMPLING)
    metadata: JsonObject | None = option(_BY_KEY, has_effect=False)
    service_tier: Text | None = option("There is one tier.", has_effect=False)

    refused: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "stop": "Use 'stop_sequences' instead.",
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "Use 'max_tokens' instead."),
    }
