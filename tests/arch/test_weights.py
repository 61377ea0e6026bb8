"""The weight map: sizes of published models, rows that fill every parameter, and the report of every contradiction."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import describe, weights

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}


def arch_of(**changes: Any) -> Arch:
    return describe(BASE | changes)


def shapes_of(arch: Arch) -> dict[str, tuple[int, ...]]:
    return {source.tensor: source.shape for source in weights(arch).sources}


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (
            # Llama-3.2-1B
            {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
            1_235_814_400,
        ),
        (
            # Llama-2-7B
            {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 32, "vocab_size": 32000},
            6_738_415_616,
        ),
        (
            # Qwen3-0.6B, whose published count of 0.6 B includes the tied head once
            {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
             "tie_word_embeddings": True},
            596_049_920,
        ),
    ],
)  # fmt: skip
def test_counts_of_published_models(config: dict[str, Any], num_params: int) -> None:
    assert weights(arch_of(**config)).num_elements == num_params


def test_fused_parameters_are_filled_by_rows() -> None:
    weight_map = weights(arch_of(attention_bias=True))
    rows = {source.tensor: (source.parameter, source.row) for source in weight_map.sources}
    assert [rows[f"model.layers.1.self_attn.{name}_proj.bias"] for name in "qkv"] == [
        ("layers.1.attention.qkv.bias", 0),
        ("layers.1.attention.qkv.bias", 64),
        ("layers.1.attention.qkv.bias", 96),
    ]
    assert rows["model.layers.0.mlp.up_proj.weight"] == ("layers.0.mlp.gate_up.weight", 96)
    parameters = weight_map.parameters()
    assert parameters["layers.1.attention.qkv.weight"].shape == (128, 64)
    assert parameters["layers.0.mlp.gate_up.weight"].shape == (192, 64)


def test_agreement_is_false() -> None:
    arch = arch_of()
    inverse: dict[str, tuple[int, ...]] = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    assert not weights(arch).compare(shapes_of(arch) | inverse)


def test_every_difference_is_named() -> None:
    arch = arch_of()
    shapes = shapes_of(arch) | {"model.layers.2.mlp.up_proj.weight": (96, 64), "model.norm.weight": (32,)}
    del shapes["model.layers.1.self_attn.q_proj.weight"]
    found = weights(arch).compare(shapes)
    assert found.missing == ("model.layers.1.self_attn.q_proj.weight",)
    assert found.unexpected == ("model.layers.2.mlp.up_proj.weight",)
    assert found.wrong_shape == (("model.norm.weight", (64,), (32,)),)
    assert str(found) == (
        "1 missing: model.layers.1.self_attn.q_proj.weight; 1 unexpected: model.layers.2.mlp.up_proj.weight; "
        "1 of another shape: model.norm.weight is [32], by config.json [64]"
    )


def test_long_lists_are_cut_with_their_number() -> None:
    message = str(weights(arch_of()).compare({}))
    assert message.startswith("21 missing: lm_head.weight, ")
    assert message.endswith(" and 13 more")


def test_a_tied_head_is_optional_and_an_untied_one_is_not() -> None:
    tied, untied = arch_of(tie_word_embeddings=True), arch_of()
    assert "lm_head.weight" not in shapes_of(tied)
    assert not weights(tied).compare(shapes_of(untied))
    assert weights(untied).compare(shapes_of(tied)).missing == ("lm_head.weight",)
    other_shape = shapes_of(tied) | {"lm_head.weight": (90, 64)}
    assert weights(tied).compare(other_shape).wrong_shape == (("lm_head.weight", (100, 64), (90, 64)),)


def test_options_add_their_tensors() -> None:
    plain = set(shapes_of(arch_of()))
    biased = set(shapes_of(arch_of(attention_bias=True, mlp_bias=True))) - plain
    assert len(biased) == 2 * 7
    assert all(name.endswith(".bias") for name in biased)
    normed = set(shapes_of(arch_of(architectures=["Qwen3ForCausalLM"], head_dim=16))) - plain
    assert normed == {f"model.layers.{layer}.self_attn.{name}_norm.weight" for layer in (0, 1) for name in "qk"}
