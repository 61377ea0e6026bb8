"""Parses the text of an answer into pieces of reasoning, calls and content, each as soon as it is certain.

An answer is reasoning, content and calls, each between the markers of the format. Four rules decide about every
character, however the text was cut:

- Text in no region is content. A marker is never content: one that opens or closes nothing is dropped and counted.
- If a call turns out to be none, its text is content without its markers. If its arguments had begun, only the text
  from the first wrong character on is. A call that a limit cut off before its arguments is dropped.
- A call ends reasoning that is still open, unless the reasoning goes on or ends behind it. Then the call was only
  mentioned, and is reasoning, too. A second marker of its beginning is dropped.
- Blanks beside a marker belong to the marker. Blanks between two stretches of content are kept.

The patterns of the response template find the regions. If the calls in a region are not JSON, transformers'
`ResponseParser` reads them once the region has closed. Knows no tokens and no stop strings.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from inferd.server.tools.closed_calls import calls_of
from inferd.server.tools.format import Format, Region
from inferd.server.tools.json_calls import BLANK, JsonCalls
from inferd.server.tools.pieces import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Piece,
    Reasoning,
    first_calls,
    joined,
)
from inferd.server.tools.second_look import Offer
from inferd.server.tools.watch import Seen, Watch, Watched, first

_SHORTEST_CUT_MARKER = 3
"""Characters of a marker that a limit cut off which cannot be a text's own, such as the beginning of `<tool_call>`."""
_BETWEEN_CALLS = re.compile(r"[\s,;]{0,16}(?=\{)")
"""Text between two calls in one region."""
_MOST_PROSE = 256
"""Characters behind a call inside reasoning that are awaited before it counts as mentioned only."""
_MOST_EXTRA_ENDS = 16
_EXTRA_ENDS = re.compile(rf"[\s}}\],]{{0,{_MOST_EXTRA_ENDS}}}")
"""Brackets too many, which small models write between the JSON of a call and the marker behind it."""


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
    stops_reasoning: bool = False
    """Whether stop strings and stop tokens also work inside reasoning."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that the parser must see."""
    names_function: bool = False
    """Whether `tool_choice` names the function to call."""
    only_calls: bool = False
    """Whether a grammar allows nothing but calls behind the reasoning. All other text belongs to a call then."""
    content_is_last: bool = False
    """Whether a grammar lets nothing follow the content, in which all markers are text then."""
    call_ends_reasoning: bool = True
    """Whether a call inside reasoning ends it. A grammar that has reasoning ends it by its marker alone."""
    offer: Offer | None = None
    """The tools whose calls are also read if the model writes them in another way than its own; None: none."""
    begun: AnswerParser | None = field(default=None, compare=False, repr=False)
    """A parser that has read `prefill`; `new_parser` copies it."""

    def with_prefill_parsed(self) -> ParserConfig:
        """The same config, with `prefill` parsed once for all choices."""
        return replace(self, begun=AnswerParser(self))

    def new_parser(self) -> AnswerParser:
        return AnswerParser(self) if self.begun is None else self.begun.copy()

    @property
    def tool_names(self) -> frozenset[str]:
        functions = (tool.get("function") for tool in self.tools)
        return frozenset(str(function.get("name")) for function in functions if isinstance(function, Mapping))


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
    TRIAL = auto()
    """Behind a call inside reasoning."""


