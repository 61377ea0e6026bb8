"""A caller's grammar of free texts, for texts that a model writes as they are, up to an end marker.

The lexer of llguidance takes as much as a terminal matches, so a terminal of any text would take the marker too, and
never end. Therefore no lexeme may hold the marker, and a lexeme that might begin to take it is also written together
with it.
Knows no wire fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from inferd.engine.api.wire.grammar_check import MAX_GRAMMAR_BYTES
from inferd.server.schema.caller_tool import TextFormat
from inferd.server.structured.escaping import Quoter, count_source, terminal_source
from inferd.server.structured.language import Language, lark, pattern_until
from inferd.server.structured.larks import Grammar, parse_grammar
from inferd.server.structured.quoted import check_size
from inferd.server.structured.quoted_grammar import TOO_LARGE
from inferd.server.structured.regexes import parse, source
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
        self._quoter = Quoter(grammar.terminals)
        self._names = {name: f"N{i}" for i, name in enumerate(grammar.terminals)}
        self._numbers = {name: i for i, name in enumerate(grammar.rules)}
        self._lexemes: dict[str, str] = {}
        """Source of each terminal -> name."""
        self._lines: list[str] = []
        self._num_chars = 0
        self._rules: dict[tuple[str, bool], None] = {}
        """(rule, whether the marker stands behind it) of all rules that are used, in order."""
        self._can_be_empty = {name: self._quoter.may_be_empty(tree) for name, tree in grammar.terminals.items()}
        self._find_empty_rules()
        self._marker = Text("".join(map(source, end)))
        self._ending: Node = self._marker
        """The marker, with what may be ignored before it."""
        if grammar.ignored:
            self._ending = Seq((Repeat(Alt(tuple(grammar.ignored)), 0, None), self._marker))

    def _find_empty_rules(self) -> None:
        known, rules = self._can_be_empty, self._grammar.rules
        known |= dict.fromkeys(rules, False)
        users: dict[str, list[str]] = {name: [] for name in known}
        for name, rule in rules.items():
            for inner in names_in(rule.body):
                users[inner].append(name)
        waiting = list(rules)
        while waiting:
            name = waiting.pop()
            if not known[name] and may_be_empty(rules[name].body, known):
                known[name] = True
                waiting.extend(users[name])

    def text(self) -> str:
        """The whole grammar."""
        for name, tree in self._grammar.terminals.items():
            self._add(self._names[name], terminal_source(tree, self._names))
        end = self._lexeme(self._ending)
        self._add("start", self._rule("start", is_last=True) + (f" | {end}" if self._can_be_empty["start"] else ""))
        written = 0
        while written < len(self._rules):
            for name, is_last in list(self._rules)[written:]:
                written += 1
                self._write(name, end, is_last=is_last)
        for tree in self._grammar.ignored:
            self._lines.append(f"%ignore {terminal_source(tree, self._names)}")
        return "\n".join((*self._lines, ""))

    def _write(self, name: str, end: str, *, is_last: bool) -> None:
        rule, own_name = self._grammar.rules[name], self._rule(name, is_last=is_last)
        if rule.is_lazy:
            body = f"{self._rule(name)} {end}" if is_last else terminal_source(rule.body, self._names)
            self._add(own_name if is_last else f"{own_name}[lazy]", body)
        else:
            self._add(own_name, " | ".join(self._ended(rule.body, end)) if is_last else self._plain(rule.body))

    def _add(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")
        self._num_chars += len(self._lines[-1])
        if self._num_chars > MAX_GRAMMAR_BYTES:
            raise ValueError(TOO_LARGE)

    def _rule(self, name: str, *, is_last: bool = False) -> str:
        self._rules.setdefault((name, is_last))
        return f"{'e' if is_last else 'm'}{self._numbers[name]}"

    def _lexeme(self, node: Node) -> str:
        text = terminal_source(node, self._names)
        if text not in self._lexemes:
            self._lexemes[text] = f"L{len(self._lexemes)}"
            self._add(self._lexemes[text], text)
        return self._lexemes[text]

    def _plain(self, node: Node) -> str:
        """A part of a rule as it is."""
        if self._grammar.is_lexeme(node):
            can_hold = set(self._end) <= self._chars(node)
            return self._lexeme(Both((node, _without(_ANY_TEXT, self._marker, _ANY_TEXT))) if can_hold else node)
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

    def _ended(self, node: Node, end: str) -> Iterator[str]:
        """Alternatives of a part of a rule with the marker behind its last lexeme."""
        if self._grammar.is_lexeme(node):
            yield f"{self._plain(node)} {end}"
            if self._end[0] in self._next_chars(node):
                yield self._lexeme(Both((Seq((node, self._marker)), _without(_ANY_TEXT, self._marker, _SOME_TEXT))))
        elif isinstance(node, Name):
            yield self._rule(node.name, is_last=True)
        elif isinstance(node, Alt):
            for item in node.items:
                yield from self._ended(item, end)
        elif isinstance(node, Repeat):
            if node.high != 0:
                before = Repeat(node.item, max(node.low - 1, 0), None if node.high is None else node.high - 1)
                for last in self._ended(node.item, end):
                    yield f"{self._plain(before)} {last}"
        else:
            assert isinstance(node, Seq)
            for i in range(len(node.items) - 1, -1, -1):
                before_it = " ".join(map(self._plain, node.items[:i]))
                for last in self._ended(node.items[i], end):
                    yield f"{before_it} {last}".lstrip()
                if not may_be_empty(node.items[i], self._can_be_empty):
                    break

    def _chars(self, node: Node) -> frozenset[str]:
        """Those characters of the marker that a lexeme may hold."""
        found: set[str] = set()
        for inner in nodes_in(node):
            if isinstance(inner, Name):
                found |= self._chars(self._grammar.terminals[inner.name])
            elif isinstance(inner, Not):
                found |= set(self._end)
            elif isinstance(inner, Char):
                found |= inner.specials | (set(self._end) - SPECIAL if inner.others is None else inner.others)
        return frozenset(found & set(self._end))

    def _first_chars(self, node: Node) -> frozenset[str]:
        """Those characters of the marker that a text may begin with."""
        found = self._quoter.first_chars(node)
        return frozenset(self._end) if found is None else found & set(self._end)

    def _next_chars(self, node: Node) -> frozenset[str]:
        """Those characters of the marker by which a text may go on to a longer one, as its last part tells."""
        if isinstance(node, Name):
            return self._next_chars(self._grammar.terminals[node.name])
        if isinstance(node, (Value, Lexeme)):
            return self._next_chars(node.item)
        if isinstance(node, Not):
            return frozenset(self._end)
        if isinstance(node, Repeat):
            again = frozenset() if node.high == 1 else self._first_chars(node.item)
            return self._next_chars(node.item) | again
        if isinstance(node, (Alt, Both)):
            return frozenset().union(*map(self._next_chars, node.items))
        found: frozenset[str] = frozenset()
        items = node.items if isinstance(node, Seq) else ()
        for i, item in reversed(list(enumerate(items))):
            found |= self._next_chars(item) | self._first_chars(Seq(items[i + 1 :]))
            if not self._quoter.may_be_empty(item):
                break
        return found


_ANY_TEXT, _SOME_TEXT = Text("(?s:.)*"), Text("(?s:.)+")


def _without(*parts: Node) -> Node:
    return Not(Seq(parts))
