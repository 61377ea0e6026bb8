"""Decode steps recorded once for each number of rows, then replayed: one call from Python, not some nine a layer.

A step in which every row has one token differs from the next one of as many rows by its inputs alone, which are copied
to where the recording reads them. A device may record few numbers of rows and have others padded: what is added writes
to a block of its own and nobody reads what it gives. All other steps, and models with an operation that cannot be
recorded, run call by call.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inferd.engine.models.decoder import Decoder
from inferd.engine.worker.device import Device, Recording
from inferd.engine.worker.kv import KVPool
from inferd.kernels.paged_attention import AttentionBatch
from inferd.kernels.tape import NotRecordableError

logger = logging.getLogger(__name__)


class _Inputs:
    """What recordings read: for a step of n rows the first n of everything, which lie at the same place for any n."""

    def __init__(self, x: Tensor, batches: Sequence[AttentionBatch], max_rows: int, padding_block: int | None) -> None:
        self._x = x.new_zeros(max_rows, x.shape[1])
        self._batches = [_widest(batch, max_rows) for batch in batches]
        self._padding_block = padding_block

    def fill(self, x: Tensor, batches: Sequence[AttentionBatch], bucket: int) -> None:
        num_rows = x.shape[0]
        self._x[:num_rows].copy_(x)
        for kept, batch in zip(self._batches, batches, strict=True):
            kept.query_start[: num_rows + 1].copy_(batch.query_start)
            kept.seq_lens[:num_rows].copy_(batch.seq_lens)
            kept.block_tables[:num_rows].copy_(batch.block_tables)
            kept.positions[:num_rows].copy_(batch.positions)
            kept.write_slots[:num_rows].copy_(batch.write_slots)
            if bucket > num_rows:
                self._pad(kept, num_rows, bucket)

    def _pad(self, kept: AttentionBatch, num_rows: int, bucket: int) -> None:
        """Rows of one token at position 0, all in the block that is nobody's."""
        assert self._padding_block is not None
        torch.arange(num_rows, bucket + 1, dtype=torch.int32, out=kept.query_start[num_rows : bucket + 1])
        kept.seq_lens[num_rows:bucket] = 1
        kept.block_tables[num_rows:bucket] = self._padding_block
        kept.positions[num_rows:bucket] = 0
        kept.write_slots[num_rows:bucket] = self._padding_block * kept.block_size

    def of(self, num_rows: int) -> tuple[Tensor, list[AttentionBatch]]:
        """For kernels that know lengths by the tensors alone."""
        batches = [
            replace(
                kept,
                query_start=kept.query_start[: num_rows + 1],
                seq_lens=kept.seq_lens[:num_rows],
                block_tables=kept.block_tables[:num_rows],
                positions=kept.positions[:num_rows],
                write_slots=kept.write_slots[:num_rows],
                query_lens=(1,) * num_rows,
                kv_lens=(1,) * num_rows,
            )
            for kept in self._batches
        ]
        return self._x[:num_rows], batches


def _widest(batch: AttentionBatch, max_rows: int) -> AttentionBatch:
    """Of as many rows as can be recorded, in memory of its own."""

    def room(tensor: Tensor, num_more: int = 0) -> Tensor:
        return tensor.new_zeros((max_rows + num_more, *tensor.shape[1:]))

    return replace(
        batch,
        query_start=room(batch.query_start, 1),
        seq_lens=room(batch.seq_lens),
        block_tables=room(batch.block_tables),
        positions=room(batch.positions),
        write_slots=room(batch.write_slots),
    )


class StepGraphs:
    """The decoder over one KV pool, with recordings of its decode steps."""

    def __init__(self, decoder: Decoder, kv: KVPool, device: Device) -> None:
        self._decoder, self._kv, self._device = decoder, kv, device
        self._inputs: _Inputs | None = None
        self._recordings: dict[int, Recording] = {}
        self.refusal: str | None = None
        """Why this model's steps are not recorded, once that is known."""
        self._refused_buckets: set[int] = set()

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """The numbers of rows that steps were recorded for."""
        return tuple(sorted(self._recordings))

    def forward(self, token_ids: Tensor, batches: Sequence[AttentionBatch]) -> Tensor:
        """As `Decoder.forward`; the hidden states hold until the next call."""
        x = self._decoder.embed(token_ids)
        is_decode = x.shape[0] == len(batches[0].query_lens)
        if self.refusal is None and is_decode and x.shape[0] <= self._device.row_buckets[-1]:
            output = self._replay(x, batches)
            if output is not None:
                return output[: x.shape[0]]
        return self._decoder.run_layers(x, batches, self._kv.data)

    def _replay(self, x: Tensor, batches: Sequence[AttentionBatch]) -> Tensor | None:
        """The step by its recording, which is made when there is none; None where that cannot be done."""
        buckets = self._device.row_buckets
        bucket = buckets[bisect_left(buckets, x.shape[0])]
        if bucket in self._refused_buckets:
            return None
        if self._inputs is None:
            self._inputs = _Inputs(x, batches, buckets[-1], self._kv.padding_block)
        self._inputs.fill(x, batches, bucket)
        recording = self._recordings.get(bucket)
        if recording is not None:
            recording.replay()
            return recording.output
        try:
            recording = self._device.record(lambda: self._run(bucket))
        except NotRecordableError as error:
            self._refuse(bucket, str(error))
            return None
        self._recordings[bucket] = recording
        return recording.output

    def _refuse(self, bucket: int, reason: str) -> None:
        """The first recording tells whether this model can be recorded; a later one that fails, for want of memory
        say, takes nothing from those that are there."""
        if self._recordings:
            self._refused_buckets.add(bucket)
            logger.warning("decode steps of %d rows run call by call: %s", bucket, reason)
        else:
            self.refusal = reason
            logger.info("decode steps run call by call: %s", reason)

    def _run(self, bucket: int) -> Tensor:
        """The calls to record, on batches of their own: what kernels work out once a step belongs to the recording."""
        assert self._inputs is not None
        x, batches = self._inputs.of(bucket)
        return self._decoder.run_layers(x, batches, self._kv.data)
