"""Grammars of texts inside a string of JSON, judged by llguidance: a text matches a grammar if and only if the text as
`json.dumps` writes it matches the quoted grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from benchmarks.custom_tool_calls import PATCH as GRAMMAR_OF_PATCHES
from inferd.engine.api.grammars import literal_regex
from inferd.engine.grammar.compiler import LIMITS, normal_form
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.structured import larks
from inferd.server.structured.language import TextFormat, pattern
from inferd.server.structured.quoted import MAX_DEFINITION_CHARS, json_text, quoted_lark, quoted_regex
from tests.unit.calls_made import at_most_calls
from tests.unit.large_grammars import CALLS_PER_CHARACTER, IGNORED, LARGE
from tests.unit.random_grammars import ALPHABET, near, random_grammar, random_regex

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
END = 2


@cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, 3_072)


@cache
def token_of_byte() -> dict[int, int]:
    return {byte: vocabulary().tokenize_bytes(bytes([byte]))[0] for byte in range(256)}


def matcher(grammar: str) -> LLMatcher:
    found = LLMatcher(vocabulary(), grammar, log_level=0, limits=LIMITS)
    assert not found.is_error(), found.get_error()
    return found


def follows(grammar: str | LLMatcher, text: str) -> bool:
    """Whether a grammar matches a text, given byte by byte."""
    found = matcher(grammar) if isinstance(grammar, str) else grammar
    assert found.reset()
    token_ids = [token_of_byte()[byte] for byte in text.encode()]
    return bool(found.try_consume_tokens(token_ids) == len(token_ids) and found.is_accepting())


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def sampled(grammar: str, like: list[str], seed: int, most: int = 2_000) -> str | None:
    """A text that a grammar's masks allow, of pieces of some texts; None if it has not ended after `most` pieces."""
    found, rng, token_ids = matcher(grammar), random.Random(seed), list[int]()
    for _ in range(most):
        text = rng.choice(like)
        at = rng.randrange(len(text))
        piece = vocabulary().tokenize_str(text[at : at + rng.choice((1, 2, 20))])
        num_allowed = found.validate_tokens(piece)
        token_ids += piece[:num_allowed]
        found.consume_tokens(piece[:num_allowed])
        if found.is_accepting():
            return bytes(b"".join(map(vocabulary().decode_bytes, ([i] for i in token_ids)))).decode()
    return None


# -- regular expressions -----------------------------------------------------------------------------------------------

SAMPLES = (
    "", "a", "b", "ab", "aa", "abc", "A", "K", "\u212a", "0", "42", " ", "-", "/", "é", "😀", '"', "\\", "\n", "\r",
    "\t",
    "\b", "\f", "\x00", "\x0b", "\x1f", "\x7f", "a\nb", 'a"b', "a\\b", '\\"', "\\n", "\r\n", "a b", "x\ty", "n",
    "u0001",
    "a\n", "\na", "]", "[", "^", "&", "a-b", "\u2028", "{", "}", "a{2}", "_", "\n\n", '""', "\\\\", "a\x01",
)  # fmt: skip

