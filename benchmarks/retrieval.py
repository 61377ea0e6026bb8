"""How well an encoder finds the sections of our documentation, in each format of weights.

    python -m benchmarks.retrieval FOLDER [--formats float32 int8 ...] [--out FILE]

A text is a section of docs/, without its heading. A query is the heading, or a question of `quality/questions.txt`.
nDCG@10 says how high the right section comes, from 0 to 1. The other columns compare a format with float32: the rank
correlation of all scores of a query, and the loss 1 - cosine of the texts' vectors. transformers' own float32 is the
first row, computed text by text.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log2
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from inferd.engine.api.checkpoint import Checkpoint, read_config
from inferd.engine.api.sentence_folder import SentenceFolder, sentences_of
from inferd.engine.arch.encoder_registry import describe_encoder
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.loader import load, recipe_of
from inferd.engine.models.pooled_heads import PooledHeads
from inferd.engine.worker.text_pooling import pooled
from inferd.kernels.cpu import library, native

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = Path(__file__).with_name("quality") / "questions.txt"
FORMATS = ("float32", "bfloat16", "int8", "int4")
_FIRST, _BATCH_TOKENS, _MIN_CHARS = 10, 1024, 80
_HEADING = re.compile(r"^(#{2,4}) (.+)$", re.MULTILINE)

Embed = Callable[[Sequence[list[int]]], Tensor]
"""Token ids of texts -> vectors [texts, components] of length 1, fp32."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page."""

    page: str
    heading: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}#{self.heading}"


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Scores [queries, sections], and the index of the section that answers each query."""

    scores: Tensor
    right: Tensor

    @property
    def ndcg(self) -> float:
        """nDCG@10 with one right section for each query."""
        own = self.scores.gather(1, self.right[:, None])
        ranks = (self.scores > own).sum(1).tolist()
        return sum(1.0 / log2(2 + rank) for rank in ranks if rank < _FIRST) / len(ranks)


def sections() -> list[Section]:
    """The sections of docs/ with a paragraph of their own."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        headings = list(_HEADING.finditer(text))
        for index, heading in enumerate(headings):
            end = headings[index + 1].start() if index + 1 < len(headings) else len(text)
            body = text[heading.end() : end].strip()
            if len(body) >= _MIN_CHARS:
                found.append(Section(page.name, heading[2], body))
    return found


def questions(known: Sequence[Section]) -> tuple[list[str], list[int]]:
    """(the questions, the index of each one's section). Raises `ValueError` for a section that is not there."""
    names = {section.name: index for index, section in enumerate(known)}
    asked, right = [], []
    for line in QUESTIONS.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, question = line.partition(": ")
        if name not in names:
            raise ValueError(f"{QUESTIONS.name}: there is no section {name!r}; write that of a heading in docs/")
        asked.append(question)
        right.append(names[name])
    return asked, right


class Texts:
    """The token ids of sections, headings and questions, as a model's folder wants them."""

    def __init__(self, folder: Path, sentences: SentenceFolder) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(sentences.max_tokens or 512)
        self._prompts = sentences.prompts
        known = sections()
        asked, right = questions(known)
        self.sections = self._ids([section.text for section in known], ("document", "passage", "search_document"))
        as_query = ("query", "search_query")
        self.headings = self._ids([section.heading for section in known], as_query)
        self.questions = self._ids(asked, as_query)
        self.right_of_questions = torch.tensor(right)

    def _ids(self, texts: Sequence[str], names: Sequence[str]) -> list[list[int]]:
        prompt = next((self._prompts[name] for name in names if name in self._prompts), "")
        return [encoding.ids for encoding in self._tokenizer.encode_batch([prompt + text for text in texts])]

    def results(self, embed: Embed) -> tuple[Tensor, dict[str, Retrieval]]:
        """(vectors of the sections, the results of headings and of questions)."""
        vectors = embed(self.sections)
        right = {"headings": torch.arange(len(self.sections)), "questions": self.right_of_questions}
        asked = {"headings": self.headings, "questions": self.questions}
        return vectors, {name: Retrieval(embed(ids) @ vectors.T, right[name]) for name, ids in asked.items()}


