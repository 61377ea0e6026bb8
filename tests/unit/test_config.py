"""Every "auto" becomes a number with a reason. An explicit setting is honoured or refused, never changed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.engine.api.config import AskedConfig, replicas_of
from inferd.engine.api.errors import CapacityError, ConfigError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.machine.gpu import Accelerator
from inferd.engine.api.memory.planner import block_bytes, format_bytes
from inferd.engine.api.memory.precision import KV_FORMATS, KVPrecision, Precision
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.arch.registry import describe
from inferd.server.config.models import check_host_memory

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


def facts(*, dtype: str = "bfloat16", is_embedded: bool = False, **changes: object) -> ModelFacts:
    return ModelFacts(Path("model"), describe(LLAMA | changes), dtype, is_embedded)


def kv_bytes_per_token(dtype: str) -> int:
    return block_bytes(facts().arch, Precision(dtype), 1)


def machine(gib: float) -> Machine:
    return Machine(num_cpus=2, memory_total_bytes=int(gib * GIB), memory_available_bytes=int(gib * GIB))


def gpu_machine(
    free_gib: float = 140, capability: tuple[int, int] = (9, 0), others_free_gib: tuple[float, ...] = ()
) -> Machine:
    others = tuple(int(gib * GIB) for gib in others_free_gib)
    gpu = Accelerator("H200", capability, int(141 * GIB), int(free_gib * GIB), others)
    return dataclasses.replace(machine(64), accelerator=gpu)


ASKED = AskedConfig(model_path="model")


def test_kv_bytes_are_those_of_the_published_example() -> None:
    """Llama 2 7B: 2 x 32 layers x 32 heads x 128 x 2 bytes, 1.07 GB at 2,048 tokens."""
    assert kv_bytes_per_token("float16") * 2048 == 2 * 32 * 32 * 128 * 2 * 2048 == 1_073_741_824


def test_every_auto_is_settled_and_explained() -> None:
    config, plan, decisions = resolve(ASKED, facts(), machine(64))
    unsettled = [field for field, value in msgspec.structs.asdict(config).items() if value in (None, "auto")]
    assert unsettled == ["numerics", "modelled", "draft"], "no engine is ready, the family is native, without a draft"
    changed = {field for field in AskedConfig.__struct_fields__ if getattr(config, field) != getattr(ASKED, field)}
    nobody_asks = {"weights_dtype", "rope_positions", "num_blocks"}
    assert {decision.field for decision in decisions} == changed | nobody_asks
    assert all(decision.why for decision in decisions)
    assert plan.weights_bytes == LLAMA_2_7B_PARAMS * 2
    assert plan.kv_bytes == config.kv_memory_bytes


def test_resolving_twice_changes_nothing() -> None:
    config, plan, _ = resolve(ASKED, facts(), machine(64))
    asked = AskedConfig(**{field: getattr(config, field) for field in AskedConfig.__struct_fields__})
    again, same_plan, decisions = resolve(asked, facts(), machine(64))
    assert (again, same_plan) == (config, plan)
    assert {decision.field for decision in decisions} <= {"num_blocks", "weights_dtype", "rope_positions"}


def test_what_was_asked_stays() -> None:
    asked = AskedConfig(
        model_path="model", dtype="float32", max_model_len=100, block_size=16, kv_memory_bytes=GIB, max_num_seqs=3,
        max_num_batched_tokens=7, num_threads=1,
    )  # fmt: skip
    config, _, _ = resolve(asked, facts(), machine(64))
    for field in ("dtype", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
        assert getattr(config, field) == getattr(asked, field)
    assert config.num_blocks == GIB // (kv_bytes_per_token("float32") * 16)


def test_speculation_is_what_the_device_gains_from() -> None:
    asked = msgspec.structs.replace(ASKED, speculative="auto")
    for where, became in ((machine(64), "suffix"), (gpu_machine(), "none")):
        config, _, decisions = resolve(msgspec.structs.replace(asked, device="auto"), facts(), where)
        assert config.speculative == became
        (decision,) = [decision for decision in decisions if decision.field == "speculative"]
        assert (decision.asked, decision.became) == ("auto", became) and decision.why
    plain, guessing = (
        resolve(msgspec.structs.replace(ASKED, speculative=kind, max_num_seqs=4), facts(), machine(64))[1]
        for kind in ("none", "ngram")
    )
    assert guessing.working_bytes > plain.working_bytes, "the logits of guessed tokens are planned"


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
    tokens = GIB // kv_bytes_per_token("bfloat16")
    assert config.max_model_len == tokens == 2048
    with pytest.raises(CapacityError, match="max_model_len 2048 would fit"):
        resolve(msgspec.structs.replace(small, max_model_len=4096), facts(), machine(64))


def test_an_asked_cache_beyond_the_memory_is_refused_before_anything_is_loaded() -> None:
    _, plan, _ = resolve(msgspec.structs.replace(ASKED, max_model_len=4096), facts(), machine(64))
    left = 64 * GIB - plan.weights_bytes - plan.working_bytes
    config, full, _ = resolve(msgspec.structs.replace(ASKED, kv_memory_bytes=left), facts(), machine(64))
    assert config.kv_memory_bytes == full.kv_bytes <= left < full.kv_bytes + 2**24
    with pytest.raises(CapacityError) as told:
        resolve(msgspec.structs.replace(ASKED, kv_memory_bytes=left + 1), facts(), machine(64))
    for words in (
        f"{format_bytes(left)} are left",
        "12.6 GiB in bfloat16",
        f"{format_bytes(plan.working_bytes)} to work in",
    ):
        assert words in str(told.value)


def refusal(gib: float, is_old: bool = False, **changes: object) -> str:
    with pytest.raises(CapacityError) as told:
        resolve(
            msgspec.structs.replace(ASKED, **changes),
            facts(),
            dataclasses.replace(machine(gib), has_bf16_matmul=not is_old),
        )
    return str(told.value)


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    """The message has the needed memory, the available memory, and flags that would fit: precision and context."""
    assert re.fullmatch(
        r"the model needs 25\.\d GiB for one sequence of 2 tokens \(25\.1 GiB of weights in float32, .* of KV cache, "
        r".* to work in\), and 16\.0 GiB of memory are available; what would fit: "
        r"--dtype bfloat16 \(12\.6 GiB of weights\) with --max-model-len up to 4096; "
        r"--quantization int8 \(6\.8 GiB of weights\) with --max-model-len up to 4096; "
        r"--quantization int4 \(4\.4 GiB of weights\) with --max-model-len up to 4096",
        refusal(16, dtype="float32"),
    )
    assert "--dtype bfloat16" not in refusal(16, is_old=True)
    assert refusal(4).endswith(
        "no precision that can be served here fits (weights: 25.1 GiB in float32, 12.6 GiB in bfloat16, 6.6 GiB in "
        "int8, 4.1 GiB in int4); use a smaller model or a larger machine"
    )
    assert "it is computed in" not in refusal(4)


def test_a_refusal_says_why_the_dtype_is_another() -> None:
    """A checkpoint of 12.6 GiB in float16 is refused for 25.1 GiB, so the message must say why the size doubled."""
    with pytest.raises(CapacityError) as told:
        resolve(ASKED, facts(dtype="float16"), machine(16))
    assert (
        "; it is computed in float32: float16 is the checkpoint's, but there is no float16 matrix product on a CPU; "
        "what would fit: --dtype bfloat16 (12.6 GiB of weights) with --max-model-len up to 4096; "
        "--quantization int8 (6.8 GiB of weights)"
    ) in str(told.value)
    assert "--quantization int4 (4.4 GiB of weights)" in str(told.value)
    assert "; it is computed in float32: float16 is what was asked for, but there" in refusal(16, dtype="float16")


def test_what_is_said_to_fit_does() -> None:
    gib = 14.0
    told = refusal(gib, max_model_len=4096)
    length = int(re.findall(r"what would fit: --max-model-len up to (\d+)", told)[0])
    assert 1 < length < 4096
    for quantization, context in [("none", length), ("int8", 4096), ("int4", 4096)]:
        asked = msgspec.structs.replace(ASKED, quantization=quantization, max_model_len=context)
        config, plan, _ = resolve(asked, facts(), machine(gib))
        assert config.max_model_len == context
        assert plan.total_bytes <= gib * GIB
    refusal(gib, max_model_len=length + 1)


def test_quantization_shrinks_the_weights_and_nothing_else() -> None:
    plain, plan, _ = resolve(ASKED, facts(), machine(64))
    asked = msgspec.structs.replace(ASKED, quantization="int8")
    config, small, _ = resolve(asked, facts(), machine(64))
    assert (config.dtype, config.quantization) == (plain.dtype, "int8")
    assert small.kv_bytes == plan.kv_bytes
    assert 0.5 < small.weights_bytes / plan.weights_bytes < 0.55


def test_a_model_that_cannot_be_quantized_is_refused_by_name() -> None:
    asked = msgspec.structs.replace(ASKED, quantization="int4")
    odd = facts(intermediate_size=11000)
    with pytest.raises(ConfigError, match=r"int4: layers\.0\.mlp\.down has 11000 inputs, .* size 32; give another"):
        resolve(asked, odd, machine(64))
    told = refusal_of(odd, 16)
    assert "int8" in told
    assert "int4" not in told


def refusal_of(model: ModelFacts, gib: float) -> str:
    with pytest.raises(CapacityError) as told:
        resolve(msgspec.structs.replace(ASKED, dtype="float32"), model, machine(gib))
    return str(told.value)


def test_an_asked_length_is_honoured_where_only_one_sequence_fits() -> None:
    """The cache gets more than 60% of the memory beside the weights, which is the limit of "auto"."""
    asked = msgspec.structs.replace(ASKED, max_model_len=4096)
    config, plan, _ = resolve(asked, facts(), machine(16))
    assert config.max_model_len == 4096
    assert plan.kv_bytes == 4096 * kv_bytes_per_token("bfloat16")
    assert plan.kv_bytes > 0.6 * (16 * GIB - plan.weights_bytes - plan.working_bytes)
    automatic, _, _ = resolve(ASKED, facts(), machine(16))
    assert automatic.max_model_len is not None
    assert automatic.max_model_len < 4096


@pytest.mark.sampled(keep=3, among="slow starts")
def test_whatever_is_left_is_served_or_refused_with_a_way_out() -> None:
    """Available memory goes from too little for one token to enough for the model's length, in steps of 64 MiB."""
    lengths: list[int] = []
    refusals: list[str] = []
    for step in range(208, 267):
        small = machine(step / 16)
        try:
            config, plan, _ = resolve(ASKED, facts(), small)
        except CapacityError as error:
            refusals.append(str(error))
            continue
        assert plan.total_bytes <= small.memory_available_bytes
        lengths.append(config.max_model_len)
    assert lengths == sorted(lengths)
    assert 32 <= lengths[0] < 100
    assert lengths[-1] == 4096
    assert all("what would fit: --quantization int8" in text for text in refusals)
    assert len(refusals) < len(lengths)