REGEXES = (
    "", "a", "a|b", "a||b", "(|a)", "()", "a?b*", "a*?b+?", "a{2}", "a{1,}b", "(a{1,2}){2}", "a**", r"(?:a|\n)+",
    ".", ".*", "(?s).", "(?s:.)*", "(?R).", "(?sR).", "(?s)(?-s:.)", r"[\s\S]+", r"\n", r"\r\n", r"\t|\x0b", r"\x0a",
    r"\x{a}", r"\u000a", r"\u{A}", r"\U0000000A", r"\\", r"\"", '"', r"\/", "/", r"\a|\f|\v", r"\x08", r"\x7f", r"\d+",
    r"\D", r"\w", r"\W+", r"\s", r"\S", r"\p{L}+", r"\P{L}", r"\pL", r"\p{Cc}", r"\p{Control}", r"\P{Cc}",
    r"\p{Po}", r"\p{Other_Punctuation}", r"\p{gc=Punctuation}", r"\p{gc:Po}", r"\p{White_Space}", r"\p{Any}",
    r"\p{sc=Latin}", r"\p{Script=Common}", r"\p{Latin}", r"\p{Common}", r"\p{Zyyy}", r"\p{scx=Common}", r"\p{Age=6.0}",
    r"\p{Pattern_Syntax}", r"\p{Quotation_Mark}", r"\p{Grapheme_Base}", r"\p{ASCII}", r"\p{Alphabetic}", r"\p{C}",
    r"\p{Lowercase_Letter}", r"\p{Sc}", r"\p{Scx=Zyyy}", r"\p{Math}", r"\p{LC}", r"\p{Assigned}", r"\p{Dash}",
    "[a]", "[^a]", "[]a]", "[^]a]", "[-a]", "[a-]", "[a-c]", r"[\n\r]", r"[^\n\r]", r'["\\]', r'[^"\\]', "[a/]",
    r"[\]]",
    r"[\d\n]", r"[^\d\n]", r"[\x00-\x1f]", r"[\x00-\x20]", r"[^\x00-\x1f]", r"[ -~]+", r"[\t-\r]", r"[a&&b]",
    r"[a-z&&[^b]]",
    r"[\s&&[^\n]]", r"[\s--\n]", r"[a--b]", r"[\n~~\t]", r"[a-z~~b-c]", "[[a][b]]", r"[^[a]\n]", "[[:alpha:]]",
    "[[:^alpha:]]", "[[:space:]x]", "[[:cntrl:]]", "[[:punct:]]", "[^[:print:]]", r"[^&&\n]", r"[&&a]", r"[\p{L}\n]",
    r"[^\p{L}]", r"[\P{Cc}]", r"[\x{a}-\x{d}]", "[😀é]", "(?i)a", "(?i)k", "(?i)ab\nc", "(?i:a)b", "(?i)[a-b]+",
    r"(?i)\n|A",
    "(?i)a(?-i)b", "a(?i)b|c", "(?i)[^a]", "(?x) a b # c", "(?x) a\\ b", "(?x)[ a b ]", "(?x)a +", "(?x: a ) b",
    "(?U)a*",
    "^a$", "^(a|b)$", r"\Aa\z", "^a|b$", "(^a)", "(?:a$)", "(?P<x>a)b", "(?<x>a)", "(?u)a", r"(a|\n){0,2}b?",
    r"([^\n]*\n)*", r"(\\.|[^\\])*", r'"([^"\\]|\\.)*"', r"(?s:\\.)", r"\-\_\ \&\~\#", "}", "]", r"\{", "a{ 1 , 2 }",
)  # fmt: skip


def disagreements(plain: str, quoted: str, texts: Iterable[str]) -> list[tuple[str, bool]]:
    """(text, whether the plain grammar matches it) of the texts on which the two grammars do not agree."""
    judge, judged = matcher(plain), matcher(quoted)
    verdicts = [(text, follows(judge, text)) for text in texts]
    return [(text, is_match) for text, is_match in verdicts if follows(judged, escaped(text)) != is_match]


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_matches_the_same_texts_when_quoted(regex: str) -> None:
    plain, quoted = (pattern(source or "()").text() for source in (regex, quoted_regex(regex)))
    assert disagreements(plain, quoted, SAMPLES) == []


def test_the_expression_of_a_text_matches_it_alone() -> None:
    texts = {*SAMPLES, "\x85\u00a0\u2028\ufeff\U000e0001"}
    for text in texts:
        judge = matcher(f"start: X\nX: /({literal_regex(text)})/")
        assert {other for other in texts if follows(judge, other)} == {text}


# -- grammars ----------------------------------------------------------------------------------------------------------

PATCH = """*** Begin Patch
*** Add File: a "b" \\.py
+x = "é😀"\t\x01
+
*** Update File: b.py
*** Move to: c.py
@@ def f():
 a\\n
-\r
+c
@@
 x
*** End of File
*** Delete File: z
*** End Patch
"""


def test_codex_patches() -> None:
    quoted = quoted_lark(GRAMMAR_OF_PATCHES)
    texts = [PATCH, PATCH[:-1], PATCH + "\n", PATCH.replace("+c", "c"), PATCH.replace("@@\n", "@@x\n"), "", "\n"]
    texts += [PATCH[:i] + char + PATCH[i + 1 :] for i in range(0, len(PATCH), 5) for char in '\n"']
    assert disagreements(GRAMMAR_OF_PATCHES, quoted, texts) == []
    assert follows(quoted, escaped(PATCH))
    assert not follows(quoted, PATCH), "line breaks are not escaped"


