"""The output of one response: turns events of a choice into items, and into the stream's events about them.

Reasoning, text and calls become items in their order. An item is open until the next one begins. This file knows
nothing of the response around the items.
"""

from __future__ import annotations

from collections.abc import Iterator

from inferd.server.endpoints.responses.output_calls import call_item
from inferd.server.endpoints.responses.output_items import Ending, Item, Message, Reasoning, Scored, Style
from inferd.server.generate.events import (
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.schema.answers.response_events import OutputEvent
from inferd.server.schema.answers.responses import OutputItem


class Output:
    """The items while they grow."""

    def __init__(self, style: Style) -> None:
        self.end: Finished | None = None
        self._style = style
        self._items: list[Item] = []
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
                    yield from self._more(Message, event.text)
            case ReasoningDelta():
                self._pending = ()
                yield from self._more(Reasoning, event.text)
            case ToolCallStart():
                self._pending = ()
                yield from self._close("completed")
                yield from self._begin(call_item(len(self._items), self._style, event))
            case ToolCallArguments():
                self._pending = ()
                yield from self._items[-1].more(event.text, ())
            case Finished():
                self.end = event
                if not self._items:
                    yield from self._begin(Message(0, self._style))
                yield from self._close("incomplete" if event.reason == "length" else "completed")

    def stop(self) -> None:
        """Close the open item as incomplete, because no more events come."""
        if (item := self._filled()) is not None:
            item.status = "incomplete"

    def _filled(self) -> Item | None:
        """The open item with all of its tokens; None if no item is open."""
        if not self._items or self._items[-1].status != "in_progress":
            return None
        item, scored = self._items[-1], self._take_scored()
        if isinstance(item, Message):
            item.add(scored)
        return item

    def _more(self, kind: type[Message | Reasoning], text: str) -> Iterator[OutputEvent]:
        if not (self._items and isinstance(self._items[-1], kind)):
            yield from self._close("completed")
            yield from self._begin(kind(len(self._items), self._style))
        yield from self._items[-1].more(text, self._take_scored())

    def _begin(self, item: Item) -> Iterator[OutputEvent]:
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
