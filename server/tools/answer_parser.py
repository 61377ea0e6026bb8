"""Parses the text of an answer into pieces of reasoning, calls and content, each as soon as it is certain.

An answer is reasoning, content and calls, each between the markers of the format. Four rules decide about every
character, however the text was cut:

- Text in no region is content. A marker is never content: one that opens or closes nothing is dropped and counted.
- If a call turns out to be none, its text is content without its tags. If its arguments had begun, only the text from
  the first wrong character on is. A call that a limit cut off before its arguments is dropped.
- A call ends reasoning that is still open, if the model meant it (`calls_in_reasoning`). A second marker of the
  reasoning's beginning is dropped.
- Blanks beside a marker belong to the marker. Blanks between two stretches of content are kept.

The patterns of the response template find the regions. If the calls in a region are not JSON, transformers'
`ResponseParser` reads them once the region has closed. Knows no tokens and no stop strings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto

from inferd.server.tools.argument_schema import schemas_of
from inferd.server.tools.call_regions import JsonRegion, WholeRegion
from inferd.server.tools.calls_in_reasoning import BehindCall, UncertainCall
from inferd.server.tools.format import Region
from inferd.server.tools.json_calls import JsonCalls
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.patterns import TAG
from inferd.server.tools.pieces import BLANK, AnswerText, CallBegun, CallEnded, Piece, first_calls, joined
from inferd.server.tools.watch import Seen, Watch, Watched, first

_SHORTEST_CUT_MARKER = 3
"""Characters of a marker that a limit cut off which cannot be a text's own, such as the beginning of `<tool_call>`."""


def with_prefill_parsed(config: ParserConfig) -> ParserConfig:
    """The same config, with `prefill` parsed once for all choices."""
    return replace(config, begun=AnswerParser(config))


class _Mode(Enum):
    FREE = auto()
    """Outside of regions."""
    TEXT = auto()
    CALLS = auto()
    """In a region of calls."""
    UNCERTAIN = auto()
    """In or behind a call inside reasoning, of which it is not certain whether it is meant."""


