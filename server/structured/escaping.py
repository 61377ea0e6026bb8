"""Trees of texts as they stand inside a string of JSON: with escapes for some characters.

`Quoter` rewrites trees character by character. `regex_source` and `terminal_source` write trees as source text.
Knows no rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from inferd.server.structured.regexes import source
from inferd.server.structured.trees import (
    SPECIAL,
    Alt,
    Both,
    Char,
    Lexeme,
    Name,
    Node,
    Not,
    Repeat,
    Seq,
    Text,
    Value,
    may_be_empty,
    names_in,
    nodes_in,
)

ESCAPES = {char: json.dumps(char)[1:-1] for char in sorted(SPECIAL)}

_ORDINARY = r'[^"\\\x00-\x1F]'
_ANY = Char(r"[\s\S]", SPECIAL, None)
_MOST_NODES = 100_000
"""Most items of rewritten sequences, so that a definition of 64 KiB is refused before it fills the memory."""
_MOST_LEVELS = 100


class Quoter:
    """Rewrites the trees of a grammar's terminals."""

    def __init__(self, terminals: Mapping[str, Node]) -> None:
        """Raises ValueError if a terminal refers to itself, or to what is no terminal."""
        self._is_nullable: dict[str, bool] = {}
        self._num_nodes = 0
        self._named: dict[tuple[str, str], Node | None] = {}
        self._order = _inner_first(terminals)
        self._terminals = terminals
        for name in self._order:
            self._is_nullable[name] = may_be_empty(terminals[name], self._is_nullable)

    def may_be_empty(self, node: Node) -> bool:
        return may_be_empty(node, self._is_nullable)

    def terminal(self, name: str, part: str) -> Node | None:
        """`behind` of a terminal's tree."""
        for inner in self._order if (name, part) not in self._named else ():
            if (inner, part) not in self._named:
                self._named[inner, part] = self.behind(self._terminals[inner], part)
        return self._named[name, part]

    def least_chars(self, node: Node) -> int:
        """The length of the shortest text, or less."""
        if isinstance(node, Seq):
            return sum(map(self.least_chars, node.items))
        if isinstance(node, Alt):
            return min(map(self.least_chars, node.items))
        if isinstance(node, Both):
            return max(map(self.least_chars, node.items))
        if isinstance(node, Repeat):
            return node.low * self.least_chars(node.item)
        if isinstance(node, Name):
            return self.least_chars(self._terminals[node.name])
        if isinstance(node, (Value, Lexeme)):
            return self.least_chars(node.item)
        return int(isinstance(node, Char))

    def first_chars(self, node: Node) -> frozenset[str] | None:
        """The characters that a text may begin with; None: any."""
        if isinstance(node, Char):
            return None if node.others is None else node.specials | node.others
        if isinstance(node, Name):
            return self.first_chars(self._terminals[node.name])
        if isinstance(node, (Value, Repeat, Lexeme)):
            return self.first_chars(node.item)
        if isinstance(node, (Not, Both, Text)):
            return None
        found: frozenset[str] = frozenset()
        for item in node.items:
            chars = self.first_chars(item)
            if chars is None:
                return None
            found |= chars
            if isinstance(node, Seq) and not self.may_be_empty(item):
                break
        return found

    def behind(self, node: Node, part: str) -> Node | None:
        """The quoted texts that begin with `part`, a part of an escape or nothing, without it. None: there are none.

        A terminal that a tree names becomes `Name(terminal + part)`.
        """
        if isinstance(node, Char):
            return _quoted_char(node, part)
        if isinstance(node, Value):
            return self.behind(node.item, part)
        if isinstance(node, Name):
            return None if self.terminal(node.name, part) is None else Name(node.name + part)
        if isinstance(node, Alt):
            return _either(self.behind(item, part) for item in node.items)
        if isinstance(node, Both):
            items = [self.behind(item, part) for item in node.items]
            return None if None in items else Both(tuple(item for item in items if item is not None))
        if isinstance(node, Not):
            return self._not_behind(node, part)
        if isinstance(node, Repeat):
            return self._repeat_behind(node, part)
        assert isinstance(node, Seq)
        return self._sequence_behind(node.items, part)

    def _whole(self, node: Node) -> Node:
        quoted = self.behind(node, "")
        return NOTHING if quoted is None else quoted

    def _not_behind(self, node: Not, part: str) -> Node | None:
        texts = self.behind(Repeat(_ANY, 0, None), part)
        assert texts is not None
        excluded = self.behind(node.item, part)
        return texts if excluded is None else Both((texts, Not(excluded)))

    def _repeat_behind(self, node: Repeat, part: str) -> Node | None:
        if not part:
            return Repeat(self._whole(node.item), node.low, node.high)
        first = None if node.high == 0 else self.behind(node.item, part)
        if first is None:
            return None
        rest = Repeat(self._whole(node.item), max(node.low - 1, 0), None if node.high is None else node.high - 1)
        return first if rest.high == 0 else Seq((first, rest))

    def _sequence_behind(self, items: tuple[Node, ...], part: str) -> Node | None:
        quoted = tuple(self._whole(item) for item in items)
        self._count(len(items))
        if not part:
            return Seq(quoted)
        found: list[Node] = []
        for i, item in enumerate(items):
            first = self.behind(item, part)
            if first is not None:
                found.append(Seq((first, *quoted[i + 1 :])))
                self._count(len(items) - i)
            if not self.may_be_empty(item):
                break
        return _either(found)

    def _count(self, num: int) -> None:
        self._num_nodes += num
        if self._num_nodes > _MOST_NODES:
            raise ValueError("the grammar of its escaped texts is too large; write it with fewer optional parts")


