"""The checkpoint's chat template: messages -> the text that the model was trained to continue.

Renders in transformers' sandbox, and never renders a caller's template. If the template refuses messages (roles must
alternate), the answer is a 400 with the template's words. A rendering that would take too much memory is a 400 too.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import jinja2
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from inferd.engine.api.errors import ModelError, RequestError
from inferd.server.errors import table as errors
from inferd.server.tools.fallback import Fallback, Message, Tool, ToolSupport, probe

MAX_RENDERED_CHARS = 2**26
"""Most characters that one rendering may join, those of macros and `set` blocks included: four times the largest body
taken by default. They take at most 256 MiB, and twice that while the pieces are joined."""

# Names that rendering itself sets; `chat_template_kwargs` may not overwrite them.
_RESERVED = frozenset(
    ("messages", "conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
     "continue_final_message", "add_generation_prompt", "tokenize", "self", "bos_token", "eos_token", "unk_token",
     "sep_token", "pad_token", "cls_token", "mask_token")
)  # fmt: skip

# Errors that a template raises for messages it was not written for: its own, or Python's.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError,
    MemoryError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, object] | None = None
    """Switches of the template, such as `enable_thinking`."""
    documents: Sequence[Mapping[str, object]] | None = None


def conversation_of(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: Mapping[str, object] | None,
    documents: Sequence[Mapping[str, object]] | None = None,
) -> Conversation:
    """None stands for the default: the prompt asks for an answer, unless the last message is to be continued."""
    continues = bool(continue_final_message)
    asks = not continues if add_generation_prompt is None else add_generation_prompt
    return Conversation(messages, tools, asks, continues, kwargs, documents)


class ChatTemplate:
    """One checkpoint's template. If the checkpoint has several, the one for tools and the default one."""

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, object]) -> None:
        """Raises `ModelError` for a template that does not parse, and for several templates without a default."""
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in named:
            raise ModelError(f"the tokenizer has the chat templates {sorted(named)} and no default among them")
        self._default = named["default"]
        self._with_tools = named.get("tool_use", self._default)
        self._special_tokens = {key: str(value) for key, value in special_tokens.items() if isinstance(value, str)}
        self._knows_developer = "developer" in self._default
        self._reads_thinking = "message.thinking" in self._default
        self._fallback: Fallback | None = None
        # Functions and tokens of the template, too: another `raise_exception`, for example, would refuse nothing.
        self._reserved = _RESERVED | _compile_jinja_template("").environment.globals.keys() | special_tokens.keys()
        for text in (self._default, self._with_tools):
            _check_syntax(text)

    @property
    def source(self) -> str:
        """The checkpoint's template; if there are several, the one without tools."""
        return self._default

    @property
    def lacks_tools(self) -> bool:
        """Whether the server writes tools into the messages, because the template does not show them."""
        return self._fallback is not None and not self._fallback.support.tools

    def probe(self) -> ToolSupport:
        """Find out which parts of tool use the template shows. Renders probes, for as long as the template takes."""

        def render(messages: Sequence[Message], tools: Sequence[Tool] | None) -> str | None:
            try:
                return self._render_calls(Conversation(messages, tools), {})
            except _TEMPLATE_ERRORS:
                return None

        return probe(render)

    def with_fallback(self, fallback: Fallback) -> Self:
        """A copy of the template that uses `fallback` for what it does not show."""
        made = copy.copy(self)
        made._fallback = fallback
        return made

    def render(self, conversation: Conversation) -> str:
        """The prompt's text. Raises `RequestError` for messages that the template refuses."""
        if self._fallback is not None:
            messages = self._fallback.messages(conversation.messages, conversation.tools)
            tools = None if self.lacks_tools else conversation.tools
            conversation = replace(conversation, messages=messages, tools=tools)
        kwargs = conversation.kwargs or {}
        for name in kwargs:
            if name in self._reserved:
                where = f"chat_template_kwargs.{name}"
                raise errors.unsupported_parameter(where, "The request has a field of its own for it, or none.")
        if conversation.documents and "documents" not in self._of(conversation):
            way_out = "This model's chat template reads no documents; put them into the messages."
            raise errors.unsupported_parameter("documents", way_out)
        try:
            return self._render_calls(conversation, kwargs)
        except _TEMPLATE_ERRORS as error:
            raise _refused(error) from error

    def reads_late_system(self) -> bool:
        """Whether a system message may follow other messages: some templates refuse it or leave it out.

        Renders, so do not call it on the event loop.
        """
        mark = "a-late-system-message"
        said = (("user", "a"), ("system", mark), ("assistant", "b"), ("user", "c"))
        messages = [{"role": role, "content": content} for role, content in said]
        try:
            return mark in self._render(Conversation(messages), {})
        except _TEMPLATE_ERRORS:
            return False

    def _render_calls(self, conversation: Conversation, kwargs: Mapping[str, object]) -> str:
        """Render. Most templates write the arguments of calls as JSON themselves; some join them to text and need a
        text. Some join a tool's description to text, which a tool may lack."""
        try:
            return self._render(conversation, kwargs)
        except jinja2.UndefinedError:
            described = [_described(tool) for tool in conversation.tools or ()]
            if described == list(conversation.tools or ()):
                raise
            return self._render(replace(conversation, tools=described), kwargs)
        except TypeError:
            if not any(message.get("tool_calls") for message in conversation.messages):
                raise
            messages = [_with_text_arguments(message) for message in conversation.messages]
            return self._render(replace(conversation, messages=messages), kwargs)

    def _of(self, conversation: Conversation) -> str:
        return self._with_tools if conversation.tools else self._default

    def _render(self, conversation: Conversation, kwargs: Mapping[str, object]) -> str:
        variables: dict[str, Any] = {**self._special_tokens, **kwargs}
        # The template's environment joins all output of the template, its macros and its `set` blocks by this function.
        # transformers caches the compiled template.
        _compile_jinja_template(self._of(conversation)).environment.concat = _join_counted
        _budget.num_chars = MAX_RENDERED_CHARS
        # transformers declares one string, but returns (a text for each conversation, indices that are not needed).
        texts, _ = cast(
            "tuple[list[str], object]",
            render_jinja_template(
                conversations=[[self._for_template(message) for message in conversation.messages]],
                tools=[dict(tool) for tool in conversation.tools] if conversation.tools else None,
                documents=[dict(document) for document in conversation.documents] if conversation.documents else None,
                chat_template=self._of(conversation),
                continue_final_message=conversation.continue_final_message,
                add_generation_prompt=conversation.add_generation_prompt,
                **variables,
            ),
        )
        return texts[0]

    def _for_template(self, message: Mapping[str, object]) -> dict[str, object]:
        """The message as the template takes it: role `system` if it does not know `developer`; and before a call one
        text, reasoning included, if it reads reasoning as `thinking`. That is gpt-oss's, which refuses two."""
        copy = dict(message)
        if copy["role"] == "developer" and not self._knows_developer:
            copy["role"] = "system"
        thought, content = copy.get("reasoning_content") or copy.get("reasoning"), copy.get("content")
        if self._reads_thinking and copy.get("tool_calls") and thought and content:
            copy |= {"content": f"{thought}\n{content}", "thinking": ""}
        return copy


