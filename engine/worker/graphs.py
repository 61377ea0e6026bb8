"""Recorded decode steps: recorded once for each number of rows, then replayed with one call from Python, not hundreds.
A GPU records all numbers of rows before it serves, a CPU records each when it is first needed.

In a decode step every row computes one token and draws the next. A row with drafts is several such rows here, at
positions one behind the other. Two such steps of equally many rows differ in slots and positions only. These are copied
to a fixed tensor; with them the recording finds ids and block tables in `Slots`, seeds and temperatures in `Sampler`. A
GPU's recording (a CUDA graph) goes on to the drawn ids in their slots. A CPU's recording (calls of C++ kernels) ends
with the last hidden states.

A device may record few numbers of rows, and pad steps of other numbers. A padding row has no slot, writes its KV to a
block of its own, and its result is not read. The caller runs all other steps, and models that cannot be recorded.

Two things happen here. To record a step, `_run` computes it once, call by call, while the device watches. To repeat it,
`Recordings.output` calls `Recording.replay`: a CUDA graph, or a `Tape` of `kernels/cpu/tape`. `mixed_graphs` records
steps with prompts.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.models.loader import Progress
from inferd.engine.worker.device import Device, Recording
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Batch
from inferd.kernels.cpu.tape import NotRecordableError
from inferd.kernels.ops.states import StateRows
from inferd.kernels.ops.step_inputs import write_drawn

logger = logging.getLogger(__name__)

Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [R, V], slots [R], positions [R]) -> (ids, outcomes), [R] int64 each, from tensors alone."""
PADDING_SLOT = -1
"""Slot of a padding row, and of a padding token; its position is 0."""


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
    read: Tensor | None
    """[R, states * hidden]: hidden states that a draft head reads; None without one."""


class Recordings:
    """The recordings of `run(size)` for some of `sizes`, which ascend. A step runs that of the next size."""

    def __init__(
        self, what: str, sizes: Sequence[int], device: Device, run: Callable[[int], Tensor], refusal: str | None = None
    ) -> None:
        """`what` names the steps in messages, with a place for the size: "decode steps of {} rows". `refusal`: why
        nothing is recorded, if that is known."""
        self._what, self._sizes, self._device, self._run = what, sizes, device, run
        self._recordings: dict[int, Recording] = {}
        self._refused: set[int] = set()
        self.is_complete = False
        """Whether every size was recorded or refused."""
        self.refusal = refusal
        """Why no size can be recorded; None if it can, and as long as no attempt has shown that it cannot."""
        if refusal is not None and sizes:
            logger.info("%s run call by call: %s", what.format("all"), refusal)

    @property
    def recorded(self) -> tuple[int, ...]:
        """Sizes that were recorded, ascending."""
        return tuple(sorted(self._recordings))

    def size_for(self, needed: int) -> int | None:
        """The smallest size of at least `needed`; None if such steps are not recorded."""
        if self.refusal is not None or not self._sizes or needed > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, needed)]
        return None if size in self._refused else size

    def record_all(self, prepare: Callable[[int], None], progress: Progress | None = None) -> None:
        """Record every size, with inputs that `prepare` writes. The largest comes first, because later recordings reuse
        its memory; in another order each would take memory of its own, which the memory plan does not hold.

        `progress` is called with the number of sizes that are done, and their number in all.
        """
        self.is_complete = True
        if self.refusal is not None:
            return
        for place, size in enumerate(reversed(self._sizes), start=1):
            prepare(size)
            self._record(size)
            if self.refusal is not None:
                return
            if progress is not None:
                progress(place, len(self._sizes))

    def output(self, size: int) -> Tensor | None:
        """The output for inputs that are written, by the recording of `size`. It is recorded first if need be; None if
        that fails."""
        recording = self._recordings.get(size)
        if recording is not None:
            recording.replay()
            return recording.output
        assert not self.is_complete, "a device that records whole steps records nothing while it serves"
        recording = self._record(size)
        return None if recording is None else recording.output

    def _record(self, size: int) -> Recording | None:
        """Run and record the step of `size`; None if that fails."""
        try:
            recording = self._device.record(partial(self._run, size))
        except NotRecordableError as error:
            self._refuse(size, str(error))
            return None
        self._recordings[size] = recording
        return recording

    def _refuse(self, size: int, reason: str) -> None:
        """If the first recording fails, this model cannot be recorded. If a later one fails, or that of the largest
        size, perhaps memory ran out: the others stay."""
        is_largest = self.is_complete and size == self._sizes[-1]
        if self._recordings or is_largest:
            self._refused.add(size)
            logger.warning("%s run call by call: %s", self._what.format(size), reason)
        else:
            self.refusal = reason
            logger.info("%s run call by call: %s", self._what.format("all"), reason)


