"""The wire type of /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.errors import table as errors
from inferd.server.schema import kinds
from inferd.server.schema.generation import OUTPUT, PROMPT, STOPPING, TOOLS, GenerationFields
from inferd.server.schema.kinds import Array, Boolean, Choice, Json, Kind, Schema, check_properties, object_schema
from inferd.server.schema.messages import Message, Messages
from inferd.server.schema.model import Besides, Flag, JsonObject, Many, Old, Only, Whole, option, required
from inferd.server.schema.tool_choice import ToolChoice, ToolChoiceKind

MAX_TOOLS = 128
MAX_THINKING_TOKENS = 2**20
MAX_DOCUMENTS = 1_024

_MAX_TOKENS = "what the checkpoint recommends, else what the context holds"
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the chat template shows to the model; passed on as it was given."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> Mapping[str, object]:
        tool = check_properties(value, where, ("type", "function"), (), TOOL_WITHOUT_EFFECT)
        Choice(("function",)).read(tool["type"], f"{where}.type")
        path = f"{where}.function"
        function = check_properties(tool["function"], path, ("name",), FUNCTION, TOOL_WITHOUT_EFFECT)
        check_function(function, path)
        return {**tool, "function": function}

    def schema(self) -> Schema:
        function = object_schema(function_schema(), ("name",), TOOL_WITHOUT_EFFECT)
        tool = {"type": Choice(("function",)).schema(), "function": function}
        return object_schema(tool, ("type", "function"), TOOL_WITHOUT_EFFECT)


FUNCTION = ("description", "parameters", "strict")
"""What a function may say besides its name."""
TOOL_WITHOUT_EFFECT = ("cache_control",)


def check_function(function: Mapping[str, object], where: str) -> None:
    """Raises `RequestError` for a name, or for one of `FUNCTION`, that cannot be."""
    name = kinds.Text().read(function["name"], f"{where}.name")
    if not _FUNCTION_NAME.fullmatch(name):
        raise errors.invalid_value(f"{where}.name", name, "Expected 1 to 128 letters, digits, '_', '-' or '.'.")
    for key, kind in (("description", kinds.Text()), ("parameters", Json()), ("strict", Boolean())):
        if function.get(key) is not None:
            kind.read(function[key], f"{where}.{key}")


def function_schema() -> dict[str, Schema]:
    return {
        "name": {"type": "string", "pattern": f"^{_FUNCTION_NAME.pattern}$"},
        "description": kinds.Text().schema(),
        "parameters": Json().schema(),
        "strict": Boolean().schema(),
    }


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Verbosity = Literal["low", "medium", "high"]
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
VERBOSITIES = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class ReasoningSwitch:
    """What `reasoning` says; None where it says nothing."""

    effort: str | None = None
    is_shown: bool = True


@dataclass(frozen=True, slots=True)
class ReasoningSwitchObject:
    """{effort, enabled, exclude}."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> ReasoningSwitch:
        given = check_properties(value, where, (), ("effort", "enabled", "exclude"), ("summary",))
        kinds: dict[str, Kind] = {"effort": Choice(REASONING_EFFORTS), "enabled": Boolean(), "exclude": Boolean()}
        read = {key: kinds[key].read(item, f"{where}.{key}") for key, item in given.items() if item is not None}
        effort = "none" if read.get("enabled") is False else read.get("effort")
        assert effort is None or isinstance(effort, str)
        return ReasoningSwitch(effort, read.get("exclude") is not True)

    def schema(self) -> Schema:
        flag = {"type": ["boolean", "null"]}
        effort = {"enum": [*REASONING_EFFORTS, None]}
        return object_schema({"effort": effort, "enabled": flag, "exclude": flag, "summary": {}})


