"""Renders a checkpoint's chat template in transformers' sandbox. Runs in the processes of `render_process`.

A template is a stranger's program. Its expressions may take any time and memory, also within one call into C, so only
`check_syntax` runs in the server's own process. Knows no requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jinja2
import msgspec
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from inferd.engine.api.errors import ModelError
from inferd.server.text.render_wire import MAX_RENDERED_CHARS, Program, Question

# Errors that a template raises for messages it was not written for: its own, or Python's.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError,
    MemoryError,
)  # fmt: skip


def check_syntax(text: str) -> None:
    """Parse only. Rendering and compiling would run expressions of the template, for as long as they take. Raises
    `ModelError`."""
    # transformers builds its sandbox, which has tags of its own, in this function; an empty template has the same one.
    environment = _compile_jinja_template("").environment
    try:
        power = environment.parse(text).find(nodes.Pow)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of more digits than Python reads
        raise ModelError(f"the chat template does not parse: {error}") from error
    if power is not None:
        # 9**9**9 takes hours. Compiling would compute it.
        raise ModelError(f"the chat template raises to a power in line {power.lineno}: write the number out")


def global_names() -> frozenset[str]:
    """Names that every template may use without being given them."""
    return frozenset(_compile_jinja_template("").environment.globals)


def render(program: Program, question: Question) -> str:
    """The prompt's text. Raises one of `TEMPLATE_ERRORS`.

    Most templates write the arguments of calls as JSON themselves; some join them to text and need a text. Some join a
    tool's description to text, which a tool may lack.
    """
    try:
        return _render(program, question)
    except jinja2.UndefinedError:
        described = [_described(tool) for tool in question.tools or ()]
        if described == list(question.tools or ()):
            raise
        return _render(program, msgspec.structs.replace(question, tools=described))
    except TypeError:
        if not any(message.get("tool_calls") for message in question.messages):
            raise
        messages = [_with_text_arguments(message) for message in question.messages]
        return _render(program, msgspec.structs.replace(question, messages=messages))


def _render(program: Program, question: Question) -> str:
    text = program.with_tools if question.tools else program.default
    variables: dict[str, Any] = {**program.special_tokens, **question.kwargs}
    # The template's environment joins all output of the template, its macros and its `set` blocks by this function.
    # transformers caches the compiled template.
    _compile_jinja_template(text).environment.concat = _Budget(MAX_RENDERED_CHARS).join
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
    """The message as the template takes it: role `system` if it does not know `developer`; and before a call one
    text, reasoning included, if it reads reasoning as `thinking`. That is gpt-oss's, which refuses two."""
    copy = dict(message)
    if copy["role"] == "developer" and "developer" not in program.default:
        copy["role"] = "system"
    thought, content = copy.get("reasoning_content") or copy.get("reasoning"), copy.get("content")
    if copy.get("tool_calls") and thought and content and "message.thinking" in program.default:
        copy |= {"content": f"{thought}\n{content}", "thinking": ""}
    return copy


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


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    functions = [call["function"] for call in calls]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    return {
        **message,
        "tool_calls": [
            {**call, "function": {**function, "arguments": text}}
            for call, function, text in zip(calls, functions, texts, strict=True)
        ],
    }
