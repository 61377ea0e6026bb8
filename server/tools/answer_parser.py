"""Parses the text of an answer into pieces of reasoning, calls and content, each as soon as it is certain.

Two rules decide about every character, however the text was cut:

- Text that is in no region of the format is content, markers included. If a call turns out to be none, it is content
  from its marker on. If its arguments had begun, only the text from the first wrong character on is content.
- Blanks beside a marker belong to the marker. Blanks between two stretches of content are kept.

The patterns of the response template find the regions. If the calls in a region are not JSON, transformers'
`ResponseParser` reads them once the region has closed. Knows no tokens and no stop strings.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from inferd.server.tools.closed_calls import calls_of
from inferd.server.tools.format import Format, Region
from inferd.server.tools.json_calls import BLANK, JsonCalls
from inferd.server.tools.markers import Found
from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, joined


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """How the answers of one request are parsed."""

    format: Format
    with_calls: bool
    """Whether to look for calls."""
    tools: tuple[Mapping[str, object], ...] = ()
    prefill: str = ""
    """Beginning of the answer that is already in the prompt."""
    text_tools: frozenset[str] = frozenset()
    """Names of the tools that take a text instead of arguments."""
    max_calls: int | None = None
    """Number of calls after which the answer ends; None: no bound."""
    shows_reasoning: bool = True
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that the parser must see."""
    names_function: bool = False
    """Whether `tool_choice` names the function to call."""
    begun: AnswerParser | None = field(default=None, compare=False, repr=False)
    """A parser that has read `prefill`; `new_parser` copies it."""

    def with_prefill_parsed(self) -> ParserConfig:
        """The same config, with `prefill` parsed once for all choices."""
        return replace(self, begun=AnswerParser(self))

    def new_parser(self) -> AnswerParser:
        return AnswerParser(self) if self.begun is None else self.begun.copy()

    @property
    def tool_names(self) -> Collection[str]:
        functions = (tool.get("function") for tool in self.tools)
        return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


class _Mode(Enum):
    FREE = auto()
    """Outside of regions."""
    TEXT = auto()
    CALLS = auto()
    """In a region of JSON calls."""
    CLOSING = auto()
    """After the JSON, before the marker that closes the region."""
    WHOLE = auto()
    """In a region of calls that is parsed when it has closed."""