class _Budget(threading.local):
    """Characters that the rendering on this thread may still join."""

    num_chars = MAX_RENDERED_CHARS


_budget = _Budget()


def _join_counted(pieces: Iterable[str]) -> str:
    """Join pieces, counting them first: a nested loop over the messages makes a short list of long texts. Raises
    `ValueError` if they exceed the budget.
    """
    kept: list[str] = []
    for piece in pieces:
        _budget.num_chars -= len(piece)
        if _budget.num_chars < 0:
            raise ValueError(f"it makes more than {MAX_RENDERED_CHARS} characters of them; send fewer, or shorter ones")
        kept.append(piece)
    return "".join(kept)


def _described(tool: Mapping[str, object]) -> Mapping[str, object]:
    function = tool.get("function")
    return {**tool, "function": {"description": "", **function}} if isinstance(function, Mapping) else tool


def _with_text_arguments(message: Mapping[str, object]) -> Mapping[str, object]:
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


def _check_syntax(text: str) -> None:
    """Parse only. Rendering and compiling would run expressions of the template, for as long as they take."""
    # transformers builds its sandbox, which has tags of its own, in this function; an empty template has the same one.
    environment = _compile_jinja_template("").environment
    try:
        power = environment.parse(text).find(nodes.Pow)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of more digits than Python reads
        raise ModelError(f"the chat template does not parse: {error}") from error
    if power is not None:
        # A power is one call into C that holds the interpreter and cannot be interrupted: 9**9**9 takes hours.
        raise ModelError(f"the chat template raises to a power in line {power.lineno}: write the number out")


def _refused(error: Exception) -> RequestError:
    words = errors.clip(str(error) or type(error).__name__, errors.MAX_ECHO)
    return RequestError(
        "invalid_value", f"The model's chat template does not accept these messages: {words}", "messages"
    )
