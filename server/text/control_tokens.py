"""Keeps callers' text text: the control tokens in a prompt are the chat template's, whatever texts a request holds.

Before a conversation is rendered, each character of it that may begin a control token is replaced by a mark. Marks are
single characters, so a template trims, splits, joins and compares marked texts as it does others. The process that
renders puts the characters back and tells their places. A control token's text that has one is the caller's, and is
tokenized as text. Most prompts have no such text: then the whole is tokenized as ever. Knows no requests and no
templates.
"""

from __future__ import annotations

import re
import secrets
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

from inferd.server.text.render_wire import MAX_MARKS, mark
from inferd.server.text.tokenizer import Tokenizer

T = TypeVar("T")

_MARKUP = re.compile(r"[<\[{|\uff5c\uff1c].*\w.*[>\]}|\uff5c\uff1e]", re.DOTALL)
_BLANKS = " \t\r\n\u2581"
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_LETTER = re.compile(r"[^\W_]")

_WINDOW = 2**16
"""Characters that one search reads, which holds the interpreter lock: for a few milliseconds at most."""
_LONG_WORD = 2**12
_ANCHOR = re.compile(r"[^\w\s]")
_NUM_LETTERS = 3
_MAX_LOOK = 64
"""Most characters that decide whether one is marked."""


def control_tokens_of(tokenizer: Tokenizer, mentioned: str) -> frozenset[str]:
    """The added tokens that a model reads as markup: special ones, and others in brackets. The rest is text that is
    common enough to have a token: blanks, words, and pairs of HTML tags that `mentioned` lacks (the template's text).
    """
    named = {*tokenizer.special_ids, *map(str, tokenizer.special_tokens.values())}
    added = tokenizer.added_tokens
    return frozenset(
        text for text in added
        if len(bare := text.strip(_BLANKS)) > 1
        and (text in named or (_MARKUP.fullmatch(bare) and (text in mentioned or not _is_html(text, added))))
    )  # fmt: skip


