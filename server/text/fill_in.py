"""Fill in the middle: the tokens that ask a code model for the text between a prefix and a suffix.

Finds them among a tokenizer's tokens, and puts the parts of a prompt together. The parts are tokenized one by one, so
that a special token in a caller's text stays text. Knows no request.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from inferd.server.text.tokenizer import Tokenizer

_NAMES: Mapping[str, tuple[str, ...]] = {
    "prefix": (
        "<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<\uff5cfim\u2581begin\uff5c>", "\u2581<PRE>", "<PRE>",
        "[PREFIX]", "<|code_prefix|>", "<|prefix|>",
    ),
    "suffix": (
        "<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<\uff5cfim\u2581hole\uff5c>", "\u2581<SUF>", "<SUF>",
        "[SUFFIX]", "<|code_suffix|>", "<|suffix|>",
    ),
    "middle": (
        "<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<\uff5cfim\u2581end\uff5c>", "\u2581<MID>", "<MID>",
        "[MIDDLE]", "<|code_middle|>", "<|middle|>",
    ),
    "pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>"),
    "repo": ("<|repo_name|>", "<repo_name>", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
    "file": ("<|file_sep|>", "<file_sep>"),
}  # fmt: skip
"""The names of each part's token: those of Qwen, StarCoder and Granite, DeepSeek, CodeLlama, Codestral, GLM, Falcon."""

_FURTHER_ENDS = (
    "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|EOT|>", "<EOT>", "\u2581<EOT>", "_<EOT>", "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|file_separator|>", "<reponame>",
)  # fmt: skip
"""Tokens that end a filled middle, besides those above: the next file or repository begins, or the text ends."""

_SUFFIX_FIRST = "[SUFFIX]"
"""Codestral reads the suffix, then the prefix, and no token for the middle."""

_PROJECT, _FILE = "myproject\n", "filename\n"
"""llama.cpp's names for the project and for the file with the gap, which no request has."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Written before each further text for a model without tokens for files, as llama.cpp does."""

_MARK = "\u263a"
"""A character that is tokenized before a text which continues another one, and left out of the ids, as Mistral's and
Meta's own code does."""


@dataclass(frozen=True, slots=True)
class FillIn:
    """Makes the prompts of one model."""

    prefix: int
    suffix: int
    middle: int | None
    """None: the prefix comes last."""
    repo: int | None
    file: int | None
    """Tokens before the name of a repository and of a file; both or none."""
    ends: tuple[int, ...]
    """Tokens that end the filled text."""
    tokenizer: Tokenizer
    """It reads special tokens in a text as text."""
    begin: tuple[int, ...]
    """The ids that every text begins with."""
    mark: tuple[int, ...]
    """The ids of `_MARK`, if the tokenizer puts a space before every text; else empty."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, stated: Mapping[str, int]) -> Self | None:
        """None for a model without such tokens. `stated`: the ids that the checkpoint states by part, such as
        "prefix"."""
        known = {text: token_id for text, token_id in tokenizer.added_tokens.items() if token_id < vocab_size}
        found = {part: next((known[name] for name in names if name in known), None) for part, names in _NAMES.items()}
        found |= {part: token_id for part, token_id in stated.items() if 0 <= token_id < vocab_size}
        prefix, suffix, middle = found["prefix"], found["suffix"], found["middle"]
        if suffix is not None and suffix == known.get(_SUFFIX_FIRST):
            middle = None
        elif middle is None:
            return None
        if prefix is None or suffix is None:
            return None
        has_files = found["repo"] is not None and found["file"] is not None
        ends = [*found.values(), *(known.get(name) for name in _FURTHER_ENDS)]
        literal = tokenizer.literal(frozenset(token_id for token_id in found.values() if token_id is not None))
        return cls(
            prefix=prefix,
            suffix=suffix,
            middle=middle,
            repo=found["repo"] if has_files else None,
            file=found["file"] if has_files else None,
            ends=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
            tokenizer=literal,
            begin=tokenizer.begin,
            mark=_mark_of(literal),
        )

    @property
    def num_own(self) -> int:
        """Most tokens of a prompt besides those of the caller's texts and of further files."""
        return len(self.begin) + 3

    def read(
        self, text: str, most: int, kept: int | None = None, *, continues: bool = True
    ) -> Generator[int, None, tuple[int, ...]]:
        """The ids of a text, as `Tokenizer.encode_in_parts` yields and raises. `continues`: it follows other text."""
        if not (continues and self.mark and text):
            return (yield from self.tokenizer.encode_in_parts(text, False, most, kept))
        ids = yield from self.tokenizer.encode_in_parts(_MARK + text, False, most + len(self.mark), None)
        return ids[len(self.mark) :][-(kept or 0) :]

    def read_files(self, files: Sequence[tuple[str, str]], most: int) -> Generator[int, None, tuple[int, ...]]:
        """The ids of further files, each (name, text), and of the beginning of the file with the gap.

        A gap without further files is no repository, as in `suffix`: Qwen2.5-Coder-0.5B-Instruct (Q4) filled 12 of 12
        short gaps so, and ended 7 by itself. In a repository of one file it filled 9 and ended 3.
        """
        if not files:
            return ()
        ids: list[int] = []
        if self.repo is not None:
            ids += [self.repo, *(yield from self.read(_PROJECT, most))]
        for name, text in files:
            for part in self._before_file(name):
                ids += [part] if isinstance(part, int) else (yield from self.read(part, most))
            ids += yield from self.read(text, most)
        if self.file is not None:
            ids += [self.file, *(yield from self.read(_FILE, most))]
        return tuple(ids)

    def _before_file(self, name: str) -> Iterator[int | str]:
        if self.file is None:
            yield _SNIPPET
        else:
            yield self.file
            yield f"{name}\n"

    def prompt(
        self, before: Sequence[int], behind: Sequence[int], files: Sequence[int] = (), *, add_special: bool = True
    ) -> tuple[int, ...]:
        """The whole prompt, from the ids before the gap, those behind it, and those of `read_files`."""
        begin = self.begin if add_special else ()
        if self.middle is None:
            return (*begin, *files, self.suffix, *behind, self.prefix, *before)
        return (*begin, *files, self.prefix, *before, self.suffix, *behind, self.middle)


def _mark_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    mark, letter = tokenizer.encode(_MARK, False), tokenizer.encode("a", False)
    both = tokenizer.encode(_MARK + "a", False)
    return mark if both != mark + letter and both[: len(mark)] == mark else ()


def shares_of(num_before: int, num_behind: int, room: int) -> tuple[int, int]:
    """How many tokens to take before the gap and behind it, of `room` in all. If they do not fit, those behind it get a
    quarter, or what the others leave."""
    behind = min(num_behind, max(room // 4, room - num_before))
    return min(num_before, room - behind), behind
