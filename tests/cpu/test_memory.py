"""Compares the memory plan with an engine process: resident memory of a loaded checkpoint, in every precision.

The checkpoint has 130 MB, so that the libraries' own memory does not matter. Each load has a process of its own,
because memory that an earlier load freed would serve the next.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.quality.checkpoint_formats import FORMATS
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig, plan_of
from inferd.engine.api.machine.cpu import Machine, num_cpus
from inferd.engine.api.memory.activations import (
    ATTENTION_TILE,
    CUT_BYTES,
    GPU_ROW_BUCKETS,
    PARTIALS_BYTES,
    AdapterSpace,
    Draft,
    Workload,
    working_lines,
)
from inferd.engine.api.memory.planner import MemoryPlan, plan_memory, pool_of, refusal, weight_lines
from inferd.engine.api.memory.precision import (
    FP8,
    INT4,
    INT8,
    INT8_OF_ENCODER,
    KV_FORMATS,
    KVPrecision,
    Precision,
    StoredAs,
)
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.arch.description import Arch, DraftHeadKind, DraftHeadParts
from inferd.engine.arch.registry import describe
from inferd.engine.layers.rotary import cos_sin_table, query_table
from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import RECIPES
from inferd.engine.quant.scheme import QuantizationError
from inferd.engine.sample.rules import SlotRules
from inferd.engine.worker.build import load_and_measure
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.states import StatePool
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops import linear_int8, quantized
from inferd.kernels.ops.linear_int8 import LONG_GROUP_SIZE, quantize_int8
from inferd.kernels.ops.paged_attention import ATTENTION_SPLIT, passes
from tests.arch.test_families import PUBLISHED
from tests.configs import engine_config
from tests.cpu.quantized_checkpoints import save
from tests.unit.test_step_cost import QWEN35_08B

IS_RECORDED = False

TOLERANCE = 0.03

LOAD = """
import json, sys, time
import msgspec
from inferd.engine.api.config import EngineConfig
from inferd.engine.worker.load import load_worker
config = msgspec.json.decode(sys.stdin.read(), type=EngineConfig)
_, ready = load_worker(config, time.monotonic(), lambda phase: None)
print(json.dumps({name: getattr(ready, name) for name in ready.__struct_fields__ if name.endswith("_bytes")}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the checkpoint is a tied head and a quarter the MLPs, as in small models."""
    path = tmp_path_factory.mktemp("realistic")
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"), [("none", "auto"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "auto")]
)
def test_weights_take_what_was_planned(checkpoint: Path, quantization: str, kv_cache_dtype: str) -> None:
    plan, measured = loaded(checkpoint, quantization, kv_cache_dtype)
    assert abs(measured["weights_bytes"] / plan.weights_bytes - 1) < TOLERANCE
    for wrong in wrong_plans(plan):
        assert abs(measured["weights_bytes"] / wrong - 1) > TOLERANCE


@pytest.mark.sampled(keep=3, among="models over HTTP and their memory")
def test_a_quantized_checkpoint_takes_what_was_planned(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 12288, "num_attention_heads": 16}
    chosen = next(one for one in FORMATS if one.name == "W4A16")
    save(chosen, tmp_path, **sizes, head_dim=64, num_key_value_heads=4)
    plan, measured = loaded(tmp_path, "none", "auto")
    assert abs(measured["weights_bytes"] / plan.weights_bytes - 1) < TOLERANCE
    scales_bytes = sum(part.num_bytes for part in plan.weights if part.name in ("attention", "MLP")) // 9
    assert abs(measured["weights_bytes"] / (plan.weights_bytes + 2 * scales_bytes) - 1) > TOLERANCE


@pytest.mark.sampled(keep=3, among="models over HTTP and their memory")
@pytest.mark.skipif(num_cpus() < 2, reason="two ranks need two cores")
def test_a_rank_takes_what_was_planned_for_each(checkpoint: Path) -> None:
    """More than a half of the whole: the embedding is on every rank."""
    plan, measured = loaded(checkpoint, "none", "auto", num_ranks=2)
    assert abs(measured["weights_bytes"] / plan.weights_bytes - 1) < TOLERANCE
    for wrong in wrong_plans(plan):
        assert abs(measured["weights_bytes"] / wrong - 1) > TOLERANCE


class _FreedDevice(CpuDevice):
    """A process that holds 48 MiB of freed memory, until it gives that back."""

    freed_bytes = 48 * 2**20

    def memory_in_use(self) -> int:
        return 2**27 + self.freed_bytes

    def give_back_freed(self) -> None:
        self.freed_bytes = 0


def test_memory_that_was_freed_before_is_not_taken_off_the_weights(tmp_path: Path) -> None:
    """Loading a model of a few KiB takes nothing, and gives back what the process had freed before."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=64, **sizes))
    model.save_pretrained(tmp_path)
    checkpoint, device = Checkpoint.read(tmp_path), _FreedDevice(1)
    arch = ModelFacts.of(checkpoint).arch
    work = work_on("cpu", max_model_len=64)
    planned = plan_memory(arch, Precision("float32"), work, pool_of(1, work))
    assert load_and_measure(lambda: Decoder(arch, torch.float32, "cpu"), checkpoint, planned, device)[1] == 0


def loaded(
    checkpoint: Path, quantization: str, kv_cache_dtype: str, num_ranks: int = 1
) -> tuple[MemoryPlan, dict[str, int]]:
    """(plan, bytes that a new process measured after it loaded the checkpoint; most bytes of a rank)."""
    facts = ModelFacts.of(Checkpoint.read(checkpoint))
    asked = AskedConfig(
        model_path=str(checkpoint), quantization=quantization, kv_cache_dtype=kv_cache_dtype, kv_memory_bytes=2**24,
        num_threads=2, tensor_parallel_size=num_ranks,
    )  # type: ignore[arg-type]  # fmt: skip
    config, plan, _ = resolve(asked, facts, Machine.detect())
    line = [sys.executable, "-P", "-c", LOAD]
    text = json.dumps({name: getattr(config, name) for name in config.__struct_fields__})
    done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=120, check=True)
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert measured["planned_weights_bytes"] == plan.weights_bytes
    assert measured["planned_kv_bytes"] == measured["kv_bytes"] == plan.kv_bytes
    return plan, measured


def wrong_plans(plan: MemoryPlan) -> list[int]:
    """Plans that the tolerance must refuse: a tied head counted once, and one layer too many."""
    parts = {part.name: part.num_bytes for part in plan.weights}
    return [plan.weights_bytes - parts["head"], plan.weights_bytes + (parts["attention"] + parts["MLP"]) // 2]


WINDOWED = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 96, "max_position_embeddings": 700, "max_window_layers": 2, "num_attention_heads": 4,
    "num_hidden_layers": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "sliding_window": 40,
    "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": 50,
}  # fmt: skip


class PaddingDevice(CpuDevice):
    """Pads steps, as a GPU does."""

    row_buckets = GPU_ROW_BUCKETS


GROWING = {
    "architectures": ["Ministral3ForCausalLM"],
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                        "llama_4_scaling_beta": 0.1},
}  # fmt: skip


