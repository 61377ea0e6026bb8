"""Compares the plan with published figures, with its own formulas evaluated, and with a count of every tensor."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.api.memory.activations import STANDBY_BYTES, Workload
from inferd.engine.api.memory.capacity import longest_context, longest_in_pool, options, plan_sequences, ways_out
from inferd.engine.api.memory.formula import NOTHING, Formula, term
from inferd.engine.api.memory.planner import (
    MemoryPlan,
    block_bytes,
    blocks_per_seq,
    plan_memory,
    pool_of,
    refusal,
    weight_lines,
)
from inferd.engine.api.memory.precision import DTYPE_BYTES, KV_FORMATS, KVPrecision, Precision, Quantization
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import weights

GIB = 2**30
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
LLAMA_2_7B = MISTRAL_7B | {
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_key_value_heads": 32,
    "sliding_window": None,
    "torch_dtype": "float16",
}
GEMMA_LIKE = MISTRAL_7B | {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "max_window_layers": 8,
    "sliding_window": 1024,
    "use_sliding_window": True,
}
"""A quarter of the layers see all positions, the rest 1,024."""


def arch_of(config: dict[str, Any], **changes: Any) -> Arch:
    return ModelFacts.of_config(Path("config.json"), config | changes).arch


def work(
    num_seqs: int = 1, max_model_len: int = 2048, step_tokens: int = 256, block_size: int = 32, device: str = "cpu"
) -> Workload:
    return Workload(
        num_seqs=num_seqs, max_model_len=max_model_len, step_tokens=step_tokens, block_size=block_size,
        device=device, num_threads=2,
    )  # type: ignore[arg-type]  # fmt: skip


def planned(config: dict[str, Any], num_seqs: int, length: int, precision: Precision | None = None) -> MemoryPlan:
    return plan_sequences(arch_of(config), precision or Precision("float16"), work(num_seqs, length), num_seqs)


def evaluated(formula: str) -> float:
    """The value of a formula's text, without its words."""
    arithmetic = re.sub(r"[A-Za-z]+", "", formula.replace(" x ", " * ").replace(",", ""))
    return float(eval(arithmetic, {"__builtins__": {}}))  # noqa: S307


@pytest.mark.parametrize("window", [4096, None])
def test_mistral_7b_as_published(window: int | None) -> None:
    """arXiv:2310.06825: grouped-query attention, 7.24 B parameters. Batch 4 of 4,096 tokens, fp16."""
    plan = planned(MISTRAL_7B | {"sliding_window": window}, 4, 4096)
    assert plan.kv_bytes == 2 * 4 * 4096 * 8 * 128 * 2 * 32 == 2_147_483_648
    assert plan.weights_bytes == 7_241_732_096 * 2
    assert round(plan.weights_bytes / 1e9, 1) == 14.5
    assert plan.kv.formula.text == "2 x 32 layers x 8 KV heads x head 128 x 4,096 tokens x 4 sequences x 2 B"


def test_llama_2_7b_as_published() -> None:
    """arXiv:2307.09288: multi-head attention, 6.74 B parameters. One sequence of 2,048 tokens, fp16."""
    plan = planned(LLAMA_2_7B, 1, 2048)
    assert plan.kv_bytes == 2 * 2048 * 32 * 128 * 2 * 32 == 1_073_741_824
    assert plan.weights_bytes == 6_738_415_616 * 2
    held = plan.weights_bytes + plan.kv_bytes
    assert [int(held * share / 1e9) for share in (1.1, 1.2)] == [16, 17]