class ChatRequest(GenerationFields):
    """A conversation to be continued."""

    messages: Annotated[tuple[Message, ...], Old(Messages())] = required(
        "The conversation to be continued.",
        area=PROMPT,
    )
    max_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, None)] = option(
        'Most tokens to generate; -1 is "not given". More than the context holds beside the prompt is refused.',
        unset=_MAX_TOKENS,
        area=STOPPING,
    )
    max_completion_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, None)] = option(
        "The newer name of `max_tokens`. If both are given, this one counts.",
        unset="`max_tokens`",
        area=STOPPING,
    )
    logprobs: Flag | None = option(
        "Log probabilities of the generated tokens.",
        unset="false",
        area=OUTPUT,
    )
    top_logprobs: Whole | None = option(
        "With so many alternatives to each; only with `logprobs`.",
        unset="0",
        area=OUTPUT,
        ge=0,
        le=MAX_LOGPROBS,
    )
    tools: Annotated[tuple[Mapping[str, object], ...], Old(Array(Tool(), max_length=MAX_TOOLS))] | None = option(
        "Functions that the model may call. How it writes calls is read off the checkpoint. `strict` has the arguments "
        "of a function follow its schema token by token, and refuses a schema with a keyword that cannot be enforced.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: Annotated[ToolChoice, Old(ToolChoiceKind())] | None = option(
        "`none` hides the tools from the model. `auto` lets the model decide. `required` makes it call at least one. "
        "An object that names a function makes the model call it once, and `finish_reason` is then `stop`. "
        "`allowed_tools` lists the functions that may be called. The server enforces required calls token by token, "
        "after any reasoning.",
        unset="`auto`",
        area=TOOLS,
    )
    parallel_tool_calls: Flag | None = option(
        "false: the answer ends with its first call.",
        unset="true",
        area=TOOLS,
    )
    reasoning_effort: ReasoningEffort | None = option(
        "Passed to the chat template under the template's own name: `reasoning_effort`, or `enable_thinking`, which is "
        "false only for `none`. If the template has no such switch, the field has no effect, and `x-inferd-warning` "
        "says so.",
        unset="the template's own default",
        area=TOOLS,
    )
    thinking_token_budget: Whole | None = option(
        "Most tokens of reasoning: its end is forced then. Refused where no token of its own ends it.",
        unset="no bound",
        area=TOOLS,
        ge=0,
        le=MAX_THINKING_TOKENS,
    )
    include_reasoning: Flag | None = option(
        "false: what the model reasons is counted and not shown.",
        unset="true",
        area=TOOLS,
    )
    reasoning: Annotated[ReasoningSwitch, Old(ReasoningSwitchObject())] | None = option(
        "OpenRouter's form of `reasoning_effort`: `effort` has the same values, `enabled` false means `none`, and "
        "`exclude` true means `include_reasoning` false. `summary` has no effect.",
        unset="as `reasoning_effort`",
        area=TOOLS,
    )
    verbosity: Verbosity | None = option(
        "No model served here has such a switch, and `x-inferd-warning` says so.",
        has_effect=False,
    )
    modalities: Annotated[object, Only((["text"],), 'Only ["text"] is served.')] | None = option(
        "Only text is generated.",
        has_effect=False,
    )
    prediction: JsonObject | None = option(
        "A prediction changes how fast an answer comes, not the answer.",
        has_effect=False,
    )
    functions: Annotated[object, Only(([],), "Use 'tools' instead.")] | None = option(
        "Only an empty list is accepted.",
        has_effect=False,
    )
    function_call: Annotated[object, Only(("none", "auto"), "Use 'tool_choice' instead.")] | None = option(
        "There are no `functions` to call.",
        has_effect=False,
    )
    echo: Annotated[object, Only((False,), "Only /v1/completions echoes its prompt.")] | None = option(
        "Only false is accepted.",
        has_effect=False,
    )
    add_generation_prompt: Flag | None = option(
        "End the prompt where the assistant begins to speak.",
        unset="true",
        area=PROMPT,
    )
    continue_final_message: Flag | None = option(
        "Continue the last message instead of answering it.",
        unset="false",
        area=PROMPT,
    )
    documents: Annotated[tuple[JsonObject, ...], Many(max_length=MAX_DOCUMENTS)] | None = option(
        "Given to the chat template; refused where the template reads no documents.",
        unset="none",
        area=PROMPT,
    )
    chat_template_kwargs: JsonObject | None = option(
        "Switches of the model's chat template, such as `enable_thinking`.",
        unset="none",
        area=PROMPT,
    )

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationFields.refused,
        "audio": "Only text is served.",
        "web_search_options": "Web search is not served.",
    }
