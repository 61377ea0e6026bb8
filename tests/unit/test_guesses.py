"""Guesses: what repeats is found, other tenants' answers are not, and the odds are those that were seen."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from inferd.engine.api.speculation import reason_against
from inferd.engine.api.wire.params import Pooling, SamplingParams, SchedulingParams
from inferd.engine.request import Request
from inferd.engine.speculation.guesses import Guesses
from inferd.engine.speculation.ports import NO_GUESS
from inferd.engine.speculation.recall import LONGEST_MATCH, PairIndex, RecentAnswers

WORDS = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]


def request_of(ids: Sequence[int], *, tenant: str = "", salt: str = "", name: str = "r") -> Request:
    params = SamplingParams(max_tokens=500, seed=0)
    scheduling = SchedulingParams(tenant=tenant, cache_salt=salt)
    return Request.create(name, tuple(ids), params, scheduling, max_model_len=4096)


def longest_matches(ids: Sequence[int], context: Sequence[int]) -> dict[int, int]:
    """Place -> number of ids before it that agree with the end of `context`, by comparing everywhere."""
    found = {}
    for place in range(1, len(ids) + 1):
        length = 0
        while length < min(place, len(context), LONGEST_MATCH) and ids[place - 1 - length] == context[-1 - length]:
            length += 1
        found[place] = length
    return found


def test_matches_are_those_of_a_search_everywhere() -> None:
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(4) for _ in range(rng.randrange(2, 60))]
        context = [rng.randrange(4) for _ in range(rng.randrange(2, 20))]
        index = PairIndex(ids)
        index.update(len(ids))
        expected = {place: length for place, length in longest_matches(ids, context).items() if length >= 2}
        newest = sorted(expected, reverse=True)[:8]
        found = index.matches(context)
        if newest:
            assert [(match.end, match.length) for match in found] == [(place, expected[place]) for place in newest]
        elif context[-1] in ids[1:]:
            assert [(match.ids[match.end - 1], match.length) for match in found] == [(context[-1], 1)]
        else:
            assert not found


def test_a_long_list_is_indexed_in_parts() -> None:
    ids = [*WORDS, *range(100, 9000), *WORDS[:3]]
    index = PairIndex(ids)
    index.update(len(ids) - 1)
    assert index.matches([6, 7])[0].end == 3
    assert not index.matches([7000, 7001]), "all at once: a long prompt would hold up a step"
    for _ in range(len(ids) // 512):
        index.update(len(ids) - 1)
    assert index.matches([7000, 7001])[0].length == 2


def test_only_so_many_ids_of_live_prompts_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.speculation.guesses._LIVE_IDS", 20)
    guesses = Guesses(looks_at_answers=True)
    first, second, third = (request_of([1, 2, 3, 4, 1, 2, 3, 4, 1, 2]) for _ in range(3))
    for request in (first, second, third):
        guesses.open(request, None)
    assert guesses.guess(first).ids and guesses.guess(second).ids and not guesses.guess(third).ids
    for request in (first, third):
        guesses.close(request)
    guesses.open(third, None)
    assert guesses.guess(third).ids


def test_answers_can_be_forgotten() -> None:
    guesses = Guesses(looks_at_answers=True)
    answered = request_of([1, 2])
    guesses.open(answered, None)
    answered.ids += WORDS
    guesses.close(answered)
    for is_forgotten in (False, True):
        later = request_of([900, *WORDS[:5]])
        guesses.open(later, None)
        assert bool(guesses.guess(later).ids) != is_forgotten
        guesses.forget_answers()


def test_what_repeats_is_guessed_and_goes_on_into_the_guess() -> None:
    guesses = Guesses(looks_at_answers=False)
    copied = request_of([*WORDS, 1, 2, *WORDS[:4]])
    guesses.open(copied, None)
    ids = guesses.guess(copied).ids
    assert len(ids) > 8 and list(ids) == [*WORDS[4:], 1, 2][: len(ids)]
    circle = request_of([1, 2, 3, 1, 2, 3, 1, 2])
    guesses.open(circle, None)
    assert list(guesses.guess(circle).ids[:7]) == [3, 1, 2, 3, 1, 2, 3]
    unknown = request_of([1, 2, 3, 4])
    guesses.open(unknown, None)
    assert guesses.guess(unknown) == NO_GUESS
    assert guesses.guess(request_of([1, 2, 1, 2])) == NO_GUESS, "it was not opened"


def test_odds_are_those_that_were_seen() -> None:
    guesses = Guesses(looks_at_answers=False)
    right, wrong = request_of([*WORDS, 1, *WORDS[:2]], name="a"), request_of([*WORDS, 1, *WORDS[:2]], name="b")
    for one in (right, wrong):
        guesses.open(one, None)
    first = guesses.guess(right).odds
    for number in range(2, 16):
        guesses.guess(right)
        right.ids.append(WORDS[number])
    assert guesses.guess(right).odds[0] > max(first), "it was right each time"
    for number in range(40):
        guesses.guess(wrong)
        wrong.ids += [200 + number, *WORDS[:2]]
    assert sum(guesses.guess(wrong).odds) < 0.5, "it was wrong each time"
    assert all(0.0 < odds < 1.0 for odds in guesses.guess(wrong).odds)


@pytest.mark.parametrize(
    ("tenant", "salt", "is_seen"), [("a", "", True), ("b", "", False), ("a", "other", False), ("", "", False)]
)
def test_answers_are_remembered_for_their_tenant_and_salt_alone(tenant: str, salt: str, is_seen: bool) -> None:
    guesses = Guesses(looks_at_answers=True)
    answered = request_of([1, 2], tenant="a")
    guesses.open(answered, None)
    answered.ids += WORDS
    guesses.close(answered)
    later = request_of([900, *WORDS[:5]], tenant=tenant, salt=salt)
    guesses.open(later, None)
    assert (list(guesses.guess(later).ids[:3]) == WORDS[5:8]) == is_seen
    guesses.close(later)
    assert guesses.guess(later) == NO_GUESS


def test_prompts_are_not_remembered_and_ngram_remembers_nothing() -> None:
    for looks_at_answers in (True, False):
        guesses = Guesses(looks_at_answers=looks_at_answers)
        asked = request_of([*WORDS, 77])
        guesses.open(asked, None)
        asked.ids += [300, 301]
        guesses.close(asked)
        later = request_of([900, *WORDS[:5]])
        guesses.open(later, None)
        assert guesses.guess(later) == NO_GUESS


def test_memory_of_answers_is_bounded() -> None:
    answers = RecentAnswers(100)
    for number in range(50):
        answers.add([number * 10 + i for i in range(8)])
        assert len(answers) <= 100
    assert answers.matches([492, 493])[0].length >= 2
    assert not answers.matches([2, 3]), "the oldest are forgotten"
    answers.add(range(1000, 2000))
    assert len(answers) <= 100 and answers.matches([1997, 1998])
    guesses = Guesses(looks_at_answers=True)
    for number in range(40):
        one = request_of([1], tenant=f"t{number}")
        guesses.open(one, None)
        one.ids += WORDS
        guesses.close(one)
    assert len(guesses._answers) == 16 and not guesses._live


def test_no_match_reaches_from_one_answer_into_the_next() -> None:
    answers = RecentAnswers(100)
    answers.add([1, 2, 3])
    answers.add([4, 5, 6])
    assert [match.length for match in answers.matches([3, 4])] == [1]
    (match,) = answers.matches([2, 3])
    guesses = Guesses(looks_at_answers=True)
    one = request_of([1])
    guesses.open(one, None)
    one.ids += [1, 2, 3]
    guesses.close(one)
    later = request_of([9, 2, 3])
    guesses.open(later, None)
    assert match.length == 2 and guesses.guess(later) == NO_GUESS, "the answer ended there"


class Spelled:
    """A grammar of one text, whose ids from 100 on are forced."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.place, self.failure = list(text), 0, ""

    @property
    def is_finished(self) -> bool:
        return self.place == len(self.text)

    is_accepting = is_finished

    def accept(self, token_ids: Sequence[int]) -> None:
        assert list(token_ids) == self.text[self.place : self.place + len(token_ids)]
        self.place += len(token_ids)

    def forced(self) -> list[int]:
        end = self.place
        while end < len(self.text) and self.text[end] >= 100:
            end += 1
        return self.text[self.place : end]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        count = 0
        while count < len(token_ids) and token_ids[count : count + 1] == self.text[self.place + count :][:1]:
            count += 1
        return count

    def rollback(self, num_tokens: int) -> None:
        self.place -= num_tokens

    def fill(self, words: array[int], first_word: int) -> None:
        raise AssertionError("guesses mask nothing")


