"""config.json in, `Arch` out: Llama's and Qwen3's configs, and every refusal with field, rule and value. The other
families are in `test_families`, the scalings of rope in `test_rope`."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.arch.description import Activation, ArchError, QKNorm
from inferd.engine.arch.registry import describe, known_architectures
from inferd.engine.arch.rotary import Llama3Scaling, Rope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "rope_parameters": None,
    "rope_theta": 1000000,
}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`config` with fields set, or removed if the value is `...`."""
    return {name: value for name, value in (config | changes).items() if value is not ...}


def test_llama_3_2_1b() -> None:
    arch = describe(LLAMA)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.qkv_size) == (32, 8, 64, 3072)
    assert arch.ropes == (Rope(500000.0, 64, Llama3Scaling(32.0, 1.0, 4.0, 8192)),) * 16
    assert (arch.activation, arch.norm_eps, arch.attention_scale) == (Activation.SILU, 1e-5, 0.125)
    assert (arch.tie_embeddings, arch.dtype, arch.windows) == (True, "bfloat16", (None,) * 16)
    assert not (arch.has_qkv_bias or arch.has_o_bias or arch.has_mlp_bias)
    assert (arch.qk_norm, arch.has_gate, arch.has_pre_norms, arch.has_post_norms) == (QKNorm.NONE, True, True, False)


def test_defaults_of_llama_2() -> None:
    config = changed(LLAMA, rope_parameters=..., num_key_value_heads=..., tie_word_embeddings=..., dtype=...)
    arch = describe(config)
    assert (arch.num_kv_heads, arch.ropes[0], arch.tie_embeddings) == (32, Rope(10000.0, 64), False)
    assert arch.dtype == "float32"


def test_qwen3() -> None:
    arch = describe(QWEN3)
    assert (arch.head_dim, arch.qk_norm, arch.ropes[0]) == (128, QKNorm.HEAD, Rope(1e6, 128))
    assert arch.heads(0).q_size == 4096
    windowed = describe(changed(QWEN3, use_sliding_window=True, sliding_window=512, max_window_layers=14))
    assert windowed.windows == (None,) * 14 + (512,) * 2
    listed = ["full_attention", "sliding_attention"] * 8
    arch = describe(changed(QWEN3, use_sliding_window=True, sliding_window=512, layer_types=listed))
    assert arch.windows == (None, 512) * 8


def test_a_window_wider_than_all_positions_is_none() -> None:
    arch = describe(changed(QWEN3, use_sliding_window=True, sliding_window=131072, max_window_layers=0))
    assert arch.windows == (None,) * 16
    arch = describe(changed(QWEN3, use_sliding_window=True, sliding_window=131071, max_window_layers=0))
    assert arch.windows == (131071,) * 16


def test_an_unknown_architecture_is_named_with_those_known() -> None:
    with pytest.raises(ArchError, match="unknown architecture 'MambaForCausalLM'; known are: Ernie4_5ForCausalLM, "):
        describe(changed(LLAMA, architectures=["MambaForCausalLM"]))
    assert known_architectures() == tuple(sorted(known_architectures()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ...}, "architectures must be a list of one name, but it is None"),
        ({"architectures": ["A", "B"]}, "a list of one name"),
        ({"architectures": [{}]}, "a list of one name"),
        ({"hidden_size": ...}, "config.json lacks hidden_size"),
        ({"rms_norm_eps": None}, "config.json lacks rms_norm_eps"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, but it is 0"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1, but it is 'many'"),
        ({"intermediate_size": True}, "intermediate_size must be a whole number"),
        (
            {"rms_norm_eps": float("nan")},
            "rms_norm_eps must be a finite number above 0, at most 1.8e308, but it is nan",
        ),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a finite number above 0, .*, but it is 'tiny'"),
        (
            {"rms_norm_eps": 10**400},
            "rms_norm_eps must be a finite number above 0, at most 1.8e308, but it is a number of more than 77 digits",
        ),
        ({"vocab_size": 10**400}, f"vocab_size must be at most {2**40}, but it is a number of more than 77 digits"),
        ({"hidden_size": 2**40 + 32}, f"hidden_size must be at most {2**40}, but it is {2**40 + 32}"),
        (
            {"max_position_embeddings": 10**400},
            f"max_position_embeddings must be at most {2**40}, but it is a number of more than 77 digits",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, but it is 1000000000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, but it is 'yes'"),
        ({"num_key_value_heads": 5}, r"num_key_value_heads must divide num_attention_heads \(32\), but it is 5"),
        ({"num_attention_heads": 24}, "hidden_size must be a multiple of num_attention_heads"),
        ({"head_dim": 63}, "head_dim must be even, but it is 63"),
        ({"hidden_act": "relu2"}, "hidden_act must be one of silu, .*, but it is 'relu2'"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of float32, bfloat16, float16, but it is 'float8_e4m3fn'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        describe(changed(LLAMA, **changes))


def test_qwen3_needs_its_head_size_and_the_numbers_of_its_window() -> None:
    with pytest.raises(ArchError, match="Qwen3ForCausalLM: head_dim must be given"):
        describe(changed(QWEN3, head_dim=...))
    with pytest.raises(ArchError, match=r"config\.json lacks sliding_window"):
        describe(changed(QWEN3, use_sliding_window=True, sliding_window=None, max_window_layers=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["sliding_attention"] * 16},
            "use_sliding_window must be true if layer_types names sliding_",
        ),
        (
            {"layer_types": ["full_attention"] * 15},
            "layer_types must be a list of 16, each one of full_attention, slid",
        ),
        ({"layer_types": ["mamba"] * 16}, "layer_types must be a list of 16, each one of full_attention, sliding_att"),
        ({"layer_types": [[]] * 16}, "layer_types must be a list of 16"),
    ],
)
def test_layer_types_agree_with_the_rest(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        describe(changed(QWEN3, **changes))