def test_a_window_bounds_what_a_sequence_keeps() -> None:
    short, long = (planned(MISTRAL_7B, 1, length).kv_bytes for length in (16384, 32768))
    assert short == long == block_bytes(arch_of(MISTRAL_7B), Precision("float16"), 32) * -(-(4096 + 256 - 2) // 32 + -1)
    assert planned(MISTRAL_7B | {"sliding_window": None}, 1, 32768).kv_bytes == 32768 * 2 * 32 * 8 * 128 * 2


def test_groups_of_layers_share_blocks_as_large_as_the_largest_group() -> None:
    arch, sized = arch_of(GEMMA_LIKE), work(max_model_len=8192)
    assert [(group.window, len(group.layers)) for group in arch.cache_groups] == [(None, 8), *[(1024, 8)] * 3]
    blocks = 8192 // 32 + 3 * (-(-(1024 + 256 - 2) // 32) + 1)
    assert blocks_per_seq(arch, 8192, sized) == blocks
    assert block_bytes(arch, Precision("float32"), 32) == 8 * 2 * 8 * 128 * 32 * 4
    plan = plan_sequences(arch, Precision("float32"), sized, 5)
    assert plan.kv_bytes == 5 * blocks * block_bytes(arch, Precision("float32"), 32)
    assert (
        plan.kv_bytes < plan_sequences(replace(arch, windows=(None,) * 32), Precision("float32"), sized, 5).kv_bytes / 2
    )


CONFIGS = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(1, 8).map(lambda n: 64 * n),
        "intermediate_size": st.integers(1, 40).map(lambda n: 32 * n),
        "num_hidden_layers": st.integers(1, 12),
        "vocab_size": st.integers(1, 5000),
        "tie_word_embeddings": st.booleans(),
        "sliding_window": st.none() | st.integers(1, 900),
        "num_key_value_heads": st.sampled_from([1, 2, 4, 8, 16, 32]),
        "head_dim": st.sampled_from([32, 64]),
    }
)
PRECISIONS = [
    Precision(dtype, kind, kv)
    for dtype in DTYPE_BYTES
    for kind in ("none", "fp8", "int8", "int4")
    for kv in ("auto", "fp8", "int8")
]


@given(CONFIGS, st.sampled_from(PRECISIONS), st.integers(1, 9), st.integers(1, 3000), st.sampled_from(["cpu", "cuda"]))
def test_every_formula_comes_to_the_bytes_beside_it(
    changes: dict[str, Any], precision: Precision, num_seqs: int, length: int, device: str
) -> None:
    arch = arch_of(MISTRAL_7B, **changes)
    plan = plan_sequences(arch, precision, work(num_seqs, length, device=device), num_seqs)
    parts = (*plan.weights, plan.kv, *plan.working, plan.loading)
    assert {part.name: evaluated(part.formula.text) for part in parts} == {part.name: part.num_bytes for part in parts}
    num_kept = min(length, changes["sliding_window"] or length)
    number_bytes = 1 if precision.kv_cache != "auto" else DTYPE_BYTES[precision.dtype]
    assert plan.kv_bytes >= num_seqs * num_kept * arch.num_layers * 2 * arch.heads(0).kv_size * number_bytes


