"""The BPE model of a tokenizer.json: its merges as arrays, and the tokenizer that remains without them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer

from inferd.engine.grammar.spelling import BYTE_TOKEN, state_of
from inferd.engine.grammar.tables import DROPPED_ID, SPACE

_DROPPED = "<inferd: a character without a token>"
"""The name of `DROPPED_ID`. No tokenizer has such a token."""


class _Model(msgspec.Struct, frozen=True):
    """A BPE model of the library, in the form of tokenizer.json. Others, and what no model is known to have, are not
    decoded."""

    type: Literal["BPE"]
    vocab: dict[str, int]
    merges: Sequence[tuple[str, str] | str]
    unk_token: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False
    dropout: Literal[0] | None = None
    continuing_subword_prefix: Literal[""] | None = None
    end_of_word_suffix: Literal[""] | None = None


class Bpe:
    """A tokenizer.json with such a model."""

    def __init__(self, parts: dict[str, msgspec.Raw], model: _Model) -> None:
        """Raises `ValueError` or `KeyError` if the merges are none of this vocabulary."""
        merges = [_pair(each) for each in model.merges]
        self.pairs, self.results = _sorted(model.vocab, merges)
        lines = [f"{left} {right}" for left, right in merges]
        is_plain = all(line.count(" ") == 1 for line in lines)
        self.model = replace(model, merges=())
        self.joins_with_space = _joins_with_space(model, merges)
        self.text = msgspec.json.encode({**parts, "model": replace(model, merges=lines if is_plain else merges)})
        """The same in a form that the library reads in half the memory, unless a token has a blank."""
        self._added = parts.get("added_tokens", msgspec.Raw(b"[]")).copy()

    @classmethod
    def of(cls, text: bytes) -> Bpe | None:
        """None if it is no BPE model, or one with merges that depend on more than their rank."""
        try:
            parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            return cls(parts, msgspec.json.decode(parts["model"], type=_Model))
        except (ValueError, KeyError, OverflowError):  # the library says what is wrong with it, if anything
            return None

    def symbols(self, tokenizer: Tokenizer) -> str:
        """The tokenizer with the symbols that words begin as, and without merges; empty if no such tokenizer finds
        these. `tokenizer`: the whole one."""
        vocab, unknown = self.model.vocab, self.model.unk_token
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}

        def is_symbol(token: str) -> bool:
            return len(token) == 1 or token == unknown or BYTE_TOKEN.fullmatch(token) is not None

        if any(is_symbol(token) and token not in vocab for token in added):
            return ""
        # Words are looked up by their symbols, so all of their characters must be some, and none may stand for others.
        if self.model.ignore_merges and (len(unknown or "") == 1 or not set().union(*vocab) <= vocab.keys()):
            return ""
        kept = {token: token_id for token, token_id in vocab.items() if is_symbol(token)} | added
        if unknown is None and self.model.ignore_merges:
            unknown = _DROPPED
            kept[unknown] = DROPPED_ID
        whole = {
            "added_tokens": self._added,
            "normalizer": state_of(tokenizer.normalizer),
            "pre_tokenizer": state_of(tokenizer.pre_tokenizer),
            "model": replace(self.model, vocab=kept, unk_token=unknown, ignore_merges=False),
        }
        return msgspec.json.encode(whole).decode()

    def words(self) -> list[tuple[bytes, int]]:
        """The words that become a token whatever the merges say, in order."""
        words = self.model.vocab.items() if self.model.ignore_merges else ()
        return sorted((word.encode(), token_id) for word, token_id in words)


def _pair(merge: tuple[str, str] | str) -> tuple[str, str]:
    """Raises `ValueError`."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    if not left or not right or left.startswith("#version"):
        raise ValueError("nothing to merge, or a comment of the library's oldest form")
    return left, right


def _joins_with_space(model: _Model, merges: Sequence[tuple[str, str]]) -> str | None:
    """`Facts.joins_with_space`."""
    has_bytes = model.byte_fallback and all(f"<0x{byte:02X}>" in model.vocab for byte in range(256))
    drops_none = has_bytes or model.unk_token in model.vocab  # else the characters around one that is dropped may join
    if SPACE not in model.vocab or model.ignore_merges or not drops_none:
        return None
    before = {left for left, right in merges if right.startswith(SPACE)}
    if any(BYTE_TOKEN.search(left) or (model.unk_token and model.unk_token in left) for left in before):
        return None  # some symbols of such a token may stand for other characters
    return "".join(sorted({left[-1] for left in before}))


def _sorted(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> tuple[array[int], array[int]]:
    """`Tables.pairs` and `Tables.results`. Raises `KeyError` for a token that is none, and `ValueError` if a pair comes
    twice."""
    results = {
        vocab[left] << 32 | vocab[right]: rank << 32 | vocab[left + right] for rank, (left, right) in enumerate(merges)
    }
    if len(results) < len(merges):
        raise ValueError("a pair has two ranks")
    pairs = array("Q", sorted(results))
    return pairs, array("Q", map(results.__getitem__, pairs))
