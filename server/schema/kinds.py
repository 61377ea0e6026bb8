"""The four kinds of parts that a request may have: what the server does with a tool, a block, an item or a key.

Each file of this package that reads a union of types has a table of them, which the reader, the documentation and the
tests share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["enforced", "hint", "offer", "demand"]

ABOUT: Mapping[Kind, str] = {
    "enforced": "The server does it.",
    "hint": "It can change speed, cost or bookkeeping, not the answer. It is accepted in silence.",
    "offer": "It lets the model do something that this server does not have. It is accepted, the model does not see "
    "it, and a notice says so.",
    "demand": "The caller relies on it, and the server cannot do it. The request is refused by name, with the way out.",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One type of a union, or one key of an object."""

    kind: Kind
    about: str
    """A sentence that says what the server does with it; for a demand it is the way out."""


def key_of(rows: Mapping[str, Row], name: str) -> str | None:
    """The key of a name's row: the name itself, or the key that ends in `*` and begins it, for types with a version."""
    if name in rows:
        return name
    return next((key for key in rows if key.endswith("*") and name.startswith(key[:-1])), None)
