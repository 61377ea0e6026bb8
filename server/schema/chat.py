"""The request of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.schema.caller_tool import CallerTool, custom_tool, function_tool
from inferd.server.schema.chat_messages import Messages
from inferd.server.schema.generation import CUT, OUTPUT, PROMPT, STOPPING, TOOLS, GenerationFields
from inferd.server.schema.request_model import Part, Row, option, required
from inferd.server.schema.tool_choice import ToolChoiceField
from inferd.server.schema.values import (
    AsGiven,
    Besides,
    Converted,
    Flag,
    JsonObject,
    Many,
    Matching,
    Only,
    Text,
    Whole,
    union_of,
)
from inferd.server.structured.language import TextFormat

MAX_TOOLS = 1_024
"""Agents list the tools of every server that they are connected to."""
MAX_GRAMMAR_CHARS = 65_536
MAX_THINKING_TOKENS = 2**20
MAX_DOCUMENTS = 1_024

_AS_MESSAGE = "Begin 'messages' with a message of the role 'system' instead."
_MAX_TOKENS = "what the checkpoint recommends, else what the context holds"


TOOL_WITHOUT_EFFECT = ("cache_control",)


FunctionName = Annotated[Text, Matching("[A-Za-z0-9_.-]{1,128}", "Expected 1 to 128 letters, digits, '_', '-' or '.'.")]


class _Function(Part):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None

    without_effect = TOOL_WITHOUT_EFFECT
    refused = {"input_schema": "Use 'parameters' instead."}  # noqa: RUF012


class _FunctionTool(Part):
    type: Literal["function"]
    function: _Function

    without_effect = TOOL_WITHOUT_EFFECT
    refused = dict.fromkeys(("name", "description", "parameters", "strict"), "Put it into 'function'.")


class AnyText(Part):
    type: Literal["text"]


class GrammarText(Part):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[Text, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class _GrammarFormat(Part):
    type: Literal["grammar"]
    grammar: GrammarText

    refused = dict.fromkeys(GrammarText.model_fields, "Put it into 'grammar'.")


TEXT_FORMATS: Mapping[str, Row] = {
    "text": Row("enforced", "The input is any text."),
    "grammar": Row("enforced", "The input follows the grammar."),
}
"""Type of a custom tool's format -> what is done with it."""


class _Custom(Part):
    """A tool that takes a text."""

    name: FunctionName
    description: Text | None = None
    format: union_of(  # type: ignore[valid-type]
        TEXT_FORMATS, {"text": AnyText, "grammar": _GrammarFormat}
    ) = AnyText(type="text")


class _CustomTool(Part):
    type: Literal["custom"]
    custom: _Custom

    without_effect = TOOL_WITHOUT_EFFECT
    refused = dict.fromkeys(_Custom.model_fields, "Put it into 'custom'.")


TOOLS_TAKEN: Mapping[str, Row] = {
    "function": Row("enforced", "The model is shown it. Its calls come back with `arguments`."),
    "custom": Row("enforced", "The model is shown a function of one text. Its calls come back with `input`."),
}
"""Type of a tool -> what is done with it."""

_Tool: Any = union_of(
    TOOLS_TAKEN, {"function": Annotated[Mapping[str, object], AsGiven(_FunctionTool)], "custom": _CustomTool}
)


def _tools(given: Sequence[Any], where: str) -> tuple[CallerTool, ...]:
    return tuple(_tool(tool, f"{where}[{i}]") for i, tool in enumerate(given))


def _tool(tool: _CustomTool | Mapping[str, object], path: str) -> CallerTool:
    if not isinstance(tool, _CustomTool):
        return function_tool(tool, path)
    custom, text = tool.custom, TextFormat()
    if isinstance(custom.format, _GrammarFormat):
        grammar = custom.format.grammar
        text = TextFormat(grammar.syntax, grammar.definition, f"{path}.custom.format.grammar.definition")
    return custom_tool(custom.name, custom.description, text, path)


Tools = Annotated[tuple[CallerTool, ...], Converted(Annotated[tuple[_Tool, ...], Many(max_length=MAX_TOOLS)], _tools)]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True)
class ReasoningSwitch:
    """Meaning of `reasoning`. An `effort` of None is not given."""

    effort: ReasoningEffort | None = None
    is_shown: bool = True


class _Reasoning(Part):
    effort: ReasoningEffort | None = None
    enabled: Flag = True
    exclude: Flag = False

    without_effect = ("summary",)


def _switch(given: _Reasoning, where: str) -> ReasoningSwitch:
    del where
    return ReasoningSwitch(given.effort if given.enabled else "none", not given.exclude)


