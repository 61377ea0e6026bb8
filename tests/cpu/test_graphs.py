"""A recorded decode step gives the bits of the calls that it was recorded from, for any requests in its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import RECIPES
from inferd.engine.sample.sampler import Sampler
from inferd.engine.worker.device import CpuDevice, Recording
from inferd.engine.worker.graphs import StepGraphs
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Slots
from inferd.kernels.cpu.tape import NotRecordableError
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.rms_norm import rms_norm
from tests.cpu.capturing import CapturingDevice
from tests.cpu.cases import GEMMA4
from tests.cpu.checkpoints import Case, random_decoder
from tests.cpu.paging import Pool, Request

VOCAB = 199
WIDE = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 128
}  # fmt: skip
ALL_OF_GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_key_value_heads": 4,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "enable_moe_block": True,
    "num_experts": 6, "top_k_experts": 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
    "moe_intermediate_size": 96,
}  # fmt: skip
RECORDED = (
    (Case("llama", "llama", WIDE | {"attention_bias": True}), torch.bfloat16, "none"),
    (Case("llama", "llama", WIDE), torch.float32, "none"),
    (Case("qwen3", "qwen3", WIDE | {"head_dim": 48}), torch.bfloat16, "int8"),
    (Case("qwen2 moe", "qwen2_moe", WIDE | EXPERTS), torch.bfloat16, "int4"),
    (
        Case("gpt-oss", "gpt_oss", WIDE | {"num_local_experts": 5, "head_dim": 32, "sliding_window": 20}),
        torch.bfloat16,
        "int8",
    ),
    (Case("olmo2", "olmo2", WIDE), torch.bfloat16, "none"),
    (Case("starcoder2", "starcoder2", WIDE), torch.bfloat16, "none"),
    (Case("granite", "granite", WIDE | {"residual_multiplier": 0.5}), torch.bfloat16, "none"),
    (Case("gemma4", "gemma4_text", WIDE | GEMMA4 | ALL_OF_GEMMA4), torch.bfloat16, "none"),
    (Case("gemma2", "gemma2", WIDE | {"head_dim": 32, "sliding_window": 20}), torch.bfloat16, "int4"),
)
BLOCK, TABLE_WIDTH, MAX_REQUESTS = 16, 8, 5


class LogitsPool(Pool):
    """A `Pool` that gives logits [count, V] of each row, not hidden states."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, 60, BLOCK, table_width=TABLE_WIDTH)

    def step(self, rows: Sequence[tuple[Request, int]]) -> list[Tensor]:
        return [self.decoder.logits(hidden) for hidden in super().step(rows)]


class GraphedPool(LogitsPool):
    """Computes steps of one token a row through `StepGraphs`, if it records them."""

    def __init__(self, decoder: Decoder, device: CpuDevice, *, is_deterministic: bool = True) -> None:
        super().__init__(decoder)
        self.random = Random(0)
        pool = KVPool(self.kv, padding_block=self.free.pop(0))
        self.slots = Slots(MAX_REQUESTS, TABLE_WIDTH * BLOCK, BLOCK, device, len(self.groups))
        sampler = Sampler(MAX_REQUESTS, VOCAB, device.torch_device)
        self.graphs = StepGraphs(LoadedModel(decoder, pool, self.slots, sampler, device, is_deterministic))

    def step(self, rows: Sequence[tuple[Request, int]]) -> list[Tensor]:
        if any(count > 1 for _, count in rows):
            return super().step(rows)
        self.extend(rows)
        places = self.random.sample(range(MAX_REQUESTS), len(rows))
        for group in range(len(self.groups)):
            self.slots.block_tables[group, places] = self.tables(rows, group)
        for slot, (request, _) in zip(places, rows, strict=True):
            self.slots.token_ids[slot, request.computed] = request.token_ids[request.computed]
        decoded = self.graphs.decode([(slot, row[0].computed) for slot, row in zip(places, rows, strict=True)])
        if decoded is None:
            return super().step(rows)
        for request, _ in rows:
            request.computed += 1
        return list(decoded.logits.clone().split(1))


