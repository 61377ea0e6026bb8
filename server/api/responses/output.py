"""The output of one response: turns events of a choice into items, and into the stream's events about them.

Reasoning, text and calls become items in their order. An item is open until the next one begins. This file knows
nothing of the response around the items.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import orjson

from inferd.server.api.long_lists import dumps
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
from inferd.server.schema.response_items import sealed

Json = dict[str, Any]
Scored = tuple[ScoredToken, ...]
OutputEvent = tuple[str, Json]
"""(type of an event, its fields without type and sequence number)."""


@dataclass(frozen=True, slots=True)
class Style:
    """Options for writing items."""

    logprobs: Callable[[Scored], object]
    """Makes the JSON of scored tokens, for `long_lists.dumps` to write."""
    seals_reasoning: bool
    """Whether reasoning has `encrypted_content` too."""


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

    def items(self) -> list[Json]:
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
                yield from self._begin(_Call(len(self._items), self._style, event))
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
        for _ in self._close("incomplete"):
            pass

    def _more(self, kind: type[_Message | _Reasoning], text: str) -> Iterator[OutputEvent]:
        if not (self._items and isinstance(self._items[-1], kind)):
            yield from self._close("completed")
            yield from self._begin(kind(len(self._items), self._style))
        yield from self._items[-1].more(text, self._take_scored())

    def _begin(self, item: _Item) -> Iterator[OutputEvent]:
        self._items.append(item)
        yield "response.output_item.added", {"output_index": item.index, "item": item.shown()}
        yield from item.begin()

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[OutputEvent]:
        if not self._items or self._items[-1].status != "in_progress":
            return
        item = self._items[-1]
        yield from item.close(self._take_scored())
        item.status = status
        yield "response.output_item.done", {"output_index": item.index, "item": item.shown()}

    def _take_scored(self) -> Scored:
        taken, self._pending = self._pending, ()
        return taken


class _Item(ABC):
    """One item of the output."""

    prefix: ClassVar[str]
    """Prefix of its id."""
    growth: ClassVar[str]
    """Prefix of the types of events that extend it."""

    def __init__(self, index: int, style: Style) -> None:
        self.index, self.style = index, style
        self.status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
        self.id = f"{self.prefix}_{secrets.token_hex(24)}"
        self.pieces: list[str] = []
        self.place: Json = {"item_id": self.id, "output_index": index}

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self) -> Iterator[OutputEvent]:
        """Events after the item was added."""
        yield from ()

    def more(self, text: str, scored: Scored) -> Iterator[OutputEvent]:
        """Events for more text. `scored`: the tokens since the last text."""
        del scored
        self.pieces.append(text)
        yield f"{self.growth}.delta", {**self.place, "delta": text}

    @abstractmethod
    def close(self, scored: Scored) -> Iterator[OutputEvent]:
        """Events before the item is done."""

    @abstractmethod
    def shown(self) -> Json:
        """The item as it is now."""


class _Content(_Item):
    """An item with one part, which holds its text."""

    def __init__(self, index: int, style: Style) -> None:
        super().__init__(index, style)
        self.place["content_index"] = 0

    def begin(self) -> Iterator[OutputEvent]:
        yield "response.content_part.added", {**self.place, "part": self.part()}

    def close(self, scored: Scored) -> Iterator[OutputEvent]:
        yield f"{self.growth}.done", {**self.place, "text": self.text}
        yield "response.content_part.done", {**self.place, "part": self.part()}

    @abstractmethod
    def part(self) -> Json:
        """The part as it is now."""

    def parts(self) -> list[Json]:
        """The list of its part, which is empty before the first text."""
        return [] if self.status == "in_progress" and not self.pieces else [self.part()]


class _Message(_Content):
    prefix, growth = "msg", "response.output_text"

    def __init__(self, index: int, style: Style) -> None:
        super().__init__(index, style)
        self._logprobs: list[bytes] = []
        """The contents of JSON lists, each encoded once, because the whole list is sent five times."""

    def more(self, text: str, scored: Scored) -> Iterator[OutputEvent]:
        logprobs = self._add(scored)
        for kind, fields in super().more(text, scored):
            yield kind, {**fields, "logprobs": logprobs}

    def close(self, scored: Scored) -> Iterator[OutputEvent]:
        self._add(scored)
        done, part_done = super().close(scored)
        yield done[0], {**done[1], "logprobs": _list_of(self._logprobs)}
        yield part_done

    def _add(self, scored: Scored) -> orjson.Fragment:
        added = [dumps(self.style.logprobs(scored))[1:-1]] if scored else []
        self._logprobs += added
        return _list_of(added)

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": _list_of(self._logprobs)}

    def shown(self) -> Json:
        item = {"id": self.id, "type": "message", "status": self.status, "role": "assistant"}
        return {**item, "content": self.parts()}


def _list_of(insides: list[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[" + b",".join(insides) + b"]")


class _Reasoning(_Content):
    prefix, growth = "rs", "response.reasoning_text"

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def shown(self) -> Json:
        item: Json = {"id": self.id, "type": "reasoning", "status": self.status, "summary": []}
        if self.style.seals_reasoning:
            item["encrypted_content"] = "" if self.status == "in_progress" else sealed(self.text)
        return {**item, "content": self.parts()}


class _Call(_Item):
    prefix, growth = "fc", "response.function_call_arguments"

    def __init__(self, index: int, style: Style, start: ToolCallStart) -> None:
        super().__init__(index, style)
        self._start = start

    def close(self, scored: Scored) -> Iterator[OutputEvent]:
        yield f"{self.growth}.done", {**self.place, "name": self._start.name, "arguments": self.text}

    def shown(self) -> Json:
        item = {"id": self.id, "type": "function_call", "status": self.status}
        return {**item, "call_id": self._start.id, "name": self._start.name, "arguments": self.text}
