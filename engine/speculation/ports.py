"""The interface of guesses to the scheduler: ids that may come next, and how likely each is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from inferd.engine.grammar.ports import Grammar
from inferd.engine.request import Request

MOST_DRAFTS = 15
"""Most drafts of a row: with its own token 16, a number of rows for which kernels have forms."""


class Guess(NamedTuple):
    """Guessed ids that continue a request's known ids."""

    ids: Sequence[int]
    odds: Sequence[float]
    """Probability of each to be right if all before it are."""


NO_GUESS = Guess((), ())


class Guesser(Protocol):
    """Guesses how requests go on."""

    def guess(self, request: Request) -> Guess:
        """The continuation of `request.ids`."""
        ...


class LiveGuesser(Guesser, Protocol):
    """A guesser that knows which requests live."""

    def open(self, request: Request, grammar: Grammar | None) -> None:
        """Guess for a request from now on. `grammar`: its state, if it has one, which follows the known ids."""
        ...

    def close(self, request: Request) -> None:
        """Forget a request that has ended. Nothing if it was not opened."""
        ...

    def forget_answers(self) -> None:
        """Forget what requests that have ended were answered."""
        ...
