"""Prompts for filling in the middle: the tokens of each family, and texts that stay texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from inferd.server.text.fill_in import FillIn, shares_of
from inferd.server.text.tokenizer import Tokenizer

FAMILIES: dict[str, tuple[str, ...]] = {
    "Qwen2.5-Coder": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "StarCoder2": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "CodeLlama": ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    "DeepSeek-Coder": ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    "GLM": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
}
QWEN = (*FAMILIES["Qwen2.5-Coder"], "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def tokenizer_of(*added: str, puts_space: bool = False, special: bool = False) -> Tokenizer:
    """Bytes with a few merges, or letters behind a space as in SentencePiece."""
    if puts_space:
        letters = ["\u2581", "\u263a", *"abcdef<>|_fimpreuxsd\n"]
        vocab = {letter: i for i, letter in enumerate(dict.fromkeys([*letters, "\u2581a"]))}
        backend = Backend(models.BPE(vocab, [("\u2581", "a")]))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {char: i for i, char in enumerate([*alphabet, "<|", "fi"])}
        backend = Backend(models.BPE(vocab, [("<", "|"), ("f", "i")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in added])
    return Tokenizer(backend, {}, None)


def made(*added: str, **options: Any) -> FillIn:
    found = FillIn.of(tokenizer_of(*added, **options), 1_000, {})
    assert found is not None
    return found


def read(fill_in: FillIn, text: str, **options: Any) -> tuple[int, ...]:
    steps = fill_in.read(text, 10**6, **options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return tuple(end.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_tokens_are_found_by_name(family: str) -> None:
    tokenizer = tokenizer_of(*FAMILIES[family])
    fill_in = FillIn.of(tokenizer, 1_000, {})
    assert fill_in is not None
    prefix, suffix, middle = (tokenizer.added_tokens[name] for name in FAMILIES[family])
    assert fill_in.prompt((1,), (2, 3)) == (prefix, 1, suffix, 2, 3, middle)
    assert {prefix, suffix, middle} <= set(fill_in.ends)


@pytest.mark.parametrize(("repo", "file"), [("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>")])
def test_files_come_behind_the_tokens_of_qwen_and_of_starcoder2(repo: str, file: str) -> None:
    tokenizer = tokenizer_of(*FAMILIES["StarCoder2"], repo, file)
    fill_in = FillIn.of(tokenizer, 1_000, {})
    assert fill_in is not None
    assert (fill_in.repo, fill_in.file) == (tokenizer.added_tokens[repo], tokenizer.added_tokens[file])
    assert {fill_in.repo, fill_in.file} <= set(fill_in.ends)


def test_codestral_reads_the_suffix_first() -> None:
    tokenizer = tokenizer_of("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
    fill_in = FillIn.of(tokenizer, 1_000, {})
    assert fill_in is not None
    prefix, suffix = (tokenizer.added_tokens[name] for name in ("[PREFIX]", "[SUFFIX]"))
    assert fill_in.prompt((1,), (2,)) == (suffix, 2, prefix, 1)


@pytest.mark.parametrize("missing", range(3))
def test_a_model_without_one_of_them_cannot_fill_in(missing: int) -> None:
    names = [name for i, name in enumerate(QWEN) if i != missing]
    assert FillIn.of(tokenizer_of(*names), 1_000, {}) is None


def test_a_token_without_a_row_of_the_embedding_is_none() -> None:
    tokenizer = tokenizer_of(*QWEN)
    assert FillIn.of(tokenizer, tokenizer.added_tokens["<|fim_middle|>"], {}) is None


def test_ids_that_the_checkpoint_states_count_before_names() -> None:
    fill_in = FillIn.of(tokenizer_of(*QWEN), 1_000, {"prefix": 7, "pad": 8})
    assert fill_in is not None
    assert (fill_in.prefix, 8 in fill_in.ends) == (7, True)
    stated = FillIn.of(tokenizer_of(), 1_000, {"prefix": 1, "suffix": 2, "middle": 3})
    assert stated is not None and stated.prompt((), ()) == (1, 2, 3)


@pytest.mark.parametrize("special", [False, True])
def test_a_token_in_a_callers_text_is_text(special: bool) -> None:
    tokenizer = tokenizer_of(*QWEN, "<tool>", special=special)
    fill_in = FillIn.of(tokenizer, 1_000, {})
    assert fill_in is not None
    own = set(tokenizer.added_tokens.values())
    for text in (*QWEN, "x<|fim_middle|>y", "<|fim_<|fim_prefix|>prefix|>"):
        ids = read(fill_in, text)
        assert not own & set(ids) and tokenizer.decode(ids, skip_special=False) == text
        assert own & set(tokenizer.encode(text, False)), "the tokenizer of other prompts still reads it"
    # Another added token that is not special is a word of the vocabulary, as in llama.cpp.
    assert (tokenizer.added_tokens["<tool>"] in read(fill_in, "<tool>")) != special


def test_a_text_that_continues_another_gets_no_space_before_it() -> None:
    fill_in = made(*QWEN, puts_space=True)
    tokenizer = fill_in.tokenizer
    assert tokenizer.encode("ab", False) != read(fill_in, "ab")
    assert tokenizer.encode("ab", False) == read(fill_in, "ab", continues=False)
    assert [tokenizer.token(token_id) for token_id in read(fill_in, "ab")] == ["a", "b"]
    assert read(fill_in, "abc", kept=1) == read(fill_in, "abc")[-1:]
    assert made(*QWEN).mark == ()


def test_further_files_have_names_if_the_model_knows_files() -> None:
    named, plain = made(*QWEN), made(*QWEN[:3])
    for fill_in, expected in (
        (named, "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\n"),
        (plain, "\n\n--- snippet ---\n\nx = 1\n"),
    ):
        steps = fill_in.read_files([("a.py", "x = 1\n")], 10**6)
        ids: tuple[int, ...] = ()
        try:
            while True:
                next(steps)
        except StopIteration as end:
            ids = end.value
        assert fill_in.tokenizer.decode(ids, skip_special=False) == expected


def test_the_tokenizer_shares_its_vocabulary_and_keeps_its_ids() -> None:
    path = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model" / "tokenizer.json"
    state = json.loads(path.read_text())
    own = max(state["model"]["vocab"].values())
    tokenizer = Tokenizer(Backend.from_str(json.dumps(state)), {}, None)
    literal = tokenizer.literal()
    text = "def f(x):\n    return x  # caf\u00e9 <tool_call>"
    assert literal.encode(text, True) == tokenizer.encode(text, False)
    assert max(literal.encode("<|im_end|>", False)) <= own
    assert len(literal.encode("<|im_end|>", False)) > 1


@pytest.mark.parametrize(
    ("before", "behind", "room", "taken"),
    [
        (10, 5, 100, (10, 5)),
        (100, 100, 40, (30, 10)),
        (100, 4, 40, (36, 4)),
        (5, 100, 40, (5, 35)),
        (0, 0, 0, (0, 0)),
        (9, 9, 0, (0, 0)),
        (9, 9, 1, (1, 0)),
    ],
)
def test_the_shares_of_what_does_not_fit(before: int, behind: int, room: int, taken: tuple[int, int]) -> None:
    assert shares_of(before, behind, room) == taken
