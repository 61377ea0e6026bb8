r"""Regular expressions in Rust's `regex` syntax as trees of characters.

For each character class it is known exactly which of the characters that JSON escapes it matches; the rest of the class
stays source text. Anchors at the ends are dropped, as llguidance does. Knows neither grammars nor JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_, sub, xor

from inferd.engine.api.grammars import literal_regex
from inferd.server.structured.char_sets import DIGITS, LETTERS, PERL, POSIX, PUNCTUATION, CharSet, with_property
from inferd.server.structured.trees import EMPTY, SPECIAL, Alt, Char, Node, Repeat, Seq, num_levels

_POSIX_CLASS = re.compile(r"\[:(\^?)(\w+):\]")
_SIMPLE = {"a": "\x07", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\x0b"}
_HEX = {
    char: re.compile(rf"\{{([0-9A-Fa-f]+)\}}|([0-9A-Fa-f]{{{num}}})") for char, num in (("x", 2), ("u", 4), ("U", 8))
}
_OPERATORS = {"&&": and_, "--": sub, "~~": xor}
"""Operators on classes."""
_ANCHORS = {"A": "start", "z": "end"}
_BOUNDARIES = tuple("bB<>")
_COUNT = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
_MAX_COUNT_DIGITS = 10
_GROUP = re.compile(r"\(\?(?:P?<(?P<name>[^>]*)>|(?P<flags>[a-zA-Z\-]*)(?P<end>[:)]))")
_LOOK = re.compile(r"\(\?<?[=!]")
_MAX_DEPTH = 40
_MAX_LEVELS = 3 * _MAX_DEPTH
"""Each group may hold alternatives of sequences of repetitions. A repetition may be repeated without a group."""
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The start or the end of the text."""

    where: str


def literal(text: str, *, ignores_case: bool = False) -> Node:
    """Exactly `text`."""
    chars = tuple(_char(char, ignores_case) for char in text)
    return chars[0] if len(chars) == 1 else Seq(chars)


def char_range(first: str, last: str) -> Node:
    """One character of a range, both ends included."""
    return _of_set(f"[{literal_regex(first)}-{literal_regex(last)}]", CharSet.between(first, last), frozenset())


def parse(text: str, flags: str = "") -> Node:
    """The tree of a regular expression. `flags`: those that hold from its beginning on.

    Raises ValueError for what has no tree, and for the mistakes that it meets.
    """
    parser = _Parser(text)
    node = parser.alternatives(frozenset(flags), 0)
    if not parser.at_end:
        raise ValueError(f"the regular expression {_shown(text)} closes a group that was not opened")
    if num_levels(node) > _MAX_LEVELS:
        raise ValueError(f"the regular expression {_shown(text)} is nested more than {_MAX_LEVELS} levels deep")
    return _without_anchors(node, text, start=True, end=True)


