"""Random grammars in Lark, whose terminals tell special characters apart, and random changes of texts."""

from __future__ import annotations

import json
from random import Random

ALPHABET = ("a", "b", "\n", "\t", '"', "\\", "\x01", "\x11", " ", "é")
_ELEMENTS = (
    "a", "b", r"\n", r"\t", '"', r"\\", r"\x01", r"\x11", " ", ".", r"[^\n]", "[ab]", r"[\s\S]", r"\s", r"\S",
    r'[^"\\]',
    r"[\x00-\x1f]", "[^a]", r"[\n\t]", "ab", r"a\n", r"\n\t", r"\x01\x11", "é",
)  # fmt: skip


def random_regex(rng: Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 2 or kind < 0.5:
        return rng.choice(_ELEMENTS)
    inner = random_regex(rng, depth + 1)
    if kind < 0.65:
        return inner + random_regex(rng, depth + 1)
    if kind < 0.8:
        return f"(?:{inner}|{random_regex(rng, depth + 1)})"
    return f"(?:{inner}){rng.choice(('*', '+', '?', '{2}', '{1,2}', '*?'))}"


def random_grammar(rng: Random, ignored: str = "") -> str:
    """A grammar of up to three terminals and four rules, which may be recursive or lazy."""
    terminals: list[str] = []
    lines = []
    for i in range(rng.randint(0, 3)):
        lines.append(f"T{i}: {_terminal(rng, terminals)}")
        terminals.append(f"T{i}")
    rules = [f"x{i}" for i in range(rng.randint(0, 3))]
    lines.append(f"start: {_body(rng, terminals, rules)}")
    for i, name in enumerate(rules):
        if rng.random() < 0.15:
            # Two characters at least: llguidance overlooks the end of a lazy lexeme at its first byte.
            end = json.dumps(rng.choice(ALPHABET) + rng.choice(ALPHABET))
            lines.append(f"{name}[lazy]: {_value(rng, terminals)} {end}")
        else:
            known = rules if rng.random() < 0.3 else rules[:i]
            lines.append(f"{name}: {' | '.join(_body(rng, terminals, known) for _ in range(rng.randint(1, 2)))}")
    return "\n".join((*lines, f"%ignore {ignored}" if ignored else ""))


def _value(rng: Random, terminals: list[str]) -> str:
    kind = rng.random()
    if kind < 0.4:
        return f"/{random_regex(rng)}/"
    if kind < 0.65 or not terminals:
        return json.dumps("".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 2))))
    return rng.choice(terminals)


def _terminal(rng: Random, terminals: list[str]) -> str:
    first, second = _value(rng, terminals), _value(rng, terminals)
    forms = (
        f"{first} {second}",
        f"{first} | {second}",
        f"({first})*",
        f"{first} & {second}",
        f"~{first} & /(?s:.){{0,3}}/",
    )
    return first if rng.random() < 0.6 else rng.choice(forms)


def _body(rng: Random, terminals: list[str], rules: list[str], depth: int = 0) -> str:
    kind = rng.random()
    if depth > 2 or kind < 0.45:
        return rng.choice(rules) if rules and rng.random() < 0.3 else _value(rng, terminals)
    parts = [_body(rng, terminals, rules, depth + 1) for _ in range(rng.randint(2, 3))]
    if kind < 0.65:
        return " ".join(parts)
    if kind < 0.8:
        return f"({' | '.join(parts)})"
    return f"({parts[0]}){rng.choice(('*', '+', '?', '{2}', '{1,3}', '{2,}', '~1..2'))}"


def near(rng: Random, text: str) -> str:
    """A text with one character put in, left out or replaced."""
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(("", *ALPHABET)) + text[at + rng.randint(0, 1) :]
