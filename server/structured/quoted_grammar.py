r"""Writes a grammar of free texts anew, for texts that a model writes inside a string of JSON.

Every terminal is rewritten character by character (`escaping`). That alone does not do for several terminals. The lexer
of llguidance ends a lexeme at the first byte that cannot continue it, and all escapes begin with the same byte. In
`/.*/ LF`, the backslash of `\n` might begin `\t`, so the first lexeme takes it and cannot end any more. Therefore a
lexeme may take the beginning of the next escape: each terminal is written once for every part of an escape that the
lexeme before it may have taken, and that it may take itself. The part that was taken is the state. Each rule is written
once for every pair of states before and after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from inferd.engine.api.grammars import literal_regex
from inferd.engine.api.wire.grammar_check import MAX_GRAMMAR_BYTES
from inferd.server.structured.escaping import ESCAPES, Quoter
from inferd.server.structured.facts import Facts
from inferd.server.structured.larks import Grammar
from inferd.server.structured.sources import TOO_LARGE, Lines, count_source, terminal_source
from inferd.server.structured.trees import (
    EMPTY,
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
    names_in,
    nodes_in,
)

_NUMBERED = frozenset(char for char, escape in ESCAPES.items() if len(escape) > 2)
"""Characters whose escape is a number."""
_NUMBER_PARTS = ("\\u00", "\\u000", "\\u001")
"""Parts of these escapes behind which the next character decides which escape it is."""

_Pairs = frozenset[tuple[int, int]]
"""States (before, after) between which a tree matches some text."""


_MOST_STEPS = 1_000_000
"""Most steps to find the pairs of all rules: 0.2 s (AMD EPYC Zen 4, 2026-11-28). 2,000 rules usually take 14,000."""

_EMPTY_TEXT = '""'
_NOT_EMPTY = Text("(?s:.)+")


def _first_of(node: Node) -> Node:
    """The texts of a tree that no other text of it begins.

    Used because llguidance 1.9.1 does not see that a lazy lexeme has matched if it does so at its first byte, which has
    also ended the lexeme before it.
    """
    texts = Both((node, _NOT_EMPTY))
    return Both((texts, Not(Seq((texts, _NOT_EMPTY)))))


def _joined(first: _Pairs, second: _Pairs) -> _Pairs:
    return frozenset((a, d) for a, b in first for c, d in second if b == c)


def _parts_of(trees: Iterable[Node]) -> tuple[str, ...]:
    """The parts of escapes that a lexeme may have to take, the empty one first.

    Only if trees tell special characters apart can a lexeme go on with one of them and not with another.
    """
    sets = {frozenset[str]()}
    for tree in trees:
        for node in nodes_in(tree):
            if isinstance(node, Char):
                sets.add(node.specials)
            elif isinstance(node, Not):
                sets.add(SPECIAL)
    parts = ("", "\\") if len(sets) > 2 else ("",)
    return (*parts, *_NUMBER_PARTS) if len({chars & _NUMBERED for chars in sets} - {frozenset()}) > 1 else parts


class GrammarWriter:
    """Writes one grammar anew.

    A state is an index of `_parts`, the part of an escape that was taken. If rules match what the grammar ignores,
    state 0 stands for the beginning, at which nothing may be ignored.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._quoter = Quoter(grammar.terminals)
        trees = [*grammar.terminals.values(), *grammar.ignored, *grammar.rules.values()]
        self._parts = _parts_of(trees)
        self._ignored: Repeat | None = None
        """Lexemes that may stand before any but the first; None: the lexer ignores them."""
        self._any_ignored = Lexeme(Alt(tuple(grammar.ignored)), is_ignored=True)
        self._lines = Lines()
        self._names: dict[object, str] = {}
        self._waiting: list[tuple[str, Node, int, int]] = []
        """(name, tree, state before, state after) of the rules that are still to be written."""
        self._terminals: dict[str, str] = {}
        self._behind: dict[tuple[int, int], Node | None] = {}
        self._made: dict[object, Node] = {}
        """Trees that are not the grammar's own, kept because trees are told apart by their `id`."""
        if grammar.ignored and len(self._parts) > 1:
            self._parts = ("", *self._parts)
            self._ignored = Repeat(self._any_ignored, 0, None)
        self._states = range(len(self._parts))
        self._same: _Pairs = frozenset((state, state) for state in self._states)
        self._is_solved = False
        self._num_steps = 0
        self._pairs_of: dict[int, _Pairs] = {}
        self._rules = grammar.rules
        self._pairs_of_rule: dict[str, _Pairs] = dict.fromkeys(self._rules, frozenset())
        self._solve()

    def text(self) -> str:
        """The whole grammar."""
        start = Name("start")
        ends = [state for state in self._states if not self._parts[state] and (0, state) in self._pairs(start)]
        if not ends:
            raise ValueError("the grammar's rule 'start' matches no text")
        self._add("start", " | ".join(self._use(start, 0, state) for state in ends))
        while self._waiting:
            name, node, before, after = self._waiting.pop()
            self._add(name, self._body(node, before, after))
            if len(self._names) > MAX_GRAMMAR_BYTES // 4:  # each has a line of at least as many characters
                raise ValueError(TOO_LARGE)
        if self._ignored is None:
            for tree in self._grammar.ignored:
                quoted = self._quoter.behind(tree, "")
                if quoted is not None:
                    self._lines.add(f"%ignore {self._source(quoted)}")
        return self._lines.text()

    def _add(self, name: str, body: str) -> None:
        self._lines.add(f"{name}: {body}")

    def _name(self, kind: str, key: object) -> tuple[str, bool]:
        """(the name of a rule or terminal, whether it is new)."""
        is_new = key not in self._names
        return self._names.setdefault(key, f"{kind}{len(self._names)}"), is_new

    # -- lexemes

    def _facts(self, lexeme: Lexeme) -> Facts:
        return self._quoter.facts.of(lexeme)

    def _part_behind(self, lexeme: Lexeme, state: int) -> Node | None:
        key = (id(lexeme), state)
        if key not in self._behind:
            item = lexeme.item if state == 0 or lexeme.is_ignored or lexeme.is_lazy else self._not_ignored(lexeme)
            self._behind[key] = self._quoter.behind(item, self._parts[state])
        return self._behind[key]

    def _not_ignored(self, lexeme: Lexeme) -> Node:
        """A lexeme's tree without the texts that are ignored: the lexer takes these as ignored."""
        if self._ignored is None or not self._facts(lexeme).first.overlaps(self._facts(self._any_ignored).first):
            return lexeme.item
        return Both((lexeme.item, Not(self._any_ignored.item)))

    def _lexeme_pairs(self, lexeme: Lexeme) -> _Pairs:
        """The pairs of a lexeme, with what may be ignored before it."""
        first = 0 if self._ignored is None else 1
        begins = [state for state in self._states if self._part_behind(lexeme, state) is not None]
        ends = [state for state in self._states if state >= first and not (lexeme.is_lazy and self._parts[state])]
        pairs = frozenset((a, b) for a in begins for b in ends)
        if lexeme.is_ignored:
            return frozenset(pair for pair in pairs if pair[0] >= first)
        if self._ignored is not None:
            pairs |= _joined(self._pairs(self._ignored), pairs)
        return pairs | frozenset((a, a) for a in self._states if self._facts(lexeme).may_be_empty)

    def _use_lexeme(self, lexeme: Lexeme, before: int, after: int) -> str:
        """A lexeme, with what may be ignored before it."""
        if self._ignored is None or lexeme.is_ignored or before == 0:
            return self._use_one_lexeme(lexeme, before, after)
        name, is_new = self._name("r", (id(lexeme), before, after, "ignoring"))
        if is_new:
            found = [
                f"{self._use(self._ignored, before, state)} {self._use_one_lexeme(lexeme, state, after)}"
                for state in self._states
                if (before, state) in self._pairs(self._ignored) and self._has(lexeme, state, after)
            ]
            self._add(name, " | ".join(found))
        return name

    def _has(self, lexeme: Lexeme, before: int, after: int) -> bool:
        """Whether the lexeme alone leads from one state to the other."""
        if before == after and self._facts(lexeme).may_be_empty:
            return True
        is_end = after >= (self._ignored is not None) and not (lexeme.is_lazy and self._parts[after])
        return is_end and self._part_behind(lexeme, before) is not None

    def _use_one_lexeme(self, lexeme: Lexeme, before: int, after: int) -> str:
        node = self._part_behind(lexeme, before)
        is_empty = before == after and self._facts(lexeme).may_be_empty
        is_beginning = self._ignored is not None and before == 0
        is_optional = is_empty and bool(self._parts[before])
        if is_empty and (node is None or is_beginning):
            return _EMPTY_TEXT
        assert node is not None
        if self._parts[after]:
            node = Seq((node, Text(literal_regex(self._parts[after]))))
        elif lexeme.is_lazy and self._facts(lexeme).least_chars <= 1:
            node, is_optional = _first_of(node), is_empty
        elif is_beginning and self._facts(lexeme).may_be_empty:
            node = Both((node, _NOT_EMPTY))
        name = self._terminal(node, is_lazy=lexeme.is_lazy)
        return f"({name}?)" if is_optional else name

    def _terminal(self, node: Node, *, is_lazy: bool = False) -> str:
        """The name of a terminal, written once for equal ones."""
        text = self._source(node)
        name, is_new = self._name("r" if is_lazy else "T", (text, is_lazy))
        if is_new:
            self._add(f"{name}[lazy]" if is_lazy else name, text)
        return name

    def _source(self, node: Node) -> str:
        """The body of a terminal. Writes the terminals that it names first."""
        for key in names_in(node):
            if key not in self._terminals:
                name, slash, rest = key.partition("\\")
                inner = self._quoter.terminal(name, slash + rest)
                assert inner is not None
                self._terminals[key] = self._terminal(inner)
        return terminal_source(node, self._terminals)

    # -- states

    def _solve(self) -> None:
        """Finds the pairs of all rules: the least that satisfy all of them."""
        users: dict[str, set[str]] = {name: set() for name in self._rules}
        for name, node in self._rules.items():
            for inner in names_in(node):
                if inner in users:
                    users[inner].add(name)
        queue = deque(reversed(self._rules))  # rules mostly stand before those that they refer to
        queued = set(queue)
        while queue:
            name = queue.popleft()
            queued.remove(name)
            pairs = self._pairs(self._rules[name])
            if pairs != self._pairs_of_rule[name]:
                self._pairs_of_rule[name] = pairs
                queue.extend(users[name] - queued)
                queued |= users[name]
        self._is_solved = True

    def _pairs(self, node: Node) -> _Pairs:
        if not self._is_solved:
            self._num_steps += 1
            if self._num_steps > _MOST_STEPS:
                raise ValueError("its rules refer to each other in too many ways; write it with fewer rules")
        if isinstance(node, Name):
            return self._pairs_of_rule[node.name]
        key = id(node)
        if key in self._pairs_of:
            return self._pairs_of[key]
        if isinstance(node, Lexeme):
            pairs = self._lexeme_pairs(node)
        elif isinstance(node, Seq):
            pairs = self._same
            for item in node.items:
                pairs = _joined(pairs, self._pairs(item))
        elif isinstance(node, Alt):
            pairs = frozenset().union(*map(self._pairs, node.items))
        else:
            assert isinstance(node, Repeat)
            pairs = self._repeat_pairs(self._pairs(node.item), node.low, node.high)
        if self._is_solved or isinstance(node, Lexeme):
            self._pairs_of[key] = pairs
        return pairs

    def _repeat_pairs(self, pairs: _Pairs, low: int, high: int | None) -> _Pairs:
        # Behind as many steps as there are states, more optional steps reach nothing new.
        num_more = len(self._states) if high is None else min(high - low, len(self._states))
        return _joined(self._power_pairs(pairs, low), self._power_pairs(pairs | self._same, num_more))

    def _power_pairs(self, pairs: _Pairs, num: int) -> _Pairs:
        result = self._same
        while num:
            if num & 1:
                result = _joined(result, pairs)
            pairs, num = _joined(pairs, pairs), num >> 1
        return result

    # -- rules

    def _use(self, node: Node, before: int, after: int) -> str:
        """The name of a rule or terminal for a tree, or the empty text."""
        if isinstance(node, Lexeme):
            return self._use_lexeme(node, before, after)
        if node == EMPTY:
            return _EMPTY_TEXT
        name, is_new = self._name("r", (node.name if isinstance(node, Name) else id(node), before, after))
        if is_new:
            self._waiting.append((name, node, before, after))
        return name

    def _body(self, node: Node, before: int, after: int) -> str:
        """The body of a rule for a tree that leads from one state to another."""
        if isinstance(node, Name):
            rule = self._rules[node.name]
            return self._use(rule, before, after) if isinstance(rule, Name) else self._body(rule, before, after)
        if isinstance(node, Alt):
            used = (self._use(item, before, after) for item in node.items if (before, after) in self._pairs(item))
            return " | ".join(dict.fromkeys(used))
        if isinstance(node, Seq) and len(node.items) > 1:
            return self._sequence_body(node, before, after)
        if isinstance(node, Repeat):
            return self._repeat_body(node, before, after)
        return self._use(node.items[0] if isinstance(node, Seq) and node.items else node, before, after)

    def _sequence_body(self, node: Seq, before: int, after: int) -> str:
        """A sequence, up to the first item behind which there are several states: a rule for each of them goes on."""
        written: list[str] = []
        rest: Node = self._in_pairs(node)
        while isinstance(rest, Seq) and len(rest.items) == 2:
            item, rest = rest.items
            pairs, rest_pairs = self._pairs(item), self._pairs(rest)
            states = [state for state in self._states if (before, state) in pairs and (state, after) in rest_pairs]
            if len(states) > 1:
                found = (f"{self._use(item, before, state)} {self._use(rest, state, after)}" for state in states)
                return " | ".join(" ".join((*written, text)) for text in found)
            written.append(self._use(item, before, states[0]))
            before = states[0]
        return " ".join((*written, self._use(rest, before, after)))

    def _in_pairs(self, node: Seq) -> Seq:
        """A sequence as its first item and the rest of it, which is written in the same way."""
        if len(node.items) == 2:
            return node
        key = (id(node), "in pairs")
        if key not in self._made:
            rest = node.items[-1]
            for num, item in enumerate(reversed(node.items[:-1])):
                rest = self._make((id(node), "rest", num), (item, rest))
                self._pairs(rest)  # from the end on, so that none asks for all that follow
            self._made[key] = rest
        made = self._made[key]
        assert isinstance(made, Seq)
        return made

    def _repeat_body(self, node: Repeat, before: int, after: int) -> str:
        item, low, high = node.item, node.low, node.high
        pairs = self._pairs(item)
        if all(b == before for a, b in pairs if a == before):  # no other state can be reached
            if (before, before) not in pairs or high == 0:
                return _EMPTY_TEXT
            return self._use(item, before, before) + count_source(node)
        empty = [_EMPTY_TEXT] if before == after and low == 0 else []
        if (low, high) == (0, None):  # Recursion on the left costs the parser least.
            star = self._repeat_pairs(pairs, 0, None)
            states = [state for state in self._states if (before, state) in star and (state, after) in pairs]
            more = [f"{self._use(node, before, state)} {self._use(item, state, after)}" for state in states]
            return " | ".join(empty + more)
        if (low, high) == (0, 1):
            return " | ".join(empty + ([self._use(item, before, after)] if (before, after) in pairs else []))
        rest = self._repeat(item, 0, None) if high is None else self._up_to(item, high - low)
        made = self._make((id(item), "repeat", low, high), (self._power(item, low), rest))
        return self._body(made, before, after)

    def _make(self, key: object, items: tuple[Node, ...]) -> Node:
        if key not in self._made:
            self._made[key] = Seq(items)
        return self._made[key]

    def _repeat(self, item: Node, low: int, high: int | None) -> Node:
        return self._made.setdefault((id(item), "times", low, high), Repeat(item, low, high))

    def _power(self, item: Node, num: int) -> Node:
        """`num` times, of halves."""
        if num <= 1:
            return item if num else EMPTY
        key = (id(item), "power", num)
        if key not in self._made:
            self._made[key] = Seq((self._power(item, num // 2), self._power(item, num - num // 2)))
        return self._made[key]

    def _up_to(self, item: Node, num: int) -> Node:
        """At most `num` times: at most half of them, or more than these and at most the rest."""
        if num <= 1:
            return self._repeat(item, 0, 1) if num else EMPTY
        key = (id(item), "up to", num)
        if key not in self._made:
            few = (num - 1) // 2
            many = Seq((self._power(item, few + 1), self._up_to(item, num - few - 1)))
            self._made[key] = Alt((self._up_to(item, few), many))
        return self._made[key]
