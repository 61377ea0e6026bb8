"""The checkpoint's tokenizer: text -> ids exactly as the checkpoint defines it, without torch.

Calls are thread-safe and hold the interpreter lock only briefly. Truncation and padding in a tokenizer file are
switched off, so that no prompt is silently cut. A long text is tokenized in parts, which bounds its memory and lets the
caller stop between two parts.
"""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Self, cast

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from inferd.engine.api.byte_alphabet import BYTE_OF_CHAR
from inferd.engine.api.errors import ModelError
from inferd.server.schema.embeddings import Side
from inferd.server.text.detokenizer import Detokenizer, TokenBytes
from inferd.server.text.pairs import PairFrame
from inferd.server.text.split_points import MAX_PART, PART, Span, split_points_of

MAX_WHOLE = 2**20
"""Most characters of a text for a tokenizer without split points: they take up to 600 MiB, one text at a time."""


class TooManyTokensError(Exception):
    """A text has more tokens than allowed."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: a lower bound, counted until the text was refused."""
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class NoSplitPointError(Exception):
    """A stretch of a text has no split point, and would take too much memory to tokenize."""

    def __init__(self, start: int, num_chars: int, limit: int) -> None:
        super().__init__(f"{num_chars} characters from {start} on")
        self.start, self.num_chars, self.limit = start, num_chars, limit


