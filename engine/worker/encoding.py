"""Computes the step plans of an encoder: every row is a whole text, and ends with what its request asks for.

It holds the model and the texts that wait in slots, and keeps nothing between steps but those.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.api.wire.params import Pooling, PoolingKind
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.packed_decoder import PackedDecoder
from inferd.engine.models.pooled_heads import PooledHeads
from inferd.engine.sched.plan import NO_RESULT, Admission, RowResult, RowStatus, StepPlan, StepResult, TokenMasks
from inferd.engine.worker.pooling import finished
from inferd.engine.worker.recorded_encoder import RecordedEncoder
from inferd.engine.worker.text_pooling import pooled
from inferd.kernels.cpu import native

_FAILED = RowResult(status=RowStatus.NUMERICAL_ERROR)


class _Text(NamedTuple):
    """One row of a step."""

    ids: Sequence[int]
    pooling: Pooling


class EncoderWorker:
    """An encoder and the texts of its slots."""

    cache_windows: tuple[int | None, ...] = (None,)
    """The scheduler counts tokens in blocks of one group, which have no memory."""
    adapters = None
    draft_arch = None
    ledger = None

    def __init__(
        self, encoder: Encoder | PackedDecoder, heads: PooledHeads, recorded: RecordedEncoder | None = None
    ) -> None:
        """`heads`: those that turn a pooled state into an embedding. `recorded`: computes in place of `encoder`."""
        self._encoder, self._heads = encoder, heads
        self._forward = encoder.forward if recorded is None else recorded.forward
        self._admitted: dict[int, Admission] = {}
        """Slot -> the request that it holds."""

    @property
    def arch(self) -> EncoderArch | Arch:
        return self._encoder.arch

    @torch.inference_mode()
    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> EncodedStep:
        """Compute a plan to its end: the processor is the only device."""
        del awaits_masks
        started_s = time.monotonic()
        self._admitted |= {admission.slot: admission for admission in plan.admissions}
        texts = [self._text_of(row.slot, row.start, row.num_tokens) for row in plan.rows]
        results = self._computed(texts)
        return EncodedStep(StepResult(plan.step_id, tuple(results), time.monotonic() - started_s))

    def use_threads(self, num_threads: int) -> None:
        """Compute on so many threads from now on, with the same results, if C++ kernels compute."""
        if native.missing() is None:
            torch.set_num_threads(num_threads)

    def _text_of(self, slot: int, start: int, num_tokens: int) -> _Text:
        admission = self._admitted.pop(slot)
        assert (start, num_tokens) == (0, admission.num_prompt), "an encoder computes whole texts alone"
        pooling = admission.params.pooling
        assert pooling is not None, "an encoder draws no tokens"
        return _Text(admission.token_ids, pooling)

    def _computed(self, texts: Sequence[_Text]) -> list[RowResult]:
        bounds = [0, *accumulate(len(text.ids) for text in texts)]
        ids = torch.tensor([token_id for text in texts for token_id in text.ids])
        starts = torch.tensor(bounds, dtype=torch.int32)
        hidden = self._forward(ids, starts, self._types_of(texts, bounds))
        results = [NO_RESULT] * len(texts)
        for index, result in self._results_of(texts, hidden, starts).items():
            results[index] = result
        return results

    def _types_of(self, texts: Sequence[_Text], bounds: Sequence[int]) -> Tensor | None:
        """Token types [T], or None if all are of the first type."""
        if self._encoder.num_token_types < 2 or not any(text.pooling.num_first for text in texts):
            return None
        types = torch.zeros(bounds[-1], dtype=torch.int64)
        for text, (first, end) in zip(texts, pairwise(bounds), strict=True):
            if text.pooling.num_first:
                types[min(first + text.pooling.num_first, end) : end] = 1
        return types

    def _results_of(self, texts: Sequence[_Text], hidden: Tensor, starts: Tensor) -> Mapping[int, RowResult]:
        """The result of each text, by its index."""
        results: dict[int, RowResult] = {}
        lengths, states = [len(text.ids) for text in texts], hidden.to(torch.float32)
        if any(text.pooling.gives == "logits" for text in texts):
            logits = self._encoder.logits(hidden, starts).to(torch.float32)
            results |= {i: _result(logits[i], None) for i, text in enumerate(texts) if text.pooling.gives == "logits"}
        for i, own in enumerate(torch.split(states, lengths)):
            if texts[i].pooling.gives == "token_embeddings":
                results[i] = _result(own, texts[i].pooling)
        for how in {text.pooling.how for text in texts if text.pooling.gives == "embedding"}:
            results |= _embedded(texts, self._heads.apply(pooled(states, lengths, how)), how)
        return results


def _embedded(texts: Sequence[_Text], vectors: Tensor, how: PoolingKind) -> dict[int, RowResult]:
    """The results of the texts whose embeddings are pooled so. vectors [texts, hidden]."""
    return {
        i: _result(vectors[i], text.pooling)
        for i, text in enumerate(texts)
        if text.pooling.gives == "embedding" and text.pooling.how == how
    }


def _result(numbers: Tensor, pooling: Pooling | None) -> RowResult:
    """The result of a row: numbers [hidden] or [tokens, hidden], as `pooling` wants them; None: as they are."""
    if not bool(numbers.isfinite().all()):
        return _FAILED
    answer = numbers.numpy().astype("<f4").tobytes() if pooling is None else finished(numbers, pooling)
    return RowResult(embedding=answer)


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """A step that has ended."""

    result: StepResult

    def sample(self, masks: TokenMasks) -> None:
        """Raises: no plan of an encoder draws."""
        raise AssertionError("an encoder draws no tokens")

    def wait(self) -> StepResult:
        return self.result
