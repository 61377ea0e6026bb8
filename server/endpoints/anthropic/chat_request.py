"""Translates a request of Anthropic's API into an equal chat request, so that both take one path from here on."""

from __future__ import annotations

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.anthropic_conversation import joined
from inferd.server.schema.anthropic_tools import AnthropicTools, ToolUse
from inferd.server.schema.caller_tool import CallerTool
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.chat_messages import Message
from inferd.server.schema.notices import Name, Notice
from inferd.server.schema.structured import AnswerFormat
from inferd.server.text.model import ServedModel
from inferd.server.tools.call_grammar import can_bound

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Names of the chat template variable that turns reasoning on."""

_NAMES = {
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    ".function.parameters": ".input_schema",
}
"""Chat's name of a field -> Anthropic's, for fields that are checked after the translation."""


def shown_tools(body: CountTokensRequest) -> tuple[CallerTool, ...]:
    """The tools that the model is shown, in the order of the request: one that is loaded later changes no text before
    it."""
    tools, conversation = body.tools or AnthropicTools(), body.messages
    defined = {tool.name: tool for tool in conversation.defined}
    known = (*(tool for tool in tools.callable if tool.name not in defined), *defined.values())
    hidden = () if tools.is_searched else tools.deferred
    return tuple(tool for tool in known if conversation.is_shown.get(tool.name, tool.name not in hidden))


def prompt_of(body: CountTokensRequest, model: ServedModel) -> ChatRequest:
    """The part of the chat request that determines the prompt. Raises `RequestError`."""
    messages, continues = _turns(body.messages.messages)
    if body.system:
        messages = joined([{"role": "system", "content": body.system}, *messages[:1]]) + messages[1:]
    thinking, tools = body.thinking, shown_tools(body)
    use = _use(body, tools)
    return ChatRequest.model_construct(
        model=body.model,
        messages=messages,
        continue_final_message=continues or None,
        tools=tools or None,
        tool_choice=use.choice if use else None,
        parallel_tool_calls=False if use and not use.is_parallel else None,
        chat_template_kwargs=_switches(body, model) or None,
        thinking_token_budget=thinking.budget if thinking and _bounds_thinking(model) else None,
        include_reasoning=thinking.is_shown if thinking else None,
        response_format=_format(body),
    )


def chat_of(body: MessagesRequest, model: ServedModel) -> ChatRequest:
    """The whole chat request, without a positive `max_tokens`, which is only an upper bound. Raises `RequestError`."""
    update = {
        "max_tokens": None if body.max_tokens else 0,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "seed": body.seed,
    }
    return prompt_of(body, model).model_copy(update=update)


def notices_of(body: CountTokensRequest, model: ServedModel) -> list[Notice]:
    """Notices about what the translation leaves out or does otherwise."""
    found: list[tuple[Name, str]] = []
    thinking, reasons = body.thinking, model.format.reads_reasoning
    if thinking and thinking.is_on and not (reasons or _switch(model)):
        found.append(("no_effect", "'thinking' has no effect: this model does not reason"))
    if thinking and not thinking.is_on and reasons and not _switch(model):
        text = "'thinking.type' hides the model's reasoning: its chat template has no switch that would end it"
        found.append(("no_effect", text))
    if thinking and thinking.budget and reasons and not _bounds_thinking(model):
        text = "'thinking.budget_tokens' has no effect: this model's reasoning ends with no token that could be forced"
        found.append(("no_effect", text))
    if _effort(body) and not _reads_effort(model):
        text = "'output_config.effort' has no effect: this model's chat template has no levels of reasoning"
        found.append(("no_effect", text))
    return [Notice(name, text) for name, text in found]


def in_anthropic_words(error: RequestError) -> RequestError:
    """The same refusal, with Anthropic's name of the field."""
    if isinstance(error, errors.ContextTooLongError):
        return error
    return error.reworded(anthropic_words(error.message), anthropic_words(error.param) if error.param else error.param)


def anthropic_words(text: str) -> str:
    """A text about the chat request, with Anthropic's names of fields."""
    for name, theirs in _NAMES.items():
        text = text.replace(name, theirs)
    return text


def _turns(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], bool]:
    """(messages, whether the model continues the last one). Raises `RequestError` if the last one has no answer."""
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, False
    if last.get("tool_calls"):
        rule = "The last turn calls tools: send their results in a turn of the user."
        raise errors.invalid_value("messages", "assistant", rule)
    if last.get("content"):
        return messages, True
    if len(messages) == 1:
        raise errors.invalid_value("messages", "assistant", "Expected a turn of the user.")
    return messages[:-1], False


def _use(body: CountTokensRequest, tools: tuple[CallerTool, ...]) -> ToolUse | None:
    """The choice among the tools that the model is shown. Raises `RequestError` if it needs another one."""
    use = body.tool_choice
    if use is None:
        return None
    for name, where in use.choice.names or ():
        if name not in [tool.name for tool in tools]:
            raise _not_shown(body, name, where, tools)
    if tools:
        return use
    if use.choice.mode == "required" and body.tools:
        rule = "The model is shown none of the tools. Add one that you run yourself, or leave the choice to 'auto'."
        raise errors.invalid_value("tool_choice.type", "any", rule)
    return use if use.choice.mode == "required" else None


def _not_shown(body: CountTokensRequest, name: str, where: str, tools: tuple[CallerTool, ...]) -> RequestError:
    given = body.tools or AnthropicTools()
    if name in given.hidden:
        way_out = "Choose a tool that you run yourself, or 'auto'."
        return errors.unsupported_value(where, name, f"{given.hidden[name]}. {way_out}")
    if any(tool.name == name for tool in (*given.callable, *body.messages.defined)):
        rule = "This tool is not loaded. Leave out its 'defer_loading', or load it by a 'tool_reference' first."
        return errors.invalid_value(where, name, rule)
    if not tools:
        return RequestError(
            "invalid_value", "The 'tool_choice' parameter is only allowed when 'tools' are specified.", "tool_choice"
        )
    return errors.not_among(where, name, [tool.name for tool in tools[:10]])


def _template(model: ServedModel) -> str:
    return model.template.source if model.template else ""


def _switch(model: ServedModel) -> str | None:
    """The chat template's variable that turns reasoning on."""
    return next((name for name in _THINKING_SWITCHES if name in _template(model)), None)


def _effort(body: CountTokensRequest) -> str | None:
    """The effort of a turn of the system counts more than that of the request."""
    return body.messages.effort or (body.output_config.effort if body.output_config else None)


def _reads_effort(model: ServedModel) -> bool:
    return "reasoning_effort" in _template(model)


def _bounds_thinking(model: ServedModel) -> bool:
    form = model.format
    return form.reads_reasoning and can_bound(form.reasoning_syntax, model.tokenizer.added_tokens)


def _switches(body: CountTokensRequest, model: ServedModel) -> dict[str, object]:
    """The chat template's variables about reasoning, if it has any."""
    switches: dict[str, object] = {}
    switch, effort = _switch(model), _effort(body)
    if body.thinking and switch:
        switches[switch] = body.thinking.is_on
    if effort and _reads_effort(model):
        switches["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return switches


def _format(body: CountTokensRequest) -> AnswerFormat | None:
    newer = body.output_config.format if body.output_config else None
    if newer is not None and body.output_format is not None:
        message = "Only one of 'output_config.format' and 'output_format' can be given."
        raise RequestError("invalid_value", message, "output_format")
    return newer or body.output_format
