"""Renders a checkpoint's chat template in transformers' sandbox. Runs in the processes of `render_process`.

A template is a stranger's program. Its expressions may take any time and memory, also within one call into C, so only
`check_syntax` runs in the server's own process. Knows no requests.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self, cast

import jinja2
import msgspec
import pydantic_core
from jinja2 import nodes

from inferd.engine.api.errors import ModelError
from inferd.server.text.render_wire import MAX_RENDERED_CHARS, Program, RenderAnswer, RenderQuestion, mark, unmarked
from inferd.server.text.turn_order import forms_of, late_system_texts
from inferd.server.tools.single_files import single_files

try:
    with single_files("transformers", "transformers.utils"):
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template
except ImportError:  # another version's file needs its packages: the same, but a slower start
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

# Errors that a template raises for messages it was not written for: its own, or Python's.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError,
    MemoryError,
)  # fmt: skip

_RETRIED = (jinja2.TemplateError, ValueError, TypeError)
"""Errors of a template that may take another form of tools or arguments."""


@dataclass(frozen=True, slots=True)
class Literals:
    """Texts in a template."""

    written: frozenset[str]
    """Its own text, and the strings in its expressions."""
    names: frozenset[str]
    """Strings and attributes that its expressions look up or compare."""

    def __or__(self, other: Self) -> Literals:
        return Literals(self.written | other.written, self.names | other.names)


def check_syntax(text: str) -> Literals:
    """Parse only. Rendering and compiling would run expressions of the template, for as long as they take. Raises
    `ModelError`."""
    # transformers builds its sandbox, which has tags of its own, in this function; an empty template has the same one.
    environment = _compile_jinja_template("").environment
    try:
        tree = environment.parse(text)
        power = tree.find(nodes.Pow)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of more digits than Python reads
        raise ModelError(f"the chat template does not parse: {error}") from error
    if power is not None:
        # 9**9**9 takes hours. Compiling would compute it.
        raise ModelError(f"the chat template raises to a power in line {power.lineno}: write the number out")
    strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    written = {node.data for node in tree.find_all(nodes.TemplateData)}
    return Literals(frozenset(strings | written), frozenset(strings | attributes))


def global_names() -> frozenset[str]:
    """Names that every template may use without being given them."""
    return frozenset(_compile_jinja_template("").environment.globals)


def answer(program: Program, question: RenderQuestion) -> RenderAnswer:
    """The prompt's text, of the conversation as it is given, or of the first form that the template takes and shows
    completely. All forms together have the time of one rendering. Raises one of `TEMPLATE_ERRORS`."""
    found = _marked_answer(program, question)
    text, places = found.text, b""
    if question.marks:
        if _SPELT in text and not _holds(question, _SPELT):
            text = _SPELT_MARK.sub(lambda spelt: chr(int(spelt[1], 16)), text)
        text, places = unmarked(text, question.marks)
    return RenderAnswer(text, form=found.form, places=places)


_SPELT = r"\ud"
_SPELT_MARK = re.compile(r"(?<!\\ud[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")
"""A mark as Python writes it in a list or an object, which some templates print."""


def _holds(value: Any, text: str) -> bool:
    """Whether a text in `value` holds `text`."""
    if isinstance(value, RenderQuestion):
        return any(_holds(part, text) for part in (value.messages, value.tools, value.documents, value.kwargs))
    if isinstance(value, Mapping):
        return any(_holds(part, text) for item in value.items() for part in item)
    if isinstance(value, (list, tuple)):
        return any(_holds(item, text) for item in value)
    return isinstance(value, str) and text in value


def _marked_answer(program: Program, question: RenderQuestion) -> RenderAnswer:
    wanted = late_system_texts(question.messages)
    found: RenderAnswer | None = None
    refusal: Exception | None = None
    for form, messages in chain((("", question.messages),), forms_of(question.messages)):
        try:
            text = render(program, msgspec.structs.replace(question, messages=messages))
        except MemoryError:
            raise
        except TEMPLATE_ERRORS as error:
            refusal = refusal or error
            continue
        if all(part in text for part in wanted):
            return RenderAnswer(text, form=form)
        found = found or RenderAnswer(text, form=form)
    if found is None:
        assert refusal is not None
        raise refusal
    return found


def render(program: Program, question: RenderQuestion) -> str:
    """The prompt's text. Raises one of `TEMPLATE_ERRORS`.

    Arguments that are no JSON object are shown as the model wrote them, also by templates that print JSON: a word
    stands for them while the template is rendered. A template that takes objects alone gets as much of one as there is.
    """
    words = _Placeholders()
    as_object = partial(_object_of, marks=question.marks)
    replaced = _with_arguments(
        question, lambda arguments: words.of(arguments) if isinstance(arguments, str) else arguments
    )
    try:
        text = _render_some_form(program, replaced)
    except _RETRIED:
        if not words.texts:
            raise
        return _render_some_form(program, _with_arguments(question, as_object))
    if not words.are_all_in(text):
        with contextlib.suppress(*_RETRIED):
            return _render_some_form(program, _with_arguments(question, as_object))
    return words.replaced(text)


class _Placeholders:
    """Words that stand for texts which a template must not change. They are random, so that no message has one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._word = f"written{secrets.token_hex(8)}n"
        self._pattern = re.compile(f'"{self._word}([0-9]+)e"|{self._word}([0-9]+)e')

    def of(self, text: str) -> str:
        self.texts.append(text)
        return f"{self._word}{len(self.texts) - 1}e"

    def are_all_in(self, prompt: str) -> bool:
        found = {word[1] or word[2] for word in self._pattern.finditer(prompt)} if self.texts else ()
        return len(found) == len(self.texts)

    def replaced(self, prompt: str) -> str:
        """The prompt with the texts in place of the words, and of the quotes that JSON puts around them. Raises
        `ValueError` for one that is too long."""
        if not self.texts:
            return prompt
        pieces: list[str] = []
        end = 0
        for word in self._pattern.finditer(prompt):
            pieces += (prompt[end : word.start()], self.texts[int(word[1] or word[2])])
            end = word.end()
        return _Budget(MAX_RENDERED_CHARS).join((*pieces, prompt[end:]))


