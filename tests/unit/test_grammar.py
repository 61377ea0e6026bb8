"""Grammars on llguidance with the embedded model's vocabulary: masks, ends, limits, and the errors of a bad grammar."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from inferd.engine.grammar import thread as thread_module
from inferd.engine.grammar.check import judge
from inferd.engine.grammar.compiler import brief, compile_grammar, normal_form
from inferd.engine.grammar.matcher import MatchedGrammar
from inferd.engine.grammar.ports import WORD_BITS, Grammar, GrammarError, NoGrammars, PendingGrammar
from inferd.engine.grammar.thread import GrammarThread
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.structured.language import (
    Language,
    either,
    free_text,
    free_text_until,
    json_value,
    lark,
    literal,
    marked,
    one_of,
    pattern,
    repeat,
    sequence,
    token,
)

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
VOCAB_SIZE = 3_072
NUM_WORDS = VOCAB_SIZE // WORD_BITS
END, START, CALL, END_CALL = 2, 1, 3, 4
"""<|im_end|>, <|im_start|>, <tool_call>, </tool_call>."""


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, VOCAB_SIZE)


@pytest.fixture
def thread() -> Iterator[GrammarThread]:
    thread = GrammarThread(MODEL_PATH, VOCAB_SIZE)
    yield thread
    thread.close()


def matched(vocabulary: LLTokenizer, language: Language, ending_ids: tuple[int, ...] = (END,)) -> MatchedGrammar:
    return MatchedGrammar(compile_grammar(vocabulary, normal_form(language.text()).text), vocabulary, ending_ids)


def allowed(grammar: Grammar) -> set[int]:
    words = array("I", [0xDEADBEEF]) * (NUM_WORDS + 2)
    grammar.fill(words, 1)
    assert words[0] == words[-1] == 0xDEADBEEF, "a mask is written over its edges"
    return {i for i in range(VOCAB_SIZE) if words[1 + i // WORD_BITS] >> i % WORD_BITS & 1}


def matches(vocabulary: LLTokenizer, language: Language, text: str) -> bool:
    """Whether the grammar accepts a text, token by token, and may end after it."""
    grammar = matched(vocabulary, language)
    for token_id in vocabulary.tokenize_str(text, parse_special=True):
        if token_id not in allowed(grammar):
            return False
        grammar.accept((token_id,))
    return grammar.is_accepting


def drawn(vocabulary: LLTokenizer, language: Language, seed: int, most: int = 200) -> tuple[list[int], MatchedGrammar]:
    """Tokens drawn evenly from the allowed ones, until the grammar or an end token ends it."""
    grammar, rng, token_ids = matched(vocabulary, language), random.Random(seed), []
    while not grammar.is_finished and len(token_ids) < most:
        token_id = rng.choice(sorted(allowed(grammar)))
        if token_id == END:
            break
        token_ids.append(token_id)
        grammar.accept((token_id,))
    return token_ids, grammar


# -- languages ---------------------------------------------------------------------------------------------------------

ODD = "a.b*c/d[e]{f}(g)|h^$+?#&~-\\ \"'\n\tÄ😀<x>\x01"


@pytest.mark.parametrize(
    ("language", "texts", "others"),
    [
        (literal(ODD), [ODD], [ODD[:-1], ODD + "x", ""]),
        (literal("<|im_end|>"), [], ["<|im_en"]),
        (one_of([ODD, "zz", "zzz"]), [ODD, "zz", "zzz"], ["z", "zzzz"]),
        (pattern(r"a/b\/c[/]\d{2}"), ["a/b/c/42"], ["a/b/c/4x"]),
        (pattern("a\nb"), ["a\nb"], ["anb"]),
        (json_value({"type": "integer"}), ["0", "-12"], ["01", "1.5", " 1"]),
        (json_value({"type": "object"}), ["{}", '{"a": [1,\n  null]}'], ["[]", '{"a":  1}', "{} "]),
        (json_value({}), ["1", '"x"', "[]"], ["x"]),
        (sequence(literal("a"), literal("b")), ["ab"], ["a", "b"]),
        (either(literal("a"), sequence(literal("b"), literal("c"))), ["a", "bc"], ["ac", "b"]),
        (repeat(literal("ab"), 1, 2), ["ab", "abab"], ["", "ababab"]),
        (repeat(literal("ab"), 2, None), ["abab", "ab" * 7], ["ab"]),
        (sequence(free_text_until("</x>"), literal("!")), ["</x>!", "a<b</x>!"], ["a", "</x></x>!"]),
        (sequence(token("<tool_call>", CALL), literal("a")), ["<tool_call>a"], ["a"]),
        (marked("<tool_call>\n{", {"<tool_call>": CALL}), ["<tool_call>\n{"], ["{"]),
        (either(lark('start: "A" x\nx: /[0-9]+/'), lark('root ::= "B" [a-z]')), ["A12", "Bq"], ["A", "B1"]),
        (free_text(), ["", "any\ntext"], []),
    ],
)  # fmt: skip
def test_languages(vocabulary: LLTokenizer, language: Language, texts: list[str], others: list[str]) -> None:
    assert [text for text in texts if not matches(vocabulary, language, text)] == []
    assert [text for text in others if matches(vocabulary, language, text)] == []


def test_equal_parts_of_a_composition_are_defined_once() -> None:
    part = sequence(free_text_until("</x>"), lark('start: "a"'))
    text = either(part, sequence(part, literal("!"))).text()
    assert (text.count("[lazy]"), text.count('\\"a\\"')) == (1, 1)


def test_a_text_that_spells_a_special_token_is_written_as_text(vocabulary: LLTokenizer) -> None:
    for seed in range(20):
        token_ids, grammar = drawn(vocabulary, literal("<|im_end|><tool_call>"), seed)
        assert vocabulary.decode_bytes(token_ids) == b"<|im_end|><tool_call>"
        assert grammar.is_finished and not {START, END, CALL} & set(token_ids)


def test_free_text_holds_no_special_token_and_no_half_character(vocabulary: LLTokenizer) -> None:
    may = allowed(matched(vocabulary, free_text(), ()))
    assert not may & {0, START, END, CALL, END_CALL}
    for seed in range(20):
        token_ids, _ = drawn(vocabulary, pattern(r"(.|\n){8}"), seed)
        assert len(vocabulary.decode_bytes(token_ids).decode()) == 8


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (r'root ::= "\u0042\u000a\u00e9"', ["B\n\u00e9"], ["B", r"\u42"]),
        (r'root ::= "\u0022\u005c\U0001F600"', ['"\\\U0001f600'], []),
        (r"root ::= [\u0042-\u0044]", ["B", "D"], ["A", "E"]),
        (r"root ::= [\U0001F600-\U0001F602\n]", ["\U0001f601", "\n"], ["x"]),
        (r"root ::= [\u005d\u005e\u002d]", ["]", "^", "-"], ["\\", "u"]),
        (r"root ::= [^\u0022]", ["a"], ['"']),
        ("root ::= [a-z&&b~~c]", ["a", "&", "~"], ["A"]),
        ("root ::= [^\\n]+", ["any text"], ["", "a\n"]),
        ('root ::= [a-z]+ "b"', ["aab", "bb"], ["b", "ba"]),
        ('root ::= x "b"\nx ::= [a-z]+', ["aab", "bb"], ["b", "ba"]),
        ('root ::= "a" root | [^\\n]+', ["aab", "x"], ["x\n"]),
        ('root ::= START "b"\nSTART ::= "a"', ["ab"], ["a"]),
    ],
)  # fmt: skip
def test_gbnf(vocabulary: LLTokenizer, grammar: str, texts: list[str], others: list[str]) -> None:
    assert [text for text in texts if not matches(vocabulary, lark(grammar), text)] == []
    assert [text for text in others if matches(vocabulary, lark(grammar), text)] == []


def test_gbnf_without_recursion_is_one_expression() -> None:
    """With a lexeme for each letter, following the grammar takes ten times as long."""
    assert normal_form(r"root ::= [^\n]+").text == "%llguidance {}\nstart: START\nSTART: /[^\\n]/+\n"
    assert "START" not in normal_form(r'root ::= "a" root | [^\n]+').text


# -- where a request stands --------------------------------------------------------------------------------------------


def test_an_end_token_may_come_exactly_where_the_text_may_end(vocabulary: LLTokenizer) -> None:
    grammar = matched(vocabulary, pattern("ab?"))
    seen = []
    for text in ("a", "b"):
        seen.append(END in allowed(grammar))
        grammar.accept(vocabulary.tokenize_str(text))
    assert seen == [False, True] and grammar.is_finished and allowed(grammar) == {END}


def test_ids_that_do_not_end_this_request_are_never_drawn(vocabulary: LLTokenizer) -> None:
    """Under `ignore_eos` no end token is drawn. An end token of the client's own may be any token."""
    without = matched(vocabulary, pattern("a*"), ())
    assert not allowed(without) & {0, END}
    own = matched(vocabulary, pattern("a*"), (100,))
    assert 100 in allowed(own) and END not in allowed(own)


