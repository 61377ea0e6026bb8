"""The vocabulary that grammars are built from is the one that llguidance reads from tokenizer.json itself."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from inferd.engine.api.process.written_once import WrittenOnce, is_written
from inferd.engine.grammar import reading
from inferd.engine.grammar import tables as tables_module
from inferd.engine.grammar import thread as thread_module
from inferd.engine.grammar.compiler import compile_grammar
from inferd.engine.grammar.matcher import MatchedGrammar
from inferd.engine.grammar.merging import MergingTokenizer
from inferd.engine.grammar.ports import WORD_BITS, GrammarError
from inferd.engine.grammar.reading import tables_of, tokenizer_of
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
    assert tables_of(MODEL_PATH, 3_080).facts.symbols
    ours = load_vocabulary(MODEL_PATH, 3_080)
    assert_same(ours, LLTokenizer(_text(MODEL_PATH), n_vocab=3_080, eos_token=ours.eos_tokens))


@pytest.mark.long
@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabularies_are_those_of_llguidance(name: str) -> None:
    folder = installed_tokenizer(name)
    assert_same(load_vocabulary(folder, VOCABULARIES[name]), LLTokenizer(_text(folder), n_vocab=VOCABULARIES[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_have_the_tokens_that_the_library_gives_them(name: str) -> None:
    """Tokens of real vocabularies in a random order, and changed in the middle of characters."""
    folder = installed_tokenizer(name)
    tables, library, draw = tables_of(folder, VOCABULARIES[name]), tokenizer_of(folder), random.Random(2)
    assert tables.facts.symbols
    ours, tokens = MergingTokenizer(tables), tables.tokens()
    for count in range(5_000):
        drawn = b"".join(draw.choices(tokens, k=1 + count % 30))
        text = drawn[draw.randrange(3) :].decode(errors=draw.choice(["ignore", "replace"]))
        assert ours(text) == library.encode(text, add_special_tokens=False).ids, text


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
    assert tables_of(tmp_path, len(vocab)).facts.symbols
    ours = load_vocabulary(tmp_path, len(vocab))
    assert_same(ours, LLTokenizer(text))
    assert ours.decode_str(ours.tokenize_str("ab")) == "ab" and ours.eos_tokens == [vocab["</s>"]]


MODELS = (
    {}, {"byte_fallback": True}, {"unk_token": "?"}, {"unk_token": "?", "fuse_unk": True}, {"ignore_merges": True},
    {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True, "ignore_merges": True},
    {"unk_token": "<unk>", "ignore_merges": True},
)  # fmt: skip


def random_tokenizer(draw: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with random tokens and merges of a few characters, and with added tokens among them."""
    vocab = dict.fromkeys(["?", *"abc \u00e9\u65e5\u2581", *(f"<0x{byte:02X}>" for byte in range(256))])
    vocab |= dict.fromkeys("<x0123456789ABCDEF>endunk")
    merges: dict[tuple[str, str], None] = {}
    for _ in range(40):
        left, right = draw.choices([*list(vocab)[:8], *map("".join, merges)], k=2)
        if len(left + right) <= 8:
            vocab.setdefault(left + right)
            merges[left, right] = None
    shuffled = draw.sample(list(merges), len(merges))
    for word in ("cab", "bcb ", "abcabc", "<unk>"):
        vocab.setdefault(word)
    added = [
        {"id": 0, "content": content, "single_word": draw.random() < 0.3, "lstrip": draw.random() < 0.3,
         "rstrip": draw.random() < 0.3, "normalized": draw.random() < 0.3, "special": draw.random() < 0.5}
        for content in ("<end>", "ab", "bb c")
    ]  # fmt: skip
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    splitter = {"type": "Split", "pattern": {"Regex": " ?[^ ]+| +"}, "behavior": "Isolated", "invert": False}
    return {
        "added_tokens": added,
        "normalizer": draw.choice([None, {"type": "NFC"}, {"type": "Lowercase"}, spaces, spaces]),
        "pre_tokenizer": draw.choice([None, splitter]),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": {word: n for n, word in enumerate(vocab)}, "merges": shuffled, **model},
    }


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_merges_are_those_of_the_library(model: dict[str, Any], tmp_path: Path) -> None:
    """With every kind of model, also for texts of characters that no token has."""
    draw, joins = random.Random(3), set()
    for _ in range(12):
        document = random_tokenizer(draw, model)
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        tables, library = tables_of(tmp_path, 400), tokenizer_of(tmp_path)
        assert tables.facts.symbols and tables.facts.takes_words == ("ignore_merges" in model)
        joins.add(tables.facts.joins_with_space)
        ours = MergingTokenizer(tables)
        for _ in range(60):
            parts = draw.choices(["a", "b", "c", " ", "ab", "cab", "e\u0301", "\u65e5", "y", "?", "<end>", "C"], k=30)
            text = "".join(parts[: draw.randrange(31)])
            assert ours(text) == library.encode(text, add_special_tokens=False).ids, (document, text)
    can_cut = bool(model) and "ignore_merges" not in model
    assert len(joins - {None}) > 2 if can_cut else joins == {None}


