"""Grammars of the simulation: the allowed tokens follow from all the tokens before. So a lost, repeated or misdelivered
token changes the text.

A grammar's text is a list of numbers, in the order of `SimulatedGrammar`'s fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from inferd.engine.grammar.ports import WORD_BITS, GrammarError

VOCAB_SIZE = 64
NUM_WORDS = -(-VOCAB_SIZE // WORD_BITS)
NEVER = 1_000


@dataclass(frozen=True, slots=True)
class Rule:
    """One grammar. Numbers of output tokens; `NEVER` if it does not happen."""

    seed: int
    end: int
    """Number of tokens after which no token may follow."""
    dead: int
    """Number of tokens after which no token may follow, though the text is not complete."""
    complex: int
    """Number of tokens from which on it can be followed no further than an odd token."""
    ticks: int
    """Ticks that its compilation takes."""

    @property
    def text(self) -> str:
        return f"{self.seed} {self.end} {self.dead} {self.complex} {self.ticks}"

    @classmethod
    def read(cls, text: str) -> Rule:
        return cls(*map(int, text.split()))


@dataclass(slots=True)
class SimulatedGrammar:
    """State of one request in its rule."""

    rule: Rule
    ending_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    failure: str = ""
    num_followed: int = 0
    """Number of tokens before the one that it failed at."""

    @property
    def is_finished(self) -> bool:
        return not self.failure and len(self.token_ids) >= self.rule.end

    @property
    def is_accepting(self) -> bool:
        at = len(self.token_ids)
        return (
            not self.failure and at != self.rule.dead and (at >= self.rule.end or hash((self.rule.seed, at)) % 2 == 0)
        )

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id not in self.allowed():
                self._fail(f"{token_id} is not allowed")
            elif len(self.token_ids) + 1 >= self.rule.complex and token_id % 2:
                self._fail("too complex")
            self.token_ids.append(token_id)

    def _fail(self, failure: str) -> None:
        if not self.failure:
            self.failure, self.num_followed = failure, len(self.token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self.token_ids[len(self.token_ids) - num_tokens :]
        if len(self.token_ids) <= self.num_followed:
            self.failure = ""

    def forced(self) -> list[int]:
        """Now and then two tokens, of which the second may be forbidden: no text can be drawn in one way only."""
        allowed = sorted(self.allowed() - set(self.ending_ids))
        return allowed[:2] if hash((self.rule.seed, len(self.token_ids))) % 3 == 0 else []

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        ahead, num_allowed = self.copy(), 0
        for token_id in token_ids:
            if token_id not in ahead.allowed() - set(self.ending_ids):
                break
            ahead.accept((token_id,))
            num_allowed += 1
        return num_allowed

    def copy(self) -> SimulatedGrammar:
        return replace(self, token_ids=list(self.token_ids))

    def allowed(self) -> set[int]:
        """Tokens that may come next. When the text is complete, an end token still may."""
        at = len(self.token_ids)
        if self.failure or at == self.rule.dead:
            return set()
        if self.is_finished:
            return set(self.ending_ids)
        chosen = {i for i in range(VOCAB_SIZE) if hash((self.rule.seed, *self.token_ids, i)) % 5 < 2}
        ending = set(self.ending_ids)
        return chosen | ending if self.is_accepting else chosen - ending

    def fill(self, words: array[int], first_word: int) -> None:
        for i in range(NUM_WORDS):
            words[first_word + i] = 0
        for token_id in self.allowed():
            words[first_word + token_id // WORD_BITS] |= 1 << token_id % WORD_BITS


def allowed_by(words: Sequence[int]) -> list[int]:
    """The tokens of one mask, ascending."""
    return [i for i in range(VOCAB_SIZE) if words[i // WORD_BITS] >> i % WORD_BITS & 1]


@dataclass(slots=True)
class _Pending:
    grammar: SimulatedGrammar
    ready_tick: int
    tick: Callable[[], int]

    @property
    def is_done(self) -> bool:
        return self.tick() >= self.ready_tick

    def take(self) -> SimulatedGrammar:
        assert self.is_done, "taken before it was compiled"
        if self.grammar.rule.end < 0:
            raise GrammarError("no grammar")
        return self.grammar


@dataclass(slots=True)
class SimulatedGrammars:
    """Compiles in virtual time."""

    tick: Callable[[], int]

    def open(self, text: str, token_ids: Sequence[int], ending_ids: Sequence[int], tenant: str = "") -> _Pending:
        rule = Rule.read(text)
        grammar = SimulatedGrammar(rule, tuple(ending_ids))
        grammar.accept(token_ids)
        return _Pending(grammar, self.tick() + rule.ticks, self.tick)
