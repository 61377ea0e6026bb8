"""Probe conversations, and the text that a template renders behind their user's message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from inferd.server.tools.fallback import Message, Tool, ToolSupport

RenderTurn = Callable[[Sequence[Message], Sequence[Tool] | None, bool, Mapping[str, object]], str | None]
"""(messages, tools, whether to ask for an answer, switches of the template) -> text; None: the template refuses."""

ASKED, SAID, THOUGHT, RESULT = "user-said-5d1", "content-said-5d1", "thought-said-5d1", "result-said-5d1"
NAMES = ("probe_alpha", "probe_beta")
KEYS = ("key_alpha", "key_beta")
VALUES = ("value-alpha", "value-beta")
NUMBER = 70351
IDS = ("probe5d1a", "probe5d1b")
"""Some templates accept only ids of nine letters and digits."""
USUAL_ID = "call_0123456789abcdef"

ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
"""Switches of reasoning: the names that templates have for them."""

_EMPTY: dict[str, dict[str, object]] = {"text": {"content": ""}, "null": {"content": None}, "absent": {}}


def _tool(name: str) -> Tool:
    properties = {key: {"type": "string", "description": "A word."} for key in KEYS}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


TOOLS: tuple[Tool, ...] = tuple(map(_tool, NAMES))


def call(number: int, arguments: Mapping[str, Any], call_id: str = "") -> Message:
    """The call of the probe's first or second tool."""
    return {
        "type": "function",
        "id": call_id or IDS[number],
        "function": {"name": NAMES[number], "arguments": dict(arguments)},
    }


@dataclass
class Probes:
    """Renders probes of one template, each once."""

    render: RenderTurn
    support: ToolSupport
    num_rendered: int = 0
    _with_tools: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if self.turn(content=SAID) is None:
            self._with_tools = False

    def turn(
        self,
        calls: Sequence[Message] = (),
        *,
        content: str = "",
        thought: str = "",
        chunks: bool = False,
        kwargs: Mapping[str, object] | None = None,
        follows: bool = False,
    ) -> str | None:
        """The text of an assistant's turn, behind the user's message. `chunks`: the thought is a part of the content.
        `follows`: another message of the user comes after it."""
        message: dict[str, object] = {"role": "assistant", **({"content": content} if content else self._empty)}
        if thought and chunks:
            parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": content}]
            message["content"] = parts
        elif thought:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if calls:
            message["tool_calls"] = list(calls)
        messages: list[Message] = [{"role": "user", "content": ASKED}, message]
        if follows:
            messages.append({"role": "user", "content": RESULT})
        return self._behind(messages, kwargs or {}, ASKED, is_prompt=False)

    def prompt(self, kwargs: Mapping[str, object]) -> str | None:
        """The text between the user's message and the answer."""
        return self._behind([{"role": "user", "content": ASKED}], kwargs, ASKED, is_prompt=True)

    @cached_property
    def prompt_after_result(self) -> str | None:
        """The text between a tool's result and the answer."""
        messages: list[Message] = [
            {"role": "user", "content": ASKED},
            {"role": "assistant", **self._empty, "tool_calls": [call(0, {KEYS[0]: VALUES[0]})]},
            {"role": "tool", "tool_call_id": IDS[0], "name": NAMES[0], "content": RESULT},
        ]
        return self._behind(messages, {}, RESULT, is_prompt=True)

    @property
    def _empty(self) -> dict[str, object]:
        return _EMPTY[self.support.empty]

    def _behind(
        self, messages: Sequence[Message], kwargs: Mapping[str, object], word: str, *, is_prompt: bool
    ) -> str | None:
        self.num_rendered += 1
        text = self.render(messages, TOOLS if self._with_tools else None, is_prompt, kwargs)
        if text is None or word not in text:
            return None
        return text[text.rfind(word) + len(word) :]
