"""The interface of grammars to the core: compile one, follow a request's tokens, mask the next token.

Knows no llguidance, so that the core and its simulation run without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

WORD_BITS = 32
"""Tokens in each word of a mask; bit i of word w allows token 32 w + i."""


class GrammarError(Exception):
    """A grammar that cannot be followed. The text says why, for its author."""


class Grammar(Protocol):
    """State of one request in its grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and no token may follow."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def failure(self) -> str:
        """Why the grammar can be followed no further; empty if it can."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Follow tokens that were drawn."""
        ...

    def forced(self) -> list[int]:
        """The tokens of the text that must come next, as the tokenizer writes it; the text may be drawn as others."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Number of leading tokens that may be drawn one after the other, without one that ends the request."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Remove the last tokens accepted, and a failure at any of them."""
        ...

    def fill(self, words: array[int], first_word: int) -> None:
        """Write the mask of the next token into `words` from `first_word` on, rounded up to whole words."""
        ...


class PendingGrammar(Protocol):
    """A grammar that is being compiled."""

    @property
    def is_done(self) -> bool:
        """Whether `take` would return at once."""
        ...

    def take(self) -> Grammar:
        """The compiled grammar. Raises `GrammarError`."""
        ...


class Grammars(Protocol):
    """Compiles grammars beside the core's loop."""

    def open(self, text: str, token_ids: Sequence[int], ending_ids: Sequence[int], tenant: str = "") -> PendingGrammar:
        """A grammar for one request, advanced by `token_ids`. An id of `ending_ids` may come wherever the text may end.

        Tenants take turns if several wait.
        """
        ...

    def prepare(self) -> None:
        """Do in advance what the first grammar needs. Called while nothing else is to be done."""
        ...


class NoGrammars:
    """Refuses every grammar."""

    def open(self, text: str, token_ids: Sequence[int], ending_ids: Sequence[int], tenant: str = "") -> PendingGrammar:
        del text, token_ids, ending_ids, tenant
        return _Refused()

    def prepare(self) -> None:
        """There is nothing to prepare."""


class _Refused:
    is_done = True

    def take(self) -> Grammar:
        raise GrammarError("this engine was built without grammars")