@pytest.mark.parametrize("kind", ["dropout", "prefix", "unigram", "unknown", "symbol", "wrong"])
def test_other_tokenizers_are_those_of_the_library(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are no BPE or depend on more than ranks; and if the merges gave other ids for any reason."""
    document = random_tokenizer(random.Random(4), {})
    model = document["model"]
    model |= {"dropout": {"dropout": 0.5}, "prefix": {"end_of_word_suffix": "a"}}.get(kind, {})
    model |= {"unk_token": "?", "ignore_merges": True} if kind == "unknown" else {}
    if kind == "unigram":
        words = [[word, -1.0 * token_id] for word, token_id in model["vocab"].items()]
        document["model"] = {"type": "Unigram", "unk_id": 0, "vocab": words, "byte_fallback": True}
    if kind == "symbol":
        document["added_tokens"].append({**document["added_tokens"][0], "content": "z"})
    if kind == "wrong":
        monkeypatch.setattr(MergingTokenizer, "_merged", lambda _, ids: ids)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert tables_of(tmp_path, 400).facts.symbols == ""
    if kind != "dropout":
        vocabulary, library = load_vocabulary(tmp_path, 400), tokenizer_of(tmp_path)
        assert vocabulary.tokenize_str("ab cab") == library.encode("ab cab", add_special_tokens=False).ids


def test_a_vocabulary_that_another_process_has_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    once = WrittenOnce()
    for _ in range(2):  # an engine, and the next one
        thread = GrammarThread(MODEL_PATH, 3_072, once.path)
        thread.prepare()
        thread.close()
        assert is_written(once.path)
        monkeypatch.setattr(reading.subprocess, "run", None)
        monkeypatch.setattr(reading, "_block", None)
    shared = load_vocabulary(MODEL_PATH, 3_072, once.path)
    monkeypatch.undo()
    assert_same(shared, load_vocabulary(MODEL_PATH, 3_072))
    assert load_vocabulary(MODEL_PATH, 3_080, once.path).vocab_size == 3_080, "not those of another size"
    monkeypatch.setattr(tables_module, "MADE_BY", "another version")
    assert tables_of(MODEL_PATH, 3_072, once.path).facts.symbols


def test_an_engine_that_can_start_no_process_reads_the_vocabulary_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(reading.subprocess, "run", fail)
    once = WrittenOnce()
    assert load_vocabulary(MODEL_PATH, 3_072, once.path).vocab_size == 3_072
    assert is_written(once.path), "others need not read it"


def test_a_vocabulary_that_no_process_can_read_is_refused_by_the_engine(tmp_path: Path) -> None:
    once = WrittenOnce()
    thread = GrammarThread(tmp_path, 10, once.path)
    with pytest.raises(GrammarError, match=r"has no tokenizer\.json"):
        thread.open("start: /a/", (), ()).take()
    thread.close()
    assert not is_written(once.path)


def test_a_vocabulary_is_read_once_and_in_advance_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    load = thread_module.load_vocabulary

    def counting(path: Path, vocab_size: int, *of_the_server: Any) -> LLTokenizer:
        read.append(path)
        return load(path, vocab_size, *of_the_server)

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
