"""Grammars whose rewriting would be work out of all proportion, if something was done anew for each use of a part."""

from __future__ import annotations

IGNORED = '\n%ignore /[ \\n"]/\n'


def _chain(prefix: str, body: str, last: str, num: int) -> str:
    """Rules or terminals, each of which refers to the next one."""
    lines = [f"{prefix}{i}: {body.replace('NEXT', f'{prefix}{i + 1}')}" for i in range(num)]
    return "\n".join([*lines, f"{prefix}{num}: {last}\n"])


NAMES = [f"a{i}" for i in range(200)]
LARGE = {
    "terminals of terminals": "start: /\\n/ A0\n" + _chain("A", "NEXT | NEXT", '"a"', 60) + IGNORED,
    "lazy terminals": "start: x\nx[lazy]: A0\n" + _chain("A", "NEXT NEXT", '"a"?', 60),
    "optional parts": "start: " + '"a"? ' * 300,
    "optional characters": "start: /" + "a?" * 2_000 + "\\n/",
    "many ends": "start: " + '"a" ' * 200 + "(" + "|".join(['"b"'] * 200) + ")",
    "rules of rules": _chain("a", 'NEXT | "x"', "/\\n/", 200) + f"start: {'|'.join(NAMES)}",
    "empty rules": _chain("a", "NEXT?", "/\\n/", 200) + f"start: /a/ {' '.join(NAMES)}",
    "brackets": "start: " + '("c"|"d"' * 27 + ' "a\\n"' + ")?" * 27 + IGNORED,
}
CALLS_PER_CHARACTER = 120
"""Most calls of functions for each character of such a grammar."""
