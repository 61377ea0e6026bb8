"""One choice's text as events: content, reasoning and calls in order, and how many of its tokens are reasoning.

Connects an `AnswerParser`, which only knows text, to the events of a choice.
"""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Protocol

from inferd.server.generate.events import (
    Event,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.tools.answer_parser import ParserConfig
from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, joined
from inferd.server.tools.text_input import TextInput

_SHORT_ID_CHARS = string.ascii_letters + string.digits
_SHORT_ID_LENGTH = 9


class Answer(Protocol):
    """Turns the text of one choice into events."""

    @property
    def num_calls(self) -> int:
        """Number of calls whose name is known."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the answer ends here, because no further call is wanted."""
        ...

    def token(self, offset: int) -> None:
        """Add a token whose text begins `offset` characters into the choice's text."""
        ...

    def feed(self, text: str) -> None:
        """Add text; none of it will be taken back."""
        ...

    def finish(self) -> None:
        """Called when no more text comes."""
        ...

    def events(
        self, token_ids: tuple[int, ...], scored: tuple[ScoredToken, ...], num_cached_tokens: int, num_unsent: int = 0
    ) -> Iterator[Event]:
        """The events that became certain since the last call, with the tokens that came meanwhile."""
        ...


def answer_of(choice: int, parser_config: ParserConfig | None) -> Answer:
    return PlainAnswer(choice) if parser_config is None else ParsedAnswer(choice, parser_config)


class PlainAnswer:
    """All of the text is content; the format of the model is not known."""

    num_calls = 0
    is_full = False

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self._pieces: list[str] = []

    def token(self, offset: int) -> None:
        pass

    def feed(self, text: str) -> None:
        self._pieces.append(text)

    def finish(self) -> None:
        pass

    def events(
        self, token_ids: tuple[int, ...], scored: tuple[ScoredToken, ...], num_cached_tokens: int, num_unsent: int = 0
    ) -> Iterator[Event]:
        text, self._pieces = "".join(self._pieces), []
        if text or token_ids:
            yield TextDelta(self._choice, text, token_ids, scored, num_cached_tokens, 0, num_unsent)


class ParsedAnswer:
    """Separates content, reasoning and calls."""

    def __init__(self, choice: int, parser_config: ParserConfig) -> None:
        self.num_calls = 0
        self._choice, self._config = choice, parser_config
        self._parser = parser_config.new_parser()
        self._offsets: list[int] = []
        """Number of characters before each token, never falling. Tokens without text count too."""
        self._num_reasoning = self._num_closed = self._num_spans = 0
        """Tokens of reasoning, those of closed stretches, and number of these."""
        self._pieces: list[Piece] = []
        self._text_input: TextInput | None = None
        """Reads the open call's text; None if it is a function's."""

    @property
    def is_full(self) -> bool:
        return self._parser.is_full

    def token(self, offset: int) -> None:
        self._offsets.append(offset)

    def feed(self, text: str) -> None:
        if text:
            self._pieces += self._parser.feed(text)

    def finish(self) -> None:
        self._pieces += (*self._parser.finish(), CallEnded())  # the answer may be cut off within a call

    def events(
        self, token_ids: tuple[int, ...], scored: tuple[ScoredToken, ...], num_cached_tokens: int, num_unsent: int = 0
    ) -> Iterator[Event]:
        pieces, self._pieces = joined(self._pieces), []
        content = ""
        if pieces and isinstance(pieces[0], Content):
            content, pieces = pieces[0].text, pieces[1:]
        num_more = self._more_reasoning()
        if content or token_ids or num_more:
            yield TextDelta(self._choice, content, token_ids, scored, num_cached_tokens, num_more, num_unsent)
        yield from self._events_of(pieces, num_cached_tokens, num_unsent)

    def _events_of(self, pieces: Iterable[Piece], num_cached_tokens: int, num_unsent: int) -> Iterator[Event]:
        for piece in pieces:
            match piece:
                case Content():
                    yield TextDelta(self._choice, piece.text, (), (), num_cached_tokens, 0, num_unsent)
                case Reasoning():
                    if self._config.shows_reasoning:
                        yield ReasoningDelta(self._choice, piece.text)
                case CallBegun():
                    self.num_calls += 1
                    self._text_input = TextInput() if piece.name in self._config.text_tools else None
                    yield ToolCallStart(self._choice, self.num_calls - 1, self._new_id(), piece.name)
                case CallArguments():
                    yield from self._arguments(piece.text)
                case CallEnded():
                    yield from self._call_ended()

    def _arguments(self, text: str) -> Iterator[Event]:
        text = text if self._text_input is None else self._text_input.feed(text)
        if text:
            yield ToolCallArguments(self._choice, self.num_calls - 1, text)

    def _call_ended(self) -> Iterator[Event]:
        rest = "" if self._text_input is None else self._text_input.finish()
        if rest:
            yield ToolCallArguments(self._choice, self.num_calls - 1, rest)
        self._text_input = None

    def _new_id(self) -> str:
        if self._config.format.has_short_ids:
            return "".join(secrets.choice(_SHORT_ID_CHARS) for _ in range(_SHORT_ID_LENGTH))
        return f"call_{secrets.token_hex(12)}"

    def _more_reasoning(self) -> int:
        """Number of tokens that begin inside reasoning, markers included, and are not counted yet. A closed stretch is
        counted once: later tokens begin behind it."""
        spans = self._parser.reasoning_spans
        self._num_closed += sum(self._num_between(start, end) for start, end in spans[self._num_spans :])
        self._num_spans = len(spans)
        start = self._parser.reasoning_start
        total = self._num_closed + (0 if start is None else len(self._offsets) - bisect_left(self._offsets, start))
        more, self._num_reasoning = total - self._num_reasoning, total
        return more

    def _num_between(self, start: int, end: int) -> int:
        return bisect_left(self._offsets, end) - bisect_left(self._offsets, start)
