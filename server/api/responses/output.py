"""The output of one response: turns events of a choice into items, and into the stream's events about them.

Reasoning, text and calls become items in their order. An item is open until the next one begins. This file knows
nothing of the response around the items.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import orjson

from inferd.server.api.long_lists import dumps
from inferd.server.api.responses.built_in_calls import read_call
from inferd.server.generate.events import (
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.schema.answers.generation import TokenLogprob
from inferd.server.schema.answers.response_events import (
    CommandDeltaEvent,
    CommandEvent,
    GrowthEvent,
    ItemEvent,
    OutputEvent,
    PartEvent,
    PartGrowthEvent,
)
from inferd.server.schema.answers.responses import (
    CallItem,
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SealedReasoning,
)
from inferd.server.schema.caller_tool import CallerTool, ToolKind
from inferd.server.schema.response_texts import sealed

Scored = tuple[ScoredToken, ...]
Ending = Literal["completed", "incomplete"]

_PREFIXES: Mapping[ToolKind, str] = {"shell": "sh", "local_shell": "lsh", "apply_patch": "apc", "tool_search": "tsc"}
"""Kind of a tool -> prefix of its items' ids."""


@dataclass(frozen=True, slots=True)
class Style:
    """Options for writing items."""

    logprobs: Callable[[Scored], Sequence[TokenLogprob]]
    """Makes the JSON of scored tokens, for `long_lists.dumps` to write."""
    seals_reasoning: bool
    """Whether reasoning has `encrypted_content` too."""
    numbers: Iterator[int]
    """The numbers of the stream's events, which must be sent in the order in which they are made."""
    tools: Mapping[str, CallerTool]
    """The tools that the model sees, by their names."""


class Output:
    """The items while they grow."""

    def __init__(self, style: Style) -> None:
        self.end: Finished | None = None
        self._style = style
        self._items: list[_Item] = []
        self._pending: Scored = ()
        """Tokens that came without text, because a character or a stop string was unfinished, or they have none."""

    @property
    def item_ids(self) -> tuple[str, ...]:
        return tuple(item.id for item in self._items)

    def items(self) -> list[OutputItem]:
        """The items as they are now, for orjson to write."""
        return [item.shown() for item in self._items]

    def feed(self, event: Event) -> Iterator[OutputEvent]:
        """The stream's events for an event of the choice. Must be read to its end."""
        match event:
            case PromptRead():
                raise AssertionError("the prompt of a response is not shown")
            case TextDelta():
                self._pending += event.scored
                if event.text:
                    yield from self._more(_Message, event.text)
            case ReasoningDelta():
                self._pending = ()
                yield from self._more(_Reasoning, event.text)
            case ToolCallStart():
                self._pending = ()
                yield from self._close("completed")
                yield from self._begin(_call_item(len(self._items), self._style, event))
            case ToolCallArguments():
                self._pending = ()
                yield from self._items[-1].more(event.text, ())
            case Finished():
                self.end = event
                if not self._items:
                    yield from self._begin(_Message(0, self._style))
                yield from self._close("incomplete" if event.reason == "length" else "completed")

    def stop(self) -> None:
        """Close the open item as incomplete, because no more events come."""
        if (item := self._filled()) is not None:
            item.status = "incomplete"

    def _filled(self) -> _Item | None:
        """The open item with all of its tokens; None if no item is open."""
        if not self._items or self._items[-1].status != "in_progress":
            return None
        item, scored = self._items[-1], self._take_scored()
        if isinstance(item, _Message):
            item.add(scored)
        return item

    def _more(self, kind: type[_Message | _Reasoning], text: str) -> Iterator[OutputEvent]:
        if not (self._items and isinstance(self._items[-1], kind)):
            yield from self._close("completed")
            yield from self._begin(kind(len(self._items), self._style))
        yield from self._items[-1].more(text, self._take_scored())

    def _begin(self, item: _Item) -> Iterator[OutputEvent]:
        self._items.append(item)
        yield from item.begin()

    def _close(self, status: Ending) -> Iterator[OutputEvent]:
        if (item := self._filled()) is not None:
            yield from item.close(status)
            item.status = status
            yield item.whole("response.output_item.done")

    def _take_scored(self) -> Scored:
        taken, self._pending = self._pending, ()
        return taken