LAYER_TYPES = ["full_attention", "sliding_attention"]
UNLIKE_HEADS = {
    "architectures": ["Gemma4ForCausalLM"], "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 50, "num_kv_shared_layers": 1, "layer_types": [*LAYER_TYPES, *LAYER_TYPES[::-1]] * 2,
    "num_hidden_layers": 8, "rope_scaling": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"use_sliding_window": False}, {"max_window_layers": 5}, GROWING, UNLIKE_HEADS]
)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_cache", ["float32", *KV_FORMATS])
def test_tables_slots_and_cache_are_exactly_as_planned(changes: dict[str, object], kind: str, kv_cache: str) -> None:
    arch, device = describe(WINDOWED | changes), (CpuDevice if kind == "cpu" else PaddingDevice)(1)
    config = engine_config(
        model_path="-", dtype="float32", device=kind, max_model_len=700, block_size=16, num_blocks=99, max_num_seqs=7,
        max_num_batched_tokens=64, kv_cache_dtype=kv_cache, weights_dtype="float32",
    )  # type: ignore[arg-type]  # fmt: skip
    plan = plan_of(config, arch)
    planned = {part.name: part.num_bytes for part in plan.working}
    form = KV_FORMATS.get(kv_cache)  # type: ignore[call-overload]
    pool = KVPool.allocate(arch, 99, 16, getattr(torch, kv_cache if form is None else form.dtype), device)
    assert pool.num_bytes == plan.kv_bytes
    assert (pool.padding_block is None) == (kind == "cpu")
    slots = Slots(7, 700, 16, device, len(arch.cache_groups))
    assert slots.token_ids.nbytes + slots.block_tables.nbytes == planned["slots"]
    rules = SlotRules(7, arch.vocab_size, device.torch_device)
    assert sum(tensor.nbytes for tensor in rules.state) == planned["sampling rules"]
    tables = {rope: cos_sin_table(rope, 700, device.torch_device) for rope in arch.ropes if rope is not None}
    for_queries = [query_table(rope, table) for rope, table in tables.items()]
    every = [*tables.values(), *(table for table in for_queries if table is not None)]
    assert sum(table.nbytes for table in every) == planned["rotary"]


