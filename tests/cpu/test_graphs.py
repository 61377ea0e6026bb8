"""A recorded decode step gives the bits of the calls that it was recorded from, for any requests in its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from inferd.engine.arch.description import Activation
from inferd.engine.layers import mlp
from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import RECIPES
from inferd.engine.worker.device import CpuDevice, Recording
from inferd.engine.worker.graphs import StepGraphs
from inferd.engine.worker.kv import KVPool
from inferd.kernels.gated_mul import silu_mul
from inferd.kernels.paged_attention import AttentionBatch
from inferd.kernels.tape import NotRecordableError
from tests.cpu.checkpoints import Case, random_decoder
from tests.cpu.paging import Pool, Request

VOCAB = 199
WIDE = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
RECORDED = (
    (Case("llama", "llama", WIDE | {"attention_bias": True}), torch.bfloat16, "none"),
    (Case("llama", "llama", WIDE), torch.float32, "none"),
    (Case("qwen3", "qwen3", WIDE | {"head_dim": 48}), torch.bfloat16, "int8"),
    (Case("olmo2", "olmo2", WIDE), torch.bfloat16, "none"),
    (Case("starcoder2", "starcoder2", WIDE), torch.bfloat16, "none"),
    (Case("granite", "granite", WIDE | {"residual_multiplier": 0.5}), torch.bfloat16, "none"),
    (Case("gemma2", "gemma2", WIDE | {"head_dim": 32, "sliding_window": 20}), torch.bfloat16, "int4"),
)
BLOCK, TABLE_WIDTH = 16, 8


class GraphedPool(Pool):
    """Computes through `StepGraphs`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, 60, BLOCK, table_width=TABLE_WIDTH)
        self.graphs = StepGraphs(decoder, KVPool(self.kv, padding_block=self.free.pop(0)), CpuDevice(1))

    def forward(self, token_ids: Tensor, batches: Sequence[AttentionBatch]) -> Tensor:
        return self.graphs.forward(token_ids, batches).clone()


def name_of(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


def run(pool: Pool, seed: int) -> list[Tensor]:
    """Requests come, decode in changing company, and go: the hidden states of every step."""
    random, states, running = Random(seed), [], list[Request]()
    for _ in range(40):
        if len(running) < 5 and random.random() < 0.4:
            request = Request([random.randrange(VOCAB) for _ in range(random.randrange(1, 40))])
            states += pool.step([(request, len(request.token_ids))])
            running.append(request)
        if running and random.random() < 0.2:
            for blocks in running.pop(random.randrange(len(running))).blocks:
                pool.free.extend(blocks)
        rows = random.sample(running, random.randrange(len(running) + 1))
        for request in rows:
            request.token_ids.append(random.randrange(VOCAB))
        states += pool.step([(request, 1) for request in rows]) if rows else []
    return states


def assert_equal_steps(case: Case, dtype: torch.dtype, quantization: str) -> StepGraphs:
    decoder = random_decoder(case, dtype, RECIPES[quantization])
    pool = GraphedPool(decoder)
    for seed in range(3):
        expected = run(Pool(decoder, 60, BLOCK, table_width=TABLE_WIDTH), seed)
        pool.free = Pool(decoder, 60, BLOCK, table_width=TABLE_WIDTH).free[1:]
        states = run(pool, seed)
        assert len(states) == len(expected) > 40
        assert all(torch.equal(state, other) for state, other in zip(states, expected, strict=True))
    return pool.graphs


@pytest.mark.parametrize(("case", "dtype", "quantization"), RECORDED, ids=name_of)
def test_a_replay_gives_the_same_bits(case: Case, dtype: torch.dtype, quantization: str, kernels: str) -> None:
    step_graphs = assert_equal_steps(case, dtype, quantization)
    if kernels == "cpp":
        assert step_graphs.refusal is None
        assert step_graphs.recorded_rows == (1, 2, 3, 4, 5)
    else:
        assert step_graphs.refusal is not None


def test_what_cannot_be_recorded_is_called(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(mlp, "_GATES", {Activation.SILU: lambda x: silu_mul(x) * 1.0})
    step_graphs = assert_equal_steps(*RECORDED[0])
    assert step_graphs.refusal is not None
    assert kernels != "cpp" or "aten.mul" in step_graphs.refusal
    assert step_graphs.recorded_rows == ()


def test_steps_are_padded_to_the_next_bucket(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(CpuDevice, "row_buckets", (1, 4, 5))
    for setup in RECORDED:
        step_graphs = assert_equal_steps(*setup)
        assert step_graphs.recorded_rows == ((1, 4, 5) if kernels == "cpp" else ())


def test_a_recording_that_fails_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    record = CpuDevice.record

    def failing_for_three(self: CpuDevice, run: Callable[[], Tensor]) -> Recording:
        recording = record(self, run)
        if recording.output.shape[0] == 3:
            raise NotRecordableError("out of memory")
        return recording

    monkeypatch.setattr(CpuDevice, "record", failing_for_three)
    step_graphs = assert_equal_steps(*RECORDED[0])
    assert step_graphs.refusal is None
    assert step_graphs.recorded_rows == (1, 2, 4, 5)


def test_more_rows_than_are_recorded(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(CpuDevice, "row_buckets", (1, 2))
    step_graphs = assert_equal_steps(*RECORDED[0])
    assert step_graphs.recorded_rows == ((1, 2) if kernels == "cpp" else ())
