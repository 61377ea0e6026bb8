"""Translates a request of Anthropic's API into an equal chat request, so that both take one path from here on."""

from __future__ import annotations

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.anthropic_turns import joined
from inferd.server.schema.caller_tool import functions
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.messages import Message
from inferd.server.schema.structured import AnswerFormat
from inferd.server.text.model import ServedModel

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Names of the chat template variable that turns reasoning on."""

_NAMES = {
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    ".function.parameters": ".input_schema",
}
"""Chat's name of a field -> Anthropic's, for fields that are checked after the translation."""


def has_late_system(wire: CountTokensRequest) -> bool:
    """Whether a system message comes after other messages. Agents send reminders this way."""
    return any(message["role"] == "system" for message in wire.messages[1:])


def prompt_of(wire: CountTokensRequest, model: ServedModel, *, reads_late_system: bool = True) -> ChatRequest:
    """The part of the chat request that determines the prompt. Raises `RequestError`.

    If the template cannot read late system messages, they become messages of the user.
    """
    messages, continues = _turns(wire.messages)
    if wire.system:
        messages = joined([{"role": "system", "content": wire.system}, *messages[:1]]) + messages[1:]
    if not reads_late_system:
        late = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[1:]]
        messages = joined([messages[0], *late])
    thinking, use = wire.thinking, wire.tool_choice
    reasons = model.format.reads_reasoning
    return ChatRequest.model_construct(
        model=wire.model,
        messages=messages,
        continue_final_message=continues or None,
        tools=None if wire.tools is None else functions(wire.tools),
        tool_choice=use.choice if use else None,
        parallel_tool_calls=False if use and not use.is_parallel else None,
        chat_template_kwargs=_switches(wire, model) or None,
        thinking_token_budget=thinking.budget if thinking and reasons else None,
        include_reasoning=thinking.is_shown if thinking else None,
        response_format=_format(wire),
    )


def chat_of(wire: MessagesRequest, model: ServedModel, *, reads_late_system: bool = True) -> ChatRequest:
    """The whole chat request, without a positive `max_tokens`, which is only an upper bound. Raises `RequestError`."""
    budget = wire.thinking.budget if wire.thinking else None
    if budget is not None and budget >= wire.max_tokens:
        rule = f"Expected less than 'max_tokens', which is {wire.max_tokens}."
        raise errors.invalid_value("thinking.budget_tokens", budget, rule)
    update = {
        "max_tokens": None if wire.max_tokens else 0,
        "stop": wire.stop_sequences,
        "stream": wire.stream,
        "temperature": wire.temperature,
        "top_k": wire.top_k,
        "top_p": wire.top_p,
    }
    return prompt_of(wire, model, reads_late_system=reads_late_system).model_copy(update=update)


def in_anthropic_words(error: RequestError) -> RequestError:
    """The same refusal, with Anthropic's name of the field."""
    if isinstance(error, errors.ContextTooLongError):
        return error
    message, param = error.message, error.param
    for name, theirs in _NAMES.items():
        message = message.replace(name, theirs)
        param = param.replace(name, theirs) if param else param
    return error.reworded(message, param)


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


def _switches(wire: CountTokensRequest, model: ServedModel) -> dict[str, object]:
    """The chat template's variables about reasoning, if it has any."""
    template = model.template.source if model.template else ""
    switches: dict[str, object] = {}
    switch = next((name for name in _THINKING_SWITCHES if name in template), None)
    if wire.thinking and switch:
        switches[switch] = wire.thinking.mode != "disabled"
    effort = wire.output_config.effort if wire.output_config else None
    if effort and "reasoning_effort" in template:
        switches["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return switches


def _format(wire: CountTokensRequest) -> AnswerFormat | None:
    newer = wire.output_config.format if wire.output_config else None
    if newer is not None and wire.output_format is not None:
        message = "Only one of 'output_config.format' and 'output_format' can be given."
        raise RequestError("invalid_value", message, "output_format")
    return newer or wire.output_format