@pytest.mark.parametrize("fields", [QWEN35_08B, *(PUBLISHED[name][0] for name in ("LFM2-1.2B", "granite-4.0-h-tiny"))])
@pytest.mark.parametrize("speculative", ["none", "ngram"])
def test_states_are_exactly_as_planned(fields: dict[str, Any], speculative: str) -> None:
    arch, device = describe(fields), CpuDevice(1)
    config = engine_config(
        model_path="-", dtype="bfloat16", device="cpu", max_model_len=700, block_size=16, num_blocks=99, max_num_seqs=3,
        max_num_batched_tokens=64, kv_cache_dtype="bfloat16", weights_dtype="bfloat16", num_checkpoints=2,
        speculative=speculative,
    )  # type: ignore[arg-type]  # fmt: skip
    names = ("states", "checkpoints", "inputs of drafts")
    planned = sum(part.num_bytes for part in plan_of(config, arch).working if part.name in names)
    max_drafted = config.most_draws if speculative == "ngram" else 0
    pool = StatePool.allocate(arch, 3, 2, torch.bfloat16, device, max_drafted)
    assert pool is not None and pool.num_bytes == planned


@pytest.mark.parametrize(("name", "stored"), [("fp8", FP8), ("int8", INT8), ("int4", INT4)])
@pytest.mark.parametrize("columns", [32, 33, 48, 65536, 65537, 65568])
def test_the_plan_refuses_what_the_layers_refuse(name: str, stored: StoredAs, columns: int) -> None:
    try:
        RECIPES[name].layers.check(8, columns)
    except QuantizationError:
        assert stored.refuses(columns) is not None
    else:
        assert stored.refuses(columns) is None


@pytest.mark.parametrize(("columns", "group_size"), [(384, 128), (320, 64), (312, 312)])
def test_an_encoders_matrices_in_8_bits_take_what_is_planned(
    columns: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "has_wide_rows", lambda device_type: False)
    q, scales = quantize_int8(torch.randn(48, columns), linear_int8.group_size(columns, "cpu", LONG_GROUP_SIZE))
    assert scales.shape[1] == columns // group_size
    assert q.nbytes + scales.nbytes == INT8_OF_ENCODER.num_bytes(48, columns).value


def test_a_head_is_refused_by_its_own_rule() -> None:
    """Layers have 4 bits, the head 8: a hidden size of 72 suits the head and no other layer."""
    arch: Arch = describe(WINDOWED | {"hidden_size": 72, "intermediate_size": 96})
    rule = "must be a multiple of the group size 32"
    assert refusal(arch, "int4") == f"layers.0.attention.qkv has 72 inputs, which {rule}"
    RECIPES["int4"].head.check(50, 72)


def work_on(device: str, max_model_len: int = 4096, **changes: int) -> Workload:
    """A workload of up to 300 rows and 4,096 tokens a step."""
    settings = {"num_seqs": 300, "step_tokens": 4096, "block_size": 16, "num_threads": 2} | changes
    return Workload(max_model_len=max_model_len, device=device, **settings)  # type: ignore[arg-type]


def working(work: Workload) -> dict[str, int]:
    arch = describe(WINDOWED | {"max_position_embeddings": 1 << 20})
    return {part.name: part.num_bytes for part in working_lines(arch, Precision("bfloat16"), work)}


@pytest.mark.parametrize("group", [1, 4, 7, 32])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_attention_keeps_no_more_sums_on_a_gpu_than_are_planned(group: int, num_kv_heads: int) -> None:
    """Holds for any step on any GPU. With long sequences the sums reach the bound."""
    most = 0
    for head_dim, num_sms, sm, kv_bytes in ((64, 58, 89, 1), (128, 132, 90, 2), (256, 148, 100, 1)):
        shape = passes.Shape(num_kv_heads, group, head_dim, kv_bytes, None, DeviceProperties.of(sm, num_sms))
        for lens in ([1] * 256, [1] * 7 + [2048], [4096], [64] * 64):
            for is_deterministic in (True, False):
                for tokens in (ATTENTION_TILE, 4096, 1 << 20):
                    parts = passes.passes(shape, lens, tokens, is_deterministic=is_deterministic)
                    rows = max(part.num_slots * part.slot_rows for part in parts) * num_kv_heads
                    assert rows == 0 or tokens > ATTENTION_TILE
                    most = max(most, rows * (head_dim + 2) * 4)
    assert 0.99 * PARTIALS_BYTES < most <= PARTIALS_BYTES
    assert working(work_on("cuda"))["partial sums"] == 2 * PARTIALS_BYTES
    assert "partial sums" not in working(work_on("cuda", max_model_len=ATTENTION_TILE))


