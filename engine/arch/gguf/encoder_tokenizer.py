"""The parts of tokenizer.json that only encoders have: WordPiece ("bert"), Unigram ("t5"), and the special tokens
around a text and around a pair of texts. It knows no tokenizer library."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from inferd.engine.arch.gguf.header import GgufError
from inferd.engine.arch.gguf.vocabulary import NORMAL, SPACE, UNUSED, Json, Vocabulary

_PREFIX = "##"
"""Beginning of WordPiece's tokens that go on with a word. A file leaves it out, and marks the others by `SPACE`."""
_DEFAULT_IDS = {"bos_token_id": 101, "seperator_token_id": 102, "unknown_token_id": 100}
"""Those of BERT, which llama.cpp takes if a file states none."""
_MAX_WORD_CHARS = 100
_MOST_CASED = 0.01
"""Largest part of the tokens with capital letters in a vocabulary of lower case."""


def wordpiece(vocabulary: Vocabulary, _: str) -> Json:
    vocab = {
        written(vocabulary, index, token): index
        for index, token in enumerate(vocabulary.tokens)
        if vocabulary.types[index] != UNUSED
    }
    if len(vocab) + list(vocabulary.types).count(UNUSED) != len(vocabulary.tokens):
        raise GgufError("tokenizer.ggml.tokens must differ without the marks of their places in words, but some do not")
    lowercases = vocabulary.flag("normalizer.lowercase", not _is_cased(vocabulary))
    unknown = vocabulary.token_id("unknown_token_id", _DEFAULT_IDS["unknown_token_id"])
    if unknown is None:
        raise GgufError("the metadata lacks tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": vocabulary.flag("normalizer.strip_accents", lowercases), "lowercase": lowercases,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _PREFIX, "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": vocabulary.tokens[unknown], "continuing_subword_prefix": _PREFIX,
            "max_input_chars_per_word": _MAX_WORD_CHARS, "vocab": vocab,
        },
    }  # fmt: skip


def written(vocabulary: Vocabulary, index: int, token: str) -> str:
    """The token as WordPiece writes it."""
    if vocabulary.types[index] != NORMAL and not token.startswith(SPACE):
        return token
    if token == f"[EMPTY_{index}]":
        return _PREFIX
    return token[1:] if token.startswith(SPACE) and token != SPACE else _PREFIX + token


def _is_cased(vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary has tokens with capital letters. Old files do not say whether texts are written in lower
    case."""
    tokens = zip(vocabulary.tokens, vocabulary.types, strict=True)
    cased = sum(token != token.lower() for token, kind in tokens if kind == NORMAL)
    return cased > _MOST_CASED * len(vocabulary.tokens)


def unigram(vocabulary: Vocabulary, _: str) -> Json:
    if not vocabulary.scores:
        raise GgufError("the metadata lacks tokenizer.ggml.scores")
    unknown = vocabulary.token_id("unknown_token_id")
    if unknown is None:
        raise GgufError("the metadata lacks tokenizer.ggml.unknown_token_id")
    has_prefix = vocabulary.flag("add_space_prefix", True)
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if has_prefix else "never",
             "split": True}  # fmt: skip
    splitters = [{"type": "WhitespaceSplit"}] if vocabulary.flag("remove_extra_whitespaces", False) else []
    charsmap = vocabulary.whole_numbers("precompiled_charsmap")
    normalizer = {"type": "Precompiled", "precompiled_charsmap": _base64(charsmap)} if charsmap else None
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitters, space]},
        "decoder": space,
        "model": {
            "type": "Unigram", "unk_id": unknown, "byte_fallback": False,
            "vocab": [list(pair) for pair in zip(vocabulary.tokens, vocabulary.scores, strict=True)],
        },
    }  # fmt: skip


def _base64(numbers: tuple[int, ...]) -> str:
    """Bytes as files have them, signed or not."""
    if not all(-128 <= number < 256 for number in numbers):
        raise GgufError("tokenizer.ggml.precompiled_charsmap must be an array of bytes")
    return base64.b64encode(bytes(number & 0xFF for number in numbers)).decode()


def around_texts(vocabulary: Vocabulary, architecture: str) -> Json:
    """`post_processor` of an encoder's tokenizer.json: CLS and SEP around a text, and another SEP behind the second of
    a pair. RoBERTa has two SEP between them, and BERT gives the second text another type."""
    is_bert = vocabulary.kind == "bert"
    first = _id_of(vocabulary, "bos_token_id", "cls_token_id")
    last = _id_of(vocabulary, *(("seperator_token_id", "eos_token_id") if is_bert else ("eos_token_id",)))
    doubles = not is_bert and architecture != "modern-bert"

    def special(index: int, type_id: int) -> Json:
        return {"SpecialToken": {"id": vocabulary.tokens[index], "type_id": type_id}}

    def pair() -> Iterator[Json]:
        second = int(is_bert)
        yield from single
        if doubles:
            yield special(last, 0)
        yield {"Sequence": {"id": "B", "type_id": second}}
        yield special(last, second)

    single = [special(first, 0), {"Sequence": {"id": "A", "type_id": 0}}, special(last, 0)]
    used = {vocabulary.tokens[index]: index for index in (first, last)}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*pair()],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()},
    }


def _id_of(vocabulary: Vocabulary, *keys: str) -> int:
    """The id that the first of these keys states; without any, BERT's."""
    for key in keys:
        found = vocabulary.token_id(key)
        if found is not None:
            return found
    default = _DEFAULT_IDS.get(keys[0]) if vocabulary.kind == "bert" else None
    if default is None or default >= len(vocabulary.tokens):
        raise GgufError(f"the metadata lacks tokenizer.ggml.{keys[0]}, which encoders put around texts")
    return default