def by_transformers(folder: Path, sentences: SentenceFolder) -> Embed:
    import transformers  # noqa: PLC0415

    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    heads = PooledHeads.of(folder, sentences, model.config.hidden_size, "cpu")

    @torch.inference_mode()
    def embed(texts: Sequence[list[int]]) -> Tensor:
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts]
        vectors = torch.cat([pooled(own, [len(own)], sentences.pooling) for own in states])
        return torch.nn.functional.normalize(heads.apply(vectors))

    return embed


def by_inferd(folder: Path, sentences: SentenceFolder, name: str) -> Embed:
    """The encoder in the format `name`: a dtype, or a quantization with activations in float32."""
    checkpoint = Checkpoint.read(folder)
    arch = describe_encoder(checkpoint.config)
    dtype, quantization = (torch.float32, name) if name in ("int8", "int4") else (getattr(torch, name), "none")
    encoder = Encoder(arch, dtype, "cpu", recipe=recipe_of(arch, quantization, dtype))
    load(encoder, checkpoint.tensors_of(arch))
    heads = PooledHeads.of(folder, sentences, arch.hidden_size, "cpu")

    @torch.inference_mode()
    def embed(texts: Sequence[list[int]]) -> Tensor:
        found = []
        for first, end in _batches([len(ids) for ids in texts]):
            own = texts[first:end]
            lengths = [len(ids) for ids in own]
            starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            hidden = encoder.forward(torch.tensor([token for ids in own for token in ids]), starts)
            found.append(heads.apply(pooled(hidden.float(), lengths, sentences.pooling)))
        return torch.nn.functional.normalize(torch.cat(found))

    return embed


def _batches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of texts with some thousand tokens each."""
    found, first, num_tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if num_tokens and num_tokens + length > _BATCH_TOKENS:
            found.append((first, index))
            first, num_tokens = index, 0
        num_tokens += length
    return [*found, (first, len(lengths))]


def rank_correlation(ours: Tensor, theirs: Tensor) -> float:
    """Mean over queries of Spearman's correlation of all scores."""
    ranks = [scores.argsort(1).argsort(1).double() for scores in (ours, theirs)]
    own, other = (each - each.mean(1, keepdim=True) for each in ranks)
    return float(torch.nn.functional.cosine_similarity(own, other).mean())


def measure(folder: Path, formats: Sequence[str]) -> str:
    """The table."""
    sentences = sentences_of(folder, read_config(folder))
    texts = Texts(folder, sentences)
    rows = {"transformers, float32": texts.results(by_transformers(folder, sentences))}
    rows |= {name: texts.results(by_inferd(folder, sentences, name)) for name in formats}
    vectors, plain = next(iter(rows.values()))
    lines = [
        f"{folder.name}: {len(texts.sections)} sections, {len(texts.headings)} headings, "
        f"{len(texts.questions)} questions",
        "",
        "| format | nDCG@10, headings | nDCG@10, questions | rank correlation | 1 - cosine, mean | most |",
        "|---|---|---|---|---|---|",
    ]
    for name, (own, found) in rows.items():
        alike = rank_correlation(found["questions"].scores, plain["questions"].scores)
        losses = 1.0 - (own.double() * vectors.double()).sum(1)
        lines.append(
            f"| {name} | {found['headings'].ndcg:.4f} | {found['questions'].ndcg:.4f} | {alike:.5f} | "
            f"{float(losses.mean()):.1e} | {float(losses.max()):.1e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--out", type=Path, help="also write the table here")
    asked = parser.parse_args()
    native.prepare(library.default_cache_dir())
    table = measure(asked.folder, asked.formats)
    print(table)
    if asked.out is not None:
        asked.out.write_text(f"{table}\n")


if __name__ == "__main__":
    main()