def test_a_cache_that_holds_no_block_is_told_the_least() -> None:
    with pytest.raises(CapacityError, match=r"there are 0 B .* at least 16\.0 MiB are needed"):
        resolve(msgspec.structs.replace(ASKED, kv_memory_bytes=2**20), facts(), machine(64))


@pytest.mark.parametrize("kv_cache", KV_FORMATS)
def test_kv_in_8_bits_holds_nearly_twice_as_many_tokens(kv_cache: KVPrecision) -> None:
    asked = msgspec.structs.replace(ASKED, kv_memory_bytes=GIB, kv_cache_dtype=kv_cache)
    config, plan, decisions = resolve(asked, facts(), machine(64))
    tokens = GIB // block_bytes(facts().arch, Precision("bfloat16", kv_cache=kv_cache), 1)
    assert config.kv_cache_dtype == kv_cache and "kv_cache_dtype" not in {decision.field for decision in decisions}
    assert config.max_model_len is not None and tokens - 32 < config.max_model_len <= tokens
    assert config.max_model_len > 1.87 * 2048
    assert plan.kv_bytes == config.kv_memory_bytes
    plain, _, decisions = resolve(ASKED, facts(), machine(64))
    assert plain.kv_cache_dtype == "bfloat16"
    assert next(decision.why for decision in decisions if decision.field == "kv_cache_dtype") == "the dtype"