class _Item(ABC):
    """One item of the output."""

    prefix: ClassVar[str]
    """Prefix of its id."""

    def __init__(self, index: int, style: Style) -> None:
        self.index, self.style = index, style
        self.status: ItemStatus = "in_progress"
        self.id = f"{self.prefix}_{secrets.token_hex(24)}"
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def growth(self) -> GrowthEvent:
        """The fields of a new event that say which item grows."""
        return {"sequence_number": next(self.style.numbers), "item_id": self.id, "output_index": self.index}

    def whole(self, kind: Literal["response.output_item.added", "response.output_item.done"]) -> ItemEvent:
        number = next(self.style.numbers)
        return {"type": kind, "sequence_number": number, "output_index": self.index, "item": self.shown()}

    def begin(self) -> Iterator[OutputEvent]:
        """Events of its beginning."""
        yield self.whole("response.output_item.added")

    def more(self, text: str, scored: Scored) -> Iterator[OutputEvent]:
        """Add text. Gives its event. `scored`: the tokens since the last text."""
        self.pieces.append(text)
        yield self.delta(text, scored)

    @abstractmethod
    def delta(self, text: str, scored: Scored) -> OutputEvent:
        """The event of more text."""

    @abstractmethod
    def close(self, status: Ending) -> Iterator[OutputEvent]:
        """Events before the item is done. `status`: how it ends."""

    @abstractmethod
    def shown(self) -> OutputItem:
        """The item as it is now."""


class _Content(_Item):
    """An item with one part, which holds its text."""

    def part_growth(self) -> PartGrowthEvent:
        return {**self.growth(), "content_index": 0}

    def begin(self) -> Iterator[OutputEvent]:
        yield from super().begin()
        yield self.whole_part("response.content_part.added")

    def close(self, status: Ending) -> Iterator[OutputEvent]:
        yield self.done()
        yield self.whole_part("response.content_part.done")

    def whole_part(self, kind: Literal["response.content_part.added", "response.content_part.done"]) -> PartEvent:
        return {"type": kind, **self.part_growth(), "part": self.part()}

    @property
    def has_part(self) -> bool:
        """Whether the item shows its part. It does not before the first text."""
        return bool(self.pieces) or self.status != "in_progress"

    @abstractmethod
    def part(self) -> ContentPart:
        """The part as it is now."""

    @abstractmethod
    def done(self) -> OutputEvent:
        """The event with the whole text."""


class _Message(_Content):
    prefix = "msg"

    def __init__(self, index: int, style: Style) -> None:
        super().__init__(index, style)
        self._logprobs: list[bytes] = []
        """The contents of JSON lists, each encoded once, because the whole list is sent five times."""

    def delta(self, text: str, scored: Scored) -> OutputEvent:
        logprobs = _list_of(self.add(scored))
        return {"type": "response.output_text.delta", **self.part_growth(), "delta": text, "logprobs": logprobs}

    def done(self) -> OutputEvent:
        logprobs = _list_of(self._logprobs)
        return {"type": "response.output_text.done", **self.part_growth(), "text": self.text, "logprobs": logprobs}

    def add(self, scored: Scored) -> list[bytes]:
        """Add scored tokens. Returns the content of their list."""
        added = [dumps(self.style.logprobs(scored))[1:-1]] if scored else []
        self._logprobs += added
        return added

    def part(self) -> OutputText:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": _list_of(self._logprobs)}

    def shown(self) -> OutputMessage:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [self.part()] if self.has_part else [],
        }


def _list_of(insides: list[bytes]) -> Sequence[TokenLogprob]:
    """The list with these contents, for orjson to write."""
    return cast("list[TokenLogprob]", orjson.Fragment(b"[" + b",".join(insides) + b"]"))


class _Reasoning(_Content):
    prefix = "rs"

    def delta(self, text: str, scored: Scored) -> OutputEvent:
        return {"type": "response.reasoning_text.delta", **self.part_growth(), "delta": text}

    def done(self) -> OutputEvent:
        return {"type": "response.reasoning_text.done", **self.part_growth(), "text": self.text}

    def part(self) -> ReasoningText:
        return {"type": "reasoning_text", "text": self.text}

    def shown(self) -> ReasoningItem:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            **self._sealed(),
            "content": [self.part()] if self.has_part else [],
        }

    def _sealed(self) -> SealedReasoning:
        if not self.style.seals_reasoning:
            return {}
        return {"encrypted_content": "" if self.status == "in_progress" else sealed(self.text)}


