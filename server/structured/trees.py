"""Trees of regular expressions and grammars: characters, and how they are put together.

`regexes` and `larks` make them from source text. Knows no syntax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SPECIAL = frozenset('"\\') | frozenset(map(chr, range(0x20)))
"""The characters that JSON escapes in a string."""


@dataclass(frozen=True, slots=True)
class Char:
    """One character of a set."""

    text: str
    """The set as a regular expression: a character, an escape or a class in brackets."""
    specials: frozenset[str]
    """Those that JSON escapes."""
    others: frozenset[str] | None
    """The rest of the set; None: it is not known, and may be any other characters."""
    ignores_case: bool = False


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; the empty text if there are none."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one of the items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; `high` None: no upper bound."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Both:
    """Texts of all items at once (`&` of Lark)."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """All other texts (`~` of Lark)."""

    item: Node


@dataclass(frozen=True, slots=True)
class Name:
    """A rule or terminal of Lark."""

    name: str


@dataclass(frozen=True, slots=True)
class Text:
    """A regular expression that is written already, without `|` outside of brackets."""

    source: str


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A tree that a rule matches as one lexeme."""

    item: Node
    is_lazy: bool = False
    """Whether it ends as soon as it matches."""
    is_ignored: bool = False
    """Whether it is what the grammar ignores."""


Node = Char | Seq | Alt | Repeat | Both | Not | Name | Text | Lexeme

EMPTY = Seq(())
"""The empty text."""
NOTHING = Char("[a&&b]", frozenset(), frozenset())
"""No text at all."""


def inner_of(node: Node) -> tuple[Node, ...]:
    """The trees that a tree is made of."""
    if isinstance(node, (Seq, Alt, Both)):
        return node.items
    return (node.item,) if isinstance(node, (Repeat, Not, Lexeme)) else ()


def nodes_in(node: Node) -> Iterator[Node]:
    """A tree and all trees in it."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(inner_of(found))


def num_levels(node: Node) -> int:
    """How deeply trees are nested in a tree."""
    level, found = [node], 0
    while level:
        found += 1
        level = [inner for outer in level for inner in inner_of(outer)]
    return found


def names_in(node: Node) -> list[str]:
    """The rules and terminals that a tree names."""
    return [found.name for found in nodes_in(node) if isinstance(found, Name)]
