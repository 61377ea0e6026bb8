"""Metadata of GGUF files: published files describe the models that they were converted from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import ModelError
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.description import Arch
from inferd.engine.arch.gguf.config import config_of
from inferd.engine.arch.gguf.families import FAMILIES
from inferd.engine.arch.gguf.header import GgufError, GgufTensor
from inferd.engine.arch.gguf.metadata import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, Metadata
from inferd.engine.arch.gguf.tensors import OriginalNames, Sizes
from inferd.engine.arch.gguf.types import TYPES
from inferd.engine.arch.registry import describe, known_architectures, tensor_names, weights
from inferd.engine.arch.rotary import LinearScaling, LongRopeScaling, Rope, YarnScaling
from inferd.engine.arch.stacked import slices

from .test_families import PUBLISHED

Keys = dict[str, Any]

FILES: dict[str, tuple[str, Keys, int]] = {
    "Mistral-7B-v0.1": ("llama", {
        "block_count": 32, "context_length": 32768, "embedding_length": 4096, "feed_forward_length": 14336,
        "rope.dimension_count": 128, "attention.head_count": 32, "attention.head_count_kv": 8,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "attention.sliding_window": 4096,
        "vocab_size": 32000,
    }, 32000),
    "Qwen2.5-0.5B": ("qwen2", {
        "block_count": 24, "context_length": 32768, "embedding_length": 896, "feed_forward_length": 4864,
        "attention.head_count": 14, "attention.head_count_kv": 2, "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }, 151936),
    "gemma-2-2b": ("gemma2", {
        "block_count": 26, "context_length": 8192, "embedding_length": 2304, "feed_forward_length": 9216,
        "attention.head_count": 8, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 256, "attention.value_length": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "attention.sliding_window": 4096,
    }, 256000),
    "gemma-3-1b-it": ("gemma3", {
        "block_count": 26, "context_length": 32768, "embedding_length": 1152, "feed_forward_length": 6912,
        "attention.head_count": 4, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 256, "attention.value_length": 256, "rope.freq_base": 1e6,
        "attention.sliding_window": 512,
    }, 262144),
    "Phi-3-mini-4k-instruct": ("phi3", {
        "block_count": 32, "context_length": 4096, "embedding_length": 3072, "feed_forward_length": 8192,
        "attention.head_count": 32, "attention.head_count_kv": 32, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 96, "rope.freq_base": 10000.0, "attention.sliding_window": 2047,
        "rope.scaling.original_context_length": 4096,
    }, 32064),
    "OLMo-2-1124-7B": ("olmo2", {
        "block_count": 32, "context_length": 4096, "embedding_length": 4096, "feed_forward_length": 11008,
        "attention.head_count": 32, "attention.head_count_kv": 32, "rope.freq_base": 500000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }, 100352),
    "Olmo-3-7B-Instruct": ("olmo2", {
        "block_count": 32, "context_length": 65536, "embedding_length": 4096, "feed_forward_length": 11008,
        "attention.head_count": 32, "attention.head_count_kv": 32, "rope.freq_base": 500000.0,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 4096,
        "attention.sliding_window_pattern": (True, True, True, False) * 8, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 8192,
    }, 100278),
    "Seed-OSS-36B-Instruct": ("seed_oss", {
        "block_count": 64, "context_length": 524288, "embedding_length": 5120, "feed_forward_length": 27648,
        "attention.head_count": 80, "attention.head_count_kv": 8, "attention.key_length": 128,
        "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
    }, 155136),
    "SmolLM3-3B": ("smollm3", {
        "block_count": 36, "context_length": 65536, "embedding_length": 2048, "feed_forward_length": 11008,
        "attention.head_count": 16, "attention.head_count_kv": 4, "rope.freq_base": 5e6,
        "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 128256, "rope.dimension_count": 128,
    }, 128256),
    "granite-3.1-2b-instruct": ("granite", {
        "block_count": 40, "context_length": 131072, "embedding_length": 2048, "feed_forward_length": 8192,
        "attention.head_count": 32, "attention.head_count_kv": 8, "rope.freq_base": 5e6,
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 49155, "rope.dimension_count": 64,
        "attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0,
    }, 49155),
    "Mixtral-8x7B-v0.1": ("llama", {
        "block_count": 32, "context_length": 32768, "embedding_length": 4096, "feed_forward_length": 14336,
        "rope.dimension_count": 128, "attention.head_count": 32, "attention.head_count_kv": 8, "expert_count": 8,
        "expert_used_count": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "vocab_size": 32000,
    }, 32000),
    "OLMoE-1B-7B-0924": ("olmoe", {
        "block_count": 16, "context_length": 4096, "embedding_length": 2048, "feed_forward_length": 1024,
        "attention.head_count": 16, "attention.head_count_kv": 16, "rope.freq_base": 10000.0, "expert_count": 64,
        "expert_used_count": 8, "attention.layer_norm_rms_epsilon": 1e-5,
    }, 50304),
    "gpt-oss-20b": ("gpt-oss", {
        "block_count": 24, "context_length": 131072, "embedding_length": 2880, "feed_forward_length": 2880,
        "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128,
        "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096, "expert_count": 32, "expert_used_count": 4,
        "expert_feed_forward_length": 2880,
    }, 201088),
    "Qwen3-30B-A3B": ("qwen3moe", {
        "block_count": 48, "context_length": 40960, "embedding_length": 2048, "feed_forward_length": 6144,
        "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128,
        "attention.value_length": 128, "rope.freq_base": 1e6, "expert_count": 128, "expert_used_count": 8,
        "expert_feed_forward_length": 768, "attention.layer_norm_rms_epsilon": 1e-6,
    }, 151936),
    "starcoder2-3b": ("starcoder2", {
        "block_count": 30, "context_length": 16384, "embedding_length": 3072, "feed_forward_length": 12288,
        "attention.head_count": 24, "attention.head_count_kv": 2, "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 999999.4420358813, "attention.sliding_window": 4096,
    }, 49152),
}  # fmt: skip
"""Published model -> (architecture, metadata under its name, rows of the embedding), as converted files state them."""

UNTIED = (
    "Mistral-7B-v0.1", "Phi-3-mini-4k-instruct", "OLMo-2-1124-7B", "Olmo-3-7B-Instruct", "Seed-OSS-36B-Instruct",
    "Mixtral-8x7B-v0.1", "OLMoE-1B-7B-0924", "gpt-oss-20b",
    "Qwen3-30B-A3B",
)  # fmt: skip
SMALL: Keys = {
    "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip

EXPERTS: Keys = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32}


DELTA: Keys = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
    "full_attention_interval": 2,
}  # fmt: skip
REQUIRED: dict[str, Keys] = {
    "ernie4_5-moe": {"interleave_moe_layer_step": 1, "expert_shared_count": 1},
    "gemma4": {"attention.sliding_window": 64, "attention.sliding_window_pattern": (True, False)},
    "glm4moe": {"expert_shared_count": 1},
    "gpt-oss": {"attention.sliding_window": 64},
    "granitehybrid": {
        **DELTA, "attention.head_count_kv": (0, 2), "expert_shared_feed_forward_length": 64,
    },
    "lfm2": {"attention.head_count_kv": (0, 2), "shortconv.l_cache": 3},
    "lfm2moe": {"attention.head_count_kv": (0, 2), "shortconv.l_cache": 3},
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), DELTA),
}  # fmt: skip
"""Keys that only some architectures need."""
OTHER_TENSORS = ("blk.1.ffn_up_shexp.weight", "blk.1.attn_v.weight", "blk.1.ffn_gate_inp.weight")


def small(architecture: str) -> Keys:
    """The metadata of a small model."""
    experts = EXPERTS if "expert_count" in FAMILIES[architecture].reads and architecture != "llama" else {}
    return SMALL | REQUIRED.get(architecture, {}) | experts


def tensors_of(rows: int, *others: str) -> dict[str, GgufTensor]:
    """The tensors that a config depends on, and enough others for 64 layers."""
    names = {"token_embd.weight": (rows, 64), **dict.fromkeys(others, (64,))}
    names |= {f"blk.{layer}.attn_norm.weight": (64,) for layer in range(64)}
    return {name: GgufTensor(name, TYPES[14 if len(shape) > 1 else 0], shape, 0) for name, shape in names.items()}


def arch_of(architecture: str, keys: Keys, *others: str, rows: int = 512, **factors: tuple[float, ...]) -> Arch:
    values = {"general.architecture": architecture, **{f"{architecture}.{key}": item for key, item in keys.items()}}
    named = {name.replace("__", ".") + ".weight": found for name, found in factors.items()}
    return describe(config_of(Metadata(values, tensors_of(rows, *others), named)))


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_describes_the_published_model(name: str) -> None:
    architecture, keys, rows = FILES[name]
    others = ["output.weight"] if name in UNTIED else []
    others += ["blk.0.attn_q.bias", "blk.0.ffn_up.bias"] if architecture == "starcoder2" else []
    others += ["blk.0.attn_q.bias"] if architecture in ("gpt-oss", "qwen2", "seed_oss") else []
    original = describe(PUBLISHED[name][0])
    assert arch_of(architecture, keys, *others, rows=rows) == dataclasses.replace(original, dtype="bfloat16")


def test_every_family_has_files() -> None:
    """Files of Mistral and Mixtral state `llama`, and those of OLMo 3 `olmo2`. Some families have no files here."""
    others = {"MistralForCausalLM", "MixtralForCausalLM", "Olmo3ForCausalLM"}
    unread = {"GlmForCausalLM", "MiMoForCausalLM"}
    assert {family.architecture for family in FAMILIES.values()} == set(known_architectures()) - others - unread


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_tensor_of_a_layer_has_a_name(architecture: str) -> None:
    """No two names in a file are one tensor, and every tensor of the model has one."""
    family, size = FAMILIES[architecture], 32 if architecture == "gemma4" else 16
    keys = small(architecture) | {"attention.key_length": size, "attention.value_length": size}
    arch = arch_of(architecture, keys, *OTHER_TENSORS)
    own = tensor_names(arch.architecture, splits_matrices=arch.splits_matrices)
    original = OriginalNames(family, own, Sizes(arch.num_layers, 4, 2, arch.recurrent))
    theirs = (
        "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q", "attn_k", "attn_v", "attn_qkv",
        "attn_output", "attn_q_norm", "attn_k_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "attn_gate",
        "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_sinks", "exp_probs_b", "layer_output_scale",
        "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_inp_shexp", "ssm_in", "ssm_conv1d", "ssm_dt",
        "ssm_ba", "ssm_alpha", "ssm_beta", "ssm_norm", "ssm_out", "shortconv.conv", "shortconv.in_proj",
        "shortconv.out_proj", "inp_gate", "proj", "post_norm", "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2",
    )  # fmt: skip
    # The MLP of a dense Granite has the names of the shared expert of the other.
    unused = {
        "lfm2": "ssm_",
        "lfm2moe": "ssm_",
        "granitehybrid": ("shortconv.", "ffn_gate_s", "ffn_up_s", "ffn_down_s"),
    }
    others = tuple(name for name in theirs if not name.startswith(unused.get(architecture, "shortconv.")))
    kinds = [f"{name}.{kind}" for name in others for kind in ("weight", "bias")]
    names = [
        f"blk.{layer}.{name}"
        for layer in range(arch.num_layers)
        for name in (*kinds, "ssm_a", "ssm_d", "ffn_gate_inp.scale", "ffn_down_exps.scale")
    ]
    names += ["token_embd.weight", "output_norm.bias", "output.weight", "per_layer_token_embd.weight"]
    names += ["token_embd_norm.weight" if architecture.startswith("lfm2") else "output_norm.weight"]
    names += ["per_layer_model_proj.weight", "per_layer_proj_norm.weight"]
    tensors = [GgufTensor(name, TYPES[0], (64, 4), 0) for name in names]
    found = [named[0] for named in map(original.of, tensors) if named is not None]
    assert len(set(found)) == len(found)
    shapes = ((EXPERTS["expert_count"], 32, 64), (EXPERTS["expert_count"], 32))
    of_experts = {part for name in found for shape in shapes for part, _ in slices(name, shape, own)}
    assert {source.tensor for source in weights(arch).sources} <= set(found) | of_experts


def test_every_tensor_of_an_mtp_layer_has_a_name() -> None:
    """It comes behind the layers of the model."""
    own = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    tensors = [
        GgufTensor(f"blk.2.{name}.weight", TYPES[0], (64,), 0) for name in (*(f"nextn.{one}" for one in own), "attn_q")
    ]
    named = {}
    for architecture, family in FAMILIES.items():
        original = OriginalNames(family, tensor_names(family.architecture), Sizes(2, 4, 2))
        named[architecture] = [found[0] for found in map(original.of, tensors) if found is not None]
    assert named["qwen35"] == named["qwen35moe"] == named["qwen3next"] == [
        "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    ]  # fmt: skip
    assert named["glm4moe"] == [
        "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight", "model.layers.2.hnorm.weight",
        "model.layers.2.shared_head.norm.weight", "model.layers.2.self_attn.q_proj.weight",
    ]  # fmt: skip
    assert named["llama"][0] == "blk.2.nextn.eh_proj.weight"  # which no layer has


def test_a_scaled_rope_is_read_in_every_form() -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert arch_of("llama", SMALL | linear).ropes[0] == Rope(1e4, 16, LinearScaling(4.0))
    assert arch_of("llama", SMALL | {"rope.scaling.factor": 4.0}).ropes[0] == Rope(1e4, 16, LinearScaling(4.0))
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    rope = arch_of("qwen2", SMALL | yarn).ropes[0]
    assert rope is not None and rope.scaling == YarnScaling(4.0, 128, 32.0, 1.0, truncate=True)
    factors = (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)
    rope = arch_of("llama", SMALL, rope_freqs=factors).ropes[0]
    assert rope == Rope(1e4, 16, LongRopeScaling(512, factors, factors), 1.0)
    both = {"rope_factors_short": factors, "rope_factors_long": factors[::-1]}
    rope = arch_of("phi3", SMALL | {"rope.scaling.original_context_length": 128}, **both).ropes[0]
    assert rope is not None and rope.scaling == LongRopeScaling(128, factors, factors[::-1])
    part = {"rope.dimension_count": 12}
    assert all(rope and rope.rotary_dim == 12 for rope in arch_of("phi3", SMALL | part).ropes)
    assert (LONG_FACTORS, SHORT_FACTORS, ROPE_FACTORS) == (
        "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
    )  # fmt: skip


def test_the_largest_gemmas_scale_scores_by_another_number() -> None:
    wide = {"attention.key_length": 32, "attention.value_length": 32}
    assert arch_of("gemma2", SMALL | wide).attention_scale == 32**-0.5
    largest = {"block_count": 40, "attention.head_count": 8}
    assert arch_of("gemma2", SMALL | wide | largest).attention_scale == 32**-0.5
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        keys = {f"{architecture}.{key}": item for key, item in {**SMALL, **wide, "block_count": layers}.items()}
        tensors = tensors_of(512, *(f"blk.{layer}.ffn_norm.weight" for layer in range(40)))
        arch = describe(config_of(Metadata({"general.architecture": architecture, **keys}, tensors, {})))
        assert arch.attention_scale == 16**-0.5


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("gpt-neox", {}, "unknown architecture 'gpt-neox'; known are: ernie4_5, ernie4_5-moe, exaone4, gemma2"),
        ("llama", {"block_count": None}, "the metadata lacks llama.block_count"),
        ("llama", {"block_count": 10**9}, r"llama.block_count must be at most the number of tensors, 65, but is 10"),
        ("llama", {"block_count": "two"}, "llama.block_count must be a whole number of at least 1, but is 'two'"),
        ("qwen2", {"expert_count": 8}, "qwen2.expert_count must be 0 in this family, but is 8"),
        ("llama", {"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv must be 0.0 in this family, but is 8.0"),
        ("llama", {"logit_scale": 8.0}, "llama.logit_scale must be 1.0 in this family"),
        ("qwen2", {"attention.sliding_window": 64}, "qwen2.attention.sliding_window must be 0 in this family"),
        ("llama", {"attention.causal": False}, "llama.attention.causal must be True"),
        ("llama", {"rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 16},
         "llama.rope.dimension_count must be the size of a head, 16, but is 8"),
        ("llama", {"attention.key_length": 16, "attention.value_length": 32},
         "llama.attention.value_length must be attention.key_length, 16, but is 32"),
        ("llama", {"rope.scaling.type": "ntk"}, "llama.rope.scaling.type must be none, linear, yarn or longrope"),
        ("llama", {"attention.head_count": 0}, "num_attention_heads must be a whole number of at least 1, but it is 0"),
        ("llama", {"attention.head_count_kv": 3}, "num_key_value_heads must divide num_attention_heads"),
        ("llama", {"attention.head_count": (4, 4)}, "num_attention_heads must be a whole number"),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_refused_by_key(architecture: str, keys: Keys, words: str) -> None:
    stated = {key: item for key, item in (SMALL | keys).items() if item is not None}
    with pytest.raises(ValueError, match=words):
        arch_of(architecture, stated)


def test_lists_of_factors_come_in_pairs() -> None:
    with pytest.raises(GgufError, match=r"must have both rope_factors_short.weight and rope_factors_long.weight, or"):
        arch_of("phi3", SMALL, rope_factors_long=(1.0,) * 8)
    with pytest.raises(GgufError, match=r"rope.scaling.type must be none beside the tensor rope_freqs.weight"):
        arch_of("llama", SMALL | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, rope_freqs=(1.0,) * 8)


HOSTILE: tuple[Any, ...] = (
    True, False, 0, 1, -1, 2**31, 2**63, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), 1e308, 1e-320, "",
    "x" * 10_000, [], ["a"], (), (0,), (1.5, float("nan")), (True,) * 40, (2**31,) * 40,
)  # fmt: skip


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_value_of_any_key_breaks_the_reader(architecture: str) -> None:
    """A value is accepted or refused with an error of ours. No other exception is raised."""
    keys = {key for _, found, _ in FILES.values() for key in found} | set(SMALL)
    keys |= {key for found in REQUIRED.values() for key in found} | set(EXPERTS)
    keys |= {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.freq_base_swa",
             "rope.scaling.yarn_beta_fast", "attention.sliding_window_pattern", "expert_gating_func",
             "attention.temperature_scale", "attention.recurrent_layers", "nextn_predict_layers"}  # fmt: skip
    num_refused = 0
    for key in keys:
        for value in HOSTILE:
            values = {f"{architecture}.{name}": item for name, item in (small(architecture) | {key: value}).items()}
            for factors in ({}, {LONG_FACTORS: (1.0,) * 8, SHORT_FACTORS: (float("nan"),) * 8}):
                tensors = tensors_of(512, *OTHER_TENSORS)
                of = Metadata({"general.architecture": architecture, **values}, tensors, factors)
                try:
                    ModelFacts.of_config(Path("x"), config_of(of))
                except (ModelError, GgufError):
                    num_refused += 1
    assert num_refused > 200
