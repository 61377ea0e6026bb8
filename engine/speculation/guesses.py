"""Guesses how running requests go on, from what they and earlier answers of their tenant repeat.

A guess is free to be wrong: a step verifies it, and a token that is not drawn is not given. What it costs is time, so
each guessed id carries the probability that it is right, as counted for guesses of its kind. Also guesses that no step
verified are counted: each is compared with the ids that came. Knows no scheduler, no blocks and no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from inferd.engine.api.speculation import reason_against
from inferd.engine.grammar.ports import Grammar
from inferd.engine.request import Request
from inferd.engine.speculation.ports import MOST_DRAFTS, NO_GUESS, Guess
from inferd.engine.speculation.recall import END_OF_SOURCE, LONGEST_MATCH, Match, PairIndex, RecentAnswers

_MOST_IDS = MOST_DRAFTS + 1
"""Ids of a guess: one may be drawn by a step in flight before the drafts are verified."""
_LEAST_CHANCE = 0.02
"""A guess ends when all of it is right with less than this probability."""
_TENANT_IDS, _ALL_IDS = 1 << 14, 1 << 18
"""Ids that are remembered of one tenant's answers, and of all. Each takes 205 bytes if no pair repeats, and 46 in ids
as skewed as those of text (Python 3.11, 2026-11-26)."""
_LIVE_IDS = 1 << 18
"""Ids of the prompts of live requests that are guessed for. Each takes 180 bytes: 47 MB. Others are not guessed for."""
_OWN_WEIGHT = 4.0
"""Guesses of all requests count as this many of a request's own."""
_FORGETTING = 0.999


class _Kind(NamedTuple):
    """Kind of a guessed id: ids of one kind share a probability."""

    length: int
    """Ids that agree before it, guessed ones included: 1, 2, 3, 4, 8 or 16 stand for themselves and those up to the
    next."""
    share: int
    """Quarters of the matches that go on with it."""
    is_forced: bool = False
    """Whether the grammar forces the text, which may still be drawn as other tokens."""


_FORCED = _Kind(0, 0, is_forced=True)
_EXPECTED = {0: 0.8, 1: 0.2, 2: 0.4, 3: 0.5, 4: 0.65, 8: 0.85, 16: 0.95}
"""Probability of a guess by `_Kind.length` before any was counted; 0: forced. Assumed, and soon outweighed."""
_EXPECTED_WEIGHT = 2.0
_LENGTHS = tuple(
    next(least for least in (16, 8, 4, 3, 2, 1, 0) if least <= length) for length in range(LONGEST_MATCH + 1)
)


class _Counts:
    """How often guesses of each kind were right."""

    def __init__(self) -> None:
        self._counts: dict[_Kind, tuple[float, float]] = {}

    def odds(self, kind: _Kind, expected: float, weight: float) -> float:
        """The probability for a kind, if `expected` were true of `weight` earlier guesses."""
        right, of = self._counts.get(kind, (0.0, 0.0))
        return (right + expected * weight) / (of + weight)

    def count(self, kind: _Kind, *, is_right: bool) -> None:
        right, of = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (_FORGETTING * right + is_right, _FORGETTING * of + 1.0)


class _Guessed:
    """State of one request: its index, its last guess, and how often its guesses were right."""

    __slots__ = ("at", "counts", "grammar", "guess", "index", "kinds", "request")

    def __init__(self, request: Request, grammar: Grammar | None) -> None:
        self.request, self.grammar = request, grammar
        self.index = PairIndex(request.ids)
        self.counts = _Counts()
        self.at = -1
        """Number of known ids when `guess` was made."""
        self.guess = NO_GUESS
        self.kinds: Sequence[_Kind] = ()


