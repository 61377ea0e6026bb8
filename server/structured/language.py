"""Sets of texts and their composition, written as Lark grammars for llguidance.

Pure functions: a `Language` in, a `Language` out, and `Language.text` for the engine. Knows no wire fields and no
limits; whether a grammar is well-formed is found where it is compiled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

WHITESPACE = r"(\r?\n[ \t]{0,40}|[ ])"
"""What may stand, once, between the tokens of JSON: a space, or a line break and an indentation (ten levels of four).
Bounded, so that a model cannot spend its answer on blanks."""

_OPTIONS = '%llguidance {"no_forcing": true}'
"""Where only one text can follow, the model still chooses its tokens: forced ones would be those of the tokenizer,
which reads special tokens in a text that only spells them."""

_NAMED_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
_REGEX_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()/#&~\-]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Language:
    """The texts that `expression`, the body of a Lark rule, matches."""

    expression: str
    rules: tuple[str, ...] = ()
    """Lines that define what it names; equal lines of composed languages are one."""
    grammars: tuple[tuple[str, str], ...] = ()
    """(name, text) of whole grammars that it names as `@name`."""

    def text(self) -> str:
        """The whole grammar, as llguidance takes it."""
        main = "\n".join((_OPTIONS, f"start: {self.expression}", *self.rules, ""))
        if not self.grammars:
            return main
        named = [{"name": name, "lark_grammar": text} for name, text in self.grammars]
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *named]}, ensure_ascii=False)


def literal(text: str) -> Language:
    """Exactly `text`."""
    return Language(json.dumps(text, ensure_ascii=False))


def pattern(regex: str) -> Language:
    """The texts that a regular expression of Rust's `regex` syntax matches whole."""
    return Language(f"/{_without_bare_slashes(regex)}/")


def one_of(texts: Iterable[str]) -> Language:
    """One of these texts. As one lexeme: thousands of alternatives of a rule exceed the parser's limits."""
    return pattern("(" + "|".join(map(_escaped, texts)) + ")")


def json_value(schema: Mapping[str, object] | bool, *, is_lenient: bool = False) -> Language:
    """The JSON values of a schema. `is_lenient`: what cannot be enforced is left to the model, not refused."""
    options: dict[str, object] = {"whitespace_pattern": WHITESPACE}
    if is_lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    wanted: dict[str, object] = {} if schema is True else {"enum": []} if schema is False else dict(schema)
    return Language("%json " + json.dumps({**wanted, "x-guidance": options}))


def free_text() -> Language:
    """Any text, the empty one too, without special tokens."""
    return Language(r"/(.|\n)*/")


def free_text_until(end: str) -> Language:
    """Any text up to and with the first `end`."""
    name = _rule_name("until", end)
    return Language(name, (f"{name}[lazy]: /(.|\\n)*{_escaped(end)}/",))


def token(text: str, token_id: int) -> Language:
    """A special token of the vocabulary, which no text stands for."""
    return Language(text if _NAMED_TOKEN.fullmatch(text) else f"<[{token_id}]>")


def marked(text: str, tokens: Mapping[str, int]) -> Language:
    """`text` as the model writes it: what `tokens` name in it are these tokens, the rest is text."""
    if not tokens:
        return literal(text)
    names = sorted(tokens, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    written = [token(part, tokens[part]) if part in tokens else literal(part) for part in parts if part]
    return sequence(*written) if written else literal("")


def lark(text: str) -> Language:
    """A whole grammar of a caller's, in Lark or GBNF."""
    name = _rule_name("grammar", text)
    return Language(f"@{name}", grammars=((name, text),))


def sequence(*languages: Language) -> Language:
    """One after the other."""
    return _composed(" ".join(_grouped(language) for language in languages), languages)


def either(*languages: Language) -> Language:
    """Any one of them."""
    return _composed(" | ".join(_grouped(language) for language in languages), languages)


def repeat(language: Language, low: int, high: int | None) -> Language:
    """`low` to `high` times, one after the other; `high` None: any number of times."""
    bounds = f"{{{low},{'' if high is None else high}}}"
    return _composed(f"({language.expression}){bounds}", (language,))


def _composed(expression: str, languages: tuple[Language, ...]) -> Language:
    rules = dict.fromkeys(rule for language in languages for rule in language.rules)
    grammars = dict.fromkeys(grammar for language in languages for grammar in language.grammars)
    return Language(expression, tuple(rules), tuple(grammars))


def _grouped(language: Language) -> str:
    return f"({language.expression})"


def _rule_name(kind: str, text: str) -> str:
    """The same name for the same text, so that equal rules are one rule."""
    return f"{kind}_{hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _escaped(text: str) -> str:
    """A regular expression, fit to stand between slashes, for exactly `text`."""
    escaped = _REGEX_SPECIAL.sub(lambda match: "\\" + match[0], text)
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped)


def _without_bare_slashes(regex: str) -> str:
    """Fit to stand between slashes on one line."""
    parts: list[str] = []
    is_escaped = False
    for char in regex:
        if char == "/" and not is_escaped:
            parts.append("\\")
        # A line break is the same regular expression spelt as an escape, where it is not escaped itself.
        parts.append({"\n": "n" if is_escaped else "\\n", "\r": "r" if is_escaped else "\\r"}.get(char, char))
        is_escaped = char == "\\" and not is_escaped
    return "".join(parts)