def test_activations_are_quantized_as_declared_where_that_can_be() -> None:
    """Another checkpoint, or a GPU, says why it is not done."""
    byte_rows = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": byte_rows | {"strategy": "channel"},
        "input_activations": byte_rows | {"strategy": "token", "dynamic": True},
    }  # fmt: skip

    def settled(**changes: Any) -> tuple[str, str]:
        own = group | {"input_activations": group["input_activations"] | changes}
        stored = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": own}}
        return activations(facts(quantization_config=stored), machine(64))

    def activations(found: ModelFacts, where: Machine) -> tuple[str, str]:
        asked = msgspec.structs.replace(ASKED, activations="declared", device="auto")
        config, _, decisions = resolve(asked, found, where)
        return config.activations, next((made.why for made in decisions if made.field == "activations"), "")

    assert settled() == ("declared", "")
    for change in (
        {"dynamic": False},
        {"strategy": "tensor"},
        {"symmetric": False},
        {"num_bits": 4},
        {"type": "float"},
    ):
        assert settled(**change) == ("own", "the checkpoint declares no activations of 8 bits with one scale a token")
    assert activations(facts(), machine(64))[0] == "own"
    assert activations(facts(), gpu_machine()) == ("own", "GPUs do not quantize the activations of integers")
    assert resolve(ASKED, facts(), machine(64))[0].activations == "own"


