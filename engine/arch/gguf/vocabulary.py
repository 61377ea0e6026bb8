"""The keys `tokenizer.ggml.*` of a GGUF file, checked. It knows no kind of tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferd.engine.arch.gguf.header import GgufError, Value
from inferd.engine.arch.shown import shown

Json = dict[str, Any]
Merges = list[str] | list[list[str]]
"""All merges as lines of two tokens with a blank between them, or all as pairs of tokens if a token has a blank itself.
The library reads lines in a third of the memory."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
SPACE = "\u2581"
"""Character that stands for a space in SentencePiece's tokens, and for the beginning of a word in WordPiece's."""

_MAX_TOKEN_CHARS, _MAX_CHARS = 2**10, 2**22
"""Most characters of a token, and of all. A vocabulary of 262,144 tokens has 2 million. Merges are found by cutting
each token at each place, which takes time to the square of its length."""


class Vocabulary:
    """The keys `tokenizer.ggml.*` of one file, checked."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        """Raises `GgufError` for a key of another type, and for lists of different lengths."""
        self._values = values
        self.kind: str = self._get("model", str, None)
        self.tokens = self._tokens()
        size = len(self.tokens)
        self.types: Sequence[int] = self._list("token_type", size) or (NORMAL,) * size
        self.scores: Sequence[float] = self._list("scores", size)

    def flag(self, name: str, default: bool) -> bool:
        found: bool = self._get(name, bool, default)
        return found

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """The id that `name` states. Raises `GgufError` if it is outside of the vocabulary."""
        key = f"tokenizer.ggml.{name}"
        found = self._values.get(key, default)
        if found is None or (key not in self._values and not self._is_id(found)):
            return None
        if not self._is_id(found):
            raise GgufError(f"{key} must be an id from 0 to {len(self.tokens) - 1}, but is {shown(found)}")
        assert isinstance(found, int)
        return found

    def merges(self) -> Merges | None:
        """The file's merges; None if it has none."""
        if "tokenizer.ggml.merges" not in self._values:
            return None
        lines: list[str] = self._get("merges", list, None)
        if all(map(is_line, lines)):
            return lines
        pairs = []
        for merge in lines:
            cut = merge.find(" ", 1)
            if cut < 0:
                raise GgufError(f"tokenizer.ggml.merges must hold two tokens in each item, but holds {shown(merge)}")
            pairs.append([merge[:cut], merge[cut + 1 :]])
        return pairs

    def whole_numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if the file has none."""
        found: tuple[Any, ...] = self._get(name, tuple, ())
        if any(type(number) is not int for number in found):
            raise GgufError(f"tokenizer.ggml.{name} must be a list of whole numbers")
        return found

    def text(self, name: str) -> str | None:
        found = self._values.get(f"tokenizer.ggml.{name}")
        return found if isinstance(found, str) else None

    def _is_id(self, value: object) -> bool:
        return type(value) is int and 0 <= value < len(self.tokens)

    def _tokens(self) -> list[str]:
        tokens: list[str] = self._get("tokens", list, None)
        if not tokens or not isinstance(tokens[0], str):
            raise GgufError("tokenizer.ggml.tokens must be a list of texts")
        longest, total = max(map(len, tokens)), sum(map(len, tokens))
        if longest > _MAX_TOKEN_CHARS or total > _MAX_CHARS:
            raise GgufError(
                f"tokenizer.ggml.tokens must have at most {_MAX_TOKEN_CHARS} characters in a token and {_MAX_CHARS} in "
                f"all, but has {longest} and {total}"
            )
        named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        if len(set(named)) < len(named):
            seen: dict[str, int] = {}
            for index, token in enumerate(named):
                if seen.setdefault(token, index) != index:
                    raise GgufError(
                        f"tokenizer.ggml.tokens holds {shown(token)} twice, as {seen[token]} and as {index}"
                    )
        return named

    def _list(self, name: str, size: int) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._get(name, tuple, ())
        if found and len(found) != size:
            raise GgufError(f"tokenizer.ggml.{name} must have an item for each of {size} tokens, but has {len(found)}")
        return found

    def _get(self, name: str, kind: type, default: Any) -> Any:
        found = self._values.get(f"tokenizer.ggml.{name}", default)
        if found is None:
            raise GgufError(f"the metadata lacks tokenizer.ggml.{name}")
        if not isinstance(found, kind):
            raise GgufError(f"tokenizer.ggml.{name} must be a {kind.__name__}, but is {shown(found)}")
        return found


def is_line(merge: str) -> bool:
    """Whether the library reads two tokens from this line. It takes one of its own comments for no merge."""
    return merge.count(" ") == 1 and merge[0] != " " and merge[-1] != " " and not merge.startswith("#version")
