"""The work of a step, compared with counts by hand, published figures, and a count pair by pair."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.cost.step_cost import NO_WORK, WorkModel
from inferd.engine.api.memory.precision import KV_FORMATS, KVPrecision, Precision
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import describe

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
BF16 = Precision("bfloat16")
QWEN35_08B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
}

LAYER = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336
HEAD = 4096 * 128256
NORMS = 65 * 4096
KV_BYTES = 131_072
"""KV bytes of a token in all layers."""


def llama() -> WorkModel:
    return WorkModel.of(describe(LLAMA_31_8B), BF16, 131072)


def tiny(windows: tuple[int | None, ...]) -> Arch:
    """8 wide, 2 heads of 4 with one KV head, an MLP of 16 with a gate, a vocabulary of 10."""
    arch = describe(
        LLAMA_31_8B
        | {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
           "num_hidden_layers": len(windows), "vocab_size": 10}
    )  # fmt: skip
    return replace(arch, windows=windows)


def test_a_prompt_token_of_llama_31_8b_takes_14_gflop() -> None:
    work = llama().step([0], [2], 0)
    attention = 3 * 32 * 4 * 32 * 128
    assert (work.flops - attention) / 2 == 2 * 32 * LAYER == pytest.approx(13.96e9, rel=1e-3)


def test_a_decode_step_of_llama_31_8b_reads_15_gb_and_131072_bytes_a_token_of_context() -> None:
    empty = llama().step([0], [1], 1)
    embedding, logits, own_kv = 2 * 4096, 8 * 128256, 2 * KV_BYTES
    assert empty.num_bytes - embedding - logits - own_kv == 2 * (32 * LAYER + HEAD + NORMS)
    assert empty.num_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert llama().step([1000], [1], 1).num_bytes - empty.num_bytes == 1000 * KV_BYTES


def test_a_hybrid_reads_and_writes_the_state_of_each_row() -> None:
    """Qwen3.5-0.8B: 18 of 24 layers have 16 matrices of 128 x 128 in fp32 and 3 inputs of 6,144 channels."""
    arch = describe(QWEN35_08B)
    work = WorkModel.of(arch, BF16, 32768)
    numbers = 18 * 16 * 128 * 128
    state = 4 * numbers + 18 * 3 * 6144 * 2
    one, two = work.step([100], [1], 1), work.step([100, 100], [1, 1], 2)
    context, own = 101 * 6 * 2 * 2 * 256 * 2, 2 * 1024 + 6 * 2 * 2 * 256 * 2 + 8 * 248320
    assert two.num_bytes - one.num_bytes == 2 * state + context + own
    drafted = work.step([100, 101, 102], [1, 1, 1], 3, num_states=2)
    assert drafted.num_bytes == work.step([100, 101, 102], [1, 1, 1], 3).num_bytes - 2 * state
    delta, attention = 1024 * (6144 + 2048 + 32) + 2048 * 1024, 1024 * (4096 + 1024) + 2048 * 1024
    matrices = 18 * delta + 6 * attention + 24 * 3 * 1024 * 3584
    assert one.flops == 2 * matrices + 6 * numbers + 2 * 1024 * 248320 + 6 * 4 * 8 * 256 * 101


def test_a_batch_reads_the_weights_once_and_each_rows_keys() -> None:
    starts = [100, 200, 300]
    alone = [llama().step([start], [1], 1) for start in starts]
    together = llama().step(starts, [1] * 3, 3)
    assert together.flops == sum(work.flops for work in alone)
    assert together.num_bytes == sum(work.num_bytes for work in alone) - 2 * 2 * (32 * LAYER + HEAD + NORMS)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """Each token goes to 2 of 8 experts. The oracle draws the choices."""
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    model = WorkModel.of(describe(LLAMA_31_8B | experts), BF16, 131072)
    expert = 32 * 3 * 4096 * 14336
    assert model.expert_bytes == 2 * expert
    assert model.token_flops - llama().token_flops == 2 * (expert + 32 * 8 * 4096)
    assert model.experts_bytes(1) == 2 * 2 * expert
    random = Random(1)
    drawn = [len({e for _ in range(5) for e in random.sample(range(8), 2)}) for _ in range(20000)]
    assert model.experts_bytes(5) / model.expert_bytes == pytest.approx(sum(drawn) / len(drawn), rel=0.005)
    assert model.experts_bytes(1000) == 8 * 2 * expert


def test_without_logits_the_head_is_not_read() -> None:
    with_logits, without = llama().step([0], [64], 1), llama().step([0], [64], 0)
    assert with_logits.flops - without.flops == 2 * HEAD
    assert with_logits.num_bytes - without.num_bytes == 2 * HEAD + 8 * 128256


@pytest.mark.parametrize(
    ("precision", "weight_bytes", "head_bytes"),
    [
        (Precision("bfloat16", "int8"), LAYER + LAYER // 64 * 2, HEAD + HEAD // 64 * 2),
        (Precision("bfloat16", "int4"), LAYER // 2 + LAYER // 32 * 4, HEAD + HEAD // 64 * 2),
        (Precision("float32"), 4 * LAYER, 4 * HEAD),
    ],
    ids=lambda value: value.name if isinstance(value, Precision) else "",
)
def test_weights_are_read_as_they_are_stored(precision: Precision, weight_bytes: int, head_bytes: int) -> None:
    model = WorkModel.of(describe(LLAMA_31_8B), precision, 131072)
    assert model.weight_bytes == 32 * weight_bytes + NORMS * precision.dtype_bytes.value
    assert model.head_bytes == head_bytes
    assert model.token_flops == llama().token_flops


@pytest.mark.parametrize("kv_cache", KV_FORMATS)
def test_kv_in_8_bits_is_read_and_written_with_its_scales(kv_cache: KVPrecision) -> None:
    """8 KV heads of 128 in 32 layers: a byte a number, and 2 for each 32 of them."""
    plain, short = llama(), WorkModel.of(describe(LLAMA_31_8B), Precision("bfloat16", kv_cache=kv_cache), 131072)
    key_bytes = 2 * 8 * (128 + 4 * 2) * 32
    assert [layers.key_bytes for layers in short.attention] == [key_bytes]
    assert plain.token_bytes - short.token_bytes == 2 * 8 * 2 * 128 * 32 - key_bytes
    assert short.step([999], [1], 1).flops == plain.step([999], [1], 1).flops
    assert short.weight_bytes == plain.weight_bytes


def test_a_tied_head_is_read_like_any_other() -> None:
    tied = WorkModel.of(describe(LLAMA_31_8B | {"tie_word_embeddings": True}), BF16, 131072)
    assert tied == llama()


@pytest.mark.parametrize(
    ("counts", "phase"), [([1], "decode"), ([1, 1], "decode"), ([2], "prefill"), ([2, 9], "prefill"), ([1, 2], "mixed")]
)
def test_a_steps_phase_is_what_its_rows_are(counts: list[int], phase: str) -> None:
    assert NO_WORK.model.step([3] * len(counts), counts, 0) == (phase, 0, 0)


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    assert [layers.window for layers in WorkModel.of(tiny((4, None)), BF16, 4).attention] == [None]
    assert [layers.window for layers in WorkModel.of(tiny((4, None)), BF16, 5).attention] == [4, None]


ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6)
WINDOWS = st.lists(st.sampled_from([None, 1, 2, 5, 40]), min_size=1, max_size=4).map(tuple)


@given(ROWS, WINDOWS, st.integers(0, 6))
def test_steps_are_the_sum_of_their_pairs_and_keys(
    rows: list[tuple[int, int]], windows: tuple[int | None, ...], num_logits: int
) -> None:
    """Counts every layer, query and key instead of using closed forms."""
    matrices = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 16
    flops, num_bytes = 0, len(windows) * 2 * (matrices + 2 * 8) + 2 * 8
    for start, count in rows:
        flops += count * len(windows) * 2 * matrices
        num_bytes += count * (2 * 8 + len(windows) * 2 * 2 * 4)
        for window in windows:
            seen: set[int] = set()
            for position in range(start, start + count):
                keys = [key for key in range(position + 1) if window is None or key > position - window]
                flops += 2 * len(keys) * 2 * 4 * 2
                seen.update(keys)
            num_bytes += len(seen) * 2 * 2 * 4
    if num_logits:
        flops += num_logits * 2 * 8 * 10
        num_bytes += 2 * 8 * 10 + num_logits * 10 * 8
    starts, counts = zip(*rows, strict=True)
    work = WorkModel.of(tiny(windows), BF16, 100).step(starts, counts, num_logits)
    assert (work.flops, work.num_bytes) == (flops, num_bytes)


@pytest.mark.parametrize(
    ("flops", "num_bytes", "duration_s", "bound"),
    [
        (200, 10, 2.0, "compute"),
        (200, 30, 3.0, "memory"),
        (100, 10, 1.0, "memory"),
        (200, 10, 4.0, "compute"),
        (200, 10, 4.1, "host"),
        (200, 30, 6.1, "host"),
    ],
)
def test_the_larger_ideal_holds_a_step_up_unless_neither_explains_half_of_it(
    flops: int, num_bytes: int, duration_s: float, bound: str
) -> None:
    assert Peaks(10.0, 100.0).bound_by(flops, num_bytes, duration_s) == bound
    assert Peaks(10.0, 100.0).floor_s(200, 30) == 3.0


def test_peaks_in_words() -> None:
    assert str(Peaks(28.04e9, 215.6e9)) == "reads 28.0 GB/s, multiplies at 216 GFLOP/s"
    assert str(Peaks(4.3e12, 790e12)) == "reads 4300.0 GB/s, multiplies at 790 TFLOP/s"