def test_kv_is_kept_in_the_dtype_or_in_8_bits() -> None:
    asked = msgspec.structs.replace(ASKED, kv_cache_dtype="float16")
    with pytest.raises(ConfigError, match="must be one of auto, fp8, int8 and the dtype, bfloat16, but got float16"):
        resolve(asked, facts(), machine(64))


def test_a_short_cache_is_told_what_8_bits_would_hold() -> None:
    small = msgspec.structs.replace(ASKED, kv_memory_bytes=GIB, max_model_len=4096)
    told = r"max_model_len 2048 would fit, and 38\d\d with --kv-cache-dtype int8$"
    with pytest.raises(CapacityError, match=told):
        resolve(small, facts(), machine(64))
    for kv_cache in KV_FORMATS:
        with pytest.raises(CapacityError, match=r"would fit$"):
            resolve(msgspec.structs.replace(small, kv_cache_dtype=kv_cache), facts(), machine(64))


def test_kv_in_8_bit_floats_needs_a_gpu_that_converts_it() -> None:
    asked = msgspec.structs.replace(ASKED, kv_cache_dtype="fp8")
    ada = gpu_machine(capability=(8, 9))
    assert resolve(asked, facts(), ada)[0].device == "cuda"
    ampere = gpu_machine(capability=(8, 6))
    with pytest.raises(
        ConfigError, match=r"capability 8\.9 or higher, and H200 has 8\.6; give --kv-cache-dtype int8 or auto"
    ):
        resolve(asked, facts(), ampere)
    on_cpu = resolve(msgspec.structs.replace(asked, device="cpu"), facts(), ampere)[0]
    assert (on_cpu.device, on_cpu.kv_cache_dtype) == ("cpu", "fp8")
    integers = msgspec.structs.replace(asked, kv_cache_dtype="int8")
    assert resolve(integers, facts(), ampere)[0].kv_cache_dtype == "int8"
    short = dataclasses.replace(facts(), arch=facts(max_position_embeddings=10**6).arch)
    tight = msgspec.structs.replace(ASKED, max_model_len=10**5)
    for machine_of in (ada, ampere):
        small = dataclasses.replace(
            machine_of, accelerator=gpu_machine(40, machine_of.accelerator.capability).accelerator
        )  # type: ignore[union-attr]
        with pytest.raises(CapacityError, match="--kv-cache-dtype int8 with"):
            resolve(tight, short, small)


def test_memory_of_the_host_for_kv_is_planned_beside_a_gpus_and_unused_on_a_cpu() -> None:
    asked = msgspec.structs.replace(ASKED, kv_host_bytes=20 * GIB)
    config, plan, decisions = resolve(asked, facts(), gpu_machine())
    assert config.kv_host_bytes == plan.host_bytes == 20 * GIB
    without = resolve(ASKED, facts(), gpu_machine())[1]
    assert dataclasses.replace(plan, host_bytes=0) == without and plan.total_bytes == without.total_bytes
    config, plan, decisions = resolve(asked, facts(), machine(64))
    assert config.kv_host_bytes == plan.host_bytes == 0
    (told,) = (decision for decision in decisions if decision.field == "kv_host_bytes")
    assert "--kv-memory makes it larger" in told.why
    twice = msgspec.structs.replace(resolve(asked, facts(), gpu_machine())[0], num_replicas=2)
    check_host_memory(machine(64), [twice])
    with pytest.raises(CapacityError, match=r"kv_host may take 80\.0 GiB .* 64\.0 GiB are available: give a smaller"):
        check_host_memory(machine(64), [twice, twice])


