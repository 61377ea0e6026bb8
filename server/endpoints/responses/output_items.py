"""The items of a response's output while they grow, and the stream's events about each: messages and reasoning.

An item knows nothing of its neighbours: `output` opens and closes it, and has the items of calls.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import orjson

from inferd.server.endpoints.long_lists import dumps
from inferd.server.generate.events import ScoredToken
from inferd.server.schema.answers.generation import TokenLogprob
from inferd.server.schema.answers.response_events import GrowthEvent, ItemEvent, OutputEvent, PartEvent, PartGrowthEvent
from inferd.server.schema.answers.responses import (
    ContentPart,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SealedReasoning,
)
from inferd.server.schema.caller_tool import CallerTool
from inferd.server.schema.response_parts import sealed

Scored = tuple[ScoredToken, ...]
Ending = Literal["completed", "incomplete"]


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


class Item(ABC):
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


class _Content(Item):
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


class Message(_Content):
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


class Reasoning(_Content):
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