def test_taking_tokens_back(vocabulary: LLTokenizer) -> None:
    grammar = matched(vocabulary, pattern("[a-c]{3}"))
    before = allowed(grammar)
    grammar.accept(vocabulary.tokenize_str("ab"))
    grammar.rollback(len(vocabulary.tokenize_str("ab")))
    assert allowed(grammar) == before and not grammar.failure
    grammar.rollback(1)
    assert grammar.failure and allowed(grammar) == set()


def test_a_token_outside_the_grammar_is_its_end(vocabulary: LLTokenizer) -> None:
    grammar = matched(vocabulary, pattern("[0-9]+"))
    grammar.accept(vocabulary.tokenize_str("x"))
    assert grammar.failure and not grammar.is_accepting and not grammar.is_finished
    assert allowed(grammar) == set()


def test_a_grammar_that_is_found_too_complex_allows_nothing(vocabulary: LLTokenizer) -> None:
    big = "start: " + " ".join(f"r{i}" for i in range(2_000)) + "\n"
    grammar = matched(vocabulary, lark(big + "\n".join(f'r{i}: "a"? "b"*' for i in range(2_000))))
    assert allowed(grammar) == set() and "Too many items" in grammar.failure


def test_what_fails_at_a_draft_goes_on_without_it(vocabulary: LLTokenizer) -> None:
    """After an error llguidance takes nothing back, so the accepted tokens are followed again."""
    rules = [f"r{i}" for i in range(2_000)]
    big = "start: q x | q z " + " ".join(rules) + '\nq: "q"\nx: "x"\nz: "z"\n'
    grammar = matched(vocabulary, lark(big + "\n".join(f'{rule}: "a"? "b"*' for rule in rules)))
    q, z, a, x = (vocabulary.tokenize_str(text)[0] for text in "qzax")
    grammar.accept((q,))
    before = allowed(grammar)
    grammar.accept((z,))
    assert allowed(grammar) == set() and "items" in grammar.failure
    grammar.accept((a,))
    assert grammar.failure and allowed(grammar) == set()
    grammar.rollback(1)
    assert grammar.failure, "it failed at the token before"
    grammar.rollback(1)
    assert not grammar.failure and allowed(grammar) == before
    grammar.accept((x,))
    assert grammar.is_finished


