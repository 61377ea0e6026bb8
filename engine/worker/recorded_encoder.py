"""An encoder that replays its run of a short text that it computes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.api.memory.encoders import RECORDED_TOKENS
from inferd.engine.layers.encoder import EncoderInputs
from inferd.engine.layers.packed_batch import PackedBatch
from inferd.engine.models.encoder import Encoder
from inferd.engine.worker.device import Device, Recording
from inferd.kernels.cpu.tape import NotRecordableError


class RecordedEncoder:
    """`forward` of an encoder on a CPU, with the same bits. A text of up to `RECORDED_TOKENS` tokens is computed by a
    recording for its length, which its first run makes.

    Calls from Python would take half of the time of a text of 16 tokens: All-MiniLM-L6 in int8 takes 1.2 instead of 1.9
    ms (2 cores of an Intel Xeon, 2026-12-01). Several texts are computed as usual: they are longer together.
    """

    def __init__(self, encoder: Encoder, device: Device) -> None:
        self._encoder, self._device, self._is_recordable = encoder, device, True
        self._recordings: dict[int, Recording] = {}
        """By the number of tokens."""
        positions = encoder.arch.positions
        self._has_padding = positions is not None and positions.padding_id is not None
        self._inputs = encoder.inputs_of(torch.zeros(RECORDED_TOKENS, dtype=torch.int64), _starts(RECORDED_TOKENS))

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def forward(self, token_ids: Tensor, starts: Tensor, token_types: Tensor | None = None) -> Tensor:
        """As of `Encoder`. The result is valid until the next call."""
        num_tokens = len(token_ids)
        if not (self._is_recordable and len(starts) == 2 and 0 < num_tokens <= RECORDED_TOKENS):
            return self._encoder.forward(token_ids, starts, token_types)
        inputs = self._filled(token_ids, starts, token_types)
        recording = self._recordings.get(num_tokens)
        try:
            if recording is None:
                recording = self._device.record(lambda: self._encoder.compute(inputs))
                self._recordings[num_tokens] = recording
            else:
                recording.replay()
        except NotRecordableError:  # it computes with operations of torch
            self._is_recordable = False
            return self._encoder.compute(inputs)
        return recording.output

    def _filled(self, token_ids: Tensor, starts: Tensor, token_types: Tensor | None) -> EncoderInputs:
        """Memory of the recordings' inputs, with these in it. Its positions count from 0: there is one sequence."""
        num_tokens, all_of, batch = len(token_ids), self._inputs, self._inputs.batch
        batch.starts.copy_(starts)
        ids, types, rows = (
            None if own is None else own[:num_tokens]
            for own in (all_of.token_ids, all_of.token_types, all_of.position_rows)
        )
        assert ids is not None
        ids.copy_(token_ids)
        if types is not None:
            types.zero_() if token_types is None else types.copy_(token_types)
        if rows is not None and self._has_padding:
            given = self._encoder.inputs_of(token_ids, starts).position_rows
            assert given is not None
            rows.copy_(given)
        kept = PackedBatch(batch.starts, batch.positions[:num_tokens], batch.write_slots[:num_tokens])
        return EncoderInputs(ids, types, rows, kept)


def _starts(num_tokens: int) -> Tensor:
    return torch.tensor([0, num_tokens], dtype=torch.int32)