class Tokenizer:
    """Turns text into ids, and ids into text by the table `bytes`."""

    __slots__ = (
        "_backend", "_frame", "_most_bytes", "_own_ids", "_split_points", "added_text", "added_tokens", "bytes",
        "eos_token_id", "special_ids", "special_tokens",
    )  # fmt: skip

    def __init__(self, backend: Backend, special_tokens: Mapping[str, object], eos_token_id: int | None) -> None:
        """`special_tokens`: tokens that chat templates may name, such as "bos_token". Raises `ModelError`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._own_ids: Mapping[int, int] = {}
        """Ids of `_backend` that differ from those of the checkpoint -> the checkpoint's. Others are equal."""
        self.bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Tokens found in a text before it is split into words: text -> id."""
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Added tokens that are special and not shown in a text: text -> id."""
        self.special_tokens = dict(special_tokens)
        self.eos_token_id = eos_token_id
        self._frame = _frame_of(backend)
        self.added_text = self._added_text()
        """Text of the tokens that are added before each text. Empty if there are none, or if tokens are added behind it
        too."""
        state = _state_of(backend)
        self._most_bytes = _most_bytes(state)
        self._split_points = split_points_of(state) if self._frame else None

    def _added_text(self) -> str:
        before, behind = self._frame or ((), ())
        tokens = [self.token(token_id) or "" for token_id in before]
        return "".join(tokens) if not behind and all(token in self.added_tokens for token in tokens) else ""

    def has_own_bos(self, text: str) -> bool:
        """Whether `text` begins with the tokens that would be added before it."""
        return bool(self.added_text) and text.startswith(self.added_text)

    @property
    def num_tokens(self) -> int:
        """Number of tokens with a text; the embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids that are added before and behind every text; None if they cannot be separated from those of the
        text."""
        return self._frame

    def pair_frame(self) -> PairFrame | None:
        """The ids that are added around the two texts of a pair; None if there is no such form."""
        return PairFrame.of(self._backend)

    @property
    def begin(self) -> tuple[int, ...]:
        """The ids that are added before every text; none if they cannot be separated from those of the text."""
        return self._frame[0] if self._frame else ()

    @property
    def num_added(self) -> int:
        """Number of tokens that are added before and behind every text, if they can be separated from it."""
        return sum(map(len, self._frame or ()))

    def literal(self, token_ids: Collection[int] = ()) -> Self:
        """The same tokenizer for texts in which special tokens, and the added tokens `token_ids`, are only text."""
        backend = self._with_added(
            lambda token_id, token: _added(token, token.content, token.special or token_id in token_ids)
        )
        backend.encode_special_tokens = True
        other = copy.copy(self)
        other._backend = backend
        other._frame = ((), ())
        return other

    def renamed(self, names: Mapping[str, str], separator: str) -> Self:
        """The same tokenizer for texts in which added tokens have other names, and their own texts are only text.

        `names`: text of an added token -> its name, which must occur in no text. `separator`: a text that has no ids,
        but separates the characters beside it, as an added token does.
        """
        other = copy.copy(self)
        backend = other._backend = self._with_added(
            lambda _, token: _added(token, names.get(token.content, token.content), token.special)
        )
        backend.add_tokens([AddedToken(separator, normalized=False)])
        own_ids = {names.get(text, text): token_id for text, token_id in self.added_tokens.items()}
        own_ids[separator] = _NO_ID
        other._own_ids = {cast("int", backend.token_to_id(name)): token_id for name, token_id in own_ids.items()}
        tokens = [self.token(token_id) or "" for token_id in self.begin] if self.added_text else []
        other.added_text = "".join(names.get(token, token) for token in tokens)
        other._split_points = self._split_points and self._split_points.with_added((*names.values(), separator))
        return other

    def _with_added(self, of: Callable[[int, AddedToken], AddedToken]) -> Backend:
        """A tokenizer with the same model and other added tokens: `of(id, token)`."""
        backend = Backend(self._backend.model)  # shares the vocabulary
        if self._backend.normalizer is not None:
            backend.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self._backend.pre_tokenizer
        # All are added, in their order, because a token beyond the vocabulary gets the next free id.
        backend.add_tokens([of(*item) for item in sorted(self._backend.get_added_tokens_decoder().items())])
        return backend

    def finds_added(self, texts: Collection[str]) -> bool:
        """Whether one of these texts of added tokens gets the token's id, although it is none here."""
        listed = list(texts)
        encodings = self._backend.encode_batch_fast(listed, add_special_tokens=False)
        return any(
            self.added_tokens[text] in self._ids_of(encoding) for text, encoding in zip(listed, encodings, strict=True)
        )

    @property
    def folds_added(self) -> bool:
        """Whether other texts stand for added tokens, such as those of other case, because the tokenizer changes a
        text before it looks for them."""
        if not any(token.normalized for token in self._backend.get_added_tokens_decoder().values()):
            return False
        normalizer = self._backend.normalizer
        written = "" if normalizer is None else normalizer.__getstate__().decode()
        return any(f'"{kind}"' in written for kind in _FOLDING)

    def encode(self, text: str, add_special: bool, most: int | None = None) -> tuple[int, ...]:
        """The ids of `text`. `add_special` adds the tokens that the checkpoint begins and ends a text with.

        Raises `TooManyTokensError` for more than `most`, because listing millions of ids holds the interpreter lock.
        """
        # `encode` holds the interpreter lock throughout (2.2 s for 2 MB), the batch call for a hundredth of that time.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special and not self._own_ids)[0]
        if most is not None and len(encoding) > most:
            raise TooManyTokensError(len(encoding))
        before, behind = self._frame if add_special and self._own_ids and self._frame else ((), ())
        return (*before, *self._ids_of(encoding), *behind)

    def _ids_of(self, encoding: Encoding) -> Sequence[int]:
        if not self._own_ids:
            return encoding.ids
        own_ids = (self._own_ids.get(token_id, token_id) for token_id in encoding.ids)
        return [token_id for token_id in own_ids if token_id != _NO_ID]

    def encode_in_parts(
        self, text: str, add_special: bool, most: int, kept: int | None = None, side: Side | None = None
    ) -> Generator[int, None, tuple[int, ...]]:
        """`encode`, a part at a time. Yields before each part the number of its characters.

        `kept`: only so many ids are needed, the last ones or those of `cut` with `side`, so only the text for them is
        tokenized. Raises `TooManyTokensError` if more than `most` ids are needed, and `NoSplitPointError`.
        """
        if len(text) <= 2 * PART:
            return self.cut(self.encode(text, add_special, most), kept, side)
        spans: list[Span] = []
        for span in self._split_points.spans(text) if self._split_points else [(0, len(text))]:
            spans += [span] if span is not None else []
            yield 0
        before, behind = self._frame if add_special and self._frame else ((), ())
        limit = MAX_PART if self._split_points else MAX_WHOLE
        parts: list[array[int]] = []
        num_tokens = len(before) + len(behind)
        is_backward = kept is not None and side != "right"
        for start, end in reversed(spans) if is_backward else spans:
            if end - start > limit:
                raise NoSplitPointError(start, end - start, limit)
            yield end - start
            is_framed = add_special and self._frame is None
            encoding = self._backend.encode_batch_fast([text[start:end]], add_special_tokens=is_framed)[0]
            num_tokens += len(encoding)
            if kept is None and num_tokens > most:
                raise TooManyTokensError(num_tokens)
            parts.append(array("I", self._ids_of(encoding)))
            del encoding  # otherwise it lives until the next part was tokenized
            if kept is not None and num_tokens >= kept + len(before):
                break
        ids = list(before)
        for part in reversed(parts) if is_backward else parts:
            ids += part  # part by part: listing a million ids at once holds the interpreter lock for 30 ms
        ids += behind
        return self.cut(tuple(ids), kept, side)

    def cut(self, token_ids: tuple[int, ...], kept: int | None, side: Side | None) -> tuple[int, ...]:
        """At most `kept` of a text's ids. Without a `side`, the last ones. Otherwise that side of the text is cut, and
        the tokens that are added around every text stay, as sentence-transformers cuts."""
        if kept is None or len(token_ids) <= kept:
            return token_ids
        if side is None:
            return token_ids[-kept:]
        before, behind = self._frame or ((), ())
        has_frame = token_ids[: len(before)] == before and token_ids[len(token_ids) - len(behind) :] == behind
        if not has_frame or len(before) + len(behind) >= kept:  # ids of a client need not have these tokens
            before = behind = ()
        own = token_ids[len(before) : len(token_ids) - len(behind)]
        num_own = kept - len(before) - len(behind)
        return (*before, *(own[:num_own] if side == "right" else own[-num_own:]), *behind)

    def offsets(self, text: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The character in `text` at which each id begins. The ids must be those of `encode`, with added tokens or
        without, also of a `renamed` tokenizer.

        A token covers the text up to the beginning of the next one. Tokens that `encode` adds, and all parts of a
        character but one, cover nothing.
        """
        before, behind = self._frame or ((), ())
        for num_before, num_behind in ((len(before), len(behind)), (0, 0)):
            detokenizer = Detokenizer(self.bytes, (), skip_special=False)
            own = token_ids[num_before : len(token_ids) - num_behind]
            pieces = [*[""] * num_before, *map(detokenizer.feed, own), *[""] * num_behind]
            if "".join(pieces) == text:
                return tuple(accumulate(map(len, pieces[:-1]), initial=0))
        # The tokenizer rewrites or drops characters; the library knows which characters each token was made from.
        read = [self._backend.encode_batch([text], add_special_tokens=adds)[0] for adds in (False, True)]
        spans = next((encoding.offsets for encoding in read if encoding.ids == list(token_ids)), None)
        if spans is None:  # the text has control tokens that are text: the pieces differ from it in few blanks
            return tuple(min(end, len(text)) for end in accumulate(map(len, pieces[:-1]), initial=0))
        ends = accumulate((end for _, end in spans), max)
        begins = (min(end, start) if last else end for end, (start, last) in zip(ends, spans[1:], strict=False))
        return tuple(accumulate(begins, max, initial=0))

    def size_of(self, text: str) -> tuple[int, int]:
        """(bytes, lower bound of tokens); the bound is 0 if a token of this tokenizer may cover any number of bytes."""
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return num_bytes, -(-num_bytes // self._most_bytes) if self._most_bytes else 0

    def decode(self, token_ids: Iterable[int], skip_special: bool) -> str:
        """The text of these ids, which begin a text."""
        return self.bytes.join(token_ids, skip_special).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id without a token."""
        return self._backend.id_to_token(token_id)


_NO_ID = -1
"""Stands for the separator's id, which is left out."""
_FOLDING = ("Lowercase", "NFKC", "NFKD", "Nmt", "Precompiled", "BertNormalizer", "StripAccents")
"""Normalizers that make one text of several."""


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Raises `ModelError` for whatever a library raises for a tokenizer. `what` failed, in words."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust's panics are no `Exception`
        raise ModelError(f"{what}: {str(error)[:300]}") from error


def _added(token: AddedToken, content: str, special: bool) -> AddedToken:
    """The token with another text or importance. One with another text is found wherever it is written."""
    is_exact = content != token.content
    return AddedToken(
        content,
        single_word=token.single_word and not is_exact,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not is_exact,
        special=special,
    )


def _frame_of(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that are added before and behind every text; None if they cannot be separated from those of the text."""
    with as_model_error("the tokenizer does not read the text 'a'"):
        encoding = backend.encode("a", add_special_tokens=True)
    is_added = encoding.special_tokens_mask
    if 0 not in is_added:
        return None
    first, behind = is_added.index(0), len(is_added) - is_added[::-1].index(0)
    own = backend.encode("a", add_special_tokens=False).ids
    if encoding.ids[first:behind] != own:
        return None
    return tuple(encoding.ids[:first]), tuple(encoding.ids[behind:])


def _state_of(backend: Backend) -> dict[str, Any]:
    """The content of tokenizer.json without its merges. Of 262,000 tokens the library writes it whole, and it is read
    again, in 1.3 s (Gemma 3, 2 cores, AMD EPYC Zen 4, 2026-11-29)."""
    model = backend.model
    state: dict[str, Any] = {
        "added_tokens": [
            {"content": token.content, "lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
            for token in backend.get_added_tokens_decoder().values()
        ],
        "normalizer": _written(backend.normalizer),
        "pre_tokenizer": _written(backend.pre_tokenizer),
        "model": {"type": type(model).__name__},
    }
    if isinstance(model, BPE):
        state["model"] |= {name: getattr(model, name) for name in _BPE_FIELDS}
        state["model"]["vocab"] = backend.get_vocab(with_added_tokens=False)
    return state


_BPE_FIELDS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip


def _written(part: Any) -> Any:
    """A normalizer or pre-tokenizer as tokenizer.json writes it."""
    return None if part is None else json.loads(part.__getstate__())


def _most_bytes(state: Mapping[str, Any]) -> int:
    """Most bytes that one token covers in any text; 0 if there is no bound or it is not known.

    It is known for byte-level BPE that takes texts as they are: no character is rewritten, dropped or unknown, and no
    added token takes the blanks beside it.
    """
    splitter, model = state["pre_tokenizer"], state["model"]
    parts = splitter["pretokenizers"] if splitter and splitter["type"] == "Sequence" else [splitter]
    is_whole = all(part and (part["type"], part.get("behavior")) in _WHOLE for part in parts)
    takes_blanks = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    is_bytes = parts[-1] and parts[-1]["type"] == "ByteLevel" and model["type"] == "BPE" and not model["unk_token"]
    if state["normalizer"] or takes_blanks or not is_whole or not is_bytes:
        return 0
    if BYTE_OF_CHAR.keys() - model["vocab"].keys():
        return 0  # bytes without a token are dropped
    added = [len(token["content"].encode()) for token in state["added_tokens"]]
    # In this vocabulary a character is a byte.
    return max(*map(len, model["vocab"]), *added)


_WHOLE = {("ByteLevel", None), ("Digits", None)} | {
    ("Split", behavior) for behavior in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
}
"""(type, behavior) of splitters that keep every character of a text."""
