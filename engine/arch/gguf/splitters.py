"""How byte-level tokenizers cut a text into words before they merge bytes: by the names in `tokenizer.ggml.pre`.

llama.cpp gives a name to each way. The expressions are those of the tokenizer.json files that the names stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_SEED_CODER = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_TEKKEN = "|".join((*_WORDS, r"\p{N}")) + _TAIL
_GPT4O = "|".join((*(word + "(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _WORDS), r"\p{N}{1,3}")) + _TAIL
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Splitter:
    """One way to cut a text."""

    patterns: tuple[str, ...] = ()
    """Expressions, applied one after another: each match is a word, and so is the text between two. Empty: GPT-2's."""
    has_single_digits: bool = False
    """Whether each digit is a word, before GPT-2's expression is applied."""
    normalizer: str | None = None
    """Unicode normal form of the text."""
    keeps_known_words: bool = False
    """Whether a word in the vocabulary is one token, even if merges do not lead to it."""
    begins_with_bos: bool = False
    """Whether a text begins with BOS if the file does not say."""

    def json(self) -> Json:
        """`pre_tokenizer` of tokenizer.json."""
        parts: list[Json] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        if self.has_single_digits:
            parts.append({"type": "Digits", "individual_digits": True})
        use_regex = not self.patterns
        parts.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex})
        return {"type": "Sequence", "pretokenizers": parts}


def _named(splitter: Splitter, *names: str) -> dict[str, Splitter]:
    return dict.fromkeys(names, splitter)


SPLITTERS: dict[str, Splitter] = {
    **_named(
        Splitter((_LLAMA3,), keeps_known_words=True, begins_with_bos=True),
        "llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "lfm2", "jina-v5-nano",
    ),
    **_named(Splitter((_LLAMA3,)), "dbrx", "smaug-bpe", "chatglm-bpe"),
    **_named(Splitter((_LLAMA3,), keeps_known_words=True), "glm4"),
    **_named(Splitter((_QWEN2,), normalizer="NFC"), "qwen2"),
    **_named(Splitter((_QWEN2,)), "deepseek-r1-qwen", "megrez"),
    **_named(Splitter((_QWEN35,), normalizer="NFC"), "qwen35"),
    **_named(Splitter(has_single_digits=True), "smollm", "starcoder", "refact", "minerva-7b", "exaone"),
    **_named(Splitter(), "gpt-2", "phi-2", "mellum", "trillion", "granite-docling", "exaone4", "olmo", "roberta-bpe"),
    **_named(Splitter(normalizer="NFC"), "modern-bert"),
    **_named(Splitter((_TEKKEN,), keeps_known_words=True, begins_with_bos=True), "tekken"),
    **_named(Splitter((_GPT4O,)), "gpt-4o", "minimax-m2"),
    **_named(Splitter((_SEED_CODER,)), "seed-coder"),
    **_named(Splitter(_DEEPSEEK_CODER), "deepseek-coder"),
}  # fmt: skip
