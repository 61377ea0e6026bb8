"""A caller's grammar of free texts, for texts that a model writes as they are, up to an end marker.

The lexer of llguidance takes as much as a terminal matches, so a terminal of any text would take the marker too, and
never end. Therefore no lexeme may hold the marker, and a lexeme that might begin to take it is also written together
with it.
Knows no fields of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from inferd.engine.api.grammars import literal_regex
from inferd.server.structured.facts import GrammarFacts
from inferd.server.structured.language import Language, TextFormat, lark, pattern_until
from inferd.server.structured.larks import Grammar, parse_grammar
from inferd.server.structured.quoted import MAX_KEPT, check_size
from inferd.server.structured.regexes import parse
from inferd.server.structured.sources import Lines, count_source, terminal_source
from inferd.server.structured.trees import NOTHING, Alt, Both, Lexeme, Name, Node, Not, Repeat, Seq, Text

_ANY_TEXT, _SOME_TEXT = Text("(?s:.)*"), Text("(?s:.)+")


@lru_cache(MAX_KEPT)
def text_until(end: str, text: TextFormat) -> Language:
    """The texts of the grammar that do not hold `end`, each with `end` behind it.

    Text that the grammar ignores may stand before `end`. Texts in which a lexeme is followed by the beginning of `end`
    may be missing. Raises ValueError with the reason if the grammar cannot be enforced.
    """
    check_size(text.definition)
    if text.syntax == "regex":
        parse(text.definition)
        return pattern_until(text.definition, end)
    return lark(_Writer(parse_grammar(text.definition), end).text())


class _Writer:
    """Writes one grammar anew: each rule as it is (`m`), and with the marker behind its last lexeme (`e`)."""

    def __init__(self, grammar: Grammar, end: str) -> None:
        self._grammar, self._end = grammar, end
        self._end_chars = frozenset(end)
        self._facts = GrammarFacts(grammar.terminals)
        self._empty = self._find_empty()
        self._names = {name: f"N{i}" for i, name in enumerate(grammar.terminals)}
        self._numbers = {name: i for i, name in enumerate(grammar.rules)}
        self._lines = Lines()
        self._bodies: dict[str, str] = {}
        """Body of each lexeme and of each rule that is none of the caller's -> name."""
        self._used: set[tuple[str, bool]] = set()
        self._waiting: list[tuple[str, bool]] = []
        """(rule, whether the marker stands behind it) of all rules that are used, in order."""
        self._marker = Text(literal_regex(end))
        self._lacks_marker = Not(Seq((_ANY_TEXT, self._marker, _ANY_TEXT)))
        ending: Node = self._marker
        if grammar.ignored:
            ending = Seq((Repeat(Alt(tuple(grammar.ignored)), 0, None), self._marker))
        self._ending = self._lexeme(ending)
        """The marker, with what may be ignored before it."""

    def _find_empty(self) -> set[int]:
        """The `id` of each part of a rule that the empty text matches."""
        users: dict[int, list[int]] = {}
        num_missing: dict[int, int] = {}
        """Number of its parts of which this must be found first."""
        waiting: list[Node] = list(self._grammar.rules.values())
        while waiting:
            node = waiting.pop()
            if id(node) in num_missing:
                continue
            inner, num = self._parts(node)
            num_missing[id(node)] = num
            for part in inner:
                users.setdefault(id(part), []).append(id(node))
            waiting.extend(inner)
        found: set[int] = set()
        ready = [part for part, num in num_missing.items() if not num]
        while ready:
            part_id = ready.pop()
            found.add(part_id)
            for user in users.get(part_id, ()):
                num_missing[user] -= 1
                if not num_missing[user]:
                    ready.append(user)
        return found

    def _parts(self, node: Node) -> tuple[Sequence[Node], int]:
        """(parts of a part of a rule, how many of them must match the empty text so that it does)."""
        if isinstance(node, Lexeme):
            return (), int(not self._facts.of(node).may_be_empty)
        if isinstance(node, Name):
            return (self._grammar.rules[node.name],), 1
        if isinstance(node, Repeat):
            return (node.item,), int(node.low > 0)
        assert isinstance(node, (Seq, Alt))
        return node.items, len(node.items) if isinstance(node, Seq) else 1

    def text(self) -> str:
        """The whole grammar."""
        for name, tree in self._grammar.terminals.items():
            self._lines.add(f"{self._names[name]}: {terminal_source(tree, self._names)}")
        start = [self._rule("start", is_last=True)]
        if id(self._grammar.rules["start"]) in self._empty:
            start.append(self._ending)
        self._lines.add(f"start: {' | '.join(start)}")
        for name, is_last in self._waiting:  # which grows meanwhile
            self._write(name, is_last=is_last)
        for tree in self._grammar.ignored:
            self._lines.add(f"%ignore {terminal_source(tree, self._names)}")
        return self._lines.text()

    def _write(self, name: str, *, is_last: bool) -> None:
        body, own_name = self._grammar.rules[name], self._rule(name, is_last=is_last)
        if isinstance(body, Lexeme) and body.is_lazy:
            text = f"{self._rule(name)} {self._ending}" if is_last else terminal_source(body.item, self._names)
            self._lines.add(f"{own_name}{'' if is_last else '[lazy]'}: {text}")
        elif is_last:
            self._lines.add(f"{own_name}: {' | '.join(self._ended(body)) or self._lexeme(NOTHING)}")
        else:
            self._lines.add(f"{own_name}: {self._plain(body)}")

    def _rule(self, name: str, *, is_last: bool = False) -> str:
        if (name, is_last) not in self._used:
            self._used.add((name, is_last))
            self._waiting.append((name, is_last))
        return f"{'e' if is_last else 'm'}{self._numbers[name]}"

    def _lexeme(self, node: Node) -> str:
        return self._named("L", terminal_source(node, self._names))

    def _one_of(self, alternatives: Sequence[str]) -> str:
        return alternatives[0] if len(alternatives) == 1 else self._named("r", " | ".join(alternatives))

    def _named(self, kind: str, body: str) -> str:
        """The name of a lexeme or rule, written once for equal ones."""
        if body not in self._bodies:
            self._bodies[body] = f"{kind}{len(self._bodies)}"
            self._lines.add(f"{self._bodies[body]}: {body}")
        return self._bodies[body]

    def _plain(self, node: Node) -> str:
        """A part of a rule as it is."""
        if isinstance(node, Lexeme):
            can_hold = self._facts.of(node).held.among(self._end_chars) == self._end_chars
            return self._lexeme(Both((node.item, self._lacks_marker)) if can_hold else node.item)
        if isinstance(node, Name):
            return self._rule(node.name)
        if isinstance(node, Repeat):
            item = self._plain(node.item)
            item = f"({item})" if isinstance(node.item, Repeat) else item
            return f"{item}{count_source(node)}" if node.high != 0 else '""'
        assert isinstance(node, (Seq, Alt))
        if not node.items:
            return '""'
        return f"({(' ' if isinstance(node, Seq) else ' | ').join(map(self._plain, node.items))})"

    def _ended(self, node: Node) -> list[str]:
        """Alternatives of a part of a rule with the marker behind its last lexeme; none if it has no lexeme."""
        if isinstance(node, Lexeme):
            return self._ended_lexeme(node)
        if isinstance(node, Name):
            return [self._rule(node.name, is_last=True)]
        if isinstance(node, Alt):
            return [text for item in node.items for text in self._ended(item)]
        if isinstance(node, Repeat):
            ended = self._ended(node.item) if node.high != 0 else []
            before = Repeat(node.item, max(node.low - 1, 0), None if node.high is None else node.high - 1)
            return [f"{self._plain(before)} {self._one_of(ended)}"] if ended else []
        assert isinstance(node, Seq)
        return self._ended_sequence(node.items)

    def _ended_lexeme(self, lexeme: Lexeme) -> list[str]:
        found = [f"{self._plain(lexeme)} {self._ending}"]
        if self._facts.of(lexeme).further.among(self._end_chars) & {self._end[0]}:
            goes_on = Seq((_ANY_TEXT, self._marker, _SOME_TEXT))
            found.append(self._lexeme(Both((Seq((lexeme.item, self._marker)), Not(goes_on)))))
        return found

    def _ended_sequence(self, items: Sequence[Node]) -> list[str]:
        """The last lexeme is in one of the items behind which all may be empty."""
        needed = [i for i, item in enumerate(items) if id(item) not in self._empty]
        first = needed[-1] if needed else 0
        ended: list[str] = []
        for item in reversed(items[first:]):
            more = [f"{self._plain(item)} {self._one_of(ended)}"] if ended else []
            ended = [*self._ended(item), *more]
        before = " ".join(map(self._plain, items[:first]))
        return [f"{before} {self._one_of(ended)}"] if before and ended else ended
