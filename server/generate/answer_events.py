"""One choice's text as events: content, reasoning and calls in order, and how many of its tokens are reasoning.

Connects an `AnswerParser`, which only knows text, to the events of a choice. Stop strings are found here, in what the
caller gets as content: they see no arguments and no markers.
"""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from inferd.server.generate.events import (
    Event,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.generate.request import GenerateRequest
from inferd.server.observability.server_instruments import Repair
from inferd.server.text.stops import StopStrings
from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, joined
from inferd.server.tools.second_look import SecondLook
from inferd.server.tools.text_input import TextInput

_SHORT_ID_CHARS = string.ascii_letters + string.digits
_SHORT_ID_LENGTH = 9
_EMPTY = (Content(""), Reasoning(""))


class AnswerEvents(Protocol):
    """Turns the text of one choice into events."""

    @property
    def num_calls(self) -> int:
        """Number of calls whose name is known."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the answer ends here, because no further call is wanted."""
        ...

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer. No more text may be added then."""
        ...

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        ...

    @property
    def repairs(self) -> Mapping[Repair, int]:
        """How often the text was read otherwise than the model's format says."""
        ...

    @property
    def num_held(self) -> int:
        """Number of characters at the end that are held back for a stop string, and of those behind them."""
        ...

    def stops_at(self, token: str) -> bool:
        """Whether a stop token with this text would end the answer here."""
        ...

    def token(self, offset: int) -> None:
        """Add a token whose text begins `offset` characters into the choice's text."""
        ...

    def feed(self, text: str, is_armed: bool = True) -> None:
        """Add text; none of it will be taken back. Unless `is_armed`, a stop string is text like any other."""
        ...

    def finish(self, *, is_cut: bool) -> None:
        """Called when no more text comes. `is_cut`: a limit ended it, not the model."""
        ...

    def events(
        self, token_ids: tuple[int, ...], scored: tuple[ScoredToken, ...], num_cached_tokens: int, num_unsent: int = 0
    ) -> Iterator[Event]:
        """The events that became certain since the last call, with the tokens that came meanwhile."""
        ...


def answer_of(choice: int, request: GenerateRequest) -> AnswerEvents:
    stops, config = StopStrings(request.stop, request.include_stop), request.parser_config
    return PlainAnswer(choice, stops) if config is None else ParsedAnswer(choice, config, stops)


class PlainAnswer:
    """All of the text is content; the format of the model is not known."""

    num_calls = 0
    repairs: Mapping[Repair, int] = {}
    is_full = is_in_call = False

    def __init__(self, choice: int, stops: StopStrings) -> None:
        self._choice, self._stops = choice, stops
        self._pieces: list[str] = []

    @property
    def stop(self) -> str | None:
        return None if self._stops.match is None else self._stops.match.stop

    @property
    def num_held(self) -> int:
        return self._stops.num_held

    def stops_at(self, token: str) -> bool:
        del token
        return True

    def token(self, offset: int) -> None:
        pass

    def feed(self, text: str, is_armed: bool = True) -> None:
        self._pieces.append(self._stops.feed(text, is_armed))

    def finish(self, *, is_cut: bool) -> None:
        del is_cut
        self._pieces.append(self._stops.finish())

    def events(
        self, token_ids: tuple[int, ...], scored: tuple[ScoredToken, ...], num_cached_tokens: int, num_unsent: int = 0
    ) -> Iterator[Event]:
        text, self._pieces = "".join(self._pieces), []
        if text or token_ids:
            yield TextDelta(self._choice, text, token_ids, scored, num_cached_tokens, 0, num_unsent)


class ParsedAnswer:
    """Separates content, reasoning and calls. Stop strings work on content, and on reasoning if the request says so."""

    def __init__(self, choice: int, parser_config: ParserConfig, stops: StopStrings) -> None:
        self.num_calls = 0
        self._choice, self._config = choice, parser_config
        self._parser = AnswerParser.of(parser_config)
        self._look = None if parser_config.offer is None else SecondLook(parser_config.offer)
        self._stops = stops
        self._held_type: type[Content | Reasoning] = Content
        """Type of the text that the stop strings hold back: each stretch of content or reasoning is searched alone."""
        self._offsets: list[int] = []
        """Number of characters before each token, never falling. Tokens without text count too."""
        self._num_reasoning = self._num_closed = self._num_spans = 0
        self._last_span: tuple[int, int] | None = None
        """Tokens of reasoning, those of closed stretches, and number of these."""
        self._pieces: list[Piece] = []
        self._text_input: TextInput | None = None
        """Reads the open call's text; None if it is a function's."""

    @property
    def stop(self) -> str | None:
        return None if self._stops.match is None else self._stops.match.stop

    @property
    def is_in_call(self) -> bool:
        return self._parser.is_in_call

    @property
    def repairs(self) -> Mapping[Repair, int]:
        num_found = 0 if self._look is None else self._look.num_calls
        return {"stray_marker": self._parser.num_strays, "call_in_other_format": num_found}

    @property
    def num_held(self) -> int:
        return self._stops.num_held + self._parser.num_waiting if self._stops.num_held else 0

    def stops_at(self, token: str) -> bool:
        is_read = self._parser.is_in_content or (
            self._config.stops_reasoning and self._parser.reasoning_start is not None
        )
        is_call = self._look is not None and self._look.is_in_call
        return is_read and not is_call and not self._parser.is_marker(token)

    @property
    def is_full(self) -> bool:
        return self._parser.is_full

    def token(self, offset: int) -> None:
        self._offsets.append(offset)

    def feed(self, text: str, is_armed: bool = True) -> None:
        if text:
            pieces = self._parser.feed(text)
            self._take(pieces if self._look is None else self._look.take(pieces), is_armed)

    def finish(self, *, is_cut: bool) -> None:
        if self.stop is None:
            pieces = self._parser.finish(is_cut=is_cut)
            if self._look is not None:
                pieces = [*self._look.take(pieces), *self._look.finish()]
            self._take(pieces, is_armed=True)
        if self.stop is None:
            self._release()
        self._pieces.append(CallEnded())  # the answer may be cut off within a call

    def _take(self, pieces: Iterable[Piece], is_armed: bool) -> None:
        """Add pieces up to the stop string that ends the answer."""
        for piece in pieces:
            if type(piece) is not self._held_type:
                self._release()
            if isinstance(piece, Content) or (isinstance(piece, Reasoning) and self._config.stops_reasoning):
                self._held_type = type(piece)
                piece = self._held_type(self._stops.feed(piece.text, is_armed))
            self._pieces.append(piece)
            if self.stop is not None:
                return

    def _release(self) -> None:
        """Add the text that is held back: the stretch that it belongs to has ended."""
        if held := self._stops.finish():
            self._pieces.append(self._held_type(held))

    def events(
        self, token_ids: tuple[int, ...], scored: tuple[ScoredToken, ...], num_cached_tokens: int, num_unsent: int = 0
    ) -> Iterator[Event]:
        pieces, self._pieces = joined([piece for piece in self._pieces if piece not in _EMPTY]), []
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
        counted once: later tokens begin behind it. The last one is open again if the call that closed it was none."""
        spans, last = self._parser.reasoning_spans, self._last_span
        if last is not None and spans[self._num_spans - 1 : self._num_spans] != [last]:
            self._num_closed -= self._num_between(*last)
            self._num_spans -= 1
        self._num_closed += sum(self._num_between(start, end) for start, end in spans[self._num_spans :])
        self._num_spans, self._last_span = len(spans), spans[-1] if spans else None
        start = self._parser.reasoning_start
        total = self._num_closed + (0 if start is None else len(self._offsets) - bisect_left(self._offsets, start))
        more, self._num_reasoning = total - self._num_reasoning, total
        return more

    def _num_between(self, start: int, end: int) -> int:
        return bisect_left(self._offsets, end) - bisect_left(self._offsets, start)
