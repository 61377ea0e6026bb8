"""Compares incremental text with the tokenizers library, which reads all ids at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from inferd.engine.api.errors import ModelError
from inferd.server.text.detokenizer import Detokenizer, TokenBytes

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
METASPACE = "\u2581"


@cache
def byte_level() -> Tokenizer:
    """The embedded model's tokenizer, with a special token that contains a character that stands for no byte."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|\u65e5\u672c|>", special=True)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Like Llama 2's tokenizer: words begin with a mark for a space, and each byte has a token."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "Hello", "a", "\u20ac", "\n"]
    words += [METASPACE, f"{METASPACE}Hello", f"{METASPACE}world", f"{METASPACE}{METASPACE}"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def read(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer), prompt, skip)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, often those of single bytes, so that characters break everywhere. Some are above the last token."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return st.lists(st.one_of(st.integers(0, 300), st.integers(0, size + 5)), max_size=20)


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_text_is_the_librarys_for_any_ids(data: st.DataObject, skip: bool) -> None:
    tokenizer = byte_level()
    ids = data.draw(ids_of(tokenizer))
    assert "".join(read(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans(), text=st.text(max_size=12))
def test_byte_fallback_text_is_the_librarys_for_whole_characters(data: st.DataObject, skip: bool, text: str) -> None:
    """At bytes that are not UTF-8 the library drops the whole run of byte tokens, which a stream cannot foresee."""
    tokenizer = byte_fallback()
    as_bytes = [3 + byte for byte in text.encode()]
    words = data.draw(st.lists(st.sampled_from([0, 1, 2, *range(259, 267)]), max_size=8))
    ids = [*words, *as_bytes, *words]
    assert "".join(read(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_replacement_character_before_the_end(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    table = TokenBytes(tokenizer)
    single = {table.of(i): i for i in range(tokenizer.get_vocab_size()) if len(table.of(i)) == 1}
    ids = [single[bytes((byte,))] for byte in "a\u20acb\U0001f600".encode()]
    assert read(tokenizer, ids, True) == ["a", "", "", "\u20ac", "b", "", "", "", "\U0001f600", ""]
    assert read(tokenizer, ids[:-1], True)[-2:] == ["", "\ufffd"]


@settings(deadline=None)
@given(prompt=st.text(max_size=6), output=st.text(max_size=6), cut=st.integers(0, 24))
def test_a_prompt_that_ends_inside_a_character_is_not_repeated(prompt: str, output: str, cut: int) -> None:
    """A text's bytes are cut anywhere. The prompt's whole characters and the output's text together are the text."""
    tokenizer = byte_level()
    table = TokenBytes(tokenizer)
    single = {table.of(i): i for i in range(tokenizer.get_vocab_size()) if len(table.of(i)) == 1}
    data = (prompt + output).encode()
    cut = min(cut, len(data))
    ids = [single[bytes((byte,))] for byte in data]
    whole = data[:cut].decode("utf-8", "ignore")
    assert whole + "".join(read(tokenizer, ids[cut:], True, tuple(ids[:cut]))) == prompt + output


def test_an_output_that_does_not_finish_the_prompts_character_starts_afresh() -> None:
    tokenizer = byte_level()
    euro = tokenizer.encode("\u20ac").ids
    table = TokenBytes(tokenizer)
    if len(euro) == 1:
        pytest.fail("the vocabulary has the character whole; choose another")
    assert table.join(euro, False) == "\u20ac".encode()
    assert "".join(read(tokenizer, tokenizer.encode("ab").ids, True, tuple(euro[:1]))) == "ab"


def test_the_first_words_space_is_kept_after_a_prompt_and_dropped_at_the_start() -> None:
    tokenizer = byte_fallback()
    hello, world = (tokenizer.get_vocab()[METASPACE + word] for word in ("Hello", "world"))
    assert "".join(read(tokenizer, [hello, world], True)) == "Hello world"
    assert "".join(read(tokenizer, [world], True, (1, hello))) == " world"
    assert "".join(read(tokenizer, [hello], True, (1,))) == "Hello", "a prompt of special tokens is no text"


WORDS = ("a", "##b", "it", "'", "s", "'s", ".", ",", "?", "!", "n't", "##.", "re", "'ve", "it.s")


def of_words() -> Tokenizer:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=12),
    decoder=st.sampled_from([decoders.WordPiece(), decoders.WordPiece(cleanup=False), None]),
)
def test_texts_of_words_and_their_parts_are_the_librarys(ids: list[int], decoder: decoders.Decoder | None) -> None:
    """The library keeps the mark of a word's part at the start of a text. No model's text begins so."""
    if WORDS[ids[0]].startswith("##") and decoder is not None:
        ids = [0, *ids]
    tokenizer = of_words()
    tokenizer.decoder = decoder
    assert "".join(read(tokenizer, ids, False)) == tokenizer.decode(ids)


def test_a_decoder_that_needs_its_neighbours_is_refused_by_name() -> None:
    tokenizer = of_words()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="CTC"):
        TokenBytes(tokenizer)