def test_the_object_of_a_call() -> None:
    language = json_text("input", TextFormat("lark", GRAMMAR_OF_PATCHES))
    grammar = normal_form(language.text()).text
    call = json.dumps({"input": PATCH}, ensure_ascii=False)
    assert follows(grammar, call)
    assert follows(grammar, call.replace('": "', '":"'))
    assert not follows(grammar, json.dumps({"input": PATCH}).replace("\\u00e9", "e") + " ")
    assert not follows(grammar, call.replace("*** End Patch", ""))
    assert not follows(grammar, call.replace('"input"', '"text"'))
    assert follows(json_text('a"b', TextFormat("regex", r"\d+\n")).text(), '{"a\\"b": "12\\n"}')


JS = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE
PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
SQL = r"""
start: select ";"?
?select: "SELECT"i columns "FROM"i NAME where? -> query
columns: "*" | NAME ("," NAME)*
where: "WHERE"i condition ("AND"i condition)*
condition: NAME ("=" | "<" | ">") (STRING | SIGNED_INT | ESCAPED_STRING)
NAME: /[a-zA-Z_]\w*/
STRING: "'" /[^'\\]/* "'"
%import common (WS, SIGNED_INT)
%import common.ESCAPED_STRING
%ignore WS
"""
ARITHMETIC = r"""
start: expr
expr: expr ("+" | "-") term | term
term: term ("*" | "/") factor | factor
factor: "(" expr ")" | NUMBER
%import common.NUMBER
%ignore " "
"""
LINES = r"""
%llguidance {"no_forcing": true}
start: line ~ 1..2 tail{0,3}  # at most two lines
line: /[^\x00\n]*/ "\n"       // of any text
tail: "\u0000" | "\x01" | [ "\x02" "\"" ] "."
"""
LAZY = r"""
start: text "!" rest
text[lazy, capture]: /(.|\n)*/ "\n--\n"
rest[suffix="\n", capture="x"]: TEXT
TEXT: /[^!]*/
"""
RANGES = 'start: A (B | "é" | "😀"i)+\nA: "a".."f" | "\\t".."\\r"\nB: ~/b\\n/ & /[b\\n]{1,3}/'

GRAMMARS = {
    "js": (JS, ["// @exec: x\n1", " \t// @exec:\r\nf(\"a\\n\");\n", "\n", "x\\\"\x00"], [""]),
    "sql": (
        SQL,
        ["select *\n from t", 'SELECT a,b\tFROM "t', "SELECT a FROM t WHERE a='\n\"' AND b = \"\\n\\\"\" and c<-1;"],
        ["", "SELECT", "select * from t where a = '\\'"],
    ),
    "arithmetic": (ARITHMETIC, ["1", "1 + 2*(3 - 4.5e-3)", "1 +"], ["", "1\n", '"1"']),
    "lines": (LINES, ["a\n", "\n\n", 'a\tb\x01"\n\x00', "\n\x01.", '\n\x02".\0', "a\\\n\x01"], ["a", "\0\n", "\n\x02"]),
    "lazy": (LAZY, ["\n--\n!a\n", "a\n--\nb", "a\n-\n--\n!\n", "\n--\n!\t\"\n\n"], ["\n--\n!", "a"]),
    "ranges": (RANGES, ["aé", "f😀b", "\tb\nb", "\rbb", "\nb\n", "a\n\n"], ["a", "gé", "\u2028é"]),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_matches_the_same_texts_when_quoted(name: str) -> None:
    grammar, texts, others = GRAMMARS[name]
    rng = random.Random(name)
    quoted = quoted_lark(grammar)
    mutants = [near(rng, text) for text in texts for _ in range(40)]
    if "%ignore" in grammar:
        mutants = [text for text in mutants if text == text.strip()]
    assert disagreements(grammar, quoted, [*texts, *others, *mutants]) == []
    assert [text for text in others if follows(quoted, escaped(text))] == []
    assert any(follows(quoted, escaped(text)) for text in texts)


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("name", ["patch", *GRAMMARS])
def test_texts_drawn_from_a_quoted_grammar_match_the_grammar(name: str) -> None:
    """With the tokens of a vocabulary, which end inside escapes and between lexemes."""
    grammar, texts = (GRAMMAR_OF_PATCHES, [PATCH]) if name == "patch" else GRAMMARS[name][:2]
    language = json_text("input", TextFormat("lark", grammar))
    like = [json.dumps({"input": text}, ensure_ascii=False) for text in texts]
    drawn = [text for seed in range(40) if (text := sampled(normal_form(language.text()).text, like, seed)) is not None]
    assert len(drawn) > 5
    assert [text for text in drawn if not follows(grammar, json.loads(text)["input"])] == []


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from(("", "", r"/[ \n]+/", '" "', r"/[ \t\n]/")))
def test_random_grammars(seed: int, ignored: str) -> None:
    rng = random.Random(seed)
    grammar = random_grammar(rng, ignored)
    found = [written(grammar, rng) for _ in range(8)]
    texts = [*found, *(near(rng, text) for text in found for _ in range(2))]
    if ignored:
        texts = [text for text in texts if text == text.strip()]
    try:
        quoted = quoted_lark(grammar)
    except ValueError:  # rules that only refer to themselves
        assert [text for text in texts if follows(grammar, text)] == []
        return
    assert disagreements(grammar, quoted, texts) == []


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_random_regexes(seed: int) -> None:
    rng = random.Random(seed)
    regex = "".join(random_regex(rng) for _ in range(3))
    found = [written(pattern(regex).text(), rng) for _ in range(8)]
    texts = [*found, *(near(rng, text) for text in found for _ in range(2))]
    assert disagreements(pattern(regex).text(), pattern(quoted_regex(regex)).text(), texts) == []