def test_the_plan_and_the_kernels_cut_keys_alike() -> None:
    assert (ATTENTION_TILE, PARTIALS_BYTES) == (ATTENTION_SPLIT, passes.SLOT_BYTES)


def test_sorted_scores_take_no_more_than_is_planned() -> None:
    pytest.importorskip("triton")
    from inferd.kernels.ops.top_k_top_p.triton import Chunks  # noqa: PLC0415

    for num_rows, vocab_size in ((1, 151_936), (256, 128_256), (512, 262_144)):
        chunks = Chunks(num_rows, vocab_size, torch.device("meta"))
        planned = num_rows * vocab_size * CUT_BYTES
        assert 0.85 * planned < sum(tensor.nbytes for tensor in chunks.sorted) <= planned


def test_a_processors_sums_grow_with_its_threads_up_to_a_steps_rows() -> None:
    """4 heads of 16, at 4,096 keys: 16 tiles."""
    assert working(work_on("cpu"))["partial sums"] == 2 * 171 * 16 * (16 + 2) * 4
    assert working(work_on("cpu", num_threads=500))["partial sums"] == 4 * 4096 * 16 * (16 + 2) * 4
    assert "partial sums" not in working(work_on("cpu", num_threads=1))


def test_a_gpus_recorded_steps_are_planned_for_the_bucket_of_its_rows() -> None:
    """320 rows of logits in fp32, twice, of hidden states, projections, the MLP's tensors and sorted scores. 1,024
    tokens of hidden states, projections and the MLP's tensors, and the last hidden states of each size up to that."""
    width = 3 * 64 + (4 + 2 + 2) * 16 + 3 * 96
    of_row, num_kept = (
        width * 2 + 50 * 4 * 2 + 50 * 5,
        sum((64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)),
    )
    prompts = 1024 * width * 2 + num_kept * 64 * 2
    assert working(work_on("cuda"))["recorded steps"] == 320 * of_row + prompts
    assert working(work_on("cuda", num_seqs=2000))["recorded steps"] == 512 * of_row + prompts
    short, kept_twice = work_on("cuda", step_tokens=100), AdapterSpace(num=1, rank=8, dtype="bfloat16")
    prompts = 128 * width * 2 + (64 + 128) * 64 * 2
    assert working(short)["recorded steps"] == 320 * of_row + prompts
    assert (
        working(replace(short, adapters=kept_twice))["recorded steps"] == 320 * of_row + prompts + (64 + 128) * 64 * 2
    )
    assert "recorded steps" not in working(work_on("cpu"))


def test_recorded_prompts_keep_the_states_that_a_draft_head_reads() -> None:
    """Beside the final ones: none, two, or three if its config does not say which."""
    arch = describe(WINDOWED)
    found = {}
    for read in ((), (1, 2), None):
        head = DraftHeadParts(DraftHeadKind.EAGLE3, state_size=64, layers_read=read, num_tokens=50)
        draft = Draft(replace(arch, draft_head=head), Precision("bfloat16"))
        found[read] = working(replace(work_on("cuda", step_tokens=100), draft=draft))["recorded steps"]
    assert found[1, 2] - found[()] == 2 * (64 + 128) * 64 * 2
    assert found[None] - found[()] == 3 * (64 + 128) * 64 * 2


def test_a_tied_head_is_the_embedding_itself_on_a_gpu_unless_it_is_quantized() -> None:
    arch = describe(WINDOWED | {"tie_word_embeddings": True, "hidden_size": 64})
    sized: dict[tuple[str, str], int] = {}
    for device in ("cpu", "cuda"):
        for quantization in ("none", "int8"):
            parts = weight_lines(arch, Precision("bfloat16", quantization), device)  # type: ignore[arg-type]
            sized[device, quantization] = sum(part.num_bytes for part in parts)
    assert sized["cpu", "none"] - sized["cuda", "none"] == 50 * 64 * 2
    assert sized["cpu", "int8"] == sized["cuda", "int8"]


@pytest.mark.parametrize("kv_cache", KV_FORMATS)
def test_a_pool_of_8_bits_takes_a_byte_a_number_and_two_a_group(kv_cache: KVPrecision) -> None:
    arch, work = describe(WINDOWED), work_on("cpu")
    plain, short = (
        plan_memory(arch, Precision("bfloat16", kv_cache=kind), work, pool_of(10, work)).kv_bytes  # type: ignore[arg-type]
        for kind in ("auto", kv_cache)
    )
    assert short * 2 * 16 == plain * (16 + 2)