class ChatRequest(GenerationFields):
    """A conversation and how to continue it."""

    messages: Messages = required("The conversation to continue.", area=PROMPT)
    max_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, None)] = option(
        'Most tokens to generate; -1 is "not given". ' + CUT, unset=_MAX_TOKENS, area=STOPPING
    )
    max_completion_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, None)] = option(
        "The newer name of `max_tokens`. If both are given, this one counts.", unset="`max_tokens`", area=STOPPING
    )
    logprobs: Flag | None = option("Add the log probabilities of the generated tokens.", unset="false", area=OUTPUT)
    top_logprobs: Whole | None = option(
        "Number of alternatives to each token. Only with `logprobs`.", unset="0", area=OUTPUT, ge=0, le=MAX_LOGPROBS
    )
    tools: Tools | None = option(
        "Tools that the model may call and the caller runs. How it writes calls is read off the checkpoint. A "
        "`function` with `strict` gets arguments that follow its schema token by token, and its schema is refused if "
        "a keyword cannot be enforced. A `custom` tool gets a text that follows the `grammar` in its `format` token by "
        "token.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: ToolChoiceField | None = option(
        "`none` hides the tools from the model. `auto` lets the model decide. `required` makes it call at least one. "
        "An object that names a tool makes the model call it once, and `finish_reason` is then `stop`. "
        "`allowed_tools` lists the tools that may be called. The server enforces required calls token by token, "
        "after any reasoning.",
        unset="`auto`",
        area=TOOLS,
    )
    parallel_tool_calls: Flag | None = option(
        "If false, the answer ends after its first call.", unset="true", area=TOOLS
    )
    reasoning_effort: ReasoningEffort | None = option(
        "Passed to the chat template under the template's own name: `reasoning_effort`, or `enable_thinking`, which is "
        "false only for `none`. If the template has no such switch, the field has no effect, and `x-inferd-warning` "
        "says so.",
        unset="the template's own default",
        area=TOOLS,
    )
    thinking_token_budget: Whole | None = option(
        "Most tokens of reasoning. The server forces its end after them. Refused if no special token ends this "
        "model's reasoning.",
        unset="no bound",
        area=TOOLS,
        ge=0,
        le=MAX_THINKING_TOKENS,
    )
    include_reasoning: Flag | None = option(
        "If false, the answer does not show the model's reasoning. The reasoning still counts as output.",
        unset="true",
        area=TOOLS,
    )
    stop_in_reasoning: Flag | None = option(
        "If true, `stop` and `stop_token_ids` also work inside the model's reasoning.", unset="false", area=STOPPING
    )
    reasoning: Annotated[ReasoningSwitch, Converted(_Reasoning, _switch)] | None = option(
        "OpenRouter's form of `reasoning_effort`: `effort` has the same values, `enabled` false means `none`, and "
        "`exclude` true means `include_reasoning` false. `summary` has no effect.",
        unset="as `reasoning_effort`",
        area=TOOLS,
    )
    verbosity: Verbosity | None = option(
        "No model served here has such a switch. `x-inferd-warning` says so.", has_effect=False, kind="offer"
    )
    modalities: Annotated[object, Only((["text"],), 'Only ["text"] is served.')] | None = option(
        "Only text is generated.", has_effect=False, kind="demand"
    )
    prediction: JsonObject | None = option(
        "A prediction would change the speed of an answer, not its text.", has_effect=False
    )
    functions: Annotated[object, Only(([],), "Only an empty list is accepted: use 'tools' instead.")] | None = option(
        "Only an empty list is accepted.", has_effect=False, kind="demand"
    )
    function_call: Annotated[object, Only(("none", "auto"), "Use 'tool_choice' instead.")] | None = option(
        "There are no `functions` to call.", has_effect=False, kind="demand"
    )
    echo: Annotated[object, Only((False,), "Only /v1/completions echoes its prompt.")] | None = option(
        "Only false is accepted.", has_effect=False, kind="demand"
    )
    add_generation_prompt: Flag | None = option(
        "End the prompt with the beginning of the assistant's turn.", unset="true", area=PROMPT
    )
    continue_final_message: Flag | None = option(
        "Continue the last message instead of answering it.", unset="false", area=PROMPT
    )
    documents: Annotated[tuple[JsonObject, ...], Many(max_length=MAX_DOCUMENTS)] | None = option(
        "Documents for the chat template. Refused if the template reads none.", unset="none", area=PROMPT
    )
    chat_template_kwargs: JsonObject | None = option(
        "Variables of the model's chat template, such as `enable_thinking`. A notice names those that it never reads.",
        unset="none",
        area=PROMPT,
    )

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationFields.refused,
        "audio": "Only text is generated; leave 'audio' out.",
        "max_output_tokens": "Use 'max_completion_tokens' instead.",
        "stop_sequences": "Use 'stop' instead.",
        "system": _AS_MESSAGE,
        "instructions": _AS_MESSAGE,
        "input": "Use 'messages' instead.",
        "prompt": "Use 'messages', or /v1/completions.",
        "thinking": "Use 'reasoning_effort', or 'chat_template_kwargs' with a variable of the template.",
        "json_schema": "Use 'response_format' with the type 'json_schema' instead.",
    }
    offered: ClassVar[Mapping[str, str]] = {"web_search_options": "no web search runs here"}
