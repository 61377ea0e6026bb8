"""Recorded decode steps: recorded once for each number of rows, then replayed with one call from Python, not hundreds.
A GPU records all numbers of rows before it serves, a CPU records each when it is first needed.

In a decode step every row computes one token and draws the next. Two such steps of equally many rows differ in slots
and positions only. These are copied to a fixed tensor; with them the recording finds ids and block tables in `Slots`,
seeds and temperatures in `Sampler`. A GPU's recording (a CUDA graph) goes on to the drawn ids in their slots. A CPU's
recording (calls of C++ kernels) ends with the last hidden states.

A device may record few numbers of rows, and pad steps of other numbers. A padding row has no slot, writes its KV to a
block of its own, and its result is not read. The caller runs all other steps, and models that cannot be recorded.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import Progress
from inferd.engine.sample.sampler import Sampler
from inferd.engine.worker.device import Device, Recording
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.slots import Slots
from inferd.kernels.paged_attention import AttentionBatch
from inferd.kernels.step_inputs import step_inputs, write_drawn
from inferd.kernels.tape import NotRecordableError

logger = logging.getLogger(__name__)

_PADDING = -1
"""Slot of a padding row; its position is 0."""


def _width(bucket: int) -> int:
    """Distance from the first slot to the first position, rounded up to even: Triton compiles a kernel anew if an
    address is no longer a multiple of 16."""
    return bucket + bucket % 2


class Decoded(NamedTuple):
    """Results of a decode step of R rows, valid until the next one."""

    logits: Tensor
    """[R, V] fp32."""
    outcomes: Tensor | None
    """[R] int64 from `Sampler.draw`, which treats every row as a plain one; the ids are in their slots. None if the
    recording draws nothing."""


class StepGraphs:
    """The decode steps of one decoder over one KV pool and the slots of its requests."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        slots: Slots,
        sampler: Sampler,
        device: Device,
        *,
        is_deterministic: bool = True,
    ) -> None:
        """Unless `is_deterministic`, a GPU may add up a row's keys in an order that depends on the other rows."""
        self._is_deterministic = is_deterministic
        self._decoder, self._kv, self._slots, self._sampler, self._device = decoder, kv, slots, sampler, device
        self._buckets = device.row_buckets[: bisect_left(device.row_buckets, slots.num_slots) + 1]
        max_rows = self._buckets[-1]
        self._rows = torch.empty(2 * _width(max_rows), dtype=torch.int64, device=device.torch_device)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device.torch_device)
        self._logits: Tensor | None = None
        """Logits of all recordings: one tensor each would be gigabytes."""
        self._recordings: dict[int, Recording] = {}
        self._refused_buckets: set[int] = set()
        self._is_complete = False
        """Whether every number of rows was recorded or refused."""
        self.refusal: str | None = None
        """Why this model's steps cannot be recorded; None unless an attempt has shown it."""

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """Numbers of rows that steps were recorded for."""
        return tuple(sorted(self._recordings))

    def decode(self, rows: Sequence[tuple[int, int]]) -> Decoded | None:
        """Compute the tokens at each (slot, position); slots differ. Returns None, with nothing computed, if there is
        no recording for so many rows."""
        if self._device.records_all and not self._is_complete:
            self.record_all()
        num_rows = len(rows)
        if self.refusal is not None or num_rows > self._buckets[-1]:
            return None
        bucket = self._buckets[bisect_left(self._buckets, num_rows)]
        if bucket in self._refused_buckets:
            return None
        self._write(rows, bucket)
        output = self._output(bucket)
        if output is None:
            return None
        if self._device.records_all:
            assert self._logits is not None
            return Decoded(self._logits[:num_rows], output[:num_rows])
        return Decoded(self._decoder.logits(output[:num_rows]), None)

    def record_all(self, progress: Progress | None = None) -> None:
        """Record every number of rows, all of them padding. The largest comes first, because later recordings reuse its
        memory; in another order each would take memory of its own, which the memory plan does not hold.

        `progress` is called with the number of recordings that are done, and their number in all.
        """
        assert self._kv.padding_block is not None, "a device that records whole steps pads them"
        self._is_complete = True
        for place, bucket in enumerate(reversed(self._buckets), start=1):
            self._write((), bucket)
            self._record(bucket)
            if self.refusal is not None:
                return
            if progress is not None:
                progress(place, len(self._buckets))

    def _write(self, rows: Sequence[tuple[int, int]], bucket: int) -> None:
        num_padding = _width(bucket) - len(rows)
        slots = [slot for slot, _ in rows] + [_PADDING] * num_padding
        positions = [position for _, position in rows] + [0] * num_padding
        self._device.write(self._rows[: 2 * _width(bucket)], slots + positions)

    def _output(self, bucket: int) -> Tensor | None:
        """The output of the recording for `bucket`, which is recorded first if need be; None if that fails."""
        recording = self._recordings.get(bucket)
        if recording is not None:
            recording.replay()
            return recording.output
        assert not self._is_complete, "a device that records whole steps records nothing while it serves"
        recording = self._record(bucket)
        return None if recording is None else recording.output

    def _record(self, bucket: int) -> Recording | None:
        """Run and record the step of `bucket`; None if that fails."""
        try:
            recording = self._device.record(partial(self._run, bucket))
        except NotRecordableError as error:
            self._refuse(bucket, str(error))
            return None
        self._recordings[bucket] = recording
        return recording

    def _refuse(self, bucket: int, reason: str) -> None:
        """If the first recording fails, this model cannot be recorded. If a later one fails, or that of the most rows,
        perhaps memory ran out: the others stay."""
        is_largest = self._is_complete and bucket == self._buckets[-1]
        if self._recordings or is_largest:
            self._refuse_rows(bucket, reason)
        else:
            self.refusal, self._logits = reason, None
            logger.info("decode steps run call by call: %s", reason)

    def _refuse_rows(self, bucket: int, reason: str) -> None:
        self._refused_buckets.add(bucket)
        logger.warning("decode steps of %d rows run call by call: %s", bucket, reason)

    def _run(self, bucket: int) -> Tensor:
        """The step that is recorded. A run to record it changes nothing that it reads: on a device that records whole
        steps its rows are padding, and otherwise nothing is drawn."""
        slots, positions = self._rows[: 2 * _width(bucket)].view(2, -1)[:, :bucket].unbind()
        hidden = self._hidden(slots, positions)
        if not self._device.records_all:
            return hidden
        if self._logits is None:
            self._logits = hidden.new_empty((self._buckets[-1], self._decoder.arch.vocab_size), dtype=torch.float32)
        logits = self._decoder.logits(hidden, out=self._logits[:bucket])
        token_ids, outcomes = self._sampler.draw(logits, slots, positions + 1)
        write_drawn(token_ids, slots, positions, self._slots.token_ids)
        return outcomes

    def _hidden(self, slots: Tensor, positions: Tensor) -> Tensor:
        num_rows, block_size = slots.shape[0], self._kv.block_size
        # Without a padding block the device does not pad.
        padding_block = self._kv.padding_block or 0
        tables = self._slots.block_tables
        inputs = step_inputs(slots, positions, self._slots.token_ids, tables, block_size, padding_block)
        batches = [
            AttentionBatch(
                query_start=self._query_start[: num_rows + 1],
                seq_lens=inputs.seq_lens,
                block_tables=block_tables,
                positions=positions,
                write_slots=write_slots,
                block_size=block_size,
                query_lens=(1,) * num_rows,
                kv_lens=None,
                is_deterministic=self._is_deterministic,
            )
            for block_tables, write_slots in zip(inputs.block_tables, inputs.write_slots, strict=True)
        ]
        return self._decoder.run_layers(self._decoder.embed(inputs.token_ids), batches, self._kv.data, self._kv.scales)
