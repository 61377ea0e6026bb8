"""The language of an answer, and the reasoning and calls of a chat request: what the template is given, and how the
answer is parsed.

Pure functions of the request's fields, the model's format and the rendered prompt. Knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors
from inferd.server.schema.caller_tool import CallerTool
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.chat_messages import Message
from inferd.server.schema.generation import GenerationFields
from inferd.server.schema.notices import Notice
from inferd.server.schema.structured import AnswerFormat
from inferd.server.schema.tool_choice import ToolChoice
from inferd.server.structured.language import Language, free_text, literal, marked, sequence
from inferd.server.structured.tags import Tokens, read_tags
from inferd.server.text.model import ServedModel
from inferd.server.tools.answer_parser import AnswerParser, with_prefill_parsed
from inferd.server.tools.builtin import NONE
from inferd.server.tools.call_grammar import CallRules, answer_with_calls, can_bound, reasoning
from inferd.server.tools.detect import PLAIN_CALLS
from inferd.server.tools.format import CallSyntax, Format
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.second_look import Offer

_FORMATS = ("response_format", "structured_outputs", "regex", "ebnf")

"""Fields that constrain the answer of any route."""

LACKS_TOOLS = "the chat template does not show tools, so the server writes them into the prompt as text"

_SWITCHES = ("enable_thinking", "thinking")
"""Names of the template variable that turns reasoning on, in templates without levels of reasoning."""
_WORD = re.compile(r"\w+")
_MOST_NAMED = 3
"""Most names that a notice lists."""


@dataclass(frozen=True, slots=True)
class AnswerLanguage:
    """The language of an answer, and the field that asks for it."""

    param: str
    language: Language


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """How an answer is parsed, and which texts it may be."""

    parser_config: ParserConfig | None
    """None: the answer is plain text."""
    answer: AnswerLanguage | None
    """None: any text is allowed."""


def asks_for_format(body: GenerationFields) -> bool:
    """Whether any field constrains the answer."""
    return any(getattr(body, name, None) is not None for name in _FORMATS)


def answer_language(body: GenerationFields, tokens: Tokens) -> AnswerLanguage | None:
    """The language of the answer; None for free text. Raises `RequestError` if two fields constrain it."""
    given: dict[str, AnswerFormat] = {
        name: wanted for name in _FORMATS if (wanted := getattr(body, name, None)) is not None
    }
    if len(given) > 1:
        first, second, *_ = given
        message = f"Only one of '{first}' and '{second}' can be given: both constrain the answer."
        raise RequestError("invalid_value", message, second)
    for wanted in given.values():
        language = read_tags(wanted.tags, wanted.param, tokens) if wanted.language is None else wanted.language
        return AnswerLanguage(wanted.param, language)
    return None


def check_tools(body: ChatRequest) -> None:
    """Check the fields about tools together. Raises `RequestError`."""
    choice = body.tool_choice
    for name, is_given in (
        ("tool_choice", choice is not None and choice.mode != "none"),
        ("parallel_tool_calls", body.parallel_tool_calls is False),
    ):
        if is_given and not body.tools:
            raise RequestError(
                "invalid_value", f"The '{name}' parameter is only allowed when 'tools' are specified.", name
            )
    known = dict.fromkeys(tool.name for tool in body.tools or ())
    for name, where in (choice.names if choice is not None else None) or ():
        if name not in known:
            raise errors.not_among(where, name, list(known)[:10])


def tools_of(body: ChatRequest) -> tuple[CallerTool, ...]:
    """The tools that the model is shown."""
    return () if _choice(body).mode == "none" else body.tools or ()


def tools_shown(body: ChatRequest) -> tuple[Mapping[str, object], ...] | None:
    """The same tools as the template is given them."""
    return tuple(tool.shown for tool in tools_of(body)) or None


def template_kwargs(body: ChatRequest, template: str) -> Mapping[str, object] | None:
    """`chat_template_kwargs`, with `reasoning_effort` under the template's name for it. Raises `RequestError`."""
    effort, name = _effort(body), _switch(template)
    if effort is None or not name:
        return body.chat_template_kwargs
    given = body.chat_template_kwargs or {}
    level = "xhigh" if effort == "max" else effort  # the highest level that templates know
    value: object = level if name == "reasoning_effort" else effort != "none"
    if name in given:
        message = f"Only one of 'reasoning_effort' and 'chat_template_kwargs.{name}' can be given."
        raise RequestError("invalid_value", message, "reasoning_effort")
    return {**given, name: value}