def uses_adapters(model: LoadedModel, slots: Iterable[int]) -> bool:
    """Whether one of these slots has an adapter."""
    return model.adapters is not None and model.adapters.has_any(slots)


def compute_layers(model: LoadedModel, batch: Batch, *, has_adapters: bool = False) -> Tensor:
    """The layers of a step, call by call, or while they are recorded: see `Decoder.forward`. `has_adapters`: whether a
    row has an adapter."""
    if has_adapters:
        assert model.adapters is not None
        with model.adapters.used_by(batch.token_slots):
            return compute_layers(model, batch)
    states = None if model.states is None else model.states.of(batch.state_rows)
    return model.decoder.forward(batch.token_ids, batch.attention, model.kv.data, model.kv.scales, states)


def recordings_of(
    model: LoadedModel, what: str, sizes: Sequence[int], run: Callable[[bool, int], Tensor]
) -> Mapping[bool, Recordings]:
    """The recordings of `run(has_adapters, size)`, by whether a row has an adapter."""
    names = {False: what} if model.adapters is None else {False: what, True: f"{what} with adapters"}
    why_not = model.decoder.unrecordable
    return {key: Recordings(name, sizes, model.device, partial(run, key), why_not) for key, name in names.items()}


class StepGraphs:
    """The decode steps of one decoder over one KV pool and the slots of its requests."""

    def __init__(self, model: LoadedModel, *, max_draws: int = 0, draw: Draw | None = None) -> None:
        """`max_draws`: most tokens that a step draws if it verifies drafts. `draw`: in place of `Sampler.draw`."""
        self._model, self._draw = model, draw or model.sampler.draw
        self._has_drafts = model.states is not None and model.states.drafted is not None
        device = self._device = model.device
        sizes = device.row_buckets[: bisect_left(device.row_buckets, max(max_draws, model.slots.num_slots)) + 1]
        recorded = sizes if model.decoder.arch.has_head else ()  # no other model draws
        self._recordings = recordings_of(model, "decode steps of {} rows", recorded, self._run)
        self._max_rows = sizes[-1]
        self._rows = torch.empty(2 * _width(self._max_rows), dtype=torch.int64, device=device.torch_device)
        self._query_start = torch.arange(self._max_rows + 1, dtype=torch.int32, device=device.torch_device)
        self._state_starts, self._state_slots = self._query_start.clone(), self._rows[: self._max_rows].clone()
        """First token and slot of each row as recurrent layers see it: with all drafts of its slot. Rows without tokens
        follow."""
        self._num_kept = torch.ones_like(self._query_start)
        self._logits: Tensor | None = None
        """Logits of all recordings: one tensor each would be gigabytes."""
        self._read: Tensor | None = None
        """The same for hidden states that a draft head reads."""

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """Numbers of rows that steps were recorded for."""
        return self._recordings[False].recorded

    @property
    def refusal(self) -> str | None:
        """Why this model's steps cannot be recorded; None unless an attempt has shown it."""
        return self._recordings[False].refusal

    def decode(self, rows: Sequence[tuple[int, int]]) -> Decoded | None:
        """Compute the tokens at each (slot, position), which differ. Returns None, with nothing computed, if there is
        no recording for so many rows."""
        recordings, num_rows = self._recordings[uses_adapters(self._model, (slot for slot, _ in rows))], len(rows)
        if self._device.records_all and not recordings.is_complete:
            self.record_all()
        bucket = recordings.size_for(num_rows)
        if bucket is None:
            return None
        self._write(rows, bucket)
        output = self._output(recordings, rows, bucket)
        if output is None:
            return None
        if self._device.records_all:
            assert self._logits is not None
            read = None if self._read is None else self._read[:num_rows]
            return Decoded(self._logits[:num_rows], output[:num_rows], read)
        hidden, read = self._model.decoder.parts(output[:num_rows])
        return Decoded(self._model.decoder.logits(hidden), None, read)

    def _output(self, recordings: Recordings, rows: Sequence[tuple[int, int]], bucket: int) -> Tensor | None:
        """The output for rows that are written; None, with nothing changed, if they cannot be recorded."""
        if self._model.states is None or bucket in recordings.recorded:
            return recordings.output(bucket)
        # A recording that fails may have advanced the states of some layers. If several rows were recorded, any number
        # can be, because it makes the same calls. Copies of 32 states of Qwen3.5-0.8B are 600 MB.
        is_sure = bool(recordings.recorded) and recordings.recorded[-1] > 1
        slots = [slot for slot, _ in rows]
        kept = None if is_sure else self._model.states.kept(slots)
        output = recordings.output(bucket)
        if output is None:
            assert kept is not None, "a step that should be recordable is not, and its states are lost"
            self._model.states.restore(slots, kept)
        return output

    def record_all(self, progress: Progress | None = None) -> None:
        """Record every number of rows, all of them padding. `progress` as in `Recordings`."""
        assert self._model.kv.padding_block is not None, "a device that records whole steps pads them"
        for recordings in self._recordings.values():
            recordings.record_all(lambda bucket: self._write((), bucket), progress)
        if self.refusal is not None:
            self._logits = self._read = None

    def _write(self, rows: Sequence[tuple[int, int]], bucket: int) -> None:
        num_padding = _width(bucket) - len(rows)
        slots = [slot for slot, _ in rows] + [PADDING_SLOT] * num_padding
        positions = [position for _, position in rows] + [0] * num_padding
        self._device.write(self._rows[: 2 * _width(bucket)], slots + positions)
        if self._has_drafts:
            starts = [place for place in range(bucket) if not place or slots[place] != slots[place - 1]]
            num_empty = bucket - len(starts)
            self._device.write(self._state_starts[: bucket + 1], starts + [bucket] * (num_empty + 1))
            self._device.write(self._state_slots[:bucket], [slots[place] for place in starts] + [0] * num_empty)

    def _run(self, has_adapters: bool, bucket: int) -> Tensor:
        """The step that is recorded. A run to record it changes nothing that it reads: on a device that records whole
        steps its rows are padding, and otherwise nothing is drawn."""
        slots, positions = self._rows[: 2 * _width(bucket)].view(2, -1)[:, :bucket].unbind()
        model, state_rows = self._model, None
        if self._has_drafts:
            starts, own_slots = self._state_starts[: bucket + 1], self._state_slots[:bucket]
            state_rows = StateRows(starts, positions, own_slots, self._num_kept[:bucket])
        # Without a padding block the device does not pad.
        padding_block, rows = model.kv.padding_block or 0, (slots, positions, self._query_start[: bucket + 1])
        batch = Batch.of_decodes(model.slots, rows, padding_block, state_rows, is_deterministic=model.is_deterministic)
        states = compute_layers(model, batch, has_adapters=has_adapters)
        if not self._device.records_all:
            return states
        hidden, read = model.decoder.parts(states)
        if read is not None:
            if self._read is None:
                self._read = read.new_empty((self._max_rows, read.shape[1]))
            self._read[:bucket].copy_(read)
        if self._logits is None:
            self._logits = hidden.new_empty((self._max_rows, model.decoder.arch.vocab_size), dtype=torch.float32)
        logits = model.decoder.logits(hidden, out=self._logits[:bucket])
        token_ids, outcomes = self._draw(logits, slots, positions + 1)
        write_drawn(token_ids, slots, positions, model.slots.token_ids)
        return outcomes
