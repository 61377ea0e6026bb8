"""Grammars of texts inside a string of JSON, judged by llguidance: a text matches a grammar if and only if the text as
`json.dumps` writes it matches the quoted grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from inferd.engine.grammar.compiler import LIMITS, normal_form
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.schema.caller_tool import TextFormat
from inferd.server.structured.language import pattern
from inferd.server.structured.quoted import json_text, quoted_lark, quoted_regex

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


def sampled(grammar: str, seed: int, most: int = 300) -> str | None:
    """A text drawn from a grammar's masks; None if it has not ended after `most` tokens."""
    found, rng, token_ids = matcher(grammar), random.Random(seed), []
    while not found.is_stopped():
        mask = found.compute_bitmask()
        allowed = [i for i in range(3_072) if mask[i // 8] >> i % 8 & 1]
        token_id = END if END in allowed and rng.random() < 0.2 else rng.choice(allowed)
        if token_id == END:
            break
        token_ids.append(token_id)
        assert found.consume_token(token_id)
        if len(token_ids) == most:
            return None
    return bytes(b"".join(map(vocabulary().decode_bytes, ([i] for i in token_ids)))).decode()


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


# -- grammars ----------------------------------------------------------------------------------------------------------

APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
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
    quoted = quoted_lark(APPLY_PATCH)
    texts = [PATCH, PATCH[:-1], PATCH + "\n", PATCH.replace("+c", "c"), PATCH.replace("@@\n", "@@x\n"), "", "\n"]
    texts += [PATCH[:i] + char + PATCH[i + 1 :] for i in range(0, len(PATCH), 5) for char in '\n"']
    assert disagreements(APPLY_PATCH, quoted, texts) == []
    assert follows(quoted, escaped(PATCH))
    assert not follows(quoted, PATCH), "line breaks are not escaped"


def test_the_object_of_a_call() -> None:
    language = json_text("input", TextFormat("lark", APPLY_PATCH))
    grammar = normal_form(language.text()).text
    call = json.dumps({"input": PATCH}, ensure_ascii=False)
    assert follows(grammar, call)
    assert follows(grammar, call.replace('": "', '":"'))
    assert not follows(grammar, json.dumps({"input": PATCH}).replace("\\u00e9", "e") + " ")
    assert not follows(grammar, call.replace("*** End Patch", ""))
    assert not follows(grammar, call.replace('"input"', '"text"'))
    assert follows(json_text('a"b', TextFormat("regex", r"\d+\n")).text(), '{"a\\"b": "12\\n"}')
