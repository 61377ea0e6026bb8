"""The wire type of /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.errors import table as errors
from inferd.server.schema.fields import wire
from inferd.server.schema.generation import OUTPUT, PROMPT, STOPPING, TOOLS, GenerationFields
from inferd.server.schema.kinds import (
    Array,
    Boolean,
    Choice,
    Integer,
    Json,
    Kind,
    Only,
    OrNotGiven,
    Schema,
    Text,
    check_properties,
    object_schema,
)
from inferd.server.schema.messages import Message, Messages
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
    name = Text().read(function["name"], f"{where}.name")
    if not _FUNCTION_NAME.fullmatch(name):
        raise errors.invalid_value(f"{where}.name", name, "Expected 1 to 128 letters, digits, '_', '-' or '.'.")
    for key, kind in (("description", Text()), ("parameters", Json()), ("strict", Boolean())):
        if function.get(key) is not None:
            kind.read(function[key], f"{where}.{key}")


def function_schema() -> dict[str, Schema]:
    return {
        "name": {"type": "string", "pattern": f"^{_FUNCTION_NAME.pattern}$"},
        "description": Text().schema(),
        "parameters": Json().schema(),
        "strict": Boolean().schema(),
    }


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationFields):
    """A conversation to be continued."""

    messages: tuple[Message, ...] = wire(Messages(), "The conversation to be continued.", required=True, area=PROMPT)
    max_tokens: int | None = wire(
        OrNotGiven(Integer(1), (-1,)),
        'Most tokens to generate; -1 is "not given". More than the context holds beside the prompt is refused.',
        unset=_MAX_TOKENS,
        area=STOPPING,
    )
    max_completion_tokens: int | None = wire(
        OrNotGiven(Integer(1), (-1,)),
        "The newer name of `max_tokens`. If both are given, this one counts.",
        unset="`max_tokens`",
        area=STOPPING,
    )
    logprobs: bool | None = wire(Boolean(), "Log probabilities of the generated tokens.", unset="false", area=OUTPUT)
    top_logprobs: int | None = wire(
        Integer(0, MAX_LOGPROBS), "With so many alternatives to each; only with `logprobs`.", unset="0", area=OUTPUT
    )
    tools: tuple[Mapping[str, object], ...] | None = wire(
        Array(Tool(), max_length=MAX_TOOLS),
        "Functions that the model may call. How it writes calls is read off the checkpoint. `strict` has the arguments "
        "of a function follow its schema token by token, and refuses a schema with a keyword that cannot be enforced.",
        unset="none",
        area=TOOLS,
    )
    tool_choice: ToolChoice | None = wire(  # noqa: RUF009  # it makes a dataclass field
        ToolChoiceKind(),
        "`none` hides the tools from the model. `auto` lets the model decide. `required` makes it call at least one. "
        "An object that names a function makes the model call it once, and `finish_reason` is then `stop`. "
        "`allowed_tools` lists the functions that may be called. The server enforces required calls token by token, "
        "after any reasoning.",
        unset="`auto`",
        area=TOOLS,
    )
    parallel_tool_calls: bool | None = wire(
        Boolean(), "false: the answer ends with its first call.", unset="true", area=TOOLS
    )
    reasoning_effort: str | None = wire(
        Choice(REASONING_EFFORTS),
        "Passed to the chat template under the template's own name: `reasoning_effort`, or `enable_thinking`, which is "
        "false only for `none`. If the template has no such switch, the field has no effect, and `x-inferd-warning` "
        "says so.",
        unset="the template's own default",
        area=TOOLS,
    )
    thinking_token_budget: int | None = wire(
        Integer(0, MAX_THINKING_TOKENS),
        "Most tokens of reasoning: its end is forced then. Refused where no token of its own ends it.",
        unset="no bound",
        area=TOOLS,
    )
    include_reasoning: bool | None = wire(
        Boolean(), "false: what the model reasons is counted and not shown.", unset="true", area=TOOLS
    )
    reasoning: ReasoningSwitch | None = wire(  # noqa: RUF009  # it makes a dataclass field
        ReasoningSwitchObject(),
        "OpenRouter's form of `reasoning_effort`: `effort` has the same values, `enabled` false means `none`, and "
        "`exclude` true means `include_reasoning` false. `summary` has no effect.",
        unset="as `reasoning_effort`",
        area=TOOLS,
    )
    verbosity: str | None = wire(
        Choice(VERBOSITIES), "No model served here has such a switch, and `x-inferd-warning` says so.", has_effect=False
    )
    modalities: object = wire(
        Only((["text"],), 'Only ["text"] is served.'), "Only text is generated.", has_effect=False
    )
    prediction: Mapping[str, object] | None = wire(
        Json(), "A prediction changes how fast an answer comes, not the answer.", has_effect=False
    )
    functions: object = wire(Only(([],), "Use 'tools' instead."), "Only an empty list is accepted.", has_effect=False)
    function_call: object = wire(
        Only(("none", "auto"), "Use 'tool_choice' instead."), "There are no `functions` to call.", has_effect=False
    )
    echo: object = wire(
        Only((False,), "Only /v1/completions echoes its prompt."), "Only false is accepted.", has_effect=False
    )
    add_generation_prompt: bool | None = wire(
        Boolean(), "End the prompt where the assistant begins to speak.", unset="true", area=PROMPT
    )
    continue_final_message: bool | None = wire(
        Boolean(), "Continue the last message instead of answering it.", unset="false", area=PROMPT
    )
    documents: tuple[Mapping[str, object], ...] | None = wire(
        Array(Json(), max_length=MAX_DOCUMENTS),
        "Given to the chat template; refused where the template reads no documents.",
        unset="none",
        area=PROMPT,
    )
    chat_template_kwargs: Mapping[str, object] | None = wire(
        Json(), "Switches of the model's chat template, such as `enable_thinking`.", unset="none", area=PROMPT
    )

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationFields.refused,
        "audio": "Only text is served.",
        "web_search_options": "Web search is not served.",
    }
