"""The request of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.schema.generation import OUTPUT, PROMPT, STOPPING, TOOLS, GenerationFields
from inferd.server.schema.messages import Messages
from inferd.server.schema.model import Part, option, required
from inferd.server.schema.tool_choice import ToolChoiceField
from inferd.server.schema.values import AsGiven, Besides, Converted, Flag, JsonObject, Many, Matching, Only, Text, Whole

MAX_TOOLS = 128
MAX_THINKING_TOKENS = 2**20
MAX_DOCUMENTS = 1_024

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


class _Tool(Part):
    type: Literal["function"]
    function: _Function

    without_effect = TOOL_WITHOUT_EFFECT


Tool = Annotated[Mapping[str, object], AsGiven(_Tool)]
"""A function that the chat template shows to the model; passed on as it was given."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
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
        'Most tokens to generate; -1 is "not given". More than the context holds beside the prompt is refused.',
        unset=_MAX_TOKENS,
        area=STOPPING,
    )
    max_completion_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, None)] = option(
        "The newer name of `max_tokens`. If both are given, this one counts.", unset="`max_tokens`", area=STOPPING
    )
    logprobs: Flag | None = option("Add the log probabilities of the generated tokens.", unset="false", area=OUTPUT)
    top_logprobs: Whole | None = option(
        "Number of alternatives to each token. Only with `logprobs`.", unset="0", area=OUTPUT, ge=0, le=MAX_LOGPROBS
    )
    tools: Annotated[tuple[Tool, ...], Many(max_length=MAX_TOOLS)] | None = option(
        "Functions that the model may call. How it writes calls is read off the checkpoint. `strict` has the arguments "
        "of a function follow its schema token by token, and refuses a schema with a keyword that cannot be enforced.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: ToolChoiceField | None = option(
        "`none` hides the tools from the model. `auto` lets the model decide. `required` makes it call at least one. "
        "An object that names a function makes the model call it once, and `finish_reason` is then `stop`. "
        "`allowed_tools` lists the functions that may be called. The server enforces required calls token by token, "
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
    reasoning: Annotated[ReasoningSwitch, Converted(_Reasoning, _switch)] | None = option(
        "OpenRouter's form of `reasoning_effort`: `effort` has the same values, `enabled` false means `none`, and "
        "`exclude` true means `include_reasoning` false. `summary` has no effect.",
        unset="as `reasoning_effort`",
        area=TOOLS,
    )
    verbosity: Verbosity | None = option(
        "No model served here has such a switch. `x-inferd-warning` says so.", has_effect=False
    )
    modalities: Annotated[object, Only((["text"],), 'Only ["text"] is served.')] | None = option(
        "Only text is generated.", has_effect=False
    )
    prediction: JsonObject | None = option(
        "A prediction would change the speed of an answer, not its text.", has_effect=False
    )
    functions: Annotated[object, Only(([],), "Use 'tools' instead.")] | None = option(
        "Only an empty list is accepted.", has_effect=False
    )
    function_call: Annotated[object, Only(("none", "auto"), "Use 'tool_choice' instead.")] | None = option(
        "There are no `functions` to call.", has_effect=False
    )
    echo: Annotated[object, Only((False,), "Only /v1/completions echoes its prompt.")] | None = option(
        "Only false is accepted.", has_effect=False
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
        "Variables of the model's chat template, such as `enable_thinking`.", unset="none", area=PROMPT
    )

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationFields.refused,
        "audio": "Only text is served.",
        "web_search_options": "Web search is not served.",
    }
