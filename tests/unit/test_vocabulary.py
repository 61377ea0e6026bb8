"""The vocabulary that grammars are built from is the one that llguidance reads from tokenizer.json itself."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from inferd.engine.grammar import thread as thread_module
from inferd.engine.grammar.compiler import compile_grammar
from inferd.engine.grammar.matcher import MatchedGrammar
from inferd.engine.grammar.ports import WORD_BITS, GrammarError
from inferd.engine.grammar.thread import GrammarThread
from inferd.engine.grammar.vocabulary import load_vocabulary
from tests.vocabularies import VOCABULARIES, installed_tokenizer

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
GRAMMARS = (
    'start: "{\\"name\\": \\"" /[a-z ]{3,20}/ "\\", \\"age\\": " /[0-9]+/ "}"',
    '%llguidance {}\nstart: %json {"type": "object", "properties": {"city": {"type": "string"}, "tags": {"type": '
    '"array", "items": {"type": "string", "maxLength": 12}}}, "required": ["city", "tags"]}',
    "start: /(.|\\n)*/",
)
TEXTS = (
    "A text of some words, and 12345 numbers.\n\n\tTabs;  two blanks.",
    " a blank first", "", "h\u00e9llo w\u00f6rld \u65e5\u672c\u8a9e \U0001f600", '", "name": "', "<|im_end|><table> x",
)  # fmt: skip


def assert_same(ours: LLTokenizer, theirs: LLTokenizer) -> None:
    """The same tokens, ends, texts and masks."""
    assert (ours.vocab_size, ours.eos_tokens) == (theirs.vocab_size, theirs.eos_tokens)
    for token_id in range(ours.vocab_size):
        assert ours.dbg_tokens([token_id]) == theirs.dbg_tokens([token_id])
        assert ours.is_special_token(token_id) == theirs.is_special_token(token_id)
    for text in TEXTS:
        assert ours.tokenize_str(text) == theirs.tokenize_str(text), text
    for grammar in GRAMMARS:
        assert_same_masks(ours, theirs, grammar)


def assert_same_masks(ours: LLTokenizer, theirs: LLTokenizer, grammar: str) -> None:
    pair = [MatchedGrammar(compile_grammar(each, grammar), each, ()) for each in (ours, theirs)]
    masks = [array("I", bytes(4 * -(-ours.vocab_size // WORD_BITS))) for _ in pair]
    rng = random.Random(1)
    for _ in range(40):
        for matcher, mask in zip(pair, masks, strict=True):
            matcher.fill(mask, 0)
        assert masks[0] == masks[1]
        assert pair[0].forced() == pair[1].forced()
        words = [place for place, word in enumerate(masks[0]) if word]
        if not words:
            return
        place = rng.choice(words)
        token_id = WORD_BITS * place + rng.choice([bit for bit in range(WORD_BITS) if masks[0][place] >> bit & 1])
        for matcher in pair:
            matcher.accept((token_id,))
        if pair[0].is_finished:
            return


def test_the_embedded_vocabulary_is_that_of_llguidance() -> None:
    ours = load_vocabulary(MODEL_PATH, 3_080)
    assert_same(ours, LLTokenizer(_text(MODEL_PATH), n_vocab=3_080, eos_token=ours.eos_tokens))


@pytest.mark.long
@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabularies_are_those_of_llguidance(name: str) -> None:
    folder = installed_tokenizer(name)
    assert_same(load_vocabulary(folder, VOCABULARIES[name]), LLTokenizer(_text(folder), n_vocab=VOCABULARIES[name]))


def _text(folder: Path) -> str:
    return (folder / "tokenizer.json").read_text()


@pytest.mark.parametrize("kind", ["prepend", "metaspace", "sequence"])
def test_no_space_is_put_before_a_text_that_goes_on(kind: str, tmp_path: Path) -> None:
    """Tokenizers in the style of SentencePiece: characters that stand for spaces, and tokens of single bytes."""
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}
    normalizer: Any = {"type": "Sequence", "normalizers": [prepend, replace]}
    splitter: Any = None
    if kind == "metaspace":
        normalizer, splitter = None, metaspace
    if kind == "sequence":
        normalizer, splitter = prepend, {"type": "Sequence", "pretokenizers": [metaspace]}
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *'\u2581abcdefgh{}"', "ab", "\u2581ab"]
    vocab = {word: token_id for token_id, word in enumerate(dict.fromkeys(words))}
    text = json.dumps(
        {
            "normalizer": normalizer,
            "pre_tokenizer": splitter,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "added_tokens": [
                {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True} for i, word in enumerate(("<s>", "</s>"))
            ],
            "model": {"type": "BPE", "vocab": vocab, "byte_fallback": True, "merges": ["a b", "\u2581 ab"]},
        }
    )  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(text)
    ours = load_vocabulary(tmp_path, len(vocab))
    assert_same(ours, LLTokenizer(text))
    assert ours.decode_str(ours.tokenize_str("ab")) == "ab" and ours.eos_tokens == [vocab["</s>"]]


def test_a_vocabulary_is_read_once_and_in_advance_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    load = thread_module.load_vocabulary

    def counting(path: Path, vocab_size: int) -> LLTokenizer:
        read.append(path)
        return load(path, vocab_size)

    monkeypatch.setattr(thread_module, "load_vocabulary", counting)
    thread = GrammarThread(MODEL_PATH, 3_072)
    assert read == [], "an engine that sees no grammar reads none"
    for _ in range(2):
        thread.prepare()
    thread.close()
    assert read == [MODEL_PATH]
    thread = GrammarThread(MODEL_PATH, 3_072)
    for text in ("start: /a/", "start: /b/", "start: /a/"):
        thread.open(text, (), ()).take()
    thread.prepare()
    thread.close()
    assert read == [MODEL_PATH] * 2


def test_a_vocabulary_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="cannot constrain output"):
        load_vocabulary(tmp_path, 10)


def test_tokens_of_the_configuration_alone_are_part_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = json.loads((MODEL_PATH / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    extra = {"content": "<extra>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"3072": extra}}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    vocabulary = load_vocabulary(tmp_path, 3_080)
    assert vocabulary.is_special_token(3_072) and vocabulary.vocab_size == 3_080
    assert vocabulary.eos_tokens == [7]
    grammar = compile_grammar(vocabulary, "start: <extra>")
    assert grammar.consume_token(3_072) and grammar.is_stopped()