def test_a_gpus_plan_holds_a_block_more_than_its_requests_can_have() -> None:
    config, plan, _ = resolve(ASKED, facts(), gpu_machine())
    size = block_bytes(facts().arch, Precision("bfloat16"), 32)
    assert plan.kv_bytes == config.kv_memory_bytes + size  # type: ignore[operator]
    asked = msgspec.structs.replace(ASKED, kv_memory_bytes=config.kv_memory_bytes)
    assert resolve(asked, facts(), gpu_machine())[1] == plan


def test_a_window_lets_a_pool_hold_a_longer_sequence() -> None:
    windowed = facts(
        architectures=["Qwen3ForCausalLM"], head_dim=128, use_sliding_window=True, sliding_window=512,
        max_window_layers=16,
    )  # fmt: skip
    small = msgspec.structs.replace(ASKED, kv_memory_bytes=GIB)
    longer = resolve(small, windowed, machine(64))[0].max_model_len
    whole = resolve(small, facts(architectures=["Qwen3ForCausalLM"], head_dim=128), machine(64))[0].max_model_len
    assert longer is not None
    assert whole is not None
    assert longer > 1.5 * whole


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_model_len", 4097, "at most 4096"),
        ("max_model_len", 1, "max_model_len must be at least 2, one token of prompt and one of output, but got 1"),
        ("max_model_len", 0, "at least 2"),
        ("block_size", 17, r"one of \(16, 32, 64, 128\)"),
        ("max_num_seqs", 0, "at least 1"),
        ("num_threads", -1, "at least 1"),
        ("kv_memory_bytes", 0, "at least 1"),
        ("tensor_parallel_size", 0, "tensor_parallel_size must be at least 1 and at most 128, but got 0"),
        ("tensor_parallel_size", 3, "3 does not divide its 32 attention heads; .* as one of 1, 2, 4, 8, 16, 32"),
        ("tensor_parallel_size", 4, "must be at most 2 here, .* there are 2 cores, but got 4; give a smaller"),
    ],
)
def test_bounds(field: str, value: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(msgspec.structs.replace(ASKED, **{field: value}), facts(), machine(64))


def test_each_rank_needs_a_thread_or_a_gpu() -> None:
    two = msgspec.structs.replace(ASKED, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"must be at most 1 here, .* there is 1 thread, but got 2"):
        resolve(msgspec.structs.replace(two, num_threads=1), facts(), machine(64))
    with pytest.raises(ConfigError, match=r"must be at most 1 here, .* CUDA_VISIBLE_DEVICES allows 1 x H200"):
        resolve(two, facts(), gpu_machine())
    four = msgspec.structs.replace(ASKED, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"must be at most 2 here, .* allows 2 x H200, but got 4"):
        resolve(four, facts(), gpu_machine(others_free_gib=(140.0,)))


def test_ranks_on_gpus_have_the_memory_of_the_fullest_gpu() -> None:
    two = msgspec.structs.replace(ASKED, tensor_parallel_size=2)
    config, plan, _ = resolve(two, facts(), gpu_machine(others_free_gib=(140.0,)))
    tight, smaller, _ = resolve(two, facts(), gpu_machine(others_free_gib=(20.0,)))
    assert config.exchange == "group" and config.splits_inputs
    assert smaller.weights_bytes == plan.weights_bytes
    assert tight.num_blocks is not None and config.num_blocks is not None
    assert tight.num_blocks < config.num_blocks and smaller.total_bytes < 20 * GIB
    exact, _, _ = resolve(
        msgspec.structs.replace(two, deterministic=True), facts(), gpu_machine(others_free_gib=(140.0,))
    )
    assert not exact.splits_inputs, "the bits of one process"


@pytest.mark.parametrize(
    ("gib", "asked", "positions", "why"),
    [
        (64, {}, 4096, "at most 4.0 GiB by default, and --kv-memory may give more"),
        (18, {}, 4096, "60% of the 4.8 GiB left beside the other parts"),
        (64, {"max_num_seqs": 1}, 4096, "what 1 sequence of 4096 tokens can fill"),
        (64, {"max_num_seqs": 3, "max_model_len": 64}, 4096, "what 3 sequences of 64 tokens can fill"),
        (99, {}, 65536, "what one sequence of 65536 tokens needs"),
        (64, {"kv_memory_bytes": GIB}, 4096, "kv_memory of 1.0 GiB"),
    ],
)
def test_the_bound_that_decided_the_size_of_the_kv_cache_is_said(
    gib: float, asked: dict[str, object], positions: int, why: str
) -> None:
    found = facts(max_position_embeddings=positions)
    config, plan, decisions = resolve(msgspec.structs.replace(ASKED, **asked), found, machine(gib))
    assert next(decision.why for decision in decisions if decision.field == "num_blocks") == why
    size = block_bytes(found.arch, Precision("bfloat16"), config.block_size)
    assert plan.kv_bytes == config.num_blocks * size
    if why.startswith("at most"):
        assert 4 * GIB - size < plan.kv_bytes <= 4 * GIB


def test_ranks_share_the_memory_and_the_kv_cache() -> None:
    two = msgspec.structs.replace(ASKED, tensor_parallel_size=2, kv_memory_bytes=GIB, max_model_len=1024)
    config, plan, _ = resolve(two, facts(), machine(64))
    alone, whole, _ = resolve(msgspec.structs.replace(two, tensor_parallel_size=1), facts(), machine(64))
    assert config.num_blocks == alone.num_blocks
    assert config.kv_memory_bytes == alone.kv_memory_bytes == 2 * plan.kv_bytes == whole.kv_bytes
    embedding, norms = 32000 * 4096 * 2, (2 * 32 + 1) * 4096 * 2
    assert 2 * plan.weights_bytes == whole.weights_bytes + embedding + norms
    with pytest.raises(CapacityError, match=r"7.2 GiB on each of 2 ranks for .* 5.0 GiB of memory are available to"):
        resolve(two, facts(), machine(10))


def test_each_replica_has_its_part_of_the_machine() -> None:
    two = msgspec.structs.replace(ASKED, num_replicas=2, max_model_len=1024)
    config, plan, _ = resolve(two, facts(), machine(64))
    alone, whole, _ = resolve(msgspec.structs.replace(two, num_replicas=1), facts(), machine(64))
    half, _, _ = resolve(msgspec.structs.replace(two, num_replicas=1), facts(), machine(32))
    assert (config.num_threads, alone.num_threads) == (1, 2)
    assert plan.weights_bytes == whole.weights_bytes and config.num_blocks == half.num_blocks
    assert plan.working == whole.working, "one may compute on the cores of both"
    with pytest.raises(CapacityError, match=r"10.0 GiB of memory are .*each of 2 replicas .*: give fewer --replicas"):
        resolve(two, facts(), machine(32 - 12))
    with pytest.raises(ConfigError, match=r"at most 2 here, because each needs a core .* there are 2, but got 3"):
        resolve(msgspec.structs.replace(two, num_replicas=3), facts(), machine(64))


def test_replicas_on_gpus_have_gpus_of_their_own() -> None:
    four = msgspec.structs.replace(ASKED, num_replicas=2, tensor_parallel_size=2)
    config, _, _ = resolve(four, facts(), gpu_machine(others_free_gib=(140.0,) * 3))
    assert [each.first_gpu for each in replicas_of(config)] == [0, 2]
    assert [each.cpus for each in replicas_of(config)] == [(), ()]
    with pytest.raises(ConfigError, match=r"at most 1 here, because each needs 2 GPUs .* there are 3, but got 2"):
        resolve(four, facts(), gpu_machine(others_free_gib=(140.0,) * 2))


def test_a_model_of_one_position_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 positions, but its config\.json states 1"):
        resolve(ASKED, facts(max_position_embeddings=1), machine(64))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("longest_context", r"for one sequence of 2 tokens .*; no precision that can be served here fits"),
        ("longest_in_pool", "are needed$"),
    ],
)
def test_room_for_one_token_is_no_room(monkeypatch: pytest.MonkeyPatch, source: str, words: str) -> None:
    """An automatic length must leave a token of output."""
    for module in ("resolve", "memory.capacity"):
        monkeypatch.setattr(f"inferd.engine.api.{module}.{source}", lambda *_: 1)
    with pytest.raises(CapacityError, match=words):
        resolve(ASKED, facts(), machine(64))