def _is_html(text: str, added: Collection[str]) -> bool:
    """Whether this is one of two tags, `<b>` and `</b>`, that both are tokens."""
    name = text.removeprefix("</").removeprefix("<").removesuffix(">")
    return name.isalnum() and f"<{name}>" in added and f"</{name}>" in added


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation."""

    text: str
    places: Sequence[int] = ()
    """Indices of its marked characters, in order."""


class ControlTokens:
    """Marks a conversation's texts for one model, and tells its control tokens from a caller's text."""

    def __init__(
        self, texts: Collection[str], tokenizer: Tokenizer, own: Collection[str] = (), begun: Begun | None = None
    ) -> None:
        """`texts`: the control tokens. `own`: markup that an assistant's earlier content may hold, because the model
        writes it. `begun`: control tokens that the template begins and a caller's text could complete."""
        begun = begun or Begun()
        self._may_complete = begun.may_be_completed_by if begun.letters else None
        first = {text: _ANCHOR.search(text) for text in texts}
        anchors = sorted({found[0] for found in first.values() if found is not None})
        words = sorted(text for text, found in first.items() if found is None)
        letters = sorted({text[0] for text in words} | begun.letters)
        self.marks = "".join(anchors + letters)
        """The characters that marks stand for."""
        assert len(self.marks) <= MAX_MARKS
        self._mark_of = {char: mark(i) for i, char in enumerate(self.marks)}
        firsts = "".join({*anchors, *(text[0] for text in words)})
        self._has_first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)").search
        single = _first_characters(texts, words)
        self._single = re.compile(single)
        kept = "|".join(re.escape(text) for text in sorted(own, key=len, reverse=True))
        self._unless_own = re.compile(f"({kept or '(?!)'})|{single}")
        self._found = re.compile(_pattern(texts))
        self._longest = max(map(len, texts), default=0)
        self._always = tokenizer.folds_added
        secret = secrets.token_hex(8)
        self._names = {text: f"control{secret}n{i:06d}e" for i, text in enumerate(sorted(texts))}
        self._separator = f"control{secret}separator"
        self.tokenizer = tokenizer.renamed(self._names, self._separator)
        """Tokenizes the texts that `named` returns."""
        self._separates = self.tokenizer.finds_added(texts)

    # -- before a conversation is rendered ----------------------------------------------------------------------------

    def marked_messages(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """The messages with marked texts. Roles are not the caller's: there are six."""
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, object]) -> dict[str, object]:
        is_own = message["role"] == "assistant"
        return {
            key: value if key == "role" else self._value(value, is_own and key == "content")
            for key, value in message.items()
        }

    def marked(self, value: T) -> T:
        """A value of JSON with marked texts and keys."""
        return cast("T", self._value(value, False))

    def _value(self, value: Any, is_own: bool) -> Any:
        if isinstance(value, str):
            return self._text(value, is_own)
        if isinstance(value, Mapping):
            return {self._text(key, False): self._value(item, is_own) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(item, is_own) for item in value]
        return value

    def _text(self, text: str, is_own: bool) -> str:
        if self._may_complete is not None and not is_own and self._may_complete(text):
            text = self._with_marked_letter(text)
        if self._has_first(text) is None:
            return text
        pattern, change = (self._unless_own, self._mark_unless_own) if is_own else (self._single, self._mark)
        if len(text) <= _WINDOW:
            return pattern.sub(change, text)
        pieces: list[str] = []
        end = 0
        for found in _windows(pattern, text, max(self._longest, _MAX_LOOK)):
            pieces += (text[end : found.start()], change(found))
            end = found.end()
        return "".join((*pieces, text[end:]))

    def _mark(self, found: re.Match[str]) -> str:
        return self._mark_of[found[0]]

    def _mark_unless_own(self, found: re.Match[str]) -> str:
        return found[1] or self._mark_of[found[0]]

    def _with_marked_letter(self, text: str) -> str:
        found = _LETTER.search(text)
        if found is None or found[0] not in self._mark_of:
            return text
        return f"{text[: found.start()]}{self._mark_of[found[0]]}{text[found.end() :]}"

    # -- after it is rendered -----------------------------------------------------------------------------------------

    def named(self, rendered: Rendered) -> tuple[str | None, bool]:
        """(the prompt with the template's control tokens under their names in `tokenizer`, whether the caller's texts
        hold others). None: the prompt is tokenized as it is."""
        if not (rendered.places or self._always):
            return None, False
        pieces: list[str] = []
        end, is_forged = 0, False
        for start, stop in self._spans(rendered):
            if stop == start:
                is_forged = True
                if self._separates:
                    pieces += (rendered.text[end : start + 1], self._separator)
                    end = start + 1
                continue
            pieces += (rendered.text[end:start], self._names[rendered.text[start:stop]])
            end = stop
        is_named = is_forged or self._always
        return "".join((*pieces, rendered.text[end:])) if is_named else None, is_forged

    def _spans(self, rendered: Rendered) -> Iterator[tuple[int, int]]:
        """(start, end) of each control token that the template wrote. The end of a caller's equals its start."""
        text, places, start = rendered.text, rendered.places, 0
        while start < len(text):
            last = min(start + _WINDOW, len(text))
            found = self._found.search(text, start, last + self._longest)
            if found is None or found.start() >= last:
                start = last
                continue
            start, stop = found.span()
            i = bisect_left(places, start)
            if i < len(places) and places[i] < stop:
                yield start, start
                # A shorter control token may end before the caller's text.
                found = self._found.match(text, start, places[i])
                if found is None:
                    start += 1
                    continue
                stop = found.end()
            yield start, stop
            start = stop


