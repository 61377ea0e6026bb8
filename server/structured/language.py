"""Languages (sets of texts) and their composition, written as Lark grammars for llguidance.

Pure functions take and return a `Language`; `Language.text` is for the engine. A grammar is as long as its parts
together: a part that is used twice becomes a rule (`shared`). Knows no fields of requests. The compiler, not this
file, finds malformed grammars.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from inferd.engine.api.grammars import SchemaUse, literal_regex

_OPTIONS = '%llguidance {"no_forcing": true}'
"""The model chooses the tokens even if only one text can follow. Forced tokens would come from the tokenizer, which
reads a text that spells a special token as that token."""

_NAMED_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
_ESCAPE_OR_BARE = re.compile(r"\\(.)|[/\n\r]", re.DOTALL)
_ASCII_CLASSES = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]",
    "s": r"[\t\n\x0b\x0c\r\x20]", "S": r"[^\t\n\x0b\x0c\r\x20]",
}  # fmt: skip
_PLAIN_USE = SchemaUse()
_BREAKS = {"\n": r"\n", "\r": r"\r"}

Syntax = Literal["text", "lark", "regex"]

REFERENCE_CHARS = 24
"""Most characters that each use of a `shared` language adds."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The texts that a custom tool takes: any text, or those of a grammar."""

    syntax: Syntax = "text"
    definition: str = ""
    path: str = ""
    """Path of `definition` in the request."""


@dataclass(frozen=True, slots=True)
class Language:
    """The texts that `expression`, the body of a Lark rule, matches."""

    expression: str
    rules: tuple[str, ...] = ()
    """Lines that define the rules named in `expression`."""
    grammars: tuple[tuple[str, str], ...] = ()
    """(name, text) of whole grammars that `expression` names as `@name`."""
    schemas: tuple[tuple[str, str], ...] = ()
    """(name, JSON of an object) of schemas that `expression` names as `@name`. The compiler writes them as grammars."""
    parts: tuple[Language, ...] = field(default=(), compare=False, repr=False)
    """Languages that this one is composed of; their rules belong to the same grammar. One may be reached in 2^16
    ways."""

    @property
    def num_chars(self) -> int:
        """Characters of the language and of its schemas, without those of other rules."""
        return len(self.expression) + sum(len(text) for part in _every_part(self) for _, text in part.schemas)

    def text(self) -> str:
        """The whole grammar as llguidance takes it. Equal lines are written once."""
        rules: dict[str, None] = {}
        grammars: dict[tuple[str, str], None] = {}
        schemas: dict[tuple[str, str], None] = {}
        for part in _every_part(self):
            rules.update(dict.fromkeys(part.rules))
            grammars.update(dict.fromkeys(part.grammars))
            schemas.update(dict.fromkeys(part.schemas))
        main = "\n".join((_OPTIONS, f"start: {self.expression}", *rules, ""))
        if not grammars and not schemas:
            return main
        whole = ({"name": name, "lark_grammar": text} for name, text in (("main", main), *grammars))
        written = [json.dumps(grammar, ensure_ascii=False) for grammar in whole]
        written += [f'{{"name": "{name}", {text.removeprefix("{")}' for name, text in schemas]
        return f'{{"grammars": [{", ".join(written)}]}}'


def _every_part(language: Language) -> Iterator[Language]:
    """A language and all languages that it is composed of, each once."""
    seen: set[int] = set()
    waiting = [language]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting.extend(part.parts)


def literal(text: str) -> Language:
    """Exactly `text`."""
    return Language(json.dumps(text, ensure_ascii=False))


def pattern(regex: str) -> Language:
    """The texts that a regular expression in Rust's `regex` syntax matches fully; `\\d`, `\\w` and `\\s` are ASCII."""
    return Language(f"/{_ESCAPE_OR_BARE.sub(_fit_for_slashes, regex)}/")


def pattern_until(regex: str, end: str) -> Language:
    """The texts of a regular expression that do not hold `end`, each with `end` behind it."""
    rule, stop = _rule_name("until", f"{regex} {end}"), literal_regex(end)
    texts = f"{pattern(regex).expression} " if regex else ""
    whole = f"({texts}/{stop}/) & ~/(?s:.)*{stop}(?s:.)+/"
    return Language(rule, (f"{rule}: {rule.upper()}", f"{rule.upper()}: {whole}"))