def written(grammar: str, rng: random.Random, most: int = 14) -> str:
    """A text drawn from a grammar, character by character. It may end too early."""
    found, text = matcher(grammar), ""
    while len(text) < most and not found.is_stopped():
        ids = {char: [token_of_byte()[byte] for byte in char.encode()] for char in ALPHABET}
        allowed = [char for char in ALPHABET if found.validate_tokens(ids[char]) == len(ids[char])]
        if not allowed or (found.is_accepting() and rng.random() < 0.3):
            break
        char = rng.choice(allowed)
        found.consume_tokens(ids[char])
        text += char
    return text


def test_a_lazy_lexeme_of_one_character_ends_behind_another_lexeme() -> None:
    """llguidance overlooks its end if the byte that matches has also ended the lexeme before it. A blank in escapes
    does not end by itself, because another escape might follow."""
    grammar = "start: /\\s/ x\nx[lazy]: /[^a-y]+/"
    assert disagreements(grammar, quoted_lark(grammar), ["\nz", "\nzz", "\n\n", "\t\n\n", "\nzzz", "\n"]) == []


@pytest.mark.parametrize("name", larks.COMMON)
def test_common_terminals_are_those_of_llguidance(name: str) -> None:
    grammar = f"start: X\n%import common.{name} -> X"
    texts = [
        *SAMPLES,
        "+1",
        "-1.5e3",
        ".5",
        "1.",
        "e+7",
        '"a"',
        '"a\\n"',
        "_a1",
        "#x",
        "//x",
        "/*x*/",
        "--x",
        "/**",
        "\t \n",
    ]
    assert disagreements(grammar, quoted_lark(grammar), texts) == []
    assert any(follows(grammar, text) for text in texts)


# -- work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LARGE)
def test_the_work_grows_with_the_grammar(name: str) -> None:
    with at_most_calls(CALLS_PER_CHARACTER * len(LARGE[name])):
        quoted_lark(LARGE[name])


def test_rules_that_refer_to_each_other_in_too_many_ways_are_refused() -> None:
    num = 2_000
    rules = [f"a{i}: a{i + 1}" for i in reversed(range(num))]
    grammar = "\n".join(["start: /\\n/ | " + "|".join(f"a{i}" for i in range(num)), *rules, f"a{num}: /\\n/"])
    with pytest.raises(ValueError, match="too many ways"):
        quoted_lark(grammar)


