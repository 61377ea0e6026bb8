"""Guesses of the simulation, which know how the model goes on: by the seed they are right, wrong, or wrong in part.

They also go on behind the end of an answer. Behind a wrong id they guess what the model would draw there, so that a
draft too many that is accepted looks like any other. Under a grammar they keep to it, as the product's do.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from inferd.engine.grammar.ports import Grammar
from inferd.engine.request import Request
from inferd.engine.speculation.ports import NO_GUESS, Guess
from tests.sim.grammar import VOCAB_SIZE, SimulatedGrammar
from tests.sim.oracle import Windows, next_token, views_of

_LENGTHS = (0, 1, 2, 5, 9, 16, 20)
"""Numbers of guessed ids; a row verifies at most 15."""
_WRONG = (0.0, 0.1, 0.2, 0.4, 1.0)
"""Probabilities of an id to be wrong. They do not depend on the probabilities that the guess claims."""
_CLAIMED = (0.99, 0.99, 0.9, 0.6)


class ScriptedGuesses:
    """The guesses of one engine. A guess depends on the seed, the request and its known ids alone."""

    def __init__(self, seed: int, windows: Windows, *, is_rare: bool) -> None:
        """`is_rare`: whether mostly nothing is guessed, which leaves the rows to a draft model."""
        self._seed, self._windows, self._is_rare = seed, windows, is_rare
        self.asked: Callable[[], None] = lambda: None
        """Called before each guess."""
        self._grammars: dict[Request, SimulatedGrammar | None] = {}
        self._made: dict[Request, tuple[int, Guess]] = {}
        """The newest guess for each request, with the number of its known ids."""

    def open(self, request: Request, grammar: Grammar | None) -> None:
        assert grammar is None or isinstance(grammar, SimulatedGrammar)
        assert request not in self._grammars, f"{request.request_id} is opened twice"
        self._grammars[request] = grammar

    def close(self, request: Request) -> None:
        self._grammars.pop(request, None)
        self._made.pop(request, None)

    def forget_answers(self) -> None:
        pass

    def guess(self, request: Request) -> Guess:
        self.asked()
        num_known, guess = self._made.get(request, (-1, NO_GUESS))
        if num_known != len(request.ids):
            guess = self._make(request)
            self._made[request] = len(request.ids), guess
        return guess

    def check_idle(self) -> None:
        assert not self._grammars, f"{len(self._grammars)} requests have ended, and are guessed for"

    def _make(self, request: Request) -> Guess:
        rng = Random(f"guess {self._seed} {request.request_id} {len(request.ids)}")
        wrong, claimed = rng.choice(_WRONG), rng.choice(_CLAIMED)
        if self._is_rare and rng.random() < 0.8:
            return NO_GUESS
        grammar = self._grammars[request]
        ahead = None if grammar is None else grammar.copy()
        ids = list(request.ids)
        for _ in range(rng.choice(_LENGTHS)):
            allowed = range(VOCAB_SIZE) if ahead is None else sorted(ahead.allowed())
            if not allowed:
                break
            right = next_token(views_of(tuple(ids), self._windows), request.params.seed, allowed)
            # An odd token may be one that the grammar fails at.
            others = [token_id for token_id in allowed if token_id != right and token_id % 2]
            ids.append(rng.choice(others) if others and rng.random() < wrong else right)
            if ahead is not None:
                ahead.accept(ids[-1:])
        guessed = ids[len(request.ids) :]
        if grammar is not None:
            guessed = guessed[: grammar.num_allowed(guessed)]
        return Guess(guessed, (claimed,) * len(guessed))
