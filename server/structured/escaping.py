"""Trees of texts as they stand inside a string of JSON: with escapes for some characters.

`Quoter` rewrites trees character by character. Knows no rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache

from inferd.engine.api.grammars import literal_regex
from inferd.server.structured.facts import GrammarFacts, facts_of
from inferd.server.structured.trees import NOTHING, SPECIAL, Alt, Both, Char, Name, Node, Not, Repeat, Seq, Text

ESCAPES = {char: json.dumps(char)[1:-1] for char in sorted(SPECIAL)}

_ORDINARY = r'[^"\\\x00-\x1F]'
_ANY = Char(r"[\s\S]", SPECIAL, None)
_MOST_NODES = 100_000
"""Most items of rewritten sequences, so that a definition of 64 KiB is refused before it fills the memory."""
_NODES_OF_NOT = 10
"""Items that each `~` counts for: an expression of any quoted text stands beside it."""


class Quoter:
    """Rewrites the trees of a grammar's terminals."""

    def __init__(self, terminals: Mapping[str, Node]) -> None:
        """Raises ValueError if a terminal refers to itself."""
        self.facts = GrammarFacts(terminals)
        self._terminals = terminals
        self._num_nodes = 0
        self._named: dict[tuple[str, str], Node | None] = {}

    def terminal(self, name: str, part: str) -> Node | None:
        """`behind` of a terminal's tree."""
        for inner in self.facts.terminals if (name, part) not in self._named else ():
            if (inner, part) not in self._named:
                self._named[inner, part] = self.behind(self._terminals[inner], part)
        return self._named[name, part]

    def behind(self, node: Node, part: str) -> Node | None:
        """The quoted texts that begin with `part`, a part of an escape or nothing, without it. None: there are none.

        A terminal that a tree names becomes `Name(terminal + part)`.
        """
        if isinstance(node, Char):
            return _quoted_char(node, part)
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
        self._count(_NODES_OF_NOT)
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
            if not facts_of(item, self.facts.terminals).may_be_empty:
                break
        return _either(found)

    def _count(self, num: int) -> None:
        self._num_nodes += num
        if self._num_nodes > _MOST_NODES:
            raise ValueError(
                "the grammar of its escaped texts is too large; write it with fewer optional parts and '~'"
            )


def _either(nodes: Iterable[Node | None]) -> Node | None:
    found = tuple(node for node in nodes if node is not None)
    return Alt(found) if len(found) > 1 else found[0] if found else None


def _quoted_char(char: Char, part: str) -> Node | None:
    """One character of the set, or what is left of its escape behind `part`."""
    if not char.specials:
        return None if part else char
    tails = _tails(char.specials, part)
    return _either(tails if part else (*tails, _ordinary(char)))


@lru_cache(1_024)
def _tails(chars: frozenset[str], part: str) -> tuple[Text, ...]:
    """The rests of the escapes of these characters that begin with `part`, without it."""
    escapes = [ESCAPES[char] for char in sorted(chars)]
    return tuple(map(Text, _one_of(escape.removeprefix(part) for escape in escapes if escape.startswith(part))))


def _ordinary(char: Char) -> Node | None:
    """The characters of the set that JSON does not escape."""
    if char.others is not None and not char.others:
        return None
    return Char(f"[{char.text}&&{_ORDINARY}]", frozenset(), char.others, char.ignores_case)


def _one_of(texts: Iterable[str]) -> list[str]:
    """Regular expressions that together match exactly these texts, one for each text without its last character."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:-1], []).append(text[-1])
    return [literal_regex(head) + _class_of("".join(sorted(set(last)))) for head, last in groups.items()]


def _class_of(chars: str) -> str:
    text = literal_regex(chars)
    return text if len(chars) == 1 else f"[{text}]"