def test_nothing_is_nested_too_deeply_to_be_rewritten() -> None:
    regex = "(c|d" * 39 + "[a\\n]" + ")*" * 39
    for start in ("start: A\nA: ", "start: "):
        quoted_lark(start + '("c"|"d"' * 27 + f" /{regex}/" + ")*" * 27 + IGNORED)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regex", "reason"),
    [
        ("a^b", "anchor"), ("(a$)b", "anchor"), ("(?:^a)*", "anchor"), ("(?m)^a", "anchor"),
        (r"\bfoo", "word boundary"),
        (r"a\B", "word boundary"), (r"\<a", "word boundary"), ("(?=a)b", "looks ahead"), ("a(?!b)", "looks ahead"),
        ("(?<=a)b", "behind"), ("(?<!a)b", "behind"), (r"(a)\1", "refers back"), ("(?P<stop>a)", "'stop'"),
        ("(?-u)a", "bytes"),
        (r"\p{WB=Format}", "WB=Format"), (r"\p{gc!=Po}", "!="), ("(a", "inside a group"), ("a)", "not opened"),
        ("[a", "class"),
        ("*a", "'*'"), ("a{", "count"), ("a{2,1}", "count"), ("a{9999999999}", "count"), (r"\y", r"'\y'"),
        ("a\\", "backslash"),
        (r"\x4", r"\x"), (r"\u{110000}", r"\u"), (r"\ud800", r"\u"), ("[b-a]", "range"), ("(?z)a", "'z'"),
        ("(?>a)", "(?>a"),
        (r"\p{L", "ends inside"), ("(" * 300 + ")" * 300, "levels"), ("[" * 300 + "a" + "]" * 300, "levels"),
        ("a" * (MAX_DEFINITION_CHARS + 1), "characters"), ("a" + "*" * 3_000, "levels"),
        ("a{\u0663}", "count"), ("a{" + "9" * 5_000 + "}", "count"),
        ("(?:[^a]|.)" * 6_000, "characters"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_regex_that_cannot_be_quoted_is_refused_by_name(regex: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        quoted_regex(regex)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('x: "a"', "'start'"), ('start: %json {"type": "string"}', "'%json'"),
        ('start: %regex {"substring_chars": "a"}', "'%regex'"),
        ('start: %lark { start: "a" }', "'%lark'"), ("start: <|im_end|>", "<|im_end|>"), ("start: <[5]>", "<[5]>"),
        ("start: @other", "'@other'"), ('start: A\nA: <think> "a"', "<think>"),
        ('start[max_tokens=3]: "a"', "'max_tokens'"),
        ('start[stop="x"]: /a*/', "'stop'"), ('start[foo]: "a"', "'foo'"), ('start: A\nA.2: "a"', "priority"),
        ('start: "a"\nx{y}: y', "template"), ('start: x::1\nx::_: "a"', "parameter"),
        ('start: "a" %if true', "'%if'"),
        ("%import foo.X\nstart: X", "'foo'"), ("%import common.FOO\nstart: FOO", "'FOO'"),
        ("%declare A\nstart: A", "'%declare'"),
        ('%override start: "a"', "'%override'"),
        ('%llguidance {"allow_initial_skip": true}\nstart: "a"', "'allow_initial_skip'"),
        ("%llguidance\nstart: A", "object"), ('%llguidance {"a": ' + "[" * 9_000, "object"),
        ("start: A", "'A'"), ("start: b", "'b'"),
        ("start: A\nA: A", "refers to itself"),
        ("start: A\nA: B\nB: A", "refers to itself"), ('start: A\nA: b\nb: "a"', "'b'"),
        ('start: "a"\nstart: "b"', "twice"),
        ('start: A\nA: "a"\n%import common.WS -> A', "twice"), ('start: "a" & "b"', "'&'"), ("start: start", "no text"),
        ('start: "b".."a"', "range"), ('start: "ab".."c"', "range"), ('start: ("a"', "')'"), ('start: "a', "line 1"),
        ('start: A\nA: /a(?=b)/', "looks ahead"), ('start: "a"\n  ?', "line 2"), ('start: "a" }', "out of place"),
        ('start: /a/l', "'l'"), ('start: "a"{3,2}', "count"), ("start: " + "(" * 40 + '"a"' + ")" * 40, "levels"),
        ("start: " + "~" * 2_000 + "/a/", "levels"),
        ('start: "a"\n%ignore B', "'B'"), ('start: "a"\n%ignore b\nb: "c"', "'b'"),
        ("start: /a" + "*" * 3_000 + "/", "levels"),
        ('start: "a"{' + "9" * 5_000 + "}", "count"),
        ("start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(200)) + '\nT200: "a"', "levels"),
        ("start: " + " ".join(["/[^\\n]+/ /\\n/"] * 4_600), "of more than"),
        ('start: "b" | /' + "\\t?" * 10_000 + "\\n/ | /[^b]/", "too large"),
        ("start: " + " ".join(["~" * 20 + "/a\\n/"] * 2_000), "too large"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_a_grammar_that_cannot_be_quoted_is_refused_by_name(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        quoted_lark(grammar)
    assert len(str(caught.value)) < 400
