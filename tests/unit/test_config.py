"""Every "auto" becomes a number with a reason; an explicit setting is honoured or refused, never bent."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from inferd.engine.api.config import EngineConfig, resolve
from inferd.engine.api.errors import CapacityError, ConfigError
from inferd.engine.api.machine import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.planner import ModelShape, format_bytes
from inferd.engine.arch.registry import describe

GIB = 2**30

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
LLAMA_2_7B_PARAMS = 6_738_415_616


def facts(*, num_params: int = LLAMA_2_7B_PARAMS, dtype: str = "bfloat16", is_embedded: bool = False) -> ModelFacts:
    arch = describe(LLAMA)
    shape = ModelShape(num_params, 0, arch.kv_elements_per_token, arch.max_positions, arch.vocab_size)
    return ModelFacts(Path("model"), arch, shape, dtype, is_embedded)


def machine(gib: float) -> Machine:
    return Machine(num_cpus=2, memory_total_bytes=int(gib * GIB), memory_available_bytes=int(gib * GIB))


ASKED = EngineConfig(model_path="model")


def test_kv_bytes_are_those_of_the_published_example() -> None:
    """Llama 2 7B: 2 x 32 layers x 32 heads x 128 x 2 bytes, 1.07 GB at 2,048 tokens."""
    assert facts().shape.kv_bytes_per_token("float16") * 2048 == 2 * 32 * 32 * 128 * 2 * 2048 == 1_073_741_824


def test_every_auto_is_settled_and_explained() -> None:
    config, plan, decisions = resolve(ASKED, facts(), machine(64))
    unsettled = [field for field, value in msgspec.structs.asdict(config).items() if value in (None, "auto")]
    assert unsettled == []
    changed = {f for f, v in msgspec.structs.asdict(config).items() if v != getattr(ASKED, f)}
    assert {decision.field for decision in decisions} == changed
    assert all(decision.why for decision in decisions)
    assert plan.weights_bytes == LLAMA_2_7B_PARAMS * 2
    assert plan.kv_bytes == config.kv_memory_bytes


def test_resolving_twice_changes_nothing() -> None:
    config, plan, _ = resolve(ASKED, facts(), machine(64))
    again, same_plan, decisions = resolve(config, facts(), machine(64))
    assert (again, same_plan) == (config, plan)
    assert {decision.field for decision in decisions} <= {"num_blocks", "kv_memory_bytes"}


def test_what_was_asked_stays() -> None:
    asked = EngineConfig(
        model_path="model", dtype="float32", max_model_len=100, block_size=16, kv_memory_bytes=GIB, max_num_seqs=3,
        max_num_batched_tokens=7, num_threads=1,
    )  # fmt: skip
    config, _, _ = resolve(asked, facts(), machine(64))
    for field in ("dtype", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
        assert getattr(config, field) == getattr(asked, field)
    assert config.num_blocks == GIB // (facts().shape.kv_bytes_per_token("float32") * 16)


def test_dtypes() -> None:
    assert resolve(ASKED, facts(), machine(64))[0].dtype == "bfloat16"
    assert resolve(ASKED, facts(is_embedded=True), machine(64))[0].dtype == "float32"
    config, _, decisions = resolve(ASKED, facts(dtype="float16"), machine(64))
    assert config.dtype == "float32"
    assert any("no float16 matrix product" in decision.why for decision in decisions)
    old = dataclasses.replace(machine(64), has_bf16_matmul=False)
    config, _, decisions = resolve(ASKED, facts(), old)
    assert config.dtype == "float32"
    assert any("no bfloat16 matrix product" in decision.why for decision in decisions)
    with pytest.raises(ConfigError, match="'int4'"):
        resolve(ASKED, facts(dtype="int4"), machine(64))


def test_a_short_cache_shortens_an_automatic_length_and_refuses_an_asked_one() -> None:
    small = msgspec.structs.replace(ASKED, kv_memory_bytes=GIB)
    config, _, _ = resolve(small, facts(), machine(64))
    tokens = GIB // facts().shape.kv_bytes_per_token("bfloat16")
    assert config.max_model_len == tokens == 2048
    with pytest.raises(CapacityError, match="max_model_len 2048 would fit"):
        resolve(msgspec.structs.replace(small, max_model_len=4096), facts(), machine(64))


def test_an_asked_cache_beyond_the_memory_is_refused_before_anything_is_loaded() -> None:
    asked = msgspec.structs.replace(ASKED, kv_memory_bytes=60 * GIB)
    with pytest.raises(CapacityError, match=r"60\.0 GiB was asked for, and 51\.4 GiB are left"):
        resolve(asked, facts(), machine(64))


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(CapacityError, match=r"25\.1 GiB in float32 and 16\.0 GiB .*--dtype float16 would fit"):
        resolve(msgspec.structs.replace(ASKED, dtype="float32"), facts(), machine(16))
    with pytest.raises(CapacityError, match="smaller model"):
        resolve(ASKED, facts(), machine(8))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_model_len", 4097, "at most 4096"),
        ("max_model_len", 0, "at least 1"),
        ("block_size", 17, r"one of \(16, 32, 64, 128\)"),
        ("max_num_seqs", 0, "at least 1"),
        ("num_threads", -1, "at least 1"),
        ("kv_memory_bytes", 0, "at least 1"),
    ],
)
def test_bounds(field: str, value: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(msgspec.structs.replace(ASKED, **{field: value}), facts(), machine(64))


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 * GIB, 3 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip
