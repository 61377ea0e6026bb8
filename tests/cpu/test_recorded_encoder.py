"""A recorded run of a text gives the bits of any other run, whatever was computed before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferd.engine.models.encoder import Encoder
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.recorded_encoder import RECORDED_TOKENS, RecordedEncoder
from tests.cpu.encoder_cases import CASES, VOCAB, EncoderCase, load_encoder

UNRECORDABLE = ("DebertaV2", "T5")
"""Families that compute with operations of torch, between kernels or as an activation."""
LENGTHS = (1, 5, 37, RECORDED_TOKENS)


def text_of(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, VOCAB, (length,)), torch.tensor([0, length], dtype=torch.int32)


def recorded(encoder: Encoder) -> RecordedEncoder:
    return RecordedEncoder(encoder, CpuDevice(torch.get_num_threads()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_replay_has_the_bits_of_a_run(case: EncoderCase, dtype: torch.dtype, kernels: str, tmp_path: Path) -> None:
    case.save(tmp_path, dtype)
    encoder = load_encoder(tmp_path, dtype)
    own, lengths = recorded(encoder), [n for n in LENGTHS if n <= encoder.max_positions]
    for _ in range(3):
        for length in lengths:
            ids, starts = text_of(length)
            types = torch.randint(0, 2, (length,)) if encoder.num_token_types == 2 else None
            assert torch.equal(own.forward(ids, starts, types), encoder.forward(ids, starts, types))
    is_recorded = kernels == "cpp" and case.family not in UNRECORDABLE
    assert own.num_recordings == (len(lengths) if is_recorded else 0)


@torch.inference_mode()
def test_several_texts_and_long_ones_are_not_recorded(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "bert")
    case.save(tmp_path, torch.float32)
    encoder = load_encoder(tmp_path, torch.float32)
    own, ids = recorded(encoder), torch.randint(0, VOCAB, (30,))
    for starts in ([0, 10, 30], [0, 0, 30], [0]):
        given = ids[: starts[-1]], torch.tensor(starts, dtype=torch.int32)
        assert torch.equal(own.forward(*given), encoder.forward(*given))
    assert own.num_recordings == 0