def notices_of(body: ChatRequest, model: ServedModel) -> tuple[Notice, ...]:
    """Fields that have no effect with this model, or not the usual one."""
    template = "" if model.template is None else model.template.source
    found: list[Notice] = []
    if _effort(body) is not None and not _switch(template):
        text = "'reasoning_effort' has no effect: this model's chat template has no switch for reasoning"
        found.append(Notice("no_effect", text))
    if body.verbosity not in (None, "medium"):
        text = "'verbosity' has no effect: say in the prompt how long the answer should be"
        found.append(Notice("no_effect", text))
    unread = [name for name in body.chat_template_kwargs or () if name not in _words(template)]
    if unread:
        text = (
            f"'chat_template_kwargs' has no effect for {_listed(unread)}: this model's chat template does not read it"
        )
        found.append(Notice("no_effect", text))
    if tools_of(body) and model.template is not None and model.template.lacks_tools:
        found.append(Notice("tools_as_text", LACKS_TOOLS))
    lone = _lone_results(body.messages)
    if lone:
        text = (
            f"The model reads a tool's result without its call, for {_listed(lone)}: send the call too, in 'messages'"
        )
        found.append(Notice("lone_result", text))
    return tuple(found)


def _listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(f"'{errors.clip(name, 64)}'" for name in names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown


@lru_cache(maxsize=16)
def _words(template: str) -> frozenset[str]:
    """Every word of a chat template: the variables that it reads are among them."""
    return frozenset(_WORD.findall(template))


def _lone_results(messages: Sequence[Message]) -> list[str]:
    """Ids of the results of tools that answer no call before them. A call without an id may be any result's."""
    known: set[object] = set()
    lone: list[str] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            known.update(call.get("id") for call in calls)
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and None not in known and not (call_id in known or (known and call_id is None)):
            lone.append(str(call_id or "none"))
    return lone


def _effort(body: ChatRequest) -> str | None:
    """The requested effort of reasoning; the first of its two field names wins."""
    if body.reasoning_effort is not None or body.reasoning is None:
        return body.reasoning_effort
    return body.reasoning.effort


def _switch(template: str) -> str:
    """The template's name for `reasoning_effort`; empty if it has none."""
    return next((name for name in ("reasoning_effort", *_SWITCHES) if name in template), "")


def answer_rules(body: ChatRequest, model: ServedModel, prompt: str, answer: AnswerLanguage | None) -> AnswerRules:
    """The rules for the answer. `prompt`: the rendered text. `answer`: the language that other fields ask for.

    Raises `RequestError` if a rule cannot be enforced.
    """
    form, tokens, special_ids = model.format, model.tokenizer.added_tokens, model.tokenizer.special_ids
    budget = body.thinking_token_budget
    if budget is not None and not (form.reads_reasoning and can_bound(form.reasoning_syntax, tokens)):
        rule = "This model's reasoning ends with no token that could be forced; bound the answer with 'max_tokens'."
        raise errors.unsupported_parameter("thinking_token_budget", rule)
    choice, tools = _choice(body), tools_of(body)
    rules = _rules(choice, tools, body)
    is_enforced = bool(tools) and (
        rules.is_required
        or choice.names is not None
        or answer is not None
        or budget is not None
        or any(tool.is_strict for tool in tools)
    )
    if is_enforced and _needs_plain_calls(form, rules, answer):
        form = form.with_plain_calls(PLAIN_CALLS)
    if rules.is_required and tools:
        form = form.with_bare_calls()
    is_off = form.tool_name == NONE and form.source == "settings"
    has_offer = bool(tools) and not (rules.is_required or answer is not None or is_off)
    offer = _offer(rules) if has_offer else None
    markers = form.special_markers(special_ids, with_calls=bool(tools))
    config = ParserConfig(
        format=form,
        with_calls=bool(tools),
        tools=tuple(tool.shown for tool in tools),
        text_tools=frozenset(tool.name for tool in tools if tool.text is not None),
        prefill=form.prefill(prompt),
        max_calls=1 if tools and rules.is_single else None,
        only_calls=bool(tools) and rules.is_required,
        content_is_last=answer is not None,
        call_ends_reasoning=not is_enforced and answer is None,
        offer=offer,
        stops_reasoning=bool(body.stop_in_reasoning),
        shows_reasoning=body.include_reasoning is not False and (body.reasoning is None or body.reasoning.is_shown),
        kept_ids=frozenset(special_ids[marker] for marker in markers),
        names_function=choice.is_single,
    )
    is_read = form.reads_reasoning or (bool(tools) and (form.reads_calls or offer is not None))
    before, opening = _before(config, tokens, budget)
    wanted = None if answer is None else sequence(opening, answer.language)
    if is_enforced and form.call_syntax is not None:
        written = _begun(form.call_syntax, config.prefill)
        language = answer_with_calls(rules, form.call_syntax, tokens, wanted, before, opening, written)
        answer = AnswerLanguage("tools" if answer is None else answer.param, language)
    elif form.reads_reasoning and (answer is not None or budget is not None):
        rest = sequence(before, sequence(opening, free_text()) if wanted is None else wanted)
        answer = AnswerLanguage("thinking_token_budget" if answer is None else answer.param, rest)
    return AnswerRules(with_prefill_parsed(config) if is_read else None, answer)


def _rules(choice: ToolChoice, tools: tuple[CallerTool, ...], body: ChatRequest) -> CallRules:
    names = None if choice.names is None else {name for name, _ in choice.names}
    return CallRules(
        tuple(tool for tool in tools if names is None or tool.name in names),
        is_required=choice.mode == "required",
        is_single=choice.is_single or body.parallel_tool_calls is False,
    )


def _offer(rules: CallRules) -> Offer | None:
    return Offer.of((tool.shown for tool in rules.tools), 1 if rules.is_single else None)


def _needs_plain_calls(form: Format, rules: CallRules, answer: AnswerLanguage | None) -> bool:
    """Whether calls under a grammar must be plain JSON, because no grammar for the model's own syntax is known."""
    if form.call_syntax is not None:
        return False
    return not form.reads_calls or rules.is_required or answer is not None


def _begun(syntax: CallSyntax, prefill: str) -> str:
    """The beginning of a call with which the prompt ends."""
    first = (syntax.before_all + syntax.begin).lstrip()
    ends = (first[:num] for num in range(len(first), 0, -1))
    return next((text for text in ends if text.strip() and prefill.endswith(text)), "")


def _before(config: ParserConfig, tokens: Mapping[str, int], budget: int | None) -> tuple[Language, Language]:
    """(the language of reasoning, the marker between it and the answer), without what the prompt holds of them."""
    syntax = config.format.reasoning_syntax if config.format.reads_reasoning else None
    if syntax is None:
        return literal(""), literal("")
    parser = AnswerParser(replace(config, prefill=""))
    parser.feed(config.prefill)
    is_done = bool(parser.reasoning_spans) or config.prefill.rstrip().endswith(syntax.end)
    if parser.is_in_answer or (syntax.answer and config.prefill.endswith(syntax.answer)):
        return literal(""), literal("")
    opening = marked(syntax.answer, tokens) if syntax.answer else literal("")
    is_open = parser.reasoning_start is not None
    return reasoning(syntax, tokens, is_open=is_open, is_done=is_done, budget=budget), opening


def _choice(body: ChatRequest) -> ToolChoice:
    """The request's choice, or OpenAI's default: the model decides."""
    return body.tool_choice or ToolChoice("auto")