# -- compiling ---------------------------------------------------------------------------------------------------------


def wait(pending: PendingGrammar) -> Grammar:
    while not pending.is_done:
        pass
    return pending.take()


def test_compiled_grammars_are_kept_and_every_request_has_its_own_place(thread: GrammarThread) -> None:
    text = pattern("ab").text()
    first = wait(thread.open(text, (), (END,)))
    pending = thread.open(text, (), (END,))
    assert pending.is_done, "the second of a kind waits for nobody"
    first.accept(tuple(allowed(first))[:1])
    second = pending.take()
    assert len(allowed(first)) == 1 and allowed(second) != allowed(first)


def test_tenants_take_turns(thread: GrammarThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant sends a hundred grammars that each compile for a second. It delays another tenant by one of them."""
    order: list[str] = []
    may_begin = threading.Event()
    compiled = thread_module.compile_grammar

    def compiling(vocabulary: LLTokenizer, text: str) -> LLMatcher:
        assert may_begin.wait(60)
        order.append(text)
        return compiled(vocabulary, text)

    monkeypatch.setattr(thread_module, "compile_grammar", compiling)
    texts = {f"{who}{i}": pattern(f"{who}{{{i}}}").text() for who, count in (("a", 4), ("b", 2), ("c", 1))
             for i in range(1, count + 1)}  # fmt: skip
    waiting = [thread.open(text, (), (END,), name[0]) for name, text in texts.items()]
    may_begin.set()
    for pending in waiting:
        pending.take()
    expected = ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert order in (
        [texts[name] for name in expected],
        [texts[name] for name in ("a1", "b1", "c1", "a2", "b2", "a3", "a4")],
    )


def test_a_replay_goes_on_where_it_was(thread: GrammarThread, vocabulary: LLTokenizer) -> None:
    language = json_value({"type": "array", "items": {"type": "integer"}, "maxItems": 9})
    token_ids, grammar = drawn(vocabulary, language, seed=3, most=6)
    again = wait(thread.open(language.text(), token_ids, (END,)))
    assert allowed(again) == allowed(grammar)
    elsewhere = wait(thread.open(language.text(), (5, 5, 5), (END,)))
    assert elsewhere.failure


def test_what_cannot_be_compiled_is_said_to_whoever_asks(thread: GrammarThread, tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"^invalid regex [^\n]* \(in regex\): unclosed group$"):
        wait(thread.open(pattern("(a").text(), (), ()))
    with pytest.raises(GrammarError, match=r"has no tokenizer\.json"):
        wait(GrammarThread(tmp_path, 10).open(pattern("a").text(), (), ()))
    with pytest.raises(GrammarError, match="without grammars"):
        NoGrammars().open("", (), ()).take()


# -- trying out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "reason"),
    [
        (pattern(""), "it allows nothing but the empty text"),
        (json_value(False), "it allows no value: schema is false"),
        (json_value({"type": "integer", "minimum": 3, "maximum": 1}), "no whole number is at least 3 and at most 1"),
        (json_value({"not": {}}), "'schema.not': this keyword cannot be enforced"),
        (json_value({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
         "leads back to itself"),
        (json_value({"$ref": "#"}), "the reference '#' leads back to itself before it allows any text"),
        (json_value({"anyOf": [{"$ref": "#"}]}), "leads back to itself"),
        (json_value({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (lark("start: nowhere"), 'unknown name: "nowhere"'),
        (lark('root ::= "a" nowhere'), "not a grammar in GBNF: Rule 'nowhere' not found"),
        (lark(r'root ::= "\ud83d"'), "not a grammar in GBNF"),
        (lark("root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000), "not a grammar in GBNF"),
        (lark("start: a\na: a a a a a | \"x\" | "), "it takes too long to follow"),
        (json_value({"type": "object", "properties": {f"p{i}": {} for i in range(2_000)}}), "max is 4000"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_its_reason(
    vocabulary: LLTokenizer, language: Language, reason: str
) -> None:
    verdict = judge(vocabulary, language.text())
    assert verdict.error and reason in verdict.error
    assert len(verdict.error) <= 300 and "\n" not in verdict.error and not verdict.text


def test_what_is_taken_comes_back_in_lark(vocabulary: LLTokenizer) -> None:
    verdict = judge(vocabulary, lark('root ::= "a" [0-9]{2}').text())
    assert not verdict.error and "::=" not in verdict.text
    again = judge(vocabulary, verdict.text)
    assert again.text == verdict.text
    schema = judge(vocabulary, json_value({"type": "object"}).text())
    assert "json_schema" not in schema.text and judge(vocabulary, schema.text).text == schema.text


def test_a_complaint_is_brief() -> None:
    assert brief('at 1(8): unknown name: "foo"\n   1 | start: foo\n              ^\n') == 'unknown name: "foo"'
    assert brief("<non-verbose/>") == "no reason was given"
    assert len(brief("x" * 10_000)) == 300
