"""Tokenizers from the metadata of GGUF files: the ids are those of the tokenizer that the file was converted from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from benchmarks.quality.gguf_blocks import as_bf16
from benchmarks.quality.gguf_files import content_of, convert, tokenizer_metadata, write
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.errors import ModelError
from inferd.engine.arch.gguf.header import GgufError
from inferd.engine.arch.gguf.splitters import SPLITTERS
from inferd.engine.arch.gguf.tokenizer import generation_config_of, tokenizer_config_of, tokenizer_of
from inferd.engine.grammar import reading
from inferd.engine.grammar.merging import MergingTokenizer
from inferd.engine.grammar.reading import tables_of
from inferd.server.text.model import ServedModel

TEXTS = (
    "Hello world, it's 12345 o'clock!", "  two spaces \n\n\ttab ", "na\u00efve caf\u00e9 cafe\u0301 \u2603 \U0001f600",
    "<|im_start|>user\nHi<|im_end|>\n", "<tool_call>{\"a\": 1}</tool_call>",
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e", "a\r\nb\r\n", "DON'T we'Ve I'LL", "", " ", "x" * 300,
)  # fmt: skip


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """As the reader of headers gives it: lists of numbers are tuples."""
    found = tokenizer_metadata(EMBEDDED_PATH)
    return {**found, "tokenizer.ggml.token_type": tuple(found["tokenizer.ggml.token_type"])}


def ids_of(values: dict[str, Any], text: str) -> list[int]:
    return list(Backend.from_str(json.dumps(tokenizer_of(values))).encode(text).ids)


def test_the_embedded_models_tokenizer_comes_back(metadata: dict[str, Any]) -> None:
    original = Backend.from_file(str(EMBEDDED_PATH / "tokenizer.json"))
    made = Backend.from_str(json.dumps(tokenizer_of(metadata)))
    for text in TEXTS:
        assert made.encode(text).ids == original.encode(text).ids
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == original.decode(
            original.encode(text).ids, skip_special_tokens=False
        )
    assert made.get_vocab_size() == original.get_vocab_size()


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, {}),
        ({"prefix": 7, "suffix": 8, "middle": 9}, {"prefix": 7, "suffix": 8, "middle": 9}),
        (
            {"fim_pre": 7, "prefix": 1, "fim_suf": 8, "fim_mid": 9, "fim_pad": 10, "fim_rep": 11, "fim_sep": 12},
            {"prefix": 7, "suffix": 8, "middle": 9, "pad": 10, "repo": 11, "file": 12},
        ),
    ],
)
def test_tokens_for_filling_in_the_middle_are_those_that_the_file_states(
    metadata: dict[str, Any], tmp_path: Path, keys: dict[str, int], found: dict[str, int]
) -> None:
    stated = {f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in keys.items()}
    assert tokenizer_config_of({**metadata, **stated})["fim_token_ids"] == found
    known, tensors = content_of(EMBEDDED_PATH, lambda _: as_bf16)
    file = write(tmp_path / "tiny.gguf", {**known, **stated}, tensors)
    fill_in = ServedModel.load(file, ("m",), max_model_len=2048, vocab_size=3072).fill_in
    if not found:
        assert fill_in is None
    else:
        assert fill_in is not None and fill_in.prompt((1,), (2,)) == (7, 1, 8, 2, 9)
        assert set(found.values()) <= set(fill_in.ends)


def test_an_id_for_filling_in_that_is_no_token_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(GgufError, match="fim_pad_token_id must be an id from 0 to 3071"):
        tokenizer_config_of({**metadata, "tokenizer.ggml.fim_pad_token_id": 3_072})


def test_a_served_file_has_what_its_folder_has(tmp_path: Path) -> None:
    file = convert(EMBEDDED_PATH, tmp_path / "tiny.gguf")
    models = [ServedModel.load(path, ("m",), max_model_len=2048, vocab_size=3072) for path in (file, EMBEDDED_PATH)]
    ours, original = models
    # The folder declares its own format of calls, which a GGUF file cannot state. The template shows the same.
    assert (ours.format.tool_name, ours.format.reasoning_name) == ("derived", original.format.reasoning_name)
    assert ours.eos_token_ids[0] == original.eos_token_ids[0]
    assert ours.template is not None and original.template is not None
    assert ours.template.source == original.template.source
    assert ours.tokenizer.special_ids == original.tokenizer.special_ids
    assert ours.tokenizer.special_tokens.items() <= original.tokenizer.special_tokens.items()


def with_keys(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    return {key: value for key, value in changed.items() if value is not None}


@pytest.mark.parametrize("pre", SPLITTERS)
def test_every_splitter_is_read(metadata: dict[str, Any], pre: str) -> None:
    changed = with_keys(metadata, pre=pre, add_bos_token=False)
    backend = Backend.from_str(json.dumps(tokenizer_of(changed)))
    for text in TEXTS:
        words = backend.pre_tokenizer.pre_tokenize_str(text)
        assert "".join(text[begin:end] for _, (begin, end) in words) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "\u01201234", "\u0120+", "\u01205", "\u010a", "\u010a", "DON", "'", "T"]),
        (
            "smollm",
            ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120+", "\u0120", "5", "\u010a", "\u010a", "DON", "'", "T"],
        ),
        ("llama-bpe", ["It", "'s", "\u0120", "123", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON", "'T"]),
        ("qwen2", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON", "'T"]),
        ("tekken", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON", "'T"]),
        ("qwen35", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON", "'T"]),
        ("glm4", ["It", "'s", "\u0120", "123", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON", "'T"]),
        ("lfm2", ["It", "'s", "\u0120", "123", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON", "'T"]),
        ("minimax-m2", ["It's", "\u0120", "123", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON'T"]),
        ("exaone4", ["It", "'s", "\u01201234", "\u0120+", "\u01205", "\u010a", "\u010a", "DON", "'", "T"]),
        ("olmo", ["It", "'s", "\u01201234", "\u0120+", "\u01205", "\u010a", "\u010a", "DON", "'", "T"]),
        (
            "exaone",
            ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120+", "\u0120", "5", "\u010a", "\u010a", "DON", "'", "T"],
        ),
        ("gpt-4o", ["It's", "\u0120", "123", "4", "\u0120+", "\u0120", "5", "\u010a\u010a", "DON'T"]),
    ],
)  # fmt: skip
def test_words_are_cut_as_the_name_says(metadata: dict[str, Any], pre: str, words: list[str]) -> None:
    backend = Backend.from_str(json.dumps(tokenizer_of(with_keys(metadata, pre=pre))))
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("It's 1234 + 5\n\nDON'T")] == words


def test_marks_belong_to_their_letters_in_qwen35(metadata: dict[str, Any]) -> None:
    """In Devanagari vowels are marks, which NFC does not join to letters."""
    text = "\u0939\u093f\u0928\u094d\u0926\u0940"
    counts = {}
    for pre in ("qwen2", "qwen35"):
        backend = Backend.from_str(json.dumps(tokenizer_of(with_keys(metadata, pre=pre))))
        counts[pre] = len(backend.pre_tokenizer.pre_tokenize_str(text))
    assert counts["qwen35"] == 1 < counts["qwen2"]


def test_gemma4s_tokenizer_is_that_of_its_merges() -> None:
    """The oracle is the library's own model of the same tokens and merges. Marks of tools are read as tokens."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, "<|channel>", *byte_tokens, "\u2581", "  ", "a", "b", "ab", "\u2581ab", "\n"]
    merges = [("a", "b"), ("\u2581", "ab")]
    values: dict[str, Any] = {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": (*[3] * 5, 4, *[6] * 256, *[1] * 7),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    vocabulary = {token: index for index, token in enumerate(tokens)}
    original = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    original.normalizer = normalizers.Replace(" ", "\u2581")
    original.add_special_tokens([*control, "<|channel>"])
    for text in ("ab ab", " ab<turn|>\nab", "<|channel>a\u00e9", "ba  ab"):
        assert ids_of(values, text) == [2, *original.encode(text).ids]
    assert generation_config_of(values)["eos_token_id"] == [1, 4]


def test_bos_and_eos_are_added_as_the_file_says(metadata: dict[str, Any]) -> None:
    plain = ids_of(metadata, "a cat")
    assert ids_of(with_keys(metadata, bos_token_id=1, add_bos_token=True), "a cat") == [1, *plain]
    both = with_keys(metadata, bos_token_id=1, add_bos_token=True, add_eos_token=True)
    assert ids_of(both, "a cat") == [1, *plain, 2]
    # Llama 3's files of some converters leave it out.
    silent = with_keys(metadata, bos_token_id=1, add_bos_token=None, pre="llama-bpe")
    assert ids_of(silent, "a cat")[0] == 1


def test_every_token_that_ends_an_answer_counts(metadata: dict[str, Any]) -> None:
    """The file states <|im_end|> alone; <|endoftext|> is known by its name."""
    assert generation_config_of(metadata)["eos_token_id"] == [2, 0]
    stated = {**metadata, "general.sampling.temp": 0.25, "general.sampling.top_k": 20}
    assert generation_config_of(with_keys(stated, eot_token_id=3)) == {
        "eos_token_id": [2, 3, 0], "temperature": 0.25, "top_k": 20,
    }  # fmt: skip


SPM = [
    ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ("\u2581t", -1.0, 1), ("he", -2.0, 1), ("\u2581the", -3.0, 1), ("\u2581", -4.0, 1), ("t", -5.0, 1),
    ("h", -6.0, 1), ("e", -7.0, 1),
    ("c", -8.0, 1), ("a", -9.0, 1), ("at", -1.5, 1), ("<|user|>", -1000.0, 3),
]  # fmt: skip
"""(token, score, type): what SentencePiece would have learned from a few words."""


def spm(**changes: Any) -> dict[str, Any]:
    tokens, scores, types = (list(column) for column in zip(*SPM, strict=True))
    keys: dict[str, Any] = {"model": "llama", "pre": "default", "tokens": tokens}
    values = {"general.architecture": "llama", **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    lists = {"tokenizer.ggml.scores": tuple(scores), "tokenizer.ggml.token_type": tuple(types)}
    return with_keys({**values, **lists}, **changes)


def tokens_of(values: dict[str, Any], text: str) -> list[str]:
    return list(Backend.from_str(json.dumps(tokenizer_of(values))).encode(text).tokens)


def test_sentencepiece_merges_the_best_score_first() -> None:
    assert tokens_of(spm(), "the cat") == ["<s>", "\u2581the", "\u2581", "c", "at"]
    assert tokens_of(spm(add_bos_token=False), "the") == ["\u2581the"]
    assert tokens_of(spm(add_bos_token=False, add_space_prefix=False), "the") == ["t", "he"]
    # A character without a token is written as bytes.
    assert tokens_of(spm(add_bos_token=False), "\u00e9") == ["\u2581", "<0xC3>", "<0xA9>"]
    # A space is put before every stretch of text, as the original tokenizers of Llama 2 and Phi-3 do.
    assert tokens_of(spm(add_bos_token=False), "<|user|>the") == ["<|user|>", "\u2581the"]
    backend = Backend.from_str(json.dumps(tokenizer_of(spm())))
    assert backend.decode(backend.encode("the cat \u00e9").ids) == "the cat \u00e9"


def test_merges_that_would_take_gigabytes_are_refused() -> None:
    """Each of these tokens is made by as many merges as it has characters. The file takes half a megabyte."""
    tokens = ["a" * length for length in range(1, 1025)]
    values = spm(tokens=tokens, scores=(0.0,) * len(tokens), token_type=(1,) * len(tokens))
    with pytest.raises(GgufError, match="must make at most 16777216 characters, but those up to token 369 make"):
        tokenizer_of(values)


def test_phi_3s_special_tokens_swallow_the_blanks_behind_them() -> None:
    phi3 = {**spm(add_bos_token=False), "general.architecture": "phi3"}
    assert ids_of(phi3, "<|user|>\n the") == ids_of(phi3, "<|user|>the")
    assert tokens_of(spm(add_bos_token=False), "<|user|>\nthe") == ["<|user|>", "\u2581", "<0x0A>", "t", "he"]


def test_gemmas_spaces_are_tokens() -> None:
    """Its file writes tokens of several spaces as spaces, and its scores say nothing."""
    values = {**spm(add_space_prefix=False), "general.architecture": "gemma2"}
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "  "]
    values["tokenizer.ggml.scores"] = (*[-1000.0] * len(SPM), -1000.0)
    values["tokenizer.ggml.token_type"] = (*values["tokenizer.ggml.token_type"], 4)
    assert tokens_of(values, "a  a") == ["<s>", "a", "\u2581\u2581", "a"]


@pytest.mark.parametrize("kind", ["embedded", "llama", "phi3", "gemma2"])
def test_forced_texts_have_the_ids_of_the_library(metadata: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """From the tables that grammars are compiled with, which hold the merges of these tokenizers."""
    values = metadata if kind == "embedded" else {**spm(add_space_prefix=False), "general.architecture": kind}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_of(values)))
    num_tokens = len(values["tokenizer.ggml.tokens"])
    tables, library = tables_of(tmp_path, num_tokens), reading.tokenizer_of(tmp_path)
    assert tables.facts.symbols
    for text in (*TEXTS, "the cat  the", "a<|user|> \n the", "\u00e9t\u00e9"):
        assert MergingTokenizer(tables)(text) == library.encode(text, add_special_tokens=False).ids