def test_a_grammar_extends_and_cuts_guesses_and_stays_where_it_was() -> None:
    guesses = Guesses(looks_at_answers=False)
    grammar = Spelled([100, 101, 5, 6, 102, 103, 7, 8])
    asked = request_of([2, 101, 5, 6, 103, 7, 9, 3, 4])
    guesses.open(asked, grammar)
    # Forced, recalled, forced again; recalled as far as the grammar allows.
    assert list(guesses.guess(asked).ids) == [100, 101, 5, 6, 102, 103, 7][: len(guesses.guess(asked).ids)]
    assert len(guesses.guess(asked).ids) >= 4 and grammar.place == 0


def test_requests_for_which_nothing_is_guessed() -> None:
    words = tuple((1, number) for number in range(257))
    assert reason_against(SamplingParams(max_tokens=9, seed=0)) is None
    assert "one token" in str(reason_against(SamplingParams(max_tokens=1, seed=0)))
    assert "bad words" in str(reason_against(SamplingParams(max_tokens=9, seed=0, bad_words=words)))
    assert reason_against(SamplingParams(max_tokens=9, seed=0, bad_words=words[:256])) is None
    assert "bad words" in str(reason_against(SamplingParams(max_tokens=9, seed=0, bad_words=(tuple(range(18)),))))
    pooled = SamplingParams(max_tokens=1, seed=0, pooling=Pooling(how="mean"))
    assert reason_against(pooled) is not None
