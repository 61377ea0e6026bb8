"""Measures how far a model in some precision is from the same model in float32, on fixed text and chats.

Both run in the daemon's decoder. `tests/real` compares its float32 with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.quality.material import Material
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.model import ModelFacts
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load, recipe_of
from inferd.engine.quant.recipe import Recipe
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.kv import KVPool
from inferd.kernels.ops.kv_format import is_smoothed
from inferd.kernels.ops.paged_attention import AttentionBatch

NUM_ANSWER_TOKENS = 64
"""Most tokens of a chat's answer."""
_BLOCK_SIZE = 32
_ROWS = 128
"""Number of positions whose probabilities exist at once."""

Tick = Callable[[], None]
"""Called after each piece of text or chat."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder, and the dtype of its K and V."""

    decoder: Decoder
    kv_dtype: torch.dtype

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        quantization: str | Recipe = "none",
        kv_dtype: torch.dtype | None = None,
    ) -> Model:
        arch = ModelFacts.of(checkpoint).arch
        recipe = quantization if isinstance(quantization, Recipe) else recipe_of(arch, quantization, dtype)
        decoder = Decoder(arch, dtype, "cpu", recipe=recipe)
        load(decoder, checkpoint.tensors_of(arch))
        return cls(decoder, dtype).with_kv(kv_dtype or dtype)

    def with_kv(self, kv_dtype: torch.dtype) -> Model:
        """The same decoder with K and V in this dtype."""
        if is_smoothed(kv_dtype):
            self.decoder.smooth_keys()
        return replace(self, kv_dtype=kv_dtype)

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Final hidden states [T, hidden] of a sequence without context."""
        return _Sequences(self, [len(token_ids)]).step([token_ids])

    def log_probs(self, hidden: Tensor) -> Iterator[Tensor]:
        """Log probabilities [rows, vocab] fp64 of the next token, some rows of `hidden` at a time."""
        for rows in torch.split(hidden, _ROWS):
            yield self.decoder.logits(rows).double().log_softmax(1)

    def greedy(self, prompts: Sequence[Sequence[int]], end_ids: frozenset[int]) -> list[list[int]]:
        """The most likely answer to each prompt, token by token, with the id that ends it."""
        sequences = _Sequences(self, [len(prompt) + NUM_ANSWER_TOKENS for prompt in prompts])
        hidden = sequences.step(prompts)
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        drawn = [[token_id] for token_id in self.decoder.logits(hidden[ends]).argmax(1).tolist()]
        for _ in range(NUM_ANSWER_TOKENS - 1):
            hidden = sequences.step([ids[-1:] for ids in drawn])
            for ids, token_id in zip(drawn, self.decoder.logits(hidden).argmax(1).tolist(), strict=True):
                ids.append(token_id)
        return [_until_end(ids, end_ids) for ids in drawn]


def _until_end(ids: list[int], end_ids: frozenset[int]) -> list[int]:
    return next((ids[: index + 1] for index, token_id in enumerate(ids) if token_id in end_ids), ids)


class _Sequences:
    """Sequences in a KV pool of their own. `lengths` are their most tokens."""

    def __init__(self, model: Model, lengths: Sequence[int]) -> None:
        decoder, self._lens = model.decoder, [0] * len(lengths)
        width = -(-max(lengths) // _BLOCK_SIZE)
        groups = len(decoder.arch.cache_groups)
        self._tables = torch.arange(groups * len(lengths) * width).view(groups, len(lengths), width)
        device = CpuDevice(torch.get_num_threads())
        self._kv = KVPool.allocate(decoder.arch, self._tables.numel(), _BLOCK_SIZE, model.kv_dtype, device)
        self._decoder = decoder

    def step(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states of the next tokens of every sequence, one sequence after another."""
        spans = [(start, len(ids)) for start, ids in zip(self._lens, token_ids, strict=True)]
        batches = [AttentionBatch.build(spans, tables, _BLOCK_SIZE, "cpu") for tables in self._tables]
        self._lens = [start + count for start, count in spans]
        joined = torch.tensor([token_id for ids in token_ids for token_id in ids])
        return self._decoder.forward(joined, batches, self._kv.data, self._kv.scales)


@dataclass(frozen=True, slots=True)
class Quality:
    """Distance of a model from the reference."""

    nll: float
    """Mean negative log probability of the text's tokens, in nats."""
    kl: float
    """Mean KL divergence of the next-token distribution on the text, in nats."""
    num_flips: int
    """Positions of the reference's greedy answers at which another token is the most likely one."""
    num_equal: int
    """Greedy answers that equal the reference's. A decoder's bits do not depend on the chunks, so an answer equals if
    no position flips."""


class Reference:
    """The model in float32, its hidden states on the text, and its greedy answers."""

    def __init__(self, checkpoint: Checkpoint, material: Material, tick: Tick) -> None:
        self.model, self.material = Model.load(checkpoint, torch.float32), material
        self._hidden = []
        for window in material.windows:
            self._hidden.append(self.model.hidden(window))
            tick()
        self.answers = self.model.greedy(material.prompts, material.end_ids) if material.prompts else []

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)

    def compare(self, model: Model, tick: Tick) -> Quality:
        """The quality of `model`; the reference's own has no distance."""
        nll, kl, count = 0.0, 0.0, 0
        for window, exact in zip(self.material.windows, self._hidden, strict=True):
            targets = torch.split(torch.tensor(window[1:]), _ROWS)
            ours, theirs = model.log_probs(model.hidden(window)[:-1]), self.model.log_probs(exact[:-1])
            for p, q, ids in zip(theirs, ours, targets, strict=True):
                nll -= float(q.gather(1, ids[:, None]).sum())
                kl += float((p.exp() * (p - q)).sum())
                count += len(ids)
            tick()
        flips = [self._num_flips(model, *chat, tick) for chat in zip(self.material.prompts, self.answers, strict=True)]
        return Quality(nll / count, kl / count, sum(flips), flips.count(0))

    def _num_flips(self, model: Model, prompt: Sequence[int], answer: Sequence[int], tick: Tick) -> int:
        hidden = model.hidden([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        tick()
        return int((model.decoder.logits(hidden).argmax(1) != torch.tensor(answer)).sum())