def one_of(texts: Iterable[str]) -> Language:
    """One of these texts, as one lexeme: a rule with thousands of alternatives would exceed the parser's limits."""
    return pattern("(" + "|".join(map(literal_regex, texts)) + ")")


def json_value(schema: Mapping[str, object] | bool, use: SchemaUse = _PLAIN_USE) -> Language:
    """The JSON values of a schema."""
    text = json.dumps({"json_schema": schema, **asdict(use)}, ensure_ascii=False)
    name = _rule_name("json", text)
    return Language(f"@{name}", schemas=((name, text),))


def free_text() -> Language:
    """Any text without special tokens, the empty text included."""
    return Language(r"/(.|\n)*/")


def free_text_until(end: str) -> Language:
    """Any text up to and with the first `end`."""
    name = _rule_name("until", end)
    return Language(name, (f"{name}[lazy]: /(.|\\n)*{literal_regex(end)}/",))


def token(text: str, token_id: int) -> Language:
    """A special token of the vocabulary, which free text cannot hold."""
    return Language(text if _NAMED_TOKEN.fullmatch(text) else f"<[{token_id}]>")


def begins_with_token(text: str, tokens: Mapping[str, int]) -> bool:
    return any(name and text.startswith(name) for name in tokens)


def marked(text: str, tokens: Mapping[str, int]) -> Language:
    """`text` as the model writes it: special tokens for the parts that `tokens` names, and text for the rest."""
    # Only the names in `text`: compiling an expression of thousands of special tokens takes a second.
    names = sorted((name for name in tokens if name and name in text), key=len, reverse=True)
    if not names:
        return literal(text)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return sequence(*(token(part, tokens[part]) if part in tokens else literal(part) for part in parts if part))


def parts_of(text: str, tokens: Mapping[str, int]) -> tuple[str | int, ...]:
    """The same as texts and ids of special tokens."""
    # Only the names in `text`: compiling an expression of thousands of special tokens takes a second.
    names = sorted((name for name in tokens if name and name in text), key=len, reverse=True)
    if not names:
        return (text,) if text else ()
    found = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return tuple(tokens.get(part, part) for part in found if part)


def free_text_until_marked(marker: str, tokens: Mapping[str, int]) -> Language:
    """Any text up to and with the first `marker`, which the model writes as `marked` says."""
    if begins_with_token(marker, tokens):  # free text holds no special token
        return sequence(free_text(), marked(marker, tokens))
    return free_text_until(marker)


def lark(text: str) -> Language:
    """A caller's whole grammar, in Lark or GBNF."""
    name = _rule_name("grammar", text)
    return Language(f"@{name}", grammars=((name, text),))


def sequence(*languages: Language) -> Language:
    """The languages one after the other."""
    return Language(" ".join(f"({language.expression})" for language in languages), parts=languages)


def either(*languages: Language) -> Language:
    """Any one of the languages."""
    return Language(" | ".join(f"({language.expression})" for language in languages), parts=languages)


def repeat(language: Language, low: int, high: int | None) -> Language:
    """The language `low` to `high` times in a row; `high` None: no upper bound."""
    bounds = f"{{{low},{'' if high is None else high}}}"
    return Language(f"({language.expression}){bounds}", parts=(language,))


def shared(language: Language) -> Language:
    """The same language as a rule, written once however often it is used. Otherwise each level of nesting would double
    a part that is used twice."""
    name = _rule_name("part", language.expression)
    if len(language.expression) <= len(name):
        return language
    return Language(name, (f"{name}: {language.expression}",), parts=(language,))


def _rule_name(kind: str, text: str) -> str:
    """A name derived from the text, so that equal rules become one rule."""
    return f"{kind}_{hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _fit_for_slashes(match: re.Match[str]) -> str:
    """Replacement of an escape, a slash or a line break, so that it may be written between slashes on one line."""
    escaped = match[1]
    if escaped is None:
        return _BREAKS.get(match[0], r"\/")
    return _ASCII_CLASSES.get(escaped) or _BREAKS.get(escaped) or match[0]
