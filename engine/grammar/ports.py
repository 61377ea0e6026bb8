"""What the core asks of grammars, and no more: compile one, follow a request's tokens, say which may come next.

Knows no llguidance, so that the core and its simulation run without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

WORD_BITS = 32
"""Tokens in each word of a mask; bit i of word w allows token 32 w + i."""


class GrammarError(Exception):
    """A grammar that cannot be followed, and why, in words for its author."""


class Grammar(Protocol):
    """Where one request stands in its grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether it is complete and nothing may follow."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether it may end here."""
        ...

    @property
    def failure(self) -> str:
        """Why it can be followed no further; empty while it can."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were drawn."""
        ...

    def fill(self, words: array[int], first_word: int) -> None:
        """Write which tokens may come next into `words` from `first_word` on, the vocabulary rounded up to words."""
        ...


class PendingGrammar(Protocol):
    """A grammar on its way."""

    @property
    def is_done(self) -> bool:
        """Whether `take` would not wait."""
        ...

    def take(self) -> Grammar:
        """The grammar. Raises `GrammarError`."""
        ...


class Grammars(Protocol):
    """Compiles grammars beside the core's loop."""

    def open(self, text: str, token_ids: Sequence[int], ending_ids: Sequence[int], tenant: str = "") -> PendingGrammar:
        """A request's own grammar, gone on by `token_ids`. An id of `ending_ids` may come wherever it may end. Tenants
        take turns where several wait."""
        ...


class NoGrammars:
    """Where none are served."""

    def open(self, text: str, token_ids: Sequence[int], ending_ids: Sequence[int], tenant: str = "") -> PendingGrammar:
        del text, token_ids, ending_ids, tenant
        return _Refused()


class _Refused:
    is_done = True

    def take(self) -> Grammar:
        raise GrammarError("this engine was built without grammars")