def name_of(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


def run(pool: Pool, seed: int) -> list[Tensor]:
    """Requests come, decode among changing others, and go. Gives the logits of every step."""
    draw, states, running = Random(seed), [], list[Request]()
    for _ in range(40):
        if len(running) < MAX_REQUESTS and draw.random() < 0.4:
            request = Request([draw.randrange(VOCAB) for _ in range(draw.randrange(1, 40))])
            states += pool.step([(request, len(request.token_ids))])
            running.append(request)
        if running and draw.random() < 0.2:
            for blocks in running.pop(draw.randrange(len(running))).blocks:
                pool.free.extend(blocks)
        rows = draw.sample(running, draw.randrange(len(running) + 1))
        for request in rows:
            request.token_ids.append(draw.randrange(VOCAB))
        states += pool.step([(request, 1) for request in rows]) if rows else []
    return states


def assert_equal_steps(
    case: Case, dtype: torch.dtype, quantization: str, device: CpuDevice | None = None
) -> StepGraphs:
    decoder = random_decoder(case, dtype, RECIPES[quantization])
    pool = GraphedPool(decoder, device or CpuDevice(1))
    for seed in range(3):
        expected = run(LogitsPool(decoder), seed)
        pool.free = LogitsPool(decoder).free[1:]
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


@pytest.mark.parametrize(("case", "dtype", "quantization"), RECORDED, ids=name_of)
def test_whole_steps(case: Case, dtype: torch.dtype, quantization: str, kernels: str) -> None:
    """On a device that records whole steps. All recordings share the memory of the logits."""
    step_graphs = assert_equal_steps(case, dtype, quantization, CapturingDevice())
    assert step_graphs.recorded_rows == ((1, 2, 4, 7) if kernels == "cpp" else ())


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_recording_asks_for_the_same_bits_as_the_engine(
    monkeypatch: pytest.MonkeyPatch, is_deterministic: bool, kernels: str
) -> None:
    asked: list[bool] = []
    run_layers = Decoder.run_layers

    def noted(decoder: Decoder, hidden: Tensor, batches: Sequence[AttentionBatch], *others: Any) -> Tensor:
        asked.extend(batch.is_deterministic for batch in batches)
        return run_layers(decoder, hidden, batches, *others)

    monkeypatch.setattr(Decoder, "run_layers", noted)
    case, dtype, quantization = RECORDED[0]
    pool = GraphedPool(
        random_decoder(case, dtype, RECIPES[quantization]), CpuDevice(1), is_deterministic=is_deterministic
    )
    request = Request([1, 2, 3])
    pool.step([(request, 3)])
    asked.clear()
    request.token_ids.append(4)
    pool.step([(request, 1)])
    assert asked and asked[0] == is_deterministic


def test_what_cannot_be_recorded_is_called(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    run_layers = Decoder.run_layers
    monkeypatch.setattr(Decoder, "run_layers", lambda *given: run_layers(*given) * 1.0)
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


class NarrowDevice(CapturingDevice):
    """A device without memory for recordings of some numbers of rows."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.tried: list[int] = []
        self._refused = refused

    def record(self, run: Callable[[], Tensor]) -> Recording:
        recording = super().record(run)
        self.tried.append(recording.output.shape[0])
        if self.tried[-1] in self._refused:
            raise NotRecordableError("out of memory")
        return recording


def test_a_recording_runs_on_no_lent_threads(kernels: str) -> None:
    """It keeps the number of threads of its calls, and lent cores are given back."""
    device, x, seen = CpuDevice(1), torch.rand(4, 64), list[int]()

    def run() -> Tensor:
        seen.append(torch.get_num_threads())
        return rms_norm(x, x[0], 1e-5)

    torch.set_num_threads(3)
    with contextlib.suppress(NotRecordableError):  # of plain PyTorch
        device.record(run)
    after = torch.get_num_threads()
    torch.set_num_threads(1)
    assert (seen, after) == ([1], 3)


def test_the_most_rows_are_recorded_first_for_others_to_share_their_memory(kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    device = NarrowDevice()
    assert assert_equal_steps(*RECORDED[0], device).recorded_rows == (1, 2, 4, 7)
    assert device.tried == [7, 4, 2, 1]


def test_too_little_memory_for_the_most_rows_leaves_fewer(kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    device = NarrowDevice(7)
    step_graphs = assert_equal_steps(*RECORDED[0], device)
    assert step_graphs.refusal is None
    assert step_graphs.recorded_rows == (1, 2, 4)
    assert device.tried.count(7) == 1


def test_all_are_recorded_before_the_first_request(kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    pool, done = GraphedPool(random_decoder(*RECORDED[0][:2]), NarrowDevice(2)), list[tuple[int, int]]()
    pool.graphs.record_all(lambda *progress: done.append(progress))
    assert pool.graphs.recorded_rows == (1, 4, 7)
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_more_rows_than_are_recorded(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(CpuDevice, "row_buckets", (1, 2))
    step_graphs = assert_equal_steps(*RECORDED[0])
    assert step_graphs.recorded_rows == ((1, 2) if kernels == "cpp" else ())
