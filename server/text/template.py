"""The checkpoint's chat template: messages -> the text that the model was trained to continue.

Never renders a caller's template. The checkpoint's own is rendered by workers in other processes (`RenderPool`). If it
refuses messages (roles must alternate), the answer is a 400 with the template's words.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from inferd.engine.api.errors import ModelError, RequestError
from inferd.server.errors import messages as errors
from inferd.server.schema.notices import Notice
from inferd.server.text.control_tokens import ControlTokens, Rendered, places_of
from inferd.server.text.render_wire import Limits, Program, RenderAnswer, RenderQuestion, frame_of
from inferd.server.text.render_workers import (
    EndedError,
    NotStartedError,
    OvertimeError,
    RarelyLogged,
    RenderError,
    RenderProcess,
    RenderWorker,
    render_process,
)
from inferd.server.text.rendering import check_syntax, global_names
from inferd.server.text.turn_order import ABOUT_FORMS
from inferd.server.tools.derived.derive import derive
from inferd.server.tools.detect import Derived
from inferd.server.tools.fallback import Fallback, Message, Tool, ToolSupport, probe

_PAUSES_S = (0.05, 0.2)
"""Seconds between the attempts to render a conversation, if its worker is killed from outside or cannot be started."""

_MAX_IDLE = 2
"""Most idle workers of a checkpoint."""

_KEPT_BYTES = 2**20
"""A worker that took or gave more is replaced, which returns its memory. A new one compiles the template again."""


class RenderPool:
    """The workers that render one checkpoint's chat template. Each is started when a rendering finds none idle.
    Replaces those that end, and asks again. All calls block, so they belong on threads."""

    def __init__(self, program: bytearray, process: RenderProcess | None = None) -> None:
        """`program`: a frame."""
        self._program, self._process = program, process or render_process()
        self._idle: list[RenderWorker] = []
        self._busy: set[RenderWorker] = set()
        self._num_closed = 0
        """Times that it was closed. A rendering that began before the last one is given up."""
        self._lost = RarelyLogged()

    def run(self, question: RenderQuestion) -> RenderAnswer:
        """The answer to the question. If its worker is killed from outside or cannot be started, another gets the
        question after a pause.

        Raises `OvertimeError` past a limit, and `RenderError` if no worker lives long enough.
        """
        num_closed = self._num_closed
        for pause_s in _PAUSES_S:
            try:
                return self._attempt(question, num_closed)
            except (EndedError, NotStartedError):
                time.sleep(pause_s)
        try:
            return self._attempt(question, num_closed)
        except EndedError as ended:
            raise RenderError(f"its process ended{ended.reason}, {len(_PAUSES_S) + 1} times") from ended

    def _attempt(self, question: RenderQuestion, num_closed: int) -> RenderAnswer:
        """The same, asked once. Raises `EndedError` if the worker ended, unless a limit or `close` ended it."""
        limits = question.limits
        try:
            return self._ask(question, num_closed)
        except EndedError as ended:
            if self._num_closed != num_closed:
                raise RenderError("the server is shutting down") from ended
            if ended.signal_number == signal.SIGPROF:
                raise OvertimeError(f"it took more than {limits.cpu_s:g} s of processor time") from ended
            if ended.signal_number == signal.SIGALRM:
                raise OvertimeError(f"it took longer than {limits.wall_s:g} s") from ended
            self._lost.warn("a process that renders chat templates ended%s before it had answered", ended.reason)
            raise

    def close(self) -> None:
        """End the idle workers. Renderings that run raise `RenderError`."""
        self._num_closed += 1
        for worker in tuple(self._busy):
            worker.stop()
        while self._idle:
            self._idle.pop().close()

    def _ask(self, question: RenderQuestion, num_closed: int) -> RenderAnswer:
        worker = self._take()
        self._busy.add(worker)
        try:
            if self._num_closed != num_closed:  # too late for `close` to have seen the worker
                worker.close()
                raise EndedError(None)
            answer, num_bytes = worker.ask(question)
        finally:
            self._busy.discard(worker)
        is_last = question.limits.is_nice or answer.is_spent or num_bytes > _KEPT_BYTES
        if is_last or len(self._idle) >= _MAX_IDLE:
            worker.close()
        else:
            self._idle.append(worker)
        return answer

    def _take(self) -> RenderWorker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return self._process.fork(self._program)
            if worker.is_alive():
                return worker
            worker.close()


QUICK = Limits(cpu_s=0.25)
"""Limits of a rendering that other requests wait behind. A published template takes 0.1 to 3 ms for a usual chat. A new
worker compiles it first, in 10 to 40 ms (one core, AMD EPYC Zen 4, 2026-11-28)."""

DERIVING_S = 10.0
"""Most seconds in which a format is derived from a template. A published one takes 0.1 s."""

SLOW = Limits(cpu_s=10.0)
"""A hundred times as long as 10,000 messages take (0.1 s; one core, AMD EPYC Zen 4, 2026-11-21)."""

# Names that rendering itself sets; `chat_template_kwargs` may not overwrite them.
_RESERVED = frozenset(
    ("messages", "conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
     "continue_final_message", "add_generation_prompt", "tokenize", "self", "bos_token", "eos_token", "unk_token",
     "sep_token", "pad_token", "cls_token", "mask_token")
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
    """One checkpoint's template. If the checkpoint has several, the one for tools and the default one.

    Rendering blocks until another process has rendered, so it belongs on a thread.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, object]) -> None:
        """Raises `ModelError` for a template that does not parse, and for several templates without a default."""
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in named:
            raise ModelError(f"the tokenizer has the chat templates {sorted(named)} and no default among them")
        default = named["default"]
        tokens = {key: str(value) for key, value in special_tokens.items() if isinstance(value, str)}
        self.program = Program(default, named.get("tool_use", default), tokens)
        self._fallback: Fallback | None = None
        # Functions and tokens of the template, too: another `raise_exception`, for example, would refuse nothing.
        self._reserved = _RESERVED | global_names() | special_tokens.keys()
        self.literals = check_syntax(self.program.default) | check_syntax(self.program.with_tools)
        """The texts in its templates."""
        self.control_tokens: ControlTokens | None = None
        """Keeps callers' texts text; None: they are trusted."""
        try:
            self._pool = RenderPool(frame_of(self.program))
        except UnicodeEncodeError as error:
            raise ModelError(f"the chat template or a special token is no Unicode text: {error}") from error

    @property
    def source(self) -> str:
        """The checkpoint's template; if there are several, the one without tools."""
        return self.program.default

    @property
    def lacks_tools(self) -> bool:
        """Whether the server writes tools into the messages, because the template does not show them."""
        return self._fallback is not None and not self._fallback.support.tools

    def probe(self) -> ToolSupport:
        """Find out which parts of tool use the template shows, from the prompts of test messages. Raises
        `RenderError`."""

        return probe(self._plain)

    def plain(self, messages: Sequence[Message]) -> str | None:
        """The prompt of messages that need no answer; None if the template refuses them or does not end."""
        with contextlib.suppress(RenderError):
            return self._plain(messages, None, asks=False)
        return None

    def prompt(self, messages: Sequence[Message]) -> str | None:
        """The prompt of messages that ask for an answer; None if the template refuses them. Raises `RenderError`."""
        return self._plain(messages, None)

    def _plain(self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, asks: bool = True) -> str | None:
        answer = self._ask(Conversation(messages, tools, asks), {}, QUICK)
        return answer.text if answer.refusal is None and not answer.form else None

    def derive(self, support: ToolSupport) -> Derived:
        """Derive the format of the model's answers from about 25 probe conversations. Raises `RenderError`, and
        `OvertimeError` if they take too long together."""
        deadline = time.monotonic() + DERIVING_S

        def render(
            messages: Sequence[Message], tools: Sequence[Tool] | None, is_prompt: bool, kwargs: Mapping[str, object]
        ) -> str | None:
            if time.monotonic() > deadline:
                raise OvertimeError(f"all probes took longer than {DERIVING_S:g} s together")
            answer = self._ask(Conversation(messages, tools, is_prompt), kwargs, QUICK)
            return answer.text if answer.refusal is None and not answer.form else None

        return derive(render, support, self.literals.names)

    def with_fallback(self, fallback: Fallback) -> Self:
        """A copy of the template that uses `fallback` for what it does not show."""
        made = copy.copy(self)
        made._fallback = fallback
        return made

    def with_control_tokens(self, control_tokens: ControlTokens) -> Self:
        """A copy of the template whose prompts tell the template's control tokens from callers' text."""
        made = copy.copy(self)
        made.control_tokens = control_tokens
        return made

    def render(self, conversation: Conversation, limits: Limits = SLOW, notices: list[Notice] | None = None) -> str:
        """The text of the prompt, as `read` returns it."""
        return self.read(conversation, limits, notices).text

    def read(self, conversation: Conversation, limits: Limits = SLOW, notices: list[Notice] | None = None) -> Rendered:
        """The prompt. If the template refuses the order of the messages, they are joined, moved or split, which
        `notices` tells. Raises `RequestError` for messages that the template refuses in every form, and `RenderError`.
        """
        changes: list[str] = []
        if self.control_tokens is not None:
            conversation = _marked(conversation, self.control_tokens)
        if self._fallback is not None:
            changes += self._fallback.splits(conversation.messages)
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
        answer = self._ask(conversation, kwargs, limits)
        if answer.refusal is not None:
            raise _refused(answer.refusal)
        if answer.form in ABOUT_FORMS:
            changes.append(ABOUT_FORMS[answer.form])
        if notices is not None and changes:
            text = f"the model's chat template does not take the messages in this order: {', and '.join(changes)}"
            notices.append(Notice("template_order", text))
        return Rendered(answer.text, places_of(answer.places) if answer.places else ())

    def close(self) -> None:
        """End its idle processes. Renderings that run raise `RenderError`."""
        self._pool.close()

    def _ask(self, conversation: Conversation, kwargs: Mapping[str, object], limits: Limits) -> RenderAnswer:
        question = RenderQuestion(
            limits,
            conversation.messages,
            conversation.tools or None,
            conversation.documents or None,
            conversation.add_generation_prompt,
            conversation.continue_final_message,
            kwargs,
            self.control_tokens.marks if self.control_tokens is not None else "",
        )
        return self._pool.run(question)

    def _of(self, conversation: Conversation) -> str:
        return self.program.with_tools if conversation.tools else self.program.default


def _marked(conversation: Conversation, control_tokens: ControlTokens) -> Conversation:
    mark = control_tokens.marked
    return replace(
        conversation,
        messages=control_tokens.marked_messages(conversation.messages),
        tools=mark(conversation.tools),
        documents=mark(conversation.documents),
        kwargs={name: mark(value) for name, value in (conversation.kwargs or {}).items()},
    )


def _refused(words: str) -> RequestError:
    shown = errors.clip(words, errors.MAX_ECHO)
    return RequestError(
        "invalid_value", f"The model's chat template does not accept these messages: {shown}", "messages"
    )