class AnswerParser:
    """Parses one answer."""

    def __init__(self, parser_config: ParserConfig, *, reasoning: Region | None = None) -> None:
        """`reasoning`: for a text that begins with a call inside this region; see `refused_at`."""
        self.num_calls = 0
        """Number of complete calls."""
        self.num_strays = 0
        """Number of markers that were dropped because they opened or closed nothing."""
        self.reasoning_spans: list[tuple[int, int]] = []
        """[start, end) of each closed stretch of reasoning, in characters of the text, markers included."""
        self._config, self._names = parser_config, parser_config.tool_names
        self._watch = Watch.of(
            parser_config.format,
            with_calls=parser_config.with_calls,
            call_ends_reasoning=parser_config.call_ends_reasoning,
        )
        self._pieces: list[Piece] = []
        self._reasoning = reasoning
        self.refused_at: int | None = None
        """Position of the first character, behind calls inside reasoning, that shows that the reasoning goes on."""
        self._end_at: int | None = None
        """Position of a marker that ends the reasoning around the calls."""
        self._prose_at: int | None = None
        """Position of the first text behind a call."""
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
        return len(self._text) + len(self._blanks) + len(self._held)

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
        self._blanks = ""
        """Blanks since the last character of content."""
        self._region: Region | None = None
        self._region_start = 0
        self._trial: AnswerParser | None = None
        """Reads on behind the marker of a call inside reasoning, until it is certain whether it is a call."""
        self._trial_pieces: list[Piece] = []
        self._trial_text: list[str] = []
        self._mentions_until = 0
        """Position up to which the reasoning only mentions calls."""
        self._opening = ""
        """Opening marker of a region that may turn out to be none."""
        self._body: list[str] = []
        self._captures: Mapping[str, str] = {}
        self._calls = JsonCalls()
        self._is_bare_possible = self._config.format.is_bare and self._config.with_calls and self._reasoning is None
        self._held = ""
        """Blanks at the end of the text of an open region."""
        self._shown: set[str] = set()
        """Roles of the regions so far that had text."""
        self._touches_marker = self._has_content = self._is_region_start = False
        self._is_call_open = self._is_cut = False

    def _begin_after(self, prefill: str) -> None:
        """Parse the prompt's part of the answer, and drop its text that is still held back."""
        self.feed(prefill)
        if self._mode not in (_Mode.FREE, _Mode.TEXT):
            self._reset()
        self._text = self._blanks = self._held = ""
        self._position = self._region_start = 0
        self.reasoning_spans, self.num_calls, self.num_strays = [], 0, 0

    def _run(self, *, is_end: bool) -> list[Piece]:
        steps = {
            _Mode.FREE: self._free,
            _Mode.TEXT: self._in_text,
            _Mode.CALLS: self._in_calls,
            _Mode.CLOSING: self._closing,
            _Mode.WHOLE: self._in_whole,
            _Mode.TRIAL: self._in_trial,
        }
        while not (self.is_full or self.refused_at is not None) and steps[self._mode](is_end):
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
        if self._is_bare_possible and self._watch.bare is not None:
            bare = self._watch.bare.open.at(self._text, 0, is_end=is_end)
            if bare is not None:
                if bare.end is not None:
                    self._open(Seen(self._watch.bare, bare))
                return bare.end is not None
        elif self._is_bare_possible and self._text[:1] in ("{", "["):
            self._mode = _Mode.CALLS
            self._calls = JsonCalls(known_names=self._names, keys=self._config.format.bare_keys)
            return True
        if self._config.content_is_last and self._has_content:
            self._content(self._take(len(self._text)))
            if is_end:
                self._content_ended()
            return False
        if is_end and self._is_cut:
            self._drop_cut_marker(self._watch.free, 1 if self._touches_marker else _SHORTEST_CUT_MARKER)
        seen, num_before = first(self._text, self._watch.free, self._names, is_end=is_end)
        self._content(self._take(num_before))
        if seen is not None:
            self._open(seen)
            return True
        if is_end:
            self._content_ended()
        return False

    def _drop_cut_marker(self, watched: Iterable[Watched], shortest: int) -> None:
        """Drop the part of a marker, of at least so many characters, with which a limit ended the text."""
        seen, num_before = first(self._text, watched, self._names, is_end=False)
        if seen is None and len(self._text) - num_before >= shortest:
            self._text = self._text[:num_before]
            self.num_strays += 1
            self._touches_marker = True

    def _content(self, text: str) -> None:
        """Add text outside of regions. Blanks at its end are held back, because they may belong to a marker."""
        body = text.rstrip(BLANK)
        if body and self._reasoning is not None:
            self._prose(self._position - len(text.lstrip(BLANK)), self._position - len(text) + len(body))
        if body and not self._config.only_calls:
            before = self._blanks if self._has_content or not self._touches_marker else self._blanks.strip(BLANK)
            self._pieces.append(Content(before + body))
            self._has_content = True
        if body:
            self._blanks = ""
            self._touches_marker = self._is_bare_possible = False
        self._blanks += text[len(body) :]

    def _content_ended(self) -> None:
        rest = self._blanks.strip(BLANK) if self._touches_marker else self._blanks
        if rest and not self._config.only_calls:
            self._pieces.append(Content(rest))
        self._blanks = ""

    def _open(self, seen: Seen) -> None:
        """Take the marker at the beginning of the text."""
        region, found = seen.region, seen.found
        assert found.end is not None
        num_blanks = len(self._text) - len(self._text.lstrip(BLANK))
        self._blanks += self._take(num_blanks)
        start, marker = self._position, self._take(found.end - found.start - num_blanks)
        if self._reasoning is not None and region is None and self._end_at is None:
            close = self._reasoning.close
            if close is not None and close.pattern.fullmatch(marker):
                self._end_at = start
                self.refused_at = None if self._prose_at is None else start
        elif self._refuses(region):
            self.refused_at = start if self._end_at is None else self._end_at
        if region is None:
            self.num_strays += 1
            self._touches_marker = True
            return
        self._region, self._region_start = region, start
        self._opening, self._captures = marker, found.captures
        if region.role != "call":
            self._mode, self._is_region_start, self._touches_marker, self._held = _Mode.TEXT, True, True, ""
            self.num_strays += region.role == "unshown"
        elif region.is_json:
            self._mode, self._calls = _Mode.CALLS, JsonCalls(found.captures.get("name"), keys=region.keys)
        else:
            self._mode, self._body = _Mode.WHOLE, []
            if "name" in found.captures:
                self._begin_call(found.captures["name"])

    def _refuses(self, region: Region | None) -> bool:
        """In a trial: whether a marker of `region` shows that the reasoning goes on."""
        if self._reasoning is None or region is None or region.role == "end":
            return False
        return region.role != "call" or self._end_at is not None

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
        self._region_text(region, self._take(num_before))
        if seen is not None:
            self._marker_inside(region, seen)
            return True
        if mentions:
            return True
        if is_end and self._held:
            self._add_text(region, self._held)
            self._held = ""
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
            self._mode = _Mode.TRIAL
            self._trial = AnswerParser(replace(self._config, prefill="", begun=None, max_calls=None), reasoning=region)
            self._trial_pieces, self._trial_text = [], []
        else:
            self._close_text(region)
            self._open(seen)

    def _in_trial(self, is_end: bool) -> bool:
        trial, region = self._trial, self._region
        assert trial is not None and region is not None
        text = self._take(len(self._text))
        self._trial_text.append(text)
        self._trial_pieces += trial.feed(text)
        if is_end and trial.refused_at is None:
            self._trial_pieces += trial.finish(is_cut=self._is_cut)
        is_cut_prose = self._is_cut and trial._prose_at is not None
        if trial.refused_at is None and is_end and not is_cut_prose and (trial.num_calls or trial.is_in_call):
            self._pieces += first_calls(self._trial_pieces, self._config.max_calls)
            self.num_calls, self._is_call_open = trial.num_calls, trial.is_in_call
            self.num_strays += trial.num_strays
            self._mode, self._region, self._trial = _Mode.FREE, None, None
        elif trial.refused_at is not None or is_end:
            whole = "".join(self._trial_text)
            self._text, self._position = whole, self._position - len(whole)
            self._mentions_until = self._position + (len(whole) if trial.refused_at is None else trial.refused_at)
            self.reasoning_spans.pop()
            self._mode, self._trial = _Mode.TEXT, None
            return True
        return False

    def _prose(self, start: int, end: int) -> None:
        """In a trial, text from `start` to `end` has come behind a call. If the reasoning ends behind it or goes on for
        long, the call was only mentioned. A model that ends its turn behind a few words meant the call."""
        if self._end_at is not None:
            self.refused_at = self._end_at
            return
        self._prose_at = start if self._prose_at is None else self._prose_at
        if end > self._prose_at + _MOST_PROSE:
            self.refused_at = self._prose_at + _MOST_PROSE

    def _close_text(self, region: Region) -> None:
        if region.role == "reasoning":
            self.reasoning_spans.append((self._region_start, self._position))
        self._mode, self._region, self._held, self._opening = _Mode.FREE, None, "", ""

    def _region_text(self, region: Region, text: str) -> None:
        """Add text between markers, without the blanks beside them."""
        if self._is_region_start:
            text = text.lstrip(BLANK)
        body = text.rstrip(BLANK)
        if body:
            before = self._held
            if self._is_region_start and region.role in self._shown:
                before = region.separator
            self._add_text(region, before + body)
            self._held, self._is_region_start = "", False
            self._shown.add(region.role)
            self._has_content = self._has_content or region.role == "content"
        self._held += text[len(body) :]

    def _add_text(self, region: Region, text: str) -> None:
        if region.role == "reasoning":
            self._pieces.append(Reasoning(text))
        elif region.role == "content" and not self._config.only_calls:
            self._pieces.append(Content(text))

    def _in_calls(self, is_end: bool) -> bool:
        pieces, end = self._calls.take(self._text)
        self._take(end)
        for piece in pieces:
            if isinstance(piece, CallBegun):
                self._begin_call(piece.name)
                self._opening = ""
            else:
                self._add_to_call(piece)
            if self.is_full:
                return False
        if self._calls.is_done:
            self._mode = _Mode.CLOSING
            return True
        if not (self._calls.is_broken or is_end):
            return False
        self._give_back("".join(self._calls.unread), is_whole=self._calls.is_broken)
        return True

    def _begin_call(self, name: str) -> None:
        self._touches_marker = self._is_call_open = True
        if self._region is None:
            self._blanks = ""  # also drops the separator between two calls without markers
        self._pieces.append(CallBegun(name))

    def _add_to_call(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if isinstance(piece, CallEnded):
            self.num_calls += 1
            self._is_call_open = False

    def _give_back(self, text: str, *, is_whole: bool) -> None:
        """The region was none: its text is content. `is_whole`: more text could not make it a call."""
        region = self._region
        self._mode, self._region, self._is_bare_possible = _Mode.FREE, None, False
        if region is not None and region.is_bare:
            text = self._opening + text  # what opens it is no marker
        elif self._opening:
            text = self._captures.get("name", "") + text
            self.num_strays += 1
            self._touches_marker = True
        self._opening = ""
        if self._is_cut and not is_whole and region is not None:
            self.num_strays += 1
        else:
            self._content(text)

    def _closing(self, is_end: bool) -> bool:
        close = None if self._region is None else self._region.close
        if close is not None:
            extra = _EXTRA_ENDS.match(self._text)
            assert extra is not None
            if extra.end() == len(self._text) < _MOST_EXTRA_ENDS and not is_end:
                return False
            for start in sorted({0, extra.end()}):
                found = close.at(self._text, start, is_end=False)
                if found is not None and found.end is None and not is_end:
                    return False
                if found is not None:  # at the end, a part of the marker belongs to it, too
                    self._take(len(self._text) if found.end is None else found.end)
                    break
            else:
                if self._next_call_follows():
                    return True
        self._mode, self._region = _Mode.FREE, None
        return True

    def _next_call_follows(self) -> bool:
        """Whether another call as JSON follows in the same region, and take the text between them."""
        between = None if self._calls.is_nameless else _BETWEEN_CALLS.match(self._text)
        if between is None or self._region is None:
            return False
        self._take(between.end())
        self._mode, self._calls = _Mode.CALLS, JsonCalls(keys=self._region.keys)
        return True

    def _in_whole(self, is_end: bool) -> bool:
        assert self._region is not None
        close = self._region.close
        found = None if close is None or not self._text else close.find(self._text, 0, is_end=is_end)
        self._body.append(self._take(len(self._text) if found is None else found.start))
        if found is not None and found.end is not None:
            self._whole_closed("".join(self._body), self._take(found.end - found.start))
            return True
        if is_end and (close is None or self._region.is_bare):
            self._whole_closed("".join(self._body), "")
            return True
        if is_end:
            self._whole_unread("".join(self._body), is_closed=False)
        return is_end

    def _whole_closed(self, body: str, closing: str) -> None:
        assert self._region is not None
        has_begun = "name" in self._captures
        calls = calls_of(self._region, self._opening, body, closing, self._config.tools)
        if calls is None or (has_begun and len(calls) != 1):
            self._whole_unread(body, is_closed=bool(closing) or not self._is_cut)
            return
        for name, arguments in calls:
            if not has_begun:
                self._begin_call(name)
            self._add_to_call(CallArguments(arguments))
            self._add_to_call(CallEnded())
            if self.is_full:
                return
        self._mode, self._region = _Mode.FREE, None

    def _whole_unread(self, body: str, *, is_closed: bool) -> None:
        """Handle a region that cannot be parsed or was cut off. If its call has begun, its text becomes the arguments
        as it is; else the region is content."""
        if "name" not in self._captures:
            self._give_back(body, is_whole=is_closed)
            return
        self._add_to_call(CallArguments(body))
        if is_closed:
            self._add_to_call(CallEnded())
        self._mode, self._region = _Mode.FREE, None