class AnswerParser:
    """Parses one answer."""

    def __init__(self, parser_config: ParserConfig, *, behind: BehindCall | None = None) -> None:
        """`behind`: for a text that begins with a call inside reasoning; the parser tells it what it sees."""
        self.num_calls = 0
        """Number of complete calls."""
        self.num_strays = 0
        """Number of markers that were dropped because they opened or closed nothing."""
        self.reasoning_spans: list[tuple[int, int]] = []
        """[start, end) of each closed stretch of reasoning, in characters of the text, markers included."""
        self._config, self._names = parser_config, parser_config.tool_names
        self._schemas = schemas_of(parser_config.tools)
        self._watch = Watch.of(
            parser_config.format,
            with_calls=parser_config.with_calls,
            call_ends_reasoning=parser_config.call_ends_reasoning,
        )
        self._behind = behind
        self._reset()
        if parser_config.prefill:
            self._begin_after(parser_config.prefill)

    @classmethod
    def of(cls, config: ParserConfig) -> AnswerParser:
        """A parser that has read the prompt's part of the answer."""
        begun: AnswerParser | None = None if config.begun is None else config.begun.copy()
        return cls(config) if begun is None else begun

    def copy(self) -> AnswerParser:
        """A copy in the same state. Call it outside of calls, before anything was found."""
        assert self._mode in (_Mode.FREE, _Mode.TEXT) and not (self._out.pieces or self.reasoning_spans)
        other = copy.copy(self)
        other.reasoning_spans, other._out = [], self._out.copy()
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
    def is_in_content(self) -> bool:
        """Whether the next text is content, unless it is a marker."""
        return self._mode is _Mode.FREE or (self._mode is _Mode.TEXT and self.is_in_answer)

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._is_call_open

    @property
    def num_waiting(self) -> int:
        """Number of characters at the end of the text that are in no piece yet."""
        return len(self._text) + min(0, self._position) + self._out.num_held

    @property
    def is_full(self) -> bool:
        """Whether the answer ends here, because no further call is wanted."""
        return self._config.max_calls is not None and self.num_calls >= self._config.max_calls

    def is_marker(self, text: str) -> bool:
        """Whether a token with this text belongs to a marker."""
        text = text.strip(BLANK)
        watched = self._watch.free if self._region is None else self._watch.inside.get(self._region.field.name, ())
        found = [one.marker.at(text, 0, is_end=False) for one in watched] if len(text) > 1 else []
        return any(part is not None for part in found)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after this text."""
        self._text += text
        return self._run(is_end=False)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The last pieces, when no more text comes. `is_cut`: a limit ended the text, not the model."""
        self._is_cut = is_cut
        return self._run(is_end=True)

    def _reset(self) -> None:
        self._mode = _Mode.FREE
        self._text = ""
        """Text that is not parsed yet."""
        self._position = 0
        """Position of `_text` in the answer, in characters."""
        self._out = AnswerText(keeps_content=not self._config.only_calls)
        self._region: Region | None = None
        self._region_start = 0
        self._uncertain: UncertainCall | None = None
        self._mentions_until = 0
        """Position up to which the reasoning only mentions calls."""
        self._opening = ""
        """Opening marker of a region that may turn out to be none."""
        self._captures: Mapping[str, str] = {}
        self._calls: JsonRegion | WholeRegion | None = None
        self._is_bare_possible = self._config.format.is_bare and self._config.with_calls and self._behind is None
        self._is_call_open = self._is_cut = False

    def _begin_after(self, prefill: str) -> None:
        """Parse the prompt's part of the answer. Its last characters may begin a marker that the answer ends."""
        self.feed(prefill)
        if self._mode not in (_Mode.FREE, _Mode.TEXT):
            self._reset()
        self._text = self._text if self._mode is _Mode.FREE else ""
        self._out.drop_blanks(in_region=True)
        self._position, self._region_start = -len(self._text), 0
        self.reasoning_spans, self.num_calls, self.num_strays = [], 0, 0

    def _run(self, *, is_end: bool) -> list[Piece]:
        steps = {
            _Mode.FREE: self._free,
            _Mode.TEXT: self._in_text,
            _Mode.CALLS: self._in_calls,
            _Mode.UNCERTAIN: self._in_uncertain,
        }
        while not (self.is_full or self._is_refused) and steps[self._mode](is_end):
            pass
        pieces, self._out.pieces = self._out.pieces, []
        return joined(pieces)

    @property
    def _is_refused(self) -> bool:
        return self._behind is not None and self._behind.refused_at is not None

    def _take(self, num_chars: int) -> str:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        self._position += num_chars
        return taken

    # Each step below returns whether another step may follow now.

    def _free(self, is_end: bool) -> bool:
        separators = BLANK + ";" if self._is_bare_possible and self.num_calls else BLANK
        self._out.blanks(self._take(len(self._text) - len(self._text.lstrip(separators))))
        if self._is_bare_possible and self._watch.bare is not None:
            bare = self._watch.bare.open.at(self._text, 0, is_end=is_end)
            if bare is not None:
                if bare.end is not None:
                    self._open(Seen(self._watch.bare, bare))
                return bare.end is not None
        elif self._is_bare_possible and self._text[:1] in ("{", "["):
            self._mode = _Mode.CALLS
            calls = JsonCalls(known_names=self._names, keys=self._config.format.bare_keys)
            self._calls = JsonRegion(None, calls, self._names)
            return True
        if self._config.content_is_last and self._out.has_content:
            self._content(self._take(len(self._text)))
            if is_end:
                self._out.end_content()
            return False
        if is_end and self._is_cut:
            self._drop_cut_marker(self._watch.free, 1 if self._out.touches_marker else _SHORTEST_CUT_MARKER)
        seen, num_before = first(self._text, self._watch.free, self._names, is_end=is_end)
        num_prompt = max(0, -self._position)  # characters of the prompt that turned out to begin no marker
        self._content(self._take(num_before)[num_prompt:])
        if seen is not None:
            self._open(seen)
            return True
        if is_end:
            self._out.end_content()
        return False

    def _drop_cut_marker(self, watched: Iterable[Watched], shortest: int) -> None:
        """Drop the part of a marker, of at least so many characters, with which a limit ended the text."""
        seen, num_before = first(self._text, watched, self._names, is_end=False)
        if seen is None and len(self._text) - num_before >= shortest:
            self._text = self._text[:num_before]
            self.num_strays += 1
            self._out.marker()

    def _content(self, text: str) -> None:
        """Add text outside of regions, up to the position."""
        body = text.rstrip(BLANK)
        if body:
            self._is_bare_possible = False
            if self._behind is not None:
                num_behind = len(text) - len(body)
                self._behind.text(self._position - len(text.lstrip(BLANK)), self._position - num_behind)
        self._out.content(text)

    def _open(self, seen: Seen) -> None:
        """Take the marker at the beginning of the text."""
        region, found = seen.region, seen.found
        assert found.end is not None
        num_blanks = len(self._text) - len(self._text.lstrip(BLANK))
        self._out.blanks(self._take(num_blanks))
        start, marker = self._position, self._take(found.end - found.start - num_blanks)
        if self._behind is not None:
            self._behind.marker(region, marker, start)
        if region is None:
            self.num_strays += 1
            self._out.marker()
            return
        self._region, self._region_start = region, start
        self._opening, self._captures = marker, found.captures
        if region.role != "call":
            self._mode = _Mode.TEXT
            self._out.open_region()
            self.num_strays += region.role == "unshown"
        elif region.is_json:
            calls = JsonCalls(found.captures.get("name"), keys=region.keys)
            self._mode, self._calls = _Mode.CALLS, JsonRegion(region, calls, self._names)
        else:
            self._mode = _Mode.CALLS
            self._calls = WholeRegion(region, marker, found.captures, self._schemas)
            if "name" in found.captures:
                self._begin_call(found.captures["name"])

    def _in_text(self, is_end: bool) -> bool:
        region = self._region
        assert region is not None
        watched = self._watch.inside[region.field.name]
        if is_end and self._is_cut:
            self._drop_cut_marker(watched, _SHORTEST_CUT_MARKER)
        text, is_last = self._text, is_end
        if mentions := max(0, self._mentions_until - self._position):
            watched = tuple(one for one in watched if one.region is None or one.region.role != "call")
            text, is_last = text[:mentions], True
        seen, num_before = first(text, watched, self._names, is_end=is_last)
        self._out.in_region(region, self._take(num_before))
        if seen is not None:
            self._marker_inside(region, seen)
            return True
        if mentions:
            return True
        if is_end:
            self._out.end_region(region)
        return False

    def _marker_inside(self, region: Region, seen: Seen) -> None:
        """Handle a marker in the text of a region: it closes it, opens another, or does nothing."""
        other = seen.region
        if seen.closes:
            assert seen.found.end is not None
            self._take(seen.found.end - seen.found.start)
            self._close_text(region)
        elif other is None or other.role == region.role == "reasoning":
            assert seen.found.end is not None
            self._take(seen.found.end - seen.found.start)
            self.num_strays += 1
        elif other.role == "call" and region.role == "reasoning":
            self.reasoning_spans.append((self._region_start, self._position))
            self._mode, behind = _Mode.UNCERTAIN, BehindCall(region)
            config = replace(self._config, prefill="", begun=None, max_calls=None)
            self._uncertain = UncertainCall(AnswerParser(config, behind=behind), behind)
        else:
            self._close_text(region)
            self._open(seen)

    def _in_uncertain(self, is_end: bool) -> bool:
        call = self._uncertain
        assert call is not None
        is_meant = call.read(self._take(len(self._text)), is_end=is_end, is_cut=self._is_cut)
        if is_meant is None:
            return False
        self._uncertain = None
        if is_meant:
            self._out.pieces += first_calls(call.pieces, self._config.max_calls)
            self.num_calls, self._is_call_open = call.parser.num_calls, call.parser.is_in_call
            self.num_strays += call.parser.num_strays
            self._mode, self._region = _Mode.FREE, None
            return False
        self._text, self._position = call.text, self._position - len(call.text)
        self._mentions_until = self._position + call.num_mentioned()
        self.reasoning_spans.pop()
        self._mode = _Mode.TEXT
        return True

    def _close_text(self, region: Region) -> None:
        if region.role == "reasoning":
            self.reasoning_spans.append((self._region_start, self._position))
        self._mode, self._region, self._opening = _Mode.FREE, None, ""
        self._out.close_region()

    def _in_calls(self, is_end: bool) -> bool:
        assert self._calls is not None
        taken = self._calls.take(self._text, is_end=is_end, is_cut=self._is_cut)
        self._take(taken.num_chars)
        for piece in taken.pieces:
            if isinstance(piece, CallBegun):
                self._begin_call(piece.name)
                self._opening = ""
            else:
                self._add_to_call(piece)
            if self.is_full:
                return False
        if taken.refused is not None:
            self._give_back(taken.refused, is_whole=taken.is_whole)
        elif taken.is_over:
            self._mode, self._region = _Mode.FREE, None
        return taken.is_over or taken.refused is not None

    def _begin_call(self, name: str) -> None:
        self._is_call_open = True
        self._out.marker()
        if self._region is None:
            self._out.drop_blanks()  # also drops the separator between two calls without markers
        self._out.pieces.append(CallBegun(name))

    def _add_to_call(self, piece: Piece) -> None:
        self._out.pieces.append(piece)
        if isinstance(piece, CallEnded):
            self.num_calls += 1
            self._is_call_open = False

    def _give_back(self, text: str, *, is_whole: bool) -> None:
        """The region was none: its text is content. `is_whole`: more text could not make it a call."""
        region = self._region
        self._mode, self._region, self._is_bare_possible = _Mode.FREE, None, False
        if region is not None and (region.is_bare or not TAG.search(self._opening)):
            text = self._opening + text  # what opens it may be a word of the answer
        elif self._opening:
            text = self._captures.get("name", "") + text
            self.num_strays += 1
            self._out.marker()
        self._opening = ""
        if self._is_cut and not is_whole and (region is not None or self.num_calls):
            self.num_strays += 1
            return
        num_blanks = len(text) - len(text.lstrip(BLANK))
        self._out.blanks(text[:num_blanks])
        self._content(text[num_blanks:])