def test_two_tokens_are_the_least_that_is_served() -> None:
    assert resolve(msgspec.structs.replace(ASKED, max_model_len=2), facts(), machine(64))[0].max_model_len == 2


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 * GIB, 3 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip


def test_a_gpu_is_where_a_model_is_served() -> None:
    config, plan, decisions = resolve(ASKED, facts(dtype="float16"), gpu_machine())
    assert (config.device, config.dtype, config.max_num_seqs, config.max_num_batched_tokens) == (
        "cuda", "float16", 256, 4096,
    )  # fmt: skip
    assert next(decision.why for decision in decisions if decision.field == "device") == "H200"
    assert 0.9 * 138 * GIB < plan.total_bytes < 138 * GIB


def test_a_gpu_can_be_left_alone() -> None:
    asked = msgspec.structs.replace(ASKED, device="cpu")
    config, plan, _ = resolve(asked, facts(dtype="float16"), gpu_machine())
    assert (config.device, config.dtype) == ("cpu", "float32")
    assert plan.total_bytes < 64 * GIB


def test_the_gpus_memory_is_what_counts() -> None:
    with pytest.raises(CapacityError, match=r"1[01]\.\d GiB of memory are available"):
        resolve(ASKED, facts(), gpu_machine(free_gib=12.5))