class AnswerParser:
    """Parses one answer."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self.num_calls = 0
        """Number of complete calls."""
        self.reasoning_spans: list[tuple[int, int]] = []
        """[start, end) of each closed stretch of reasoning, in characters of the text, markers included."""
        self._config = parser_config
        self._watched = parser_config.format.watched(with_calls=parser_config.with_calls)
        self._pieces: list[Piece] = []
        self._reset()
        if parser_config.prefill:
            self._begin_after(parser_config.prefill)

    def copy(self) -> AnswerParser:
        """A copy in the same state. Call it outside of calls, before anything was found."""
        assert self._mode in (_Mode.FREE, _Mode.TEXT) and not (self._pieces or self._text or self.reasoning_spans)
        other = copy.copy(self)
        other.reasoning_spans, other._pieces, other._shown = [], [], set(self._shown)
        return other

    @property
    def reasoning_start(self) -> int | None:
        """The character at which the open reasoning began; None outside of reasoning."""
        return self._region_start if self._region is not None and self._region.role == "reasoning" else None

    @property
    def is_in_answer(self) -> bool:
        """Whether a marker of the answer itself is open."""
        return self._region is not None and self._region.role == "content"

    @property
    def is_full(self) -> bool:
        """Whether the answer ends here, because no further call is wanted."""
        return self._config.max_calls is not None and self.num_calls >= self._config.max_calls

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after this text."""
        self._text += text
        return self._run(is_end=False)

    def finish(self) -> list[Piece]:
        """The last pieces, when no more text comes."""
        return self._run(is_end=True)

    def _reset(self) -> None:
        self._mode = _Mode.FREE
        self._text = ""
        """Text that is not parsed yet."""
        self._position = 0
        """Position of `_text` in the answer, in characters."""
        self._blanks = ""
        """Blanks since the last character of content."""
        self._region: Region | None = None
        self._region_start = 0
        self._opening = ""
        """Opening marker of a region that may turn out to be none."""
        self._body: list[str] = []
        self._captures: Mapping[str, str] = {}
        self._calls = JsonCalls()
        self._is_bare_possible = self._config.format.is_bare and self._config.with_calls
        self._held = ""
        """Blanks at the end of the text of an open region."""
        self._shown: set[str] = set()
        """Roles of the regions so far that had text."""
        self._touches_marker = self._has_content = self._is_region_start = False

    def _begin_after(self, prefill: str) -> None:
        """Parse the prompt's part of the answer, and drop its text that is still held back."""
        self.feed(prefill)
        if self._mode not in (_Mode.FREE, _Mode.TEXT):
            self._reset()
        self._text = self._blanks = self._held = ""
        self._position = self._region_start = 0
        self.reasoning_spans, self.num_calls = [], 0

    def _run(self, *, is_end: bool) -> list[Piece]:
        steps = {
            _Mode.FREE: self._free,
            _Mode.TEXT: self._in_text,
            _Mode.CALLS: self._in_calls,
            _Mode.CLOSING: self._closing,
            _Mode.WHOLE: self._in_whole,
        }
        while not self.is_full and steps[self._mode](is_end):
            pass
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def _take(self, num_chars: int) -> str:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        self._position += num_chars
        return taken

    # Each step below returns whether another step may follow now.

    def _free(self, is_end: bool) -> bool:
        separators = BLANK + ";" if self._is_bare_possible and self.num_calls else BLANK
        self._blanks += self._take(len(self._text) - len(self._text.lstrip(separators)))
        if self._is_bare_possible and self._text[:1] in ("{", "["):
            self._mode, self._calls = _Mode.CALLS, JsonCalls(known_names=self._config.tool_names)
            return True
        region, found, num_before = self._next_region(is_end)
        self._content(self._take(num_before))
        if region is not None and found is not None:
            self._open(region, found)
            return True
        if is_end:
            self._content_ended()
        return False

    def _next_region(self, is_end: bool) -> tuple[Region | None, Found | None, int]:
        """(region that opens first, its marker, number of characters before it). Without a region, the number counts
        the characters before a possible marker."""
        best: tuple[int, int] | None = None
        opened: tuple[Region, Found] | None = None
        held = len(self._text)
        for region in self._watched if self._text else ():
            found = region.open.find(self._text, 0, is_end=is_end)
            if found is None or found.end == found.start:
                continue
            if found.end is None:
                held = min(held, found.start)
            elif best is None or (found.start, -found.end) < best:
                best, opened = (found.start, -found.end), (region, found)
        if opened is None or opened[1].start >= held:
            return None, None, held
        return *opened, opened[1].start

    def _content(self, text: str) -> None:
        """Add text outside of regions. Blanks at its end are held back, because they may belong to a marker."""
        body = text.rstrip(BLANK)
        if body:
            before = self._blanks if self._has_content or not self._touches_marker else self._blanks.strip(BLANK)
            self._pieces.append(Content(before + body))
            self._blanks, self._has_content = "", True
            self._touches_marker = self._is_bare_possible = False
        self._blanks += text[len(body) :]

    def _content_ended(self) -> None:
        rest = self._blanks.strip(BLANK) if self._touches_marker else self._blanks
        if rest:
            self._pieces.append(Content(rest))
        self._blanks = ""

    def _open(self, region: Region, found: Found) -> None:
        assert found.end is not None
        self._region, self._region_start = region, self._position
        self._opening, self._captures = self._take(found.end - found.start), found.captures
        self._held = ""
        if region.role != "call":
            self._mode, self._is_region_start, self._touches_marker = _Mode.TEXT, True, True
        elif region.is_json:
            self._mode, self._calls = _Mode.CALLS, JsonCalls(found.captures.get("name"))
        else:
            self._mode, self._body = _Mode.WHOLE, []
            if "name" in found.captures:
                self._begin_call(found.captures["name"])

    def _in_text(self, is_end: bool) -> bool:
        region = self._region
        assert region is not None
        found = None if region.close is None or not self._text else region.close.find(self._text, 0, is_end=is_end)
        self._region_text(region, self._take(len(self._text) if found is None else found.start))
        if found is None or found.end is None:
            if is_end and self._held:
                self._pieces.append(_text_piece(region, self._held))
                self._held = ""
            return False
        self._take(found.end - found.start)
        if region.role == "reasoning":
            self.reasoning_spans.append((self._region_start, self._position))
        self._mode, self._region, self._held = _Mode.FREE, None, ""
        return True

    def _region_text(self, region: Region, text: str) -> None:
        """Add text between markers, without the blanks beside them."""
        if self._is_region_start:
            text = text.lstrip(BLANK)
        body = text.rstrip(BLANK)
        if body:
            before = self._held
            if self._is_region_start and region.role in self._shown:
                before = region.separator
            self._pieces.append(_text_piece(region, before + body))
            self._held, self._is_region_start = "", False
            self._shown.add(region.role)
            self._has_content = self._has_content or region.role == "content"
        self._held += text[len(body) :]

    def _in_calls(self, is_end: bool) -> bool:
        pieces, end = self._calls.take(self._text)
        self._take(end)
        for piece in pieces:
            if isinstance(piece, CallBegun):
                self._begin_call(piece.name)
                self._opening = ""
            else:
                self._pieces.append(piece)
                self.num_calls += isinstance(piece, CallEnded)
            if self.is_full:
                return False
        if self._calls.is_done:
            self._mode = _Mode.CLOSING
            return True
        if not (self._calls.is_broken or is_end):
            return False
        self._give_back("".join(self._calls.unread))
        return True

    def _begin_call(self, name: str) -> None:
        self._touches_marker = True
        if self._region is None:
            self._blanks = ""  # also drops the separator between two calls without markers
        self._pieces.append(CallBegun(name))

    def _give_back(self, text: str) -> None:
        """The region was none: its marker and its text are content."""
        text = self._opening + text
        self._mode, self._region, self._opening = _Mode.FREE, None, ""
        self._is_bare_possible = False
        self._content(text)

    def _closing(self, is_end: bool) -> bool:
        close = None if self._region is None else self._region.close
        blanks = len(self._text) - len(self._text.lstrip(BLANK))
        for start in (0, blanks):
            if close is None:
                break
            if start == len(self._text):
                if is_end:
                    break
                return False
            found = close.at(self._text, start, is_end=is_end)
            if found is None:
                continue
            if found.end is None:
                return False
            self._take(found.end)
            break
        self._mode, self._region = _Mode.FREE, None
        return True

    def _in_whole(self, is_end: bool) -> bool:
        assert self._region is not None
        close = self._region.close
        found = None if close is None or not self._text else close.find(self._text, 0, is_end=is_end)
        self._body.append(self._take(len(self._text) if found is None else found.start))
        if found is not None and found.end is not None:
            self._whole_closed("".join(self._body), self._take(found.end - found.start))
            return True
        if is_end and close is None:
            self._whole_closed("".join(self._body), "")
            return True
        if is_end:
            self._whole_unread("".join(self._body), "")
        return is_end

    def _whole_closed(self, body: str, closing: str) -> None:
        assert self._region is not None
        has_begun = "name" in self._captures
        calls = calls_of(self._region, self._opening, body, closing, self._config.tools)
        if calls is None or (has_begun and len(calls) != 1):
            self._whole_unread(body, closing)
            return
        for name, arguments in calls:
            if not has_begun:
                self._begin_call(name)
            self._pieces += (CallArguments(arguments), CallEnded())
            self.num_calls += 1
            if self.is_full:
                return
        self._mode, self._region = _Mode.FREE, None

    def _whole_unread(self, body: str, closing: str) -> None:
        """Handle a region that cannot be parsed or was cut off. If its call has begun, its text becomes the arguments
        as it is; else the region is content."""
        if "name" not in self._captures:
            self._give_back(body + closing)
            return
        self._pieces.append(CallArguments(body))
        self._mode, self._region = _Mode.FREE, None


def _text_piece(region: Region, text: str) -> Piece:
    return Reasoning(text) if region.role == "reasoning" else Content(text)
