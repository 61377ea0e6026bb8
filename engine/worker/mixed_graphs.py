"""Recorded layers of steps with prompts, by number of tokens: one call from Python instead of eight a layer.

A step's rows and tokens are copied to a fixed tensor. The recording finds ids and block tables in `Slots`, and ends
with the last hidden states. The caller chooses the rows whose logits it wants. The number of rows of a recording is the
most that its tokens can have: rows without tokens cost nothing. Padding tokens belong to no row, and write their KV to
a block that no request has.

Only devices that record whole steps record these: on others, arithmetic takes the time of such steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from inferd.engine.models.loader import Progress
from inferd.engine.sched.plan import Row
from inferd.engine.worker.graphs import Recordings
from inferd.engine.worker.loaded import LoadedModel
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.states import StateRows

_PADDING = -1
"""Slot of padding tokens, at position 0."""


class MixedGraphs:
    """The layers of one decoder over one KV pool and the slots of its requests, for steps of up to `max_tokens`."""

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
        self._model, device = model, model.device
        sizes = [size for size in device.token_buckets if size < max_tokens]
        sizes += [size for size in device.token_buckets if size >= max_tokens][:1]
        why_not = model.decoder.unrecordable
        what = "steps with prompts of {} tokens"
        self.recordings = Recordings(what, sizes, device, self._run, why_not)
        self._adapted = Recordings(f"{what} with adapters", sizes, device, self._run_adapted, why_not)
        self._records = bool(sizes)
        most = max(sizes, default=0)
        self._numbers = torch.zeros(2 * most + 3 * self._num_rows(most), dtype=torch.int64, device=device.torch_device)

    def record_all(self, progress: Progress | None = None) -> None:
        """Record every number of tokens, all of them padding."""
        for recordings in (self.recordings, *([] if self._model.adapters is None else [self._adapted])):
            recordings.record_all(lambda size: self._write((), size), progress)

    def forward(self, rows: Sequence[Row], *, has_adapters: bool = False) -> Tensor | None:
        """Final hidden states [T, hidden] of the rows' tokens, valid until the next step; None, with nothing computed,
        if such a step is not recorded. `has_adapters`: whether a row has an adapter."""
        if not self._records:
            return None
        if not self.recordings.is_complete:
            self.record_all()
        num_tokens = sum(row.num_tokens for row in rows)
        recordings = self._adapted if has_adapters else self.recordings
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
        numbers += [_PADDING] * (size - num_tokens)
        for row in rows:
            numbers += range(row.start, row.start + row.num_tokens)
        numbers += [0] * (size - num_tokens)
        self._model.device.write(self._numbers[: len(numbers)], numbers)

    def _run_adapted(self, size: int) -> Tensor:
        num_rows = self._num_rows(size)
        assert self._model.adapters is not None
        with self._model.adapters.used_by(self._numbers[3 * num_rows : 3 * num_rows + size]):
            return self._run(size)

    def _run(self, size: int) -> Tensor:
        """The step that is recorded. A run to record it changes nothing that it reads, because it has padding alone."""
        num_rows, block_size = self._num_rows(size), self._model.kv.block_size
        parts = [num_rows] * 3 + [size] * 2
        row_slots, seq_lens, ends, token_slots, positions = torch.split(self._numbers[: sum(parts)], parts)
        sources, is_padding = token_slots.clamp(min=0), token_slots < 0
        query_start = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        batches = [
            AttentionBatch(
                query_start=query_start,
                seq_lens=seq_lens.to(torch.int32),
                block_tables=tables.index_select(0, row_slots),
                positions=positions,
                write_slots=self._write_slots(tables[sources, positions // block_size], positions, is_padding),
                block_size=block_size,
                # However the tokens are shared out, rows have no more blocks of queries than these.
                query_lens=(size,) + (1,) * (num_rows - 1),
                kv_lens=None,
                is_deterministic=self._model.is_deterministic,
                knows_query_lens=False,
            )
            for tables in self._model.slots.block_tables
        ]
        token_ids = self._model.slots.gather_ids(sources, positions)
        model, rows = self._model, StateRows(query_start, positions, row_slots)
        states = None if model.states is None else model.states.of(rows)
        return model.decoder.forward(token_ids, batches, model.kv.data, model.kv.scales, states)

    def _write_slots(self, block_ids: Tensor, positions: Tensor, is_padding: Tensor) -> Tensor:
        assert self._model.kv.padding_block is not None, "a device that records whole steps pads them"
        block_ids = block_ids.to(torch.int64).masked_fill_(is_padding, self._model.kv.padding_block)
        return block_ids * self._model.kv.block_size + positions % self._model.kv.block_size