class Guesses:
    """The guesses of all live requests."""

    def __init__(self, *, looks_at_answers: bool) -> None:
        """`looks_at_answers`: whether guesses may repeat recent answers to the same tenant, besides the request."""
        self._looks_at_answers = looks_at_answers
        self._live: dict[Request, _Guessed] = {}
        self._counts = _Counts()
        """Counts over all requests."""
        self._answers: OrderedDict[tuple[str, str], RecentAnswers] = OrderedDict()
        """By (tenant, cache salt), the last used last."""
        self._num_live_ids = 0

    def open(self, request: Request, grammar: Grammar | None) -> None:
        """Guess for a request from now on, if it can be guessed for. Each needs a `close`."""
        has_room = self._num_live_ids + request.num_prompt <= _LIVE_IDS
        if has_room and not reason_against(request.params):
            self._live[request] = _Guessed(request, grammar)
            self._num_live_ids += request.num_prompt

    def close(self, request: Request) -> None:
        """Forget a request that has ended, and remember its answer. Nothing if it was not opened."""
        if self._live.pop(request, None) is None:
            return
        self._num_live_ids -= request.num_prompt
        if not self._looks_at_answers:
            return
        key = _owner_of(request)
        answers = self._answers.setdefault(key, RecentAnswers(_TENANT_IDS))
        self._answers.move_to_end(key)
        answers.add(request.ids[request.num_prompt :])
        while len(self._answers) * _TENANT_IDS > _ALL_IDS:
            self._answers.popitem(last=False)

    def forget_answers(self) -> None:
        """Forget the answers of requests that have ended."""
        self._answers.clear()

    def guess(self, request: Request) -> Guess:
        """The continuation of `request.ids`."""
        guessed = self._live.get(request)
        if guessed is None:
            return NO_GUESS
        if guessed.at != len(request.ids):
            self._learn(guessed)
            self._guess(guessed)
        return guessed.guess

    def _learn(self, guessed: _Guessed) -> None:
        """Compare the last guess with the ids that came."""
        came = guessed.request.ids[guessed.at :] if guessed.at >= 0 else ()
        for token_id, guess, kind in zip(came, guessed.guess.ids, guessed.kinds, strict=False):
            is_right = token_id == guess
            self._counts.count(kind, is_right=is_right)
            guessed.counts.count(kind, is_right=is_right)
            if not is_right:
                return

    def _guess(self, guessed: _Guessed) -> None:
        known = guessed.request.ids
        guessed.at = len(known)
        # The last pair is not indexed yet: it would match itself.
        guessed.index.update(len(known) - 1)
        ids, kinds = list[int](), list[_Kind]()
        if guessed.grammar is None:
            kinds = self._extend(guessed, ids)
        else:
            kinds = self._extend_under(guessed.grammar, guessed, ids)
        guessed.kinds = kinds
        guessed.guess = self._with_odds(guessed, ids)

    def _extend(self, guessed: _Guessed, ids: list[int]) -> list[_Kind]:
        """Append to guessed `ids` what followed the same ids before, and return the kind of each id."""
        known = guessed.request.ids
        context = known[-LONGEST_MATCH:] + ids
        matches = guessed.index.matches(context)
        answers = self._answers.get(_owner_of(guessed.request)) if self._looks_at_answers else None
        if answers is not None:
            matches += answers.matches(context)
        return _continue(ids, matches, _MOST_IDS - len(ids), known)

    def _extend_under(self, grammar: Grammar, guessed: _Guessed, ids: list[int]) -> list[_Kind]:
        """As `_extend`, with what the grammar forces, and as far as it allows."""
        kinds = list[_Kind]()
        while len(ids) < _MOST_IDS and not grammar.is_finished:
            first = len(ids)
            ids += grammar.forced()[: _MOST_IDS - first]
            kinds += [_FORCED] * (len(ids) - first)
            kinds += self._extend(guessed, ids)
            num_allowed = grammar.num_allowed(ids[first:])
            del ids[first + num_allowed :], kinds[first + num_allowed :]
            grammar.accept(ids[first:])
            if not num_allowed:
                break
        grammar.rollback(len(ids))
        return kinds

    def _with_odds(self, guessed: _Guessed, ids: list[int]) -> Guess:
        odds, chance = list[float](), 1.0
        for kind in guessed.kinds:
            expected = self._counts.odds(kind, _EXPECTED[kind.length], _EXPECTED_WEIGHT)
            odds.append(guessed.counts.odds(kind, expected, _OWN_WEIGHT))
            chance *= odds[-1]
            if chance < _LEAST_CHANCE:
                break
        guessed.kinds = guessed.kinds[: len(odds)]
        return Guess(tuple(ids[: len(odds)]), tuple(odds))


def _owner_of(request: Request) -> tuple[str, str]:
    """Whose answers may be looked at for a request: as for cached prefixes, those of its tenant, salt and adapter."""
    return request.scheduling.tenant, request.salt


def _continue(guessed: list[int], matches: list[Match], most: int, known: Sequence[int]) -> list[_Kind]:
    """Append to `guessed` what followed most of the matches, and return the kind of each id.

    A match within `known` that reaches its end goes on in what was guessed: so repetitions are guessed for as long as
    may be.
    """
    kinds: list[_Kind] = []
    if not matches:
        return kinds
    longest = max(match.length for match in matches)
    alive = [match for match in matches if 2 * match.length >= longest]
    for number in range(most):
        votes: dict[int, float] = {}
        followed: list[tuple[Match, int]] = []
        for match in alive:
            ids, place, _ = match
            if place < len(ids):
                token_id = ids[place]
            elif ids is known:
                token_id = guessed[place - len(known)]
            else:
                continue
            if token_id != END_OF_SOURCE:
                followed.append((match, token_id))
                votes[token_id] = votes.get(token_id, 0) + match.length
        if not votes:
            break
        # Among equals the newest occurrence, which voted first.
        chosen = max(votes, key=votes.__getitem__)
        guessed.append(chosen)
        share = int(4 * votes[chosen] / sum(votes.values()))
        kinds.append(_Kind(_LENGTHS[min(longest + number, LONGEST_MATCH)], share))
        alive = [match._replace(end=match.end + 1) for match, token_id in followed if token_id == chosen]
    return kinds