def test_a_files_vocabulary_is_that_of_its_folder(tmp_path: Path) -> None:
    tables = [tables_of(path, 3_072) for path in (convert(EMBEDDED_PATH, tmp_path / "tiny.gguf"), EMBEDDED_PATH)]
    ours, original = map(MergingTokenizer, tables)
    for text in TEXTS:
        assert ours(text) == original(text)
    assert tables[0].tokens() == tables[1].tokens()
    assert tables[0].facts.eos_ids[0] == tables[1].facts.eos_ids[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model must be one of gpt2, llama, gemma4, bert, t5, but is 'rwkv'"),
        ({"model": None}, "lacks tokenizer.ggml.model"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not known; known are: llama-bpe"),
        ({"pre": None}, "lacks tokenizer.ggml.pre, .* convert the model again"),
        ({"pre": "default"}, "lacks tokenizer.ggml.pre"),
        ({"tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokens": (1, 2)}, "tokenizer.ggml.tokens must be a list"),
        ({"tokens": ["a", "b", "a"]}, "holds 'a' twice, as 0 and as 2"),
        ({"token_type": (1, 2)}, "token_type must have an item for each of 3072 tokens, but has 2"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "merges must hold two tokens in each item, but holds 'ab'"),
        ({"bos_token_id": 3072, "add_bos_token": True}, "bos_token_id must be an id from 0 to 3071, but is 3072"),
        ({"add_bos_token": 1}, "add_bos_token must be a bool, but is 1"),
    ],
)
def test_unusable_metadata_is_refused_by_key(metadata: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(GgufError, match=words):
        tokenizer_of(with_keys(metadata, **changes))


@pytest.mark.parametrize("template", ["chatml", "", 5])
def test_a_template_must_be_jinja(metadata: dict[str, Any], template: object) -> None:
    with pytest.raises(GgufError, match=r"tokenizer.chat_template must be a Jinja template, but is"):
        tokenizer_config_of({**metadata, "tokenizer.chat_template": template})


def test_merges_of_no_tokens_are_refused(tmp_path: Path) -> None:
    metadata, tensors = content_of(EMBEDDED_PATH, lambda _: as_bf16)
    file = write(tmp_path / "tiny.gguf", {**metadata, "tokenizer.ggml.merges": ["no-such token"]}, tensors)
    with pytest.raises(ModelError, match=r"the tokenizer of tiny.gguf cannot be loaded: .*no-such"):
        ServedModel.load(file, ("m",), max_model_len=2048, vocab_size=3072)