def _render_some_form(program: Program, question: RenderQuestion) -> str:
    """Most templates write the arguments of calls as JSON themselves; some join them to text and need a text. Some join
    a tool's description to text, which a tool may lack."""
    try:
        return _render_texts(program, question)
    except jinja2.UndefinedError:
        described = [_described(tool) for tool in question.tools or ()]
        if described == list(question.tools or ()):
            raise
        return _render_texts(program, msgspec.structs.replace(question, tools=described))
    except TypeError:
        if not any(message.get("tool_calls") for message in question.messages):
            raise
        return _render_texts(program, _with_arguments(question, _text_of))


def _render_texts(program: Program, question: RenderQuestion) -> str:
    """gpt-oss's template refuses reasoning beside a text before a call, so both become one text."""
    try:
        return _render(program, question)
    except jinja2.UndefinedError:
        raise
    except jinja2.TemplateError:
        messages = list(map(_with_one_text, question.messages))
        if "message.thinking" not in program.default or messages == list(question.messages):
            raise
        return _render(program, msgspec.structs.replace(question, messages=messages))


def _render(program: Program, question: RenderQuestion) -> str:
    text = program.with_tools if question.tools else program.default
    variables: dict[str, Any] = {**program.special_tokens, **question.kwargs}
    # The template's environment joins all output of the template, its macros and its `set` blocks by this function.
    # transformers caches the compiled template.
    environment = _compile_jinja_template(text).environment
    environment.concat = _Budget(MAX_RENDERED_CHARS).join
    environment.filters["tojson"] = _as_json
    # transformers declares one string, but returns (a text for each conversation, indices that are not needed).
    texts, _ = cast(
        "tuple[list[str], object]",
        render_jinja_template(
            conversations=[[_for_template(message, program) for message in question.messages]],
            tools=[dict(tool) for tool in question.tools] if question.tools else None,
            documents=[dict(document) for document in question.documents] if question.documents else None,
            chat_template=text,
            continue_final_message=question.continue_final_message,
            add_generation_prompt=question.add_generation_prompt,
            **variables,
        ),
    )
    return texts[0]


def _for_template(message: Mapping[str, object], program: Program) -> dict[str, object]:
    """The message as the template takes it: role `system` if it does not know `developer`."""
    copy = dict(message)
    if copy["role"] == "developer" and "developer" not in program.default:
        copy["role"] = "system"
    return copy


def _with_one_text(message: Mapping[str, object]) -> Mapping[str, object]:
    """The message with its reasoning in the content, if it also has content and calls."""
    thought, content = message.get("reasoning_content") or message.get("reasoning"), message.get("content")
    if not (message.get("tool_calls") and thought and content):
        return message
    return {**message, "content": f"{thought}\n{content}", "thinking": ""}


class _Budget:
    """Characters that one rendering may still join."""

    def __init__(self, num_chars: int) -> None:
        self._num_chars = num_chars

    def join(self, pieces: Iterable[str]) -> str:
        """Join pieces, counting them first: a nested loop over the messages makes a short list of long texts. Raises
        `ValueError` if they exceed the budget."""
        kept: list[str] = []
        for piece in pieces:
            self._num_chars -= len(piece)
            if self._num_chars < 0:
                rule = f"it makes more than {MAX_RENDERED_CHARS} characters of them; send fewer, or shorter ones"
                raise ValueError(rule)
            kept.append(piece)
        return "".join(kept)


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return {**tool, "function": {"description": "", **function}} if isinstance(function, Mapping) else tool


def _with_arguments(question: RenderQuestion, convert: Callable[[Any], Any]) -> RenderQuestion:
    """The question with `convert` of the arguments of every call."""
    messages = [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": convert(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if message.get("tool_calls")
        else message
        for message in question.messages
    ]
    return msgspec.structs.replace(question, messages=messages)


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _object_of(arguments: Any, marks: str) -> Mapping[str, Any]:
    """The complete part of an object that was cut off, or an object that holds the text. `marks`: the question's."""
    if not isinstance(arguments, str):
        return cast("Mapping[str, Any]", arguments)
    try:
        found = pydantic_core.from_json(unmarked(arguments, marks)[0], allow_partial="trailing-strings")
        json.dumps(found, allow_nan=False)  # a number may be too large
    except ValueError:
        found = None
    return _marked(found, marks) if isinstance(found, dict) else {"arguments": arguments}


def _marked(value: Any, marks: str) -> Any:
    """A value of arguments with all characters marked that begin control tokens: those that are no letters."""
    if isinstance(value, str):
        for i, char in enumerate(marks):
            value = value if char.isalnum() else value.replace(char, mark(i))
        return value
    if isinstance(value, dict):
        return {_marked(key, marks): _marked(item, marks) for key, item in value.items()}
    return [_marked(item, marks) for item in value] if isinstance(value, list) else value


_ESCAPED = re.compile("[^\x00-\x7e\udc00-\udfff]+")
"""Characters that JSON escapes, and are no marks."""


def _as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """transformers' filter `tojson`, without escapes for marks."""
    text = json.dumps(value, ensure_ascii=False, **options)
    if not ensure_ascii:
        return text
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text)