def _count(digits: str) -> int:
    """The count, or one above the most allowed if it has too many digits to read."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= _MAX_COUNT_DIGITS else _MAX_COUNT + 1


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _char(char: str, ignores_case: bool) -> Char:
    return _of_set(literal_regex(char), CharSet.of(char), frozenset("i") if ignores_case else frozenset())


def _of_set(text: str, held: CharSet, flags: frozenset[str]) -> Char:
    is_known = held.is_ascii and held.is_exact
    others = held.ascii - SPECIAL if is_known else None
    ignores_case = "i" in flags
    if ignores_case and others is not None and others & LETTERS:
        others |= frozenset("".join(others & LETTERS).swapcase())
    return Char(text, held.ascii & SPECIAL, others, ignores_case)


def _without_anchors(node: Node | _Anchor, text: str, *, start: bool, end: bool) -> Node:
    """The tree without the anchors that hold anyway. Raises ValueError for any other."""
    if isinstance(node, _Anchor):
        if start if node.where == "start" else end:
            return EMPTY
        raise ValueError(
            f"the regular expression {_shown(text)} has an anchor inside ('^', '$', '\\A' or '\\z'); "
            "the whole text is matched anyway, so leave it out"
        )
    if isinstance(node, Seq):
        last = len(node.items) - 1
        items = (
            _without_anchors(item, text, start=start and i == 0, end=end and i == last)
            for i, item in enumerate(node.items)
        )
        return Seq(tuple(items))
    if isinstance(node, Alt):
        return Alt(tuple(_without_anchors(item, text, start=start, end=end) for item in node.items))
    if isinstance(node, Repeat):
        return replace(node, item=_without_anchors(node.item, text, start=False, end=False))
    return node


class _Parser:
    """Reads one regular expression from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._text)

    def alternatives(self, flags: frozenset[str], depth: int) -> Node:
        """Alternatives up to the end of their group."""
        if depth > _MAX_DEPTH:
            raise self._error(f"is nested more than {_MAX_DEPTH} levels deep")
        branches: list[list[Node]] = [[]]
        while True:
            self._skip_blanks(flags)
            char = self._peek()
            if char in ("", ")"):
                break
            if char == "|":
                self._at += 1
                branches.append([])
            elif char in "*+?{":
                self._repeat(branches[-1], char, flags)
            elif char == "(":
                node, flags = self._group(flags, depth)
                if node is not None:
                    branches[-1].append(node)
            else:
                branches[-1].append(self._atom(char, flags))
        nodes = tuple(items[0] if len(items) == 1 else Seq(tuple(items)) for items in branches)
        return nodes[0] if len(nodes) == 1 else Alt(nodes)

    def _peek(self, num: int = 1) -> str:
        return self._text[self._at : self._at + num]

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"the regular expression {_shown(self._text)} {reason}")

    def _skip_blanks(self, flags: frozenset[str]) -> None:
        """Skips blanks and comments if the flag `x` is set."""
        while "x" in flags and not self.at_end:
            if self._peek() == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif self._peek().isspace():
                self._at += 1
            else:
                break

    def _repeat(self, items: list[Node], char: str, flags: frozenset[str]) -> None:
        if not items:
            raise self._error(f"has a '{char}' with nothing before it to repeat")
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char, (0, None))
        if char == "{":
            match = _COUNT.match(self._text, self._at)
            if match is None:
                raise self._error("has a '{' that begins no count; write '\\{' for the character")
            low = _count(match[1])
            high = low if match[2] is None else _count(match[3]) if match[3] else None
            if max(low, high or 0) > _MAX_COUNT or (high is not None and high < low):
                shown = _shown(match[0])
                raise self._error(f"has the count {shown}, whose end is below its start or above {_MAX_COUNT}")
            self._at = match.end()
        else:
            self._at += 1
        self._skip_blanks(flags)
        if self._peek() == "?":  # a lazy quantifier matches the same texts
            self._at += 1
        items[-1] = Repeat(items[-1], low, high)

    def _group(self, flags: frozenset[str], depth: int) -> tuple[Node | None, frozenset[str]]:
        """(the group, or None if it only sets flags; the flags that hold behind it)."""
        inner = flags
        if self._text.startswith("(?", self._at):
            if _LOOK.match(self._text, self._at):
                raise self._error("looks ahead or behind ('(?=', '(?!', '(?<=' or '(?<!'), which a mask cannot")
            match = _GROUP.match(self._text, self._at)
            if match is None:
                raise self._error(f"has a group that begins with '{self._peek(4)}', which is not known")
            self._at = match.end()
            if match["name"] == "stop":
                raise self._error("has a group named 'stop', which looks ahead; give it another name")
            if match["flags"] is not None:
                inner = self._with_flags(flags, match["flags"])
                if match["end"] == ")":
                    return None, inner
        else:
            self._at += 1
        node = self.alternatives(inner, depth + 1)
        if self._peek() != ")":
            raise self._error("ends inside a group")
        self._at += 1
        return node, flags

    def _with_flags(self, flags: frozenset[str], text: str) -> frozenset[str]:
        on, _, off = text.partition("-")
        unknown = set(on + off) - set("imsRUux")
        if unknown:
            raise self._error(f"sets the flag '{min(unknown)}', which is not known")
        if "u" in off:
            raise self._error("turns Unicode off ('(?-u)'), so that it matches bytes, not characters")
        return (flags | set(on)) - set(off)

    def _atom(self, char: str, flags: frozenset[str]) -> Node:
        if char == "[":
            begin = self._at
            held = self._class(flags, 0)
            text = self._text[begin : self._at]
            return _of_set(_fit_for_slashes(_compact(text) if "x" in flags else text), held, flags)
        self._at += 1
        if char == ".":
            excluded = frozenset() if "s" in flags else frozenset("\r\n") if "R" in flags else frozenset("\n")
            text = f"[^{literal_regex(''.join(sorted(excluded)))}]" if excluded else r"[\s\S]"
            return _of_set(text, ~CharSet(excluded), flags)
        if char in "^$":
            if "m" in flags:
                raise self._error(f"has '{char}' with the flag 'm', an anchor inside the text")
            return _Anchor("start" if char == "^" else "end")  # type: ignore[return-value]
        if char == "\\":
            return self._escape(flags)
        return _char(char, "i" in flags)

    def _escape(self, flags: frozenset[str]) -> Node:
        """The tree of an escape outside of classes, from behind its backslash on."""
        char = self._peek()
        if char in _ANCHORS:
            self._at += 1
            return _Anchor(_ANCHORS[char])  # type: ignore[return-value]
        if char in _BOUNDARIES:
            raise self._error(f"has a word boundary ('\\{char}'), which looks at the characters around it")
        if char in DIGITS:
            raise self._error(f"refers back to a group ('\\{char}'), which a grammar cannot")
        begin = self._at
        found = self._escaped_set()
        if found is not None:
            return _of_set("\\" + self._text[begin : self._at], found, flags)
        return _char(self._escaped_char(), "i" in flags)

    def _escaped_set(self) -> CharSet | None:
        r"""The set of `\d`, `\p{..}` and so on; None if the escape stands for one character."""
        char = self._peek()
        if char.lower() in PERL and char:
            self._at += 1
            held = CharSet(PERL[char.lower()], is_ascii=False)
            return held if char.islower() else ~held
        if char not in ("p", "P"):
            return None
        self._at += 1
        if self._peek() == "{":
            end = self._text.find("}", self._at)
            if end < 0:
                raise self._error(f"ends inside '\\{char}{{'")
            name = self._text[self._at + 1 : end]
            self._at = end + 1
        else:
            name = self._peek()
            self._at += 1
        try:
            held = with_property(name)
        except ValueError as error:
            raise self._error(str(error)) from None
        return held if char == "p" else ~held

    def _escaped_char(self) -> str:
        """The one character that an escape stands for."""
        char = self._peek()
        self._at += 1
        if char in _SIMPLE:
            return _SIMPLE[char]
        if char in _HEX:
            match = _HEX[char].match(self._text, self._at)
            number = int(match[1] or match[2], 16) if match else -1
            if match is None or number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise self._error(f"has '\\{char}' without the number of a character behind it")
            self._at = match.end()
            return chr(number)
        if char in PUNCTUATION or char == " ":
            return char
        raise self._error(f"has the escape '\\{char}', which is not known" if char else "ends with a backslash")

    def _class(self, flags: frozenset[str], depth: int) -> CharSet:
        """A class in brackets, from its opening bracket on."""
        if depth > _MAX_DEPTH:
            raise self._error(f"is nested more than {_MAX_DEPTH} levels deep")
        self._at += 1
        self._skip_blanks(flags)
        is_negated = self._peek() == "^"
        self._at += is_negated
        operands, operators, items = [], [], [CharSet()]
        self._skip_blanks(flags)
        while self._peek() == "-":
            items.append(CharSet.of("-"))
            self._at += 1
            self._skip_blanks(flags)
        if self._peek() == "]" and len(items) == 1:
            items.append(CharSet.of("]"))
            self._at += 1
        while True:
            self._skip_blanks(flags)
            char = self._peek()
            if not char:
                raise self._error("ends inside a class ('[')")
            if char == "]":
                break
            if char == "[":
                items.append(self._posix() or self._class(flags, depth + 1))
            elif self._peek(2) in _OPERATORS:
                operands.append(reduce(or_, items))
                operators.append(self._peek(2))
                items = [CharSet()]
                self._at += 2
            else:
                items.append(self._class_item(flags))
        self._at += 1
        operands.append(reduce(or_, items))
        held = operands[0]
        for operator, operand in zip(operators, operands[1:], strict=True):
            held = _OPERATORS[operator](held, operand)
        return ~held if is_negated else held

    def _posix(self) -> CharSet | None:
        """A class like `[:alpha:]`; None if there is none here."""
        match = _POSIX_CLASS.match(self._text, self._at)
        if match is None or match[2] not in POSIX:
            return None
        self._at = match.end()
        held = CharSet(POSIX[match[2]])
        return ~held if match[1] else held

    def _class_item(self, flags: frozenset[str]) -> CharSet:
        """A character, a range, or an escape that stands for a set."""
        first = self._class_char()
        if isinstance(first, CharSet):
            return first
        self._skip_blanks(flags)
        if self._peek() != "-":
            return CharSet.of(first)
        begin = self._at
        self._at += 1
        self._skip_blanks(flags)
        if self._peek() in ("]", "-"):
            self._at = begin
            return CharSet.of(first)
        last = self._class_char()
        if isinstance(last, CharSet) or last < first:
            raise self._error(f"has a range from {first!r} that ends before it or in no character")
        return CharSet.between(first, last)

    def _class_char(self) -> str | CharSet:
        char = self._peek()
        self._at += 1
        if char != "\\":
            if not char:
                raise self._error("ends inside a class ('[')")
            return char
        return self._escaped_set() or self._escaped_char()


def _fit_for_slashes(text: str) -> str:
    """A class that may be written between slashes on one line."""
    return re.sub(r"(\\.)|[/\x00-\x1f]", lambda match: match[1] or literal_regex(match[0]), text, flags=re.DOTALL)


def _compact(text: str) -> str:
    """A class that was read with the flag `x`, so that it means the same without: no blanks, no comments."""
    return re.sub(r"(\\.)|\s+|#[^\n]*", lambda match: _kept(match[1]), text, flags=re.DOTALL)


def _kept(escape: str | None) -> str:
    return "" if escape is None else literal_regex(escape[1]) if escape[1:].isspace() else escape
