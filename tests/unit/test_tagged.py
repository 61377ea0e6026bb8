"""Grammars of texts up to an end marker, judged by llguidance with the grammar itself."""

from __future__ import annotations

import random
import re

import pytest

from inferd.engine.grammar.compiler import normal_form
from inferd.server.structured.language import TextFormat, literal, sequence
from inferd.server.structured.tagged import text_until
from tests.unit.calls_made import at_most_calls
from tests.unit.large_grammars import CALLS_PER_CHARACTER, LARGE
from tests.unit.random_grammars import near, random_grammar, random_regex
from tests.unit.test_quoted import GRAMMAR_OF_PATCHES, GRAMMARS, PATCH, follows, matcher, written

MARKERS = ("\n</parameter>\n", "</arg_value>\n", "</arg_value>")
PLAIN = '%llguidance {"no_forcing": true}\n'


def tagged(text: TextFormat, end: str) -> str:
    return normal_form(sequence(literal("<p>"), text_until(end, text), literal("!")).text()).text


@pytest.mark.parametrize("end", MARKERS)
@pytest.mark.parametrize("name", ["patch", *GRAMMARS])
def test_texts_before_a_marker_are_those_of_the_grammar(name: str, end: str) -> None:
    grammar, texts, others = (GRAMMAR_OF_PATCHES, [PATCH], ["x"]) if name == "patch" else GRAMMARS[name]
    rng = random.Random(name)
    plain, ended = matcher(grammar), matcher(tagged(TextFormat("lark", grammar), end))
    near_texts = [near(rng, text) for text in texts for _ in range(20)]
    verdicts = [(follows(plain, text), follows(ended, f"<p>{text}{end}!")) for text in [*texts, *others, *near_texts]]
    assert (False, True) not in verdicts
    assert verdicts.count((True, True)) > 3 * verdicts.count((True, False))
    assert not any(follows(ended, f"<p>{text}{end}{text}{end}!") for text in texts)


@pytest.mark.parametrize("seed", range(40))
def test_no_text_of_another_grammar_comes_before_the_marker(seed: int) -> None:
    rng = random.Random(seed)
    grammar, end = random_grammar(rng, rng.choice(("", '" "'))), rng.choice(("\n\t", '"a', "b\n"))
    plain, ended = matcher(grammar), matcher(tagged(TextFormat("lark", grammar), end))
    texts = [written(grammar, rng) for _ in range(8)]
    texts += [near(rng, text) for text in texts for _ in range(2)]
    held = [text for text in texts if end not in text and follows(ended, f"<p>{text}{end}!")]
    # Ignored blanks may always stand before the marker.
    assert [text for text in held if not (follows(plain, text) or follows(plain, text.rstrip(" ")))] == []


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_a_regex_before_a_marker(seed: int) -> None:
    rng = random.Random(seed)
    regex, end = random_regex(rng) + random_regex(rng), rng.choice(("\n\t", '"a', "b\n"))
    plain = matcher(f"start: X\nX: /{regex}/")
    ended = matcher(tagged(TextFormat("regex", regex), end))
    texts = [written(f"start: /{regex}/", rng) for _ in range(8)]
    for text in [*texts, *(near(rng, text) for text in texts)]:
        is_first = (text + end).find(end) == len(text)
        assert follows(ended, f"<p>{text}{end}!") == (is_first and follows(plain, text)), text


@pytest.mark.parametrize("end", MARKERS)
@pytest.mark.parametrize("line", ["[^\\n]+", "[^\\n]*"])
def test_lines_with_breaks_between_them(line: str, end: str) -> None:
    """The marker begins with a line break, which no line goes on with."""
    ended = matcher(tagged(TextFormat("lark", f"start: line (LF line)*\nline: /{line}/\nLF: /\\n/"), end))
    for text in ("a", "a\nb", "a < b\n\tc\nd"):
        assert follows(ended, f"<p>{text}{end}!"), text


def test_no_text_ends_without_the_marker() -> None:
    ended = matcher(tagged(TextFormat("lark", 'start: "a" x\nx: ""'), "</x>"))
    assert follows(ended, "<p>a</x>!")
    assert not follows(ended, "<p>a!")


@pytest.mark.parametrize("name", LARGE)
def test_the_work_grows_with_the_grammar(name: str) -> None:
    with at_most_calls(CALLS_PER_CHARACTER * len(LARGE[name])):
        text_until("\n</x>", TextFormat("lark", LARGE[name]))


def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    for text, reason in (
        (TextFormat("regex", "a(?=b)"), "looks ahead"),
        (TextFormat("lark", "start: <|im_end|>"), "<|im_end|>"),
        (TextFormat("lark", 'start: "a"\n' * 30_000), "characters"),
        (TextFormat("lark", 'start: "a"\n%ignore B'), "'B'"),
        (TextFormat("regex", "a" + "*" * 3_000), "levels"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            text_until("</x>", text)
