"""A text in parts has the tokens of the whole, for every kind of tokenizer with split points."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from inferd.server.text import split_points
from inferd.server.text.split_points import SplitPoints, split_points_of

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
MARK = "\u2581"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
QWEN2 = GPT4.replace("{1,3}", "")
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL
)
CORPUS = [
    "the quick brown fox 12345 can't 'LL jump\n\n  over/the lazy dog's 2nd bone!!! \u4eca\u5929\u6c14\uff0c\u3002",
    "Hello HELLO hello   \r\n \t x1y2 9999999 \u0301e\u0301 \u00e9 a/b/c == \U0001f600\U0001f600 \u00b2\u0663 <|x1 y|>",
] * 3
# One character of each class that the patterns distinguish, and each character that they name.
CHARS = "aAs't1\u00b2 \n\r/!\u0301\u4eca\uff0c"


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


SPLITTERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "starcoder": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt4": lambda: pre_tokenizers.Sequence([split(GPT4), bytes_only()]),
    "qwen2": lambda: pre_tokenizers.Sequence([split(QWEN2), bytes_only()]),
    "qwen3.5": lambda: pre_tokenizers.Sequence([split(QWEN3_5), bytes_only()]),
    "gpt4o": lambda: pre_tokenizers.Sequence([split(GPT4O), bytes_only()]),
    "minicpm": lambda: pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split(GPT4.replace("{1,3}", "+")), bytes_only()]),
}


@cache
def byte_level(name: str, *, is_nfc: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SPLITTERS[name]()
    if is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|x1 y|>", normalized=False), AddedToken("s 1", normalized=is_nfc)])
    tokenizer.add_tokens(
        [AddedToken("!!", rstrip=True, lstrip=True, normalized=False), AddedToken("A", single_word=True)]
    )
    return tokenizer


@cache
def sentencepiece(kind: str) -> Tokenizer:
    """Tokenizers like Llama 2 ("prepend"), newer conversions of it ("metaspace"), and Gemma ("plain")."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [" ".join(text.split()).replace(" ", MARK) for text in CORPUS]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(MARK, "merged_with_next")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words += [word for word in model["vocab"] if word not in words]
    tokenizer = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend(MARK)] if kind == "prepend" else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", MARK)])
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer.add_tokens([AddedToken("x1 y", normalized=False, rstrip=True)])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "embedded": lambda: Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json")),
    **{name: lambda name=name: byte_level(name) for name in SPLITTERS},
    "qwen2 nfc": lambda: byte_level("qwen2", is_nfc=True),
    **{kind: lambda kind=kind: sentencepiece(kind) for kind in ("prepend", "metaspace", "plain")},
}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def known(tokenizer: Tokenizer) -> SplitPoints:
    found = split_points_of(json.loads(tokenizer.to_str()))
    assert found is not None
    return found


