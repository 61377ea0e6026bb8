"""Decode steps recorded once for each number of rows, then replayed: one call from Python, not some nine a layer.

A step in which every row has one token differs from the next one of as many rows by its inputs alone, which are copied
to where the recording reads them. All other steps, and models with an operation that cannot be recorded, run call by
call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from inferd.engine.models.decoder import Decoder
from inferd.engine.worker.kv import KVPool
from inferd.kernels.paged_attention import AttentionBatch
from inferd.kernels.tape import Buffers, NotRecordableError, Tape, record

logger = logging.getLogger(__name__)

MAX_RECORDED_ROWS = 64
"""Above, the calls are 2% of a step (0.6B shape, 2 cores of a Zen 4), and recordings would hold memory for nothing."""


class _Inputs:
    """What recordings read: for a step of n rows the first n of everything, which lie at the same place for any n."""

    def __init__(self, x: Tensor, batches: Sequence[AttentionBatch]) -> None:
        self._x = x.new_zeros(MAX_RECORDED_ROWS, x.shape[1])
        self._batches = [_widest(batch) for batch in batches]

    def fill(self, x: Tensor, batches: Sequence[AttentionBatch]) -> None:
        num_rows = x.shape[0]
        self._x[:num_rows].copy_(x)
        for kept, batch in zip(self._batches, batches, strict=True):
            kept.query_start[: num_rows + 1].copy_(batch.query_start)
            kept.seq_lens[:num_rows].copy_(batch.seq_lens)
            kept.block_tables[:num_rows].copy_(batch.block_tables)
            kept.positions[:num_rows].copy_(batch.positions)
            kept.write_slots[:num_rows].copy_(batch.write_slots)

    def of(self, num_rows: int) -> tuple[Tensor, list[AttentionBatch]]:
        """For the C++ kernels, which know lengths by the tensors alone."""
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


def _widest(batch: AttentionBatch) -> AttentionBatch:
    """Of as many rows as can be recorded, in memory of its own."""

    def room(tensor: Tensor, num_more: int = 0) -> Tensor:
        return tensor.new_zeros((MAX_RECORDED_ROWS + num_more, *tensor.shape[1:]))

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

    def __init__(self, decoder: Decoder, kv: KVPool) -> None:
        self._decoder, self._kv = decoder, kv
        self._inputs: _Inputs | None = None
        self._tapes: dict[int, Tape] = {}
        self._buffers = Buffers()
        self.refusal: str | None = None
        """Why this model's steps are not recorded, once that is known."""

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """The numbers of rows that steps were recorded for."""
        return tuple(sorted(self._tapes))

    def forward(self, token_ids: Tensor, batches: Sequence[AttentionBatch]) -> Tensor:
        """As `Decoder.forward`; the hidden states hold until the next call."""
        x = self._decoder.embed(token_ids)
        is_decode = x.shape[0] == len(batches[0].query_lens)
        if self.refusal is None and is_decode and x.shape[0] <= MAX_RECORDED_ROWS:
            output = self._replay(x, batches)
            if output is not None:
                return output
        return self._decoder.run_layers(x, batches, self._kv.data)

    def _replay(self, x: Tensor, batches: Sequence[AttentionBatch]) -> Tensor | None:
        """The step by its recording, which is made when there is none; None where that cannot be done."""
        if self._inputs is None:
            self._inputs = _Inputs(x, batches)
        self._inputs.fill(x, batches)
        num_rows = x.shape[0]
        tape = self._tapes.get(num_rows)
        if tape is not None:
            tape.replay()
            return tape.output
        kept_x, kept_batches = self._inputs.of(num_rows)
        try:
            tape = record(lambda: self._decoder.run_layers(kept_x, kept_batches, self._kv.data), self._buffers)
        except NotRecordableError as error:
            self.refusal = str(error)
            logger.info("decode steps run call by call: %s", error)
            return None
        self._tapes[num_rows] = tape
        return tape.output
