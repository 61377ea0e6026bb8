"""Grammars in llguidance's dialect of Lark as trees.

Reads what has a meaning of its own. What has none (tokens of the model, JSON schemas, other grammars) is refused by
name, as is what llguidance itself refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from inferd.server.structured.lark_tokens import COMMON, Token, error_at, tokens_of
from inferd.server.structured.regexes import char_range, literal, parse
from inferd.server.structured.trees import EMPTY, Alt, Both, Lexeme, Name, Node, Not, Repeat, Seq, names_in

_MAX_DEPTH = 28
"""llguidance takes 30 levels of brackets."""
_MAX_COUNT = 2**31 - 1
_MAX_COUNT_DIGITS = 20

_NO_TEXT = {
    "%json": "'%json', a JSON schema",
    "%regex": "'%regex', a set of substrings",
    "%lark": "'%lark', a grammar in a grammar",
    "%if": "'%if', a condition on a rule's parameter",
    "%declare": "'%declare'",
    "%override": "'%override'",
}


@dataclass(slots=True)
class Grammar:
    """A whole grammar, which begins with the rule `start`. Every name in it is defined."""

    rules: dict[str, Node] = field(default_factory=dict)
    """Trees of lexemes and of names of rules."""
    terminals: dict[str, Node] = field(default_factory=dict)
    ignored: list[Node] = field(default_factory=list)
    """Texts that may stand between lexemes."""


def parse_grammar(text: str) -> Grammar:
    """Raises ValueError for what cannot be read, or has no tree."""
    parser = _Parser(text)
    parser.run()
    grammar = parser.grammar
    if "start" not in grammar.rules:
        raise ValueError("the grammar has no rule 'start'")
    for body in (*grammar.rules.values(), *grammar.terminals.values(), *grammar.ignored):
        for name in names_in(body):
            if name not in grammar.rules and name not in grammar.terminals:
                raise ValueError(f"the grammar refers to '{name}', which it does not define")
    return grammar


class _Parser:
    """Reads one grammar from left to right."""

    def __init__(self, text: str) -> None:
        self.grammar = Grammar()
        self._text, self._tokens = text, tokens_of(text)
        self._at = 0
        """Index of the next token."""
        self._depth = 0
        self._is_in_lexeme = False
        """Whether what is read becomes a part of one lexeme."""

    def _error(self, reason: str) -> ValueError:
        return error_at(self._text, self._peek().at, reason)

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _is(self, *marks: str) -> bool:
        kind, text, _ = self._peek()
        return kind in ("mark", "op", "keyword") and text in marks

    def _take(self, *marks: str) -> bool:
        found = self._is(*marks)
        self._at += found
        return found

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise self._error(f"'{mark}' is missing before {self._peek()[1]!r}")

    def _expect_kind(self, *kinds: str) -> str:
        kind, text, _ = self._peek()
        if kind not in kinds:
            raise self._error(f"a {' or '.join(kinds)} is missing before {text!r}")
        self._at += 1
        return text

    def run(self) -> None:
        while True:
            while self._peek()[0] == "newline":
                self._at += 1
            kind, text, _ = self._peek()
            if kind == "end":
                return
            if kind == "rule":
                self._rule()
            elif kind == "terminal":
                self._terminal()
            elif self._take("%ignore"):
                self.grammar.ignored.append(self._in_lexeme(self._alternatives))
            elif self._take("%import"):
                self._import()
            else:
                raise self._refused(text) if text in _NO_TEXT else self._error(f"{text!r} begins no rule")
            if self._peek()[0] not in ("newline", "end"):
                raise self._error(f"{self._peek()[1]!r} is out of place")

    def _refused(self, text: str) -> ValueError:
        return self._error(f"it uses {_NO_TEXT[text]}, which cannot be enforced in a call's text")

    def _rule(self) -> None:
        name = self._expect_kind("rule").removeprefix("!").removeprefix("?")
        self._check_head(name)
        is_lazy, suffix = self._attributes() if self._is("[") else (False, None)
        self._expect(":")
        body = self._in_lexeme(self._alternatives) if is_lazy else self._alternatives()
        if name in self.grammar.rules:
            raise self._error(f"the rule '{name}' is defined twice")
        if suffix is not None:
            body = Seq((body, suffix))
        self.grammar.rules[name] = Lexeme(body, is_lazy=True) if is_lazy else body

    def _terminal(self) -> None:
        name = self._expect_kind("terminal")
        self._check_head(name)
        self._expect(":")
        self._define(name, self._in_lexeme(self._alternatives))

    def _define(self, name: str, body: Node) -> None:
        if name in self.grammar.terminals:
            raise self._error(f"the terminal '{name}' is defined twice")
        self.grammar.terminals[name] = body

    def _check_head(self, name: str) -> None:
        for mark, noun in (("{", "a template"), (".", "a priority"), ("::", "a parameter")):
            if self._is(mark):
                raise self._error(f"'{name}' has {noun}, which is not supported; leave it out")

    def _attributes(self) -> tuple[bool, Node | None]:
        """(whether the rule is lazy, the text behind its lexeme)."""
        is_lazy, suffix = False, None
        self._expect("[")
        while not self._is("]"):
            name = self._expect_kind("rule")
            if name in ("stop", "max_tokens"):
                raise self._error(f"the attribute '{name}' cannot be enforced in a call's text; use 'lazy' or 'suffix'")
            if name == "lazy":
                is_lazy = True
            elif name == "suffix":
                self._expect("=")
                suffix, is_lazy = self._in_lexeme(self._value), True
            elif name in ("capture", "stop_capture", "temperature"):  # they change no text
                if self._take("="):
                    self._expect_kind("string", "number")
                    while self._take(".") or self._peek()[0] == "number":
                        self._at += self._peek()[0] == "number"
            else:
                raise self._error(f"the attribute '{name}' is not known")
            if not self._take(","):
                break
        self._expect("]")
        return is_lazy, suffix

    def _import(self) -> None:
        kind, path, _ = self._peek()
        if (kind, path) != ("rule", "common"):
            raise self._error(f"it imports from {path!r}, but only 'common' can be imported from")
        self._at += 1
        if self._take("("):
            names = [self._expect_kind("terminal")]
            while self._take(","):
                names.append(self._expect_kind("terminal"))
            self._expect(")")
            aliases = names
        else:
            self._expect(".")
            names = [self._expect_kind("terminal")]
            aliases = [self._expect_kind("terminal") if self._take("->") else names[0]]
        for name, alias in zip(names, aliases, strict=True):
            if name not in COMMON:
                raise self._error(f"'common' has no '{name}'; it has {', '.join(COMMON)}")
            self._define(alias, parse(COMMON[name]))

    def _in_lexeme(self, read: Callable[[], Node]) -> Node:
        """Returns what `read` reads, as a part of one lexeme."""
        before, self._is_in_lexeme = self._is_in_lexeme, True
        node = read()
        self._is_in_lexeme = before
        return node

    def _matched(self, node: Node) -> Node:
        """Returns a tree of texts, as a lexeme if a rule holds it."""
        return node if self._is_in_lexeme or node == EMPTY else Lexeme(node)

    def _nested(self, read: Callable[[], Node], end: str = "") -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"brackets are nested more than {_MAX_DEPTH} levels deep")
        node = read()
        self._depth -= 1
        if end:
            self._expect(end)
        return node

    def _alternatives(self) -> Node:
        nodes = [self._alternative()]
        while self._take_bar():
            nodes.append(self._alternative())
        return nodes[0] if len(nodes) == 1 else Alt(tuple(nodes))

    def _take_bar(self) -> bool:
        """Takes a `|`, also at the beginning of the next line."""
        if self._peek()[0] == "newline" and self._peek(1)[:2] == ("mark", "|"):
            self._at += 1
        return self._take("|")

    def _alternative(self) -> Node:
        parts = [self._expansion()]
        while self._take("&"):
            parts.append(self._expansion())
        if self._take("->"):
            self._expect_kind("rule")
        if self._is("%if"):
            raise self._refused("%if")
        if len(parts) == 1:
            return parts[0]
        if not self._is_in_lexeme:
            raise self._error("it joins parts of a rule by '&'; write them in a terminal")
        return Both(tuple(parts))

    def _expansion(self) -> Node:
        items = []
        while not (self._peek()[0] in ("newline", "end") or self._is("|", "->", "}", ")", "]", "&", "%if")):
            items.append(self._repeated())
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _repeated(self) -> Node:
        item = self._atom()
        if self._take("*"):
            return Repeat(item, 0, None)
        if self._take("+"):
            return Repeat(item, 1, None)
        if self._take("?"):
            return Repeat(item, 0, 1)
        if self._is("~") and self._peek(1)[0] == "number":
            self._at += 1
            low = self._number()
            return self._counted(item, low, self._number() if self._take("..") else low)
        if self._take("{"):
            low = 0 if self._is(",") else self._number()
            high: int | None = low
            if self._take(","):
                high = None if self._is("}") else self._number()
            self._expect("}")
            return self._counted(item, low, high)
        return item

    def _counted(self, item: Node, low: int, high: int | None) -> Node:
        if low < 0 or low > _MAX_COUNT or (high is not None and not low <= high <= _MAX_COUNT):
            raise self._error(f"the count from {low} to {high} ends before it begins, or is too large")
        return Repeat(item, low, high)

    def _number(self) -> int:
        text = self._expect_kind("number")
        if len(text) > _MAX_COUNT_DIGITS:
            raise self._error(f"the count {text[:20]}... is too large")
        return int(text)

    def _atom(self) -> Node:
        if self._take("~"):
            return self._matched(Not(self._in_lexeme(lambda: self._nested(self._atom))))
        if self._take("("):
            return self._nested(self._alternatives, ")")
        if self._take("["):
            return Repeat(self._nested(self._alternatives, "]"), 0, 1)
        return self._value()

    def _value(self) -> Node:
        kind, text, _ = self._peek()
        self._at += 1
        if kind == "string":
            return self._matched(self._string(text))
        if kind == "regexp":
            end = text.rindex("/")
            if "l" in text[end:]:
                raise self._error(f"{text} has the flag 'l', which is not supported")
            return self._matched(parse(text[1:end], text[end + 1 :]))
        if kind in ("rule", "terminal"):
            if self._is("::"):
                raise self._error(f"'{text}' has a parameter, which is not supported")
            if kind == "terminal":
                return self._matched(Name(text))
            if self._is_in_lexeme:
                raise self._error(f"it uses the rule '{text}' in a lexeme, in which only terminals may stand")
            return Name(text)
        self._at -= 1
        if text in _NO_TEXT:
            raise self._refused(text)
        if kind == "token":
            raise self._error(f"it uses the special token {text}, which the text of a call cannot hold")
        if kind == "grammar":
            raise self._error(f"it uses another grammar, '{text}', which cannot be enforced in a call's text")
        raise self._error(f"{text!r} is out of place")

    def _string(self, text: str) -> Node:
        first = _unquoted(text)
        if not self._take(".."):
            return literal(first, ignores_case=text.endswith("i"))
        last = _unquoted(self._expect_kind("string"))
        if len(first) != 1 or len(last) != 1 or last < first:
            raise self._error(
                f"a range goes from one character to one that is not before it, not {first!r} to {last!r}"
            )
        return char_range(first, last)


def _unquoted(text: str) -> str:
    """The text of a literal, with `\\xHH` beside JSON's escapes."""
    known = re.sub(r"\\(?:x(..)|.)", lambda match: match[0] if match[1] is None else f"\\u00{match[1]}", text)
    return str(json.loads(known.removesuffix("i")))