class _Call(_Item):
    """A call of a function, or of a tool that the request does not list."""

    prefix = "fc"

    def __init__(self, index: int, style: Style, start: ToolCallStart) -> None:
        super().__init__(index, style)
        self.start, self.tool = start, style.tools.get(start.name)

    def delta(self, text: str, scored: Scored) -> OutputEvent:
        return {"type": "response.function_call_arguments.delta", **self.growth(), "delta": text}

    def close(self, status: Ending) -> Iterator[OutputEvent]:
        yield {
            "type": "response.function_call_arguments.done",
            **self.growth(),
            "name": self.name,
            "arguments": self.text,
        }

    @property
    def name(self) -> str:
        """The caller's name of the tool."""
        return (self.tool.given_name if self.tool is not None else "") or self.start.name

    def shown(self) -> CallItem:
        item: FunctionCallItem = {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.start.id,
            "name": self.name,
            "arguments": self.text,
        }
        if self.tool is not None and self.tool.namespace is not None:
            item["namespace"] = self.tool.namespace
        return item


class _CustomCall(_Call):
    """A call of a custom tool."""

    prefix = "ctc"

    def delta(self, text: str, scored: Scored) -> OutputEvent:
        return {"type": "response.custom_tool_call_input.delta", **self.growth(), "delta": text}

    def close(self, status: Ending) -> Iterator[OutputEvent]:
        yield {"type": "response.custom_tool_call_input.done", **self.growth(), "input": self.text}

    def shown(self) -> CallItem:
        item: CustomCallItem = {
            "id": self.id,
            "type": "custom_tool_call",
            "status": self.status,
            "call_id": self.start.id,
            "name": self.name,
            "input": self.text,
        }
        if self.tool is not None and self.tool.namespace is not None:
            item["namespace"] = self.tool.namespace
        return item


class _WholeCall(_Call):
    """A call whose item holds no text but what the text says. It is shown when it is complete: until then, and if the
    text cannot be read, it is a call of a function."""

    def __init__(self, index: int, style: Style, start: ToolCallStart, kind: ToolKind) -> None:
        super().__init__(index, style, start)
        self.kind = kind
        self.id = f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"

    def begin(self) -> Iterator[OutputEvent]:
        return iter(())

    def more(self, text: str, scored: Scored) -> Iterator[OutputEvent]:
        self.pieces.append(text)
        return iter(())

    def close(self, status: Ending) -> Iterator[OutputEvent]:
        self.status = status
        if (item := self.read()) is None:
            self.status = "in_progress"
            yield self.whole("response.output_item.added")
            yield from super().close(status)
            return
        self.status = "in_progress"
        yield self.whole("response.output_item.added")
        if item["type"] == "shell_call":
            yield from self._commands(item["action"]["commands"])

    def _commands(self, commands: Sequence[str]) -> Iterator[OutputEvent]:
        for i, command in enumerate(commands):
            for kind, text in (("added", ""), ("delta", command), ("done", command)):
                yield self._command(kind, i, text)

    def _command(self, kind: str, index: int, text: str) -> CommandEvent | CommandDeltaEvent:
        number = next(self.style.numbers)
        if kind == "delta":
            return {
                "type": "response.shell_call_command.delta",
                "sequence_number": number,
                "output_index": self.index,
                "command_index": index,
                "delta": text,
            }
        return {
            "type": "response.shell_call_command.added" if kind == "added" else "response.shell_call_command.done",
            "sequence_number": number,
            "output_index": self.index,
            "command_index": index,
            "command": text,
        }

    def shown(self) -> CallItem:
        return self.read() or super().shown()

    def read(self) -> CallItem | None:
        """The item that the text makes; None if it cannot be read."""
        return read_call(self.kind, self.text, self.id, self.status, self.start.id)


def _call_item(index: int, style: Style, start: ToolCallStart) -> _Item:
    tool = style.tools.get(start.name)
    if tool is None or tool.kind == "function":
        return _Call(index, style, start)
    return _CustomCall(index, style, start) if tool.kind == "custom" else _WholeCall(index, style, start, tool.kind)
