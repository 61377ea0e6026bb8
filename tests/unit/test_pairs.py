"""Pairs of texts have the ids and the types that transformers gives them, whole and cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from inferd.server.text.pairs import JoinedPair, PairFrame
from inferd.server.text.tokenizer import Tokenizer

WORDS = ["the", "river", "runs", "past", "seven", "old", "houses", "and", "nobody", "knows", "why", "it", "turns"]
CORPUS = [" ".join(WORDS), " ".join(reversed(WORDS))] * 4


def bert() -> Backend:
    """WordPiece, and `[CLS] a [SEP] b [SEP]` with two types."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.decoder = decoders.Fuse()
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return backend


def xlm_roberta() -> Backend:
    """SentencePiece's Unigram, and `<s> a </s></s> b </s>` with one type."""
    backend = Backend(models.Unigram())
    backend.decoder = decoders.Metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


def roberta() -> Backend:
    """BPE of bytes, with the post-processor of its own."""
    backend = byte_level(["<s>", "<pad>", "</s>"])
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return backend


def modern_bert() -> Backend:
    """BPE of bytes, and BERT's tokens with one type."""
    backend = byte_level(["[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return backend


def llama() -> Backend:
    """BPE of bytes, and a token before each text, of which the second has a type of its own."""
    backend = byte_level(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return backend


def qwen() -> Backend:
    """BPE of bytes, and nothing around the texts."""
    backend = byte_level([])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def byte_level(special: list[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


MAKERS: list[Callable[[], Backend]] = [bert, xlm_roberta, roberta, modern_bert, llama, qwen]
HAS_TYPES = {bert, llama, qwen}


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest) -> tuple[Tokenizer, TokenizersBackend, bool]:
    """(our tokenizer, transformers' own, whether it has two types)."""
    make = request.param
    ours = make()
    theirs = TokenizersBackend(tokenizer_object=Backend.from_str(ours.to_str()))
    return Tokenizer(ours, {}, None), theirs, make in HAS_TYPES


def joined(tokenizer: Tokenizer, first: str, second: str) -> JoinedPair:
    frame = tokenizer.pair_frame()
    assert frame is not None
    return frame.join(tokenizer.encode(first, False), tokenizer.encode(second, False))


def types_of(pair: JoinedPair) -> list[int]:
    return [int(pair.num_first > 0 and i >= pair.num_first) for i in range(len(pair))]


def pairs() -> list[tuple[str, str]]:
    draw = random.Random(5)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice((1, 3, 12, 30)))) for _ in range(24)]
    return [*zip(texts[::2], texts[1::2], strict=True), ("why", ""), ("seven houses, älter?", "  n o  ")]


def test_a_pair_is_read_as_transformers_reads_it(made: tuple[Tokenizer, TokenizersBackend, bool]) -> None:
    tokenizer, theirs, has_types = made
    for first, second in pairs():
        ours, read = joined(tokenizer, first, second), theirs([first], [second], return_token_type_ids=True)
        assert list(ours.token_ids) == read["input_ids"][0]
        assert len(ours) == len(ours.token_ids)
        assert types_of(ours) == read["token_type_ids"][0]
        assert (ours.num_first > 0) == (has_types and len(ours.before) + len(ours.first) + len(ours.between) > 0)


def differences(tokenizer: Tokenizer, theirs: TokenizersBackend, cut: Callable[[JoinedPair, int], JoinedPair]) -> int:
    """Number of pairs and lengths at which a pair is cut otherwise than by `longest_first`."""
    num_wrong = 0
    for first, second in pairs():
        whole = joined(tokenizer, first, second)
        fewest = len(whole) - len(whole.first) - len(whole.second) + 2
        for most in range(fewest, len(whole) + 2):
            cutting = {"truncation": "longest_first", "max_length": most, "return_token_type_ids": True}
            read = theirs([first], [second], **cutting)
            ours = cut(whole, most)
            num_wrong += ([list(ours.token_ids)], [types_of(ours)]) != (read["input_ids"], read["token_type_ids"])
    return num_wrong


def test_a_pair_is_cut_as_transformers_cuts_it(made: tuple[Tokenizer, TokenizersBackend, bool]) -> None:
    tokenizer, theirs, _ = made
    assert differences(tokenizer, theirs, JoinedPair.cut) == 0
    assert differences(tokenizer, theirs, lambda pair, most: replace(pair, second=pair.second[: most - len(pair)])) > 50


def test_no_token_of_either_text_need_be_left() -> None:
    pair = JoinedPair((1,), (2, 3), (4,), (5, 6, 7), (8,), 1)
    assert pair.cut(7) == replace(pair, second=(5, 6))
    assert [pair.cut(most).token_ids for most in (4, 3, 0)] == [(1, 4, 5, 8), (1, 4, 8), (1, 4, 8)]
    assert pair.with_second_cut(1).token_ids == (1, 2, 3, 4, 5, 8)
    assert (pair.num_first, pair.cut(4).num_first) == (4, 2)


def test_a_form_that_cannot_be_separated_is_none() -> None:
    backend = qwen()
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$B:1 $A:0", special_tokens=[])
    assert PairFrame.of(backend) is None, "the second text comes first"
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A:1 $B:0", special_tokens=[])
    assert PairFrame.of(backend) is None, "the types are in no order"
    backend = bert()
    backend.normalizer = normalizers.Replace("a", "")
    assert PairFrame.of(backend) is None, "a text without tokens has no place"
