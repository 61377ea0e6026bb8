"""Facts of trees, compared with texts that llguidance draws from the same expressions."""

from __future__ import annotations

import random

import pytest

from inferd.server.structured.facts import Chars, GrammarFacts, facts_of
from inferd.server.structured.larks import parse_grammar
from inferd.server.structured.regexes import parse
from inferd.server.structured.trees import SPECIAL, Name
from tests.unit.random_grammars import ALPHABET, random_regex
from tests.unit.test_quoted import follows, matcher, written

CHARS = frozenset(ALPHABET)


@pytest.mark.parametrize("seed", range(60))
def test_drawn_texts_agree_with_the_facts(seed: int) -> None:
    rng = random.Random(seed)
    regex = random_regex(rng) + random_regex(rng)
    facts, judge = facts_of(parse(regex), {}), matcher(f"start: X\nX: /{regex}/")
    drawn = {written(f"start: X\nX: /{regex}/", rng) for _ in range(10)}
    texts = [text for text in drawn if follows(judge, text)]
    assert facts.may_be_empty == follows(judge, "")
    for text in texts:
        assert len(text) >= facts.least_chars
        assert set(text) <= facts.held.among(CHARS)
        assert set(text[:1]) <= facts.first.among(CHARS)


@pytest.mark.parametrize(
    ("regex", "least_chars", "first", "further"),
    [
        ("ab?", 1, "a", "b"), ("a*b", 1, "ab", ""), ("(ab)+", 2, "a", "a"), ("[^\\n]+", 1, "ab\t", "ab\t"),
        ("a{2}b{0,1}", 2, "a", "ab"), ("a|b\\n", 1, "ab", ""), ("(a?b?)*", 0, "ab", "ab"), ("", 0, "", ""),
    ],
)  # fmt: skip
def test_what_an_expression_begins_and_goes_on_with(regex: str, least_chars: int, first: str, further: str) -> None:
    facts, seen = facts_of(parse(regex), {}), frozenset("ab\n\t")
    assert facts.least_chars == least_chars
    assert facts.first.among(seen) == set(first)
    assert facts.further.among(seen) == set(further)


def test_terminals_come_behind_those_that_they_refer_to() -> None:
    facts = GrammarFacts(parse_grammar("start: A\nA: B C?\nB: ~C & /a+/\nC: /b/").terminals)
    assert list(facts.terminals) == ["C", "B", "A"]
    assert facts.terminals["A"] == facts_of(Name("A"), facts.terminals)
    assert facts.terminals["A"].least_chars == 1
    assert facts.terminals["B"].first.among(frozenset("ab\n")) == {"a", "b", "\n"}, "of ~C"


def test_sets_of_characters_overlap_if_one_character_may_be_in_both() -> None:
    letter, special, others = Chars(frozenset("a")), Chars(frozenset("\n")), Chars(frozenset('"'), has_others=True)
    assert others.overlaps(letter) and letter.overlaps(others) and others.overlaps(others)
    assert not others.overlaps(special) and not special.overlaps(others) and not letter.overlaps(special)
    assert not Chars().overlaps(others) and (special | others).overlaps(special)
    assert (special | others).among(SPECIAL) == {"\n", '"'}
