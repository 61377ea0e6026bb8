"""Facts of the texts of a tree: how short they are, and the characters with which they begin and go on.

One pass over a tree finds all of them. Knows no syntax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from inferd.server.structured.trees import SPECIAL, Alt, Both, Char, Lexeme, Name, Node, Not, Repeat, Seq, names_in

_MOST_LEVELS = 100


@dataclass(frozen=True, slots=True)
class Chars:
    """A set of characters, or more than it."""

    known: frozenset[str] = frozenset()
    has_others: bool = False
    """Whether all characters that JSON does not escape are in it."""

    def __or__(self, other: Chars) -> Chars:
        if other.known <= self.known and self.has_others >= other.has_others:
            return self
        return Chars(self.known | other.known, self.has_others or other.has_others)

    def overlaps(self, other: Chars) -> bool:
        if self.has_others and other.has_others:
            return True
        return not (self.among(other.known) | other.among(self.known)).isdisjoint(self.known | other.known)

    def among(self, chars: frozenset[str]) -> frozenset[str]:
        """Those of some characters that are in the set."""
        return chars & self.known | (chars - SPECIAL if self.has_others else frozenset())


_NO_CHARS = Chars()
_ALL_CHARS = Chars(SPECIAL, has_others=True)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a tree's texts. `first` and `held` may have more characters than they should, but never fewer."""

    least_chars: int
    """The length of the shortest text, or less. 0 if and only if the empty text is one of them."""
    first: Chars
    """Characters with which a text may begin."""
    held: Chars
    further: Chars
    """Characters by which a text may go on to a longer one, as its last part tells. Alternatives are looked at one by
    one: that "ab" goes on from "a" is not seen."""

    @property
    def may_be_empty(self) -> bool:
        return not self.least_chars


_OF_EMPTY = Facts(0, _NO_CHARS, _NO_CHARS, _NO_CHARS)


def facts_of(node: Node, named: Mapping[str, Facts]) -> Facts:
    """`node`: a tree of a lexeme. `named`: facts of each terminal that it names."""
    if isinstance(node, Char):
        return _of_char(node.specials, node.others)
    if isinstance(node, Name):
        return named[node.name]
    if isinstance(node, Repeat):
        return _repeated(facts_of(node.item, named), node)
    if isinstance(node, Not):
        return Facts(int(facts_of(node.item, named).may_be_empty), _ALL_CHARS, _ALL_CHARS, _ALL_CHARS)
    assert isinstance(node, (Seq, Alt, Both))
    parts = [facts_of(item, named) for item in node.items]
    if isinstance(node, Seq):
        found = _OF_EMPTY
        for part in reversed(parts):
            found = _joined(part, found)
        return found
    found = parts[0]
    for part in parts[1:]:
        least = (min if isinstance(node, Alt) else max)(found.least_chars, part.least_chars)
        found = Facts(least, found.first | part.first, found.held | part.held, found.further | part.further)
    return found


@lru_cache(1_024)
def _of_char(specials: frozenset[str], others: frozenset[str] | None) -> Facts:
    chars = Chars(specials | (others or frozenset()), others is None)
    return Facts(1, chars, chars, _NO_CHARS)


def _joined(one: Facts, rest: Facts) -> Facts:
    """Facts of texts one after the other."""
    first = one.first | rest.first if one.may_be_empty else one.first
    further = rest.further | one.further | rest.first if rest.may_be_empty else rest.further
    return Facts(one.least_chars + rest.least_chars, first, one.held | rest.held, further)


def _repeated(item: Facts, node: Repeat) -> Facts:
    further = item.further if node.high == 1 else item.further | item.first
    return Facts(node.low * item.least_chars, item.first, item.held, further)


class GrammarFacts:
    """Facts of the terminals and the lexemes of one grammar."""

    def __init__(self, terminals: Mapping[str, Node]) -> None:
        """Raises ValueError if a terminal refers to itself."""
        self.terminals: dict[str, Facts] = {}
        """Each terminal stands behind those that it refers to."""
        for name in _inner_first(terminals):
            self.terminals[name] = facts_of(terminals[name], self.terminals)
        self._lexemes: dict[int, tuple[Lexeme, Facts]] = {}
        """By the `id` of the lexeme, because a hash of it would visit all of its tree."""

    def of(self, lexeme: Lexeme) -> Facts:
        if id(lexeme) not in self._lexemes:
            self._lexemes[id(lexeme)] = lexeme, facts_of(lexeme.item, self.terminals)
        return self._lexemes[id(lexeme)][1]


def _inner_first(terminals: Mapping[str, Node]) -> Iterator[str]:
    done: set[str] = set()
    for start in terminals:
        path: dict[str, Iterator[str]] = {} if start in done else {start: iter(names_in(terminals[start]))}
        while path:
            name = next(reversed(path))
            inner = next(path[name], None)
            if inner is None:
                done.add(name)
                del path[name]
                yield name
            elif inner in path:
                raise ValueError(f"the terminal '{inner}' of the grammar refers to itself")
            elif len(path) > _MOST_LEVELS:
                raise ValueError(f"its terminals refer to each other over more than {_MOST_LEVELS} levels")
            elif inner not in done:
                path[inner] = iter(names_in(terminals[inner]))