def counted(arch: Arch, dtype: str, quantization: Quantization) -> int:
    """Bytes of all weights, tensor by tensor as the checkpoint names them, in the precision that each kind is stored
    in."""
    num_bytes = 0
    sources = [(source.tensor, source.shape) for source in weights(arch).sources]
    if arch.tie_embeddings:
        sources.append(("lm_head.weight", (arch.vocab_size, arch.hidden_size)))
    for name, shape in sources:
        is_linear = len(shape) == 2 and "embed_tokens" not in name and not name.endswith(".gate.weight")
        if not is_linear or quantization == "none" or (quantization == "fp8" and name == "lm_head.weight"):
            num_bytes += (shape[0] * shape[1] if len(shape) == 2 else shape[0]) * DTYPE_BYTES[dtype]
        elif quantization == "fp8":
            num_bytes += shape[0] * shape[1] + 4 * shape[0] * -(-shape[1] // 128)
        elif quantization == "int8" or name == "lm_head.weight":
            num_bytes += shape[0] * shape[1] + 2 * shape[0] * (1 if shape[1] % 64 else shape[1] // 64)
        else:
            num_bytes += shape[0] * shape[1] // 2 + shape[0] * shape[1] // 32 * 4
    return num_bytes


@given(CONFIGS, st.sampled_from(PRECISIONS), st.booleans())
def test_weights_are_those_of_every_tensor(changes: dict[str, Any], precision: Precision, is_qwen: bool) -> None:
    family = {"architectures": ["Qwen3ForCausalLM"]} if is_qwen else {}
    arch = arch_of(MISTRAL_7B, **changes, **family)
    parts = weight_lines(arch, precision)
    assert sum(part.num_bytes for part in parts) == counted(arch, precision.dtype, precision.quantization)


@pytest.mark.parametrize("precision", [Precision("bfloat16", kind) for kind in ("none", "fp8", "int8", "int4")])
def test_routers_are_never_quantized(precision: Precision) -> None:
    config = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    arch = arch_of(MISTRAL_7B, num_hidden_layers=2, **config)
    parts = {part.name: part.num_bytes for part in weight_lines(arch, precision)}
    assert parts["routers"] == 2 * 8 * 4096 * 2
    assert sum(parts.values()) == counted(arch, precision.dtype, precision.quantization)


def test_a_tied_head_is_held_twice() -> None:
    tied, untied = (
        weight_lines(arch_of(LLAMA_2_7B, tie_word_embeddings=is_tied), Precision("bfloat16"))
        for is_tied in (True, False)
    )
    assert [part.num_bytes for part in tied] == [part.num_bytes for part in untied]
    assert tied[-1].formula.text == "packed copy of the embedding 32,000 x 4,096 x 2 B"


def test_what_cannot_be_stored_is_named() -> None:
    arch = arch_of(MISTRAL_7B, intermediate_size=14340)
    assert refusal(arch, "int8") is None
    assert refusal(arch_of(MISTRAL_7B, intermediate_size=65568), "int8") == (
        "layers.0.mlp.down has 65568 inputs, and the sum of more than 65536 may not fit 32 bits"
    )
    assert refusal(arch, "int4") == "layers.0.mlp.down has 14340 inputs, which must be a multiple of the group size 32"
    hybrid = arch_of(MISTRAL_7B, architectures=["Qwen3_5ForCausalLM"])
    assert refusal(hybrid, "int4") is None, "a convolution is no matrix"


@pytest.mark.sampled(keep=3, among="slow starts")
@given(st.sampled_from([MISTRAL_7B, LLAMA_2_7B, GEMMA_LIKE]), st.integers(12 * GIB, 40 * GIB), st.integers(1, 4))
def test_the_longest_context_fits_and_one_token_more_does_not(
    config: dict[str, Any], available_bytes: int, num_full: int
) -> None:
    arch, precision = arch_of(config), Precision("bfloat16")
    longest = longest_context(arch, precision, work(num_full), num_full, available_bytes)

    def total(length: int) -> int:
        return plan_sequences(arch, precision, work(num_full, length), num_full).total_bytes

    assert longest == 0 or total(longest) <= available_bytes
    assert longest == arch.max_positions or total(longest + 1) > available_bytes


@given(st.sampled_from([MISTRAL_7B, LLAMA_2_7B, GEMMA_LIKE]), st.integers(0, 2000))
def test_the_pool_holds_the_longest_sequence_and_none_longer(config: dict[str, Any], num_blocks: int) -> None:
    arch, sized = arch_of(config), work()
    longest = longest_in_pool(arch, sized, num_blocks)
    assert blocks_per_seq(arch, longest, sized) <= num_blocks
    assert longest == arch.max_positions or blocks_per_seq(arch, longest + 1, sized) > num_blocks


@pytest.mark.parametrize("precision", [Precision("bfloat16"), Precision("bfloat16", "fp8", "int8")])
@pytest.mark.parametrize(("config", "length"), [(GEMMA_LIKE, 5000), (LLAMA_2_7B, 4096), (LLAMA_2_7B, 4095)])
def test_the_pool_is_counted_alike_by_blocks_and_by_sequences(
    config: dict[str, Any], length: int, precision: Precision
) -> None:
    """A GPU has one block more, which steps are padded with."""
    arch, kv_bytes = arch_of(config), {}
    for device in ("cpu", "cuda"):
        sized = work(3, length, device=device)
        pool = pool_of(3 * blocks_per_seq(arch, length, sized), sized)
        kv_bytes[device] = plan_memory(arch, precision, sized, pool).kv_bytes
        assert kv_bytes[device] == plan_sequences(arch, precision, sized, 3).kv_bytes
    assert kv_bytes["cuda"] - kv_bytes["cpu"] == block_bytes(arch, precision, 32)


@pytest.mark.parametrize("kv_cache", KV_FORMATS)
def test_kv_in_8_bits_as_it_is_written(kv_cache: KVPrecision) -> None:
    """A byte for each of 128 numbers and 2 for each 32 of them: 0.53 of the 16-bit size."""
    plan = planned(MISTRAL_7B | {"sliding_window": None}, 4, 4096, Precision("bfloat16", kv_cache=kv_cache))
    assert plan.kv_bytes == 2 * 32 * 8 * (128 + 4 * 2) * 4096 * 4 == 1_140_850_688
    assert plan.kv.formula.text == (
        "2 x 32 layers x 8 KV heads x (head 128 x 1 B + 4 scales x 2 B) x 4,096 tokens x 4 sequences"
    )
    odd = Precision("bfloat16", kv_cache=kv_cache).head_bytes(80)
    assert (odd.value, odd.text) == (80 + 3 * 2, "head 80 x 1 B + 3 scales x 2 B")


def test_ways_out_are_flags_that_can_be_typed() -> None:
    arch, asked = arch_of(LLAMA_2_7B), Precision("float32")
    precisions = [asked, Precision("bfloat16"), Precision("float32", "int8")]
    found = options(arch, precisions, work(), 1, 16 * GIB)
    assert ways_out(asked, found) == (
        "what would fit: --dtype bfloat16 (12.6 GiB of weights) with --max-model-len up to 4096; "
        "--quantization int8 (6.8 GiB of weights) with --max-model-len up to 4096"
    )
    assert ways_out(asked, options(arch, precisions, work(), 1, 4 * GIB)).endswith("smaller model or a larger machine")
    short = [Precision("bfloat16"), Precision("bfloat16", kv_cache="fp8")]
    longer = ways_out(short[0], options(arch, short, work(), 1, 14 * GIB))
    lengths = re.fullmatch(
        r"what would fit: --max-model-len up to (\d+); --kv-cache-dtype fp8 with --max-model-len up to (\d+)", longer
    )
    assert lengths is not None
    assert 1.5 * int(lengths[1]) < int(lengths[2]) <= 4096


def test_a_plan_is_as_full_as_its_fullest_moment() -> None:
    """The model has a large head and little else: loading it takes more memory than serving."""
    plan = planned(LLAMA_2_7B | {"vocab_size": 10**6}, 1, 64)
    assert plan.loading.num_bytes > plan.kv_bytes + plan.working_bytes
    assert plan.total_bytes > plan.weights_bytes + plan.kv_bytes + plan.working_bytes


def test_a_standby_takes_memory_of_the_machine_and_none_of_a_gpu() -> None:
    arch = arch_of(LLAMA_2_7B)
    for device, num_bytes in (("cpu", STANDBY_BYTES), ("cuda", 0)):
        alone = plan_sequences(arch, Precision("bfloat16"), work(device=device), 1)
        beside = plan_sequences(arch, Precision("bfloat16"), replace(work(device=device), has_standby=True), 1)
        assert beside.total_bytes - alone.total_bytes == num_bytes


def test_formulas_bracket_sums_and_keep_their_division_exact() -> None:
    total = (term(1, "layers") + term(4_000)).named("x") * term(3, "B")
    assert (total.value, total.text) == (12_003, "x (1 layer + 4,000) x 3 B")
    assert term(2) + NOTHING == NOTHING + term(2) == Formula(2, "2")
    with pytest.raises(AssertionError, match="7 is no multiple of 2"):
        term(7) // term(2)
