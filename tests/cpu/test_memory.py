"""The plan against what an engine process really holds: resident memory of a loaded checkpoint, in every precision.

A checkpoint of 130 MB, so that what the libraries keep for themselves does not count. Each load has a process of its
own: what an earlier one freed would serve the next.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig, plan_of, resolve
from inferd.engine.api.machine import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.planner import MemoryPlan, refusal
from inferd.engine.api.precision import FP8, INT4, INT8, StoredAs
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import describe
from inferd.engine.layers.rotary import cos_sin_table
from inferd.engine.quant.recipe import RECIPES
from inferd.engine.quant.scheme import QuantizationError
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.slots import Slots

TOLERANCE = 0.05

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
    """Half of it in a tied head and a quarter in the MLPs, as in small models."""
    path = tmp_path_factory.mktemp("realistic")
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
def test_weights_take_what_was_planned(checkpoint: Path, quantization: str) -> None:
    facts = ModelFacts.of(Checkpoint.read(checkpoint))
    asked = EngineConfig(model_path=str(checkpoint), quantization=quantization, kv_memory_bytes=2**24, num_threads=2)  # type: ignore[arg-type]
    config, plan, _ = resolve(asked, facts, Machine.detect())
    line = [sys.executable, "-P", "-c", LOAD]
    text = json.dumps({name: getattr(config, name) for name in config.__struct_fields__})
    done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=120, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["planned_weights_bytes"] == plan.weights_bytes
    assert measured["planned_kv_bytes"] == measured["kv_bytes"] == plan.kv_bytes
    assert abs(measured["weights_bytes"] / plan.weights_bytes - 1) < TOLERANCE
    for wrong in wrong_plans(plan):
        assert abs(measured["weights_bytes"] / wrong - 1) > TOLERANCE


def wrong_plans(plan: MemoryPlan) -> list[int]:
    """What the tolerance must not forgive: a tied head counted once, and one layer more than there is."""
    parts = {part.name: part.num_bytes for part in plan.weights}
    return [plan.weights_bytes - parts["head"], plan.weights_bytes + (parts["attention"] + parts["MLP"]) // 2]


WINDOWED = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 96, "max_position_embeddings": 700, "max_window_layers": 2, "num_attention_heads": 4,
    "num_hidden_layers": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "sliding_window": 40,
    "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": 50,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": False}, {"max_window_layers": 5}])
def test_tables_slots_and_cache_are_exactly_as_planned(changes: dict[str, object]) -> None:
    arch, device = describe(WINDOWED | changes), CpuDevice(1)
    config = EngineConfig(
        model_path="-", dtype="float32", device="cpu", max_model_len=700, block_size=16, num_blocks=99, max_num_seqs=7,
        max_num_batched_tokens=64,
    )  # fmt: skip
    plan = plan_of(config, arch)
    planned = {part.name: part.num_bytes for part in plan.working}
    assert KVPool.allocate(arch, 99, 16, torch.float32, device).num_bytes == plan.kv_bytes
    slots = Slots(7, 700, 16, device, len(arch.cache_groups))
    assert slots.token_ids.nbytes + slots.block_tables.nbytes == planned["slots"]
    tables = {rope: cos_sin_table(rope, 700, device.torch_device) for rope in arch.ropes if rope is not None}
    assert sum(table.nbytes for table in tables.values()) == planned["rotary"]


@pytest.mark.parametrize(("name", "stored"), [("fp8", FP8), ("int8", INT8), ("int4", INT4)])
@pytest.mark.parametrize("columns", [32, 33, 48, 65536, 65537, 65568])
def test_the_plan_refuses_what_the_layers_refuse(name: str, stored: StoredAs, columns: int) -> None:
    try:
        RECIPES[name].layers.check(8, columns)
    except QuantizationError:
        assert stored.refuses(columns) is not None
    else:
        assert stored.refuses(columns) is None


def test_a_head_is_refused_by_its_own_rule() -> None:
    """Four bits elsewhere, eight in the head: a hidden size of 72 fits the head and no other layer."""
    arch: Arch = describe(WINDOWED | {"hidden_size": 72, "intermediate_size": 96})
    assert refusal(arch, "int4") == "layers.0.attention.qkv has 72 inputs, which is no multiple of its group of 32"
    RECIPES["int4"].head.check(50, 72)
