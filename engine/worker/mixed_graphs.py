"""Recorded layers of steps with prompts, by number of tokens: Python makes one call, not eight a layer.

A step's rows and tokens are copied to a fixed tensor. The recording ends with the last hidden states, and the caller
chooses the rows whose logits it wants. The number of rows of a recording is the most that its tokens can have: rows
without tokens cost nothing. Padding tokens belong to no row. Only devices that record whole steps record these: on
others, arithmetic takes the time of such steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from inferd.engine.models.loader import Progress
from inferd.engine.sched.plan import Row
from inferd.engine.worker.graphs import PADDING_SLOT, compute_layers, recordings_of, uses_adapters
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Batch


class MixedGraphs:
    """The layers of one decoder over one KV pool and the slots of its requests, for steps of up to `max_tokens`."""

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
        self._model, device = model, model.device
        sizes = [size for size in device.token_buckets if size < max_tokens]
        sizes += [size for size in device.token_buckets if size >= max_tokens][:1]
        self._recordings = recordings_of(model, "steps with prompts of {} tokens", sizes, self._run)
        most = max(sizes, default=0)
        self._numbers = torch.zeros(2 * most + 3 * self._num_rows(most), dtype=torch.int64, device=device.torch_device)

    @property
    def recorded_tokens(self) -> tuple[int, ...]:
        """Numbers of tokens that steps were recorded for."""
        return self._recordings[False].recorded

    def record_all(self, progress: Progress | None = None) -> None:
        """Record every number of tokens, all of them padding."""
        for recordings in self._recordings.values():
            recordings.record_all(lambda size: self._write((), size), progress)

    def forward(self, rows: Sequence[Row]) -> Tensor | None:
        """Final hidden states [T, hidden] of the rows' tokens, valid until the next step; None, with nothing computed,
        if such a step is not recorded."""
        recordings = self._recordings[uses_adapters(self._model, (row.slot for row in rows))]
        if not recordings.is_complete:
            self.record_all()
        num_tokens = sum(row.num_tokens for row in rows)
        size = recordings.size_for(num_tokens)
        if size is None:
            return None
        self._write(rows, size)
        output = recordings.output(size)
        return None if output is None else output[:num_tokens]

    def _num_rows(self, size: int) -> int:
        """Most rows of a step of `size` tokens, rounded up to even: Triton compiles a kernel anew if an address is no
        longer a multiple of 16."""
        most = min(size, self._model.slots.num_slots)
        return most + most % 2

    def _write(self, rows: Sequence[Row], size: int) -> None:
        ends = list(accumulate(row.num_tokens for row in rows))
        num_tokens, num_idle = ends[-1] if ends else 0, self._num_rows(size) - len(rows)
        numbers = [row.slot for row in rows] + [0] * num_idle
        numbers += [row.start + row.num_tokens for row in rows] + [0] * num_idle
        numbers += ends + [num_tokens] * num_idle
        for row in rows:
            numbers += [row.slot] * row.num_tokens
        numbers += [PADDING_SLOT] * (size - num_tokens)
        for row in rows:
            numbers += range(row.start, row.start + row.num_tokens)
        numbers += [0] * (size - num_tokens)
        self._model.device.write(self._numbers[: len(numbers)], numbers)

    def _run(self, has_adapters: bool, size: int) -> Tensor:
        """The step that is recorded. A run to record it changes nothing that it reads, because it has padding alone."""
        model, sizes = self._model, [self._num_rows(size)] * 3 + [size] * 2
        assert model.kv.padding_block is not None, "a device that records whole steps pads them"
        row_slots, seq_lens, ends, token_slots, positions = torch.split(self._numbers[: sum(sizes)], sizes)
        batch = Batch.of_tokens(
            model.slots,
            (row_slots, seq_lens, ends),
            (token_slots, positions),
            model.kv.padding_block,
            is_deterministic=model.is_deterministic,
        )
        return compute_layers(model, batch, has_adapters=has_adapters)