def parts(found: SplitPoints, text: str) -> list[str]:
    return [text[span[0] : span[1]] for span in found.spans(text) if span is not None]


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts may have one character, so that nearly every split point is used."""
    monkeypatch.setattr(split_points, "PART", 1)


def texts(rng: random.Random, count: int) -> list[str]:
    longer = [
        "the ",
        "12345678901",
        "   ",
        "\n\n",
        "x1 y",
        "<|x1 y|>",
        "s 1",
        " A ",
        "A",
        "!!",
        " !! ",
        "\u212a",
        "<s>",
    ]
    longer += [
        "aaaa",
        "\u4eca\u5929\uff0c",
        "\U0001f600",
        "e\u0301",
        "\uac00\u11a8",
        " \u0301",
        "=====",
        "'s",
        "\t",
        "\u2581",
    ]
    units = [*CHARS, *longer]
    return ["".join(rng.choices(units, k=rng.randrange(2, 40))) for _ in range(count)]


@pytest.mark.sampled(keep=7)
@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_parts_have_the_tokens_of_the_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    found, num_cuts = known(tokenizer), 0
    for text in texts(random.Random(name), 3_000):
        split_text = parts(found, text)
        num_cuts += len(split_text) - 1
        assert [i for part in split_text for i in ids_of(tokenizer, part)] == ids_of(tokenizer, text), (
            text,
            split_text,
        )
    assert num_cuts > 1_000, "some are cut"


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("name", SPLITTERS)
def test_no_word_reaches_across_a_cut(name: str) -> None:
    """Every text of five characters, with one character of each class that a pattern distinguishes."""
    splitter, found = SPLITTERS[name](), known(byte_level(name))

    def words(text: str) -> list[str]:
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    for chars in itertools.product(CHARS, repeat=4):
        text = "".join(chars)
        split_text = parts(found, text)
        if len(split_text) > 1:
            assert [word for part in split_text for word in words(part)] == words(text), split_text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("unit", ["word ", "x1", "line\n", "\u4eca\u5929\uff0c"])
def test_a_long_text_comes_in_parts_of_bounded_length(name: str, unit: str) -> None:
    text = unit * (20 * split_points.PART // len(unit))
    split_text = parts(known(TOKENIZERS[name]()), text)
    is_cut = len(split_text) > 1
    # Llama 2 puts a space before a text, so it is split only at spaces, which are left out.
    assert is_cut or (name in ("prepend", "metaspace") and unit != "word ") or (name == "plain" and unit != "word ")
    if is_cut:
        assert max(map(len, split_text)) <= 2 * split_points.PART + len(unit)


@pytest.mark.parametrize("name", ["embedded", "gpt4", "gpt4o", "qwen2", "minicpm"])
def test_a_long_run_of_digits_is_cut_where_its_words_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "pi=3." + "1415926535" * 12_345 + " end"
    split_text = parts(known(tokenizer), text)
    assert len(split_text) > 5
    assert [i for part in split_text for i in ids_of(tokenizer, part)] == ids_of(tokenizer, text)


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\p{L}+(?: \p{L}+)*|\s+"}, "behavior": "Isolated",
                           "invert": False}},
        {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_known_is_not_cut(change: dict[str, Any]) -> None:
    state = json.loads((MODEL_PATH / "tokenizer.json").read_text())
    assert split_points_of(state) is not None
    assert split_points_of(state | change) is None


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"ignore_merges": True}, {"byte_fallback": False}])
def test_sentencepiece_whose_characters_depend_on_others_is_not_cut(change: dict[str, Any]) -> None:
    state = json.loads(sentencepiece("plain").to_str())
    state["model"] |= change
    assert split_points_of(state) is None


class Counted(str):
    """A text that counts the characters copied out of it."""

    num_copied = 0

    def __getitem__(self, key: Any) -> str:
        piece = super().__getitem__(key)
        self.num_copied += len(piece)
        return piece


@pytest.mark.parametrize("name", ["gpt2", "gpt4"])
@pytest.mark.parametrize("unit", ["<|x1 y|> ", "a <|x1 y|> ", "a"])
def test_the_search_for_cuts_is_linear(name: str, unit: str) -> None:
    """The search is linear even if an added token touches every place, so that the part grows."""
    found = split_points_of(json.loads(TOKENIZERS[name]().to_str()))
    assert found is not None
    text = Counted(unit * (2**20 // len(unit)))
    assert [span for span in found.spans(text) if span is not None] == [(0, len(text))]
    assert text.num_copied < 16 * len(text)


def test_sentencepiece_reads_its_vocabulary_once() -> None:
    """The search is linear however many neighbours in the text are neighbours in a token."""
    num_read = 0

    class Vocabulary(dict[str, int]):
        def __iter__(self) -> Iterator[str]:
            nonlocal num_read
            num_read += 1
            return super().__iter__()

    characters = [chr(0x4E00 + i) for i in range(100)]
    pairs = map("".join, itertools.product(characters, repeat=2))
    find = split_points._pair_splits(Vocabulary((pair, i) for i, pair in enumerate(pairs)), MARK, False)
    text = "".join(random.Random(1).choices(characters, k=100_000)) + "\0" + characters[0] * split_points.PART
    assert [find(text, 0, first) for first in range(split_points.PART, 81_921, split_points.PART)] == [-1] * 5
    assert find(text, 0, 98_304) == 100_000, "no token has a NUL"
    assert num_read == 1