NOTHING = Char("[a&&b]", frozenset(), frozenset())
"""No text at all."""


def _inner_first(terminals: Mapping[str, Node]) -> list[str]:
    """The names of all terminals, each behind those that it refers to."""
    done: dict[str, None] = {}
    for start in terminals:
        path: dict[str, Iterator[str]] = {} if start in done else {start: iter(names_in(terminals[start]))}
        while path:
            name = next(reversed(path))
            inner = next(path[name], None)
            if inner is None:
                done[name] = None
                del path[name]
            elif inner in path:
                raise ValueError(f"the terminal '{inner}' of the grammar refers to itself")
            elif inner not in terminals:
                raise ValueError(f"the terminal '{name}' of the grammar refers to '{inner}', which is no terminal")
            elif len(path) > _MOST_LEVELS:
                raise ValueError(f"its terminals refer to each other over more than {_MOST_LEVELS} levels")
            elif inner not in done:
                path[inner] = iter(names_in(terminals[inner]))
    return list(done)


def _either(nodes: Iterable[Node | None]) -> Node | None:
    found = tuple(node for node in nodes if node is not None)
    return Alt(found) if len(found) > 1 else found[0] if found else None


def _quoted_char(char: Char, part: str) -> Node | None:
    """One character of the set, or what is left of its escape behind `part`."""
    tails = _tails(char.specials, part)
    return _either(tails if part else (*tails, _ordinary(char)))


@lru_cache(1_024)
def _tails(chars: frozenset[str], part: str) -> tuple[Text, ...]:
    """The rests of the escapes of these characters that begin with `part`, without it."""
    escapes = [ESCAPES[char] for char in sorted(chars)]
    return tuple(map(Text, _one_of(escape.removeprefix(part) for escape in escapes if escape.startswith(part))))


def _ordinary(char: Char) -> Node | None:
    """The characters of the set that JSON does not escape."""
    if char.others is not None and not char.others and char.specials:
        return None
    text = f"[{char.text}&&{_ORDINARY}]" if char.specials else char.text
    return Char(text, frozenset(), char.others, char.ignores_case)


def _one_of(texts: Iterable[str]) -> list[str]:
    """Regular expressions that together match exactly these texts, one for each text without its last character."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:-1], []).append(text[-1])
    return ["".join(map(source, head)) + _class_of(sorted(set(last))) for head, last in groups.items()]


def _class_of(chars: list[str]) -> str:
    text = "".join(map(source, chars))
    return text if len(chars) == 1 else f"[{text}]"


# -- source text -------------------------------------------------------------------------------------------------------

_ALTERNATIVES, _SEQUENCE, _OPERAND = range(3)
"""Places of a tree in its source, by what need not be put in brackets there."""


def count_source(node: Repeat) -> str:
    bounds = (node.low, node.high)
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return known.get(bounds) or f"{{{node.low},{'' if node.high is None else node.high}}}"


def regex_source(node: Node, place: int = _ALTERNATIVES) -> str:
    """A tree of characters as a regular expression."""
    if isinstance(node, Char):
        return f"(?i:{node.text})" if node.ignores_case else node.text
    if isinstance(node, Text):
        return f"(?:{node.source})" if place == _OPERAND else node.source
    if isinstance(node, Value):
        return regex_source(node.item, place)
    if isinstance(node, Repeat):
        text = f"{regex_source(node.item, _OPERAND)}{count_source(node)}"
        return f"(?:{text})" if place == _OPERAND else text
    if isinstance(node, Alt):
        text = "|".join(regex_source(item, _SEQUENCE) for item in node.items)
        return text if place == _ALTERNATIVES else f"(?:{text})"
    assert isinstance(node, Seq)
    text = "".join(_joined(node.items))
    return f"(?:{text})" if place == _OPERAND or not text else text


def _joined(items: Iterable[Node]) -> Iterator[str]:
    """The sources of a sequence's items; letters of either case that follow each other share one group."""
    letters: list[str] = []
    for item in items:
        if isinstance(item, Char) and item.ignores_case:
            letters.append(item.text)
            continue
        if letters:
            yield f"(?i:{''.join(letters)})"
            letters = []
        yield regex_source(item, _SEQUENCE)
    if letters:
        yield f"(?i:{''.join(letters)})"


def terminal_source(node: Node, names: Mapping[str, str], place: int = _ALTERNATIVES) -> str:
    """A tree as the body of a terminal of Lark. `names`: what each `Name` is called there."""
    if not any(isinstance(inner, (Name, Both, Not)) for inner in nodes_in(node)):
        text = regex_source(node)
        return f"/{text}/" if text not in ("", "(?:)") else '""'
    if isinstance(node, Name):
        return names[node.name]
    if isinstance(node, Value):
        return terminal_source(node.item, names, place)
    if isinstance(node, Not):
        return f"~{terminal_source(node.item, names, _OPERAND)}"
    if isinstance(node, Repeat):
        if node.high == 0:
            return '""'
        text = f"{terminal_source(node.item, names, _OPERAND)}{count_source(node)}"
    elif isinstance(node, Alt):
        text = " | ".join(terminal_source(item, names, _SEQUENCE) for item in node.items)
        return text if place == _ALTERNATIVES else f"({text})"
    elif isinstance(node, Both):
        text = " & ".join(terminal_source(item, names, _OPERAND) for item in node.items)
        return f"({text})"
    else:
        assert isinstance(node, Seq)
        text = " ".join(terminal_source(item, names, _OPERAND) for item in node.items)
    return f"({text})" if place == _OPERAND else text