@dataclass(frozen=True, slots=True)
class Begun:
    """Texts that could complete a control token that a template begins, as in `<{{ key }}>`."""

    words: frozenset[str] = frozenset()
    """Whole texts, as `_word_of` writes them."""
    starts: tuple[str, ...] = ()
    """Beginnings of texts."""
    letters: frozenset[str] = frozenset()
    """First letters of all of them."""
    names: frozenset[str] = frozenset()
    """Texts that the template compares or looks up, which must stay as they are."""

    @classmethod
    def of(cls, controls: Collection[str], written: Collection[str], names: frozenset[str]) -> Self:
        """`written`: the texts that the template writes."""
        longest = max(map(len, controls), default=0)
        ends = {text[-i:] for text in written for i in range(1, min(longest, len(text)) + 1)}
        begins = {text[:i] for text in written for i in range(1, min(longest, len(text)) + 1)}
        words, starts = set(), set()
        for control in controls:
            for i in range(1, len(control)):
                if control[:i] not in ends:
                    continue
                starts.add(_word_of(control[i:]))
                words |= {control[i:j] for j in range(i + 1, len(control)) if control[j:] in begins}
        words = {_word_of(word) for word in words} - {""}
        starts -= {""}
        letters = {letter for word in words | starts for letter in (word[0], word[0].upper()) if len(letter) == 1}
        return cls(frozenset(words), tuple(starts), frozenset(letters), names)

    def may_be_completed_by(self, text: str) -> bool:
        if text in self.names:
            return False
        if len(text) > _LONG_WORD:
            return True
        word = _word_of(text)
        return word in self.words or word.startswith(self.starts)


def _word_of(text: str) -> str:
    """The letters and digits of a text, in lower case. Templates replace or remove other characters."""
    return _NOT_ALPHANUMERIC.sub("", text).lower()


def _windows(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """The matches in a long text, as `finditer` finds them, with searches that hold the interpreter lock briefly.
    `longest`: most characters that decide on a match."""
    start = 0
    while start < len(text):
        end = min(start + _WINDOW, len(text))
        found = pattern.search(text, start, end)
        sure = end if end == len(text) else end - longest
        if found is not None and found.start() < sure:
            yield found
            start = found.end()
        else:
            start = sure if found is None else found.start()


def _first_characters(texts: Collection[str], words: Collection[str]) -> str:
    """A pattern of the characters of a text to mark: those that may begin a control token.

    The letters behind one decide: three, or as many as there are. Other characters beside them may be any, because
    templates replace and remove some. Many others decide too. `words`: control tokens of letters alone, which are found
    whole.
    """
    tree: dict[str, Any] = {}
    firsts, others = set[str](), set[str]()
    for text in texts:
        found = _ANCHOR.search(text)
        if found is None:
            continue
        firsts.add(found[0])
        others.update(_NOT_ALPHANUMERIC.findall(text[found.end() : -1]))
        node = tree
        letters = _word_of(text[found.end() :])
        for char in letters[:_NUM_LETTERS]:
            node = node.setdefault(char, {})
        node["" if len(letters) >= _NUM_LETTERS else " "] = {}

    at_end = rf"[{re.escape(''.join(sorted(set(''.join(others)))))}\s]{{0,4}}\s*\Z"

    def behind(node: dict[str, Any], most: int) -> str:
        if "" in node:
            return ""
        rest = [re.escape(char) + behind(below, 4) for char, below in sorted(node.items()) if char != " "]
        rest += [r"(?![^\W_])"] if " " in node else []
        return rf"(?:[\W_]{{0,{most}}}(?:{'|'.join(rest)})|[\W_]{{{most + 1}}}|{at_end})"

    single = [f"[{re.escape(''.join(sorted(firsts)))}](?=(?i:{behind(tree, 16)}))"] if firsts else []
    single += [f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in words]
    return "|".join(single) or "(?!)"


def _pattern(texts: Collection[str]) -> str:
    """A pattern of the longest of these texts. It branches at each character, so that no text is tried in turn."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree) if texts else "(?!)"


def _branches(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        prefix += re.escape(char)
    rest = [re.escape(char) + _branches(below) for char, below in sorted(node.items()) if char]
    if not rest:
        return prefix
    return f"{prefix}(?:{'|'.join(rest)}){'?' if '' in node else ''}"


def places_of(data: bytes) -> Sequence[int]:
    """The places in an answer of the process that renders."""
    places = array("I")
    places.frombytes(data)
    return places