def test_a_gpu_that_is_not_there() -> None:
    asked = msgspec.structs.replace(ASKED, device="cuda")
    without = dataclasses.replace(machine(64), no_accelerator="the NVIDIA driver says: no driver")
    with pytest.raises(ConfigError, match="device cuda was asked for, but the NVIDIA driver says: no driver"):
        resolve(asked, facts(), without)
    config, _, decisions = resolve(ASKED, facts(), without)
    assert config.device == "cpu"
    assert "no driver" in next(decision.why for decision in decisions if decision.field == "device")


@pytest.mark.parametrize("asked", [None, False, True])
def test_on_a_processor_results_are_always_deterministic(asked: bool | None) -> None:
    settings = msgspec.structs.replace(ASKED, deterministic=asked)
    config, _, decisions = resolve(settings, facts(), machine(64))
    assert config.deterministic is True
    whys = [decision.why for decision in decisions if decision.field == "deterministic"]
    assert whys == ([] if asked else ["on a CPU results are always deterministic"])


def test_on_a_gpu_determinism_is_a_wish() -> None:
    config, _, decisions = resolve(ASKED, facts(), gpu_machine())
    assert config.deterministic is False
    assert "has not been measured" in next(why.why for why in decisions if why.field == "deterministic")
    for asked in (False, True):
        config, _, decisions = resolve(msgspec.structs.replace(ASKED, deterministic=asked), facts(), gpu_machine())
        assert config.deterministic is asked
        assert "deterministic" not in {decision.field for decision in decisions}


def test_on_a_gpu_float32_is_not_deterministic_and_says_so_before_anything_is_loaded() -> None:
    asked = msgspec.structs.replace(ASKED, deterministic=True)
    words = r"computed in bfloat16 or float16, but the dtype is float32: {}; give --dtype bfloat16, or --no-determ"
    with pytest.raises(ConfigError, match=words.format("the embedded model .* in float32")):
        resolve(asked, facts(is_embedded=True), gpu_machine())
    with pytest.raises(ConfigError, match=words.format("what was asked for")):
        resolve(msgspec.structs.replace(asked, dtype="float32"), facts(), gpu_machine())
    wide = msgspec.structs.replace(ASKED, dtype="float32")
    assert resolve(wide, facts(), gpu_machine())[0].deterministic is False
    assert resolve(msgspec.structs.replace(wide, device="cpu"), facts(), gpu_machine())[0].deterministic is True


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_are_computed_on_every_gpu(quantization: str) -> None:
    asked = msgspec.structs.replace(ASKED, quantization=quantization)
    assert resolve(asked, facts(), gpu_machine(capability=(8, 0)))[0].device == "cuda"


def test_fp8_needs_a_gpu_that_multiplies_it() -> None:
    asked = msgspec.structs.replace(ASKED, quantization="fp8")
    assert resolve(asked, facts(), gpu_machine())[0].device == "cuda"
    ampere = gpu_machine(capability=(8, 0))
    assert resolve(asked, facts(), ampere)[0].device == "cpu"
    with pytest.raises(ConfigError, match=r"fp8 needs compute capability 8\.9 or higher, and H200 has 8\.0"):
        resolve(msgspec.structs.replace(asked, device="cuda"), facts(), ampere)
