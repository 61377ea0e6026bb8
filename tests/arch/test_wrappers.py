"""The text parts of models that also see: their published configs, the names of their tensors, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.formats import Fp8, Scales
from inferd.engine.arch.registry import describe, weights
from inferd.engine.arch.rotary import LinearScaling, QueryGrowth, Rope, YarnScaling
from inferd.engine.arch.stored import Stored
from inferd.engine.arch.wrappers import is_tied, text_config, text_tensors

VISION = {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-3-4b-it": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
         "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                         "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024},
         "torch_dtype": "bfloat16", "vision_config": VISION},
        3_880_263_168,
    ),
    "gemma-3-27b-it": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
         "text_config": {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
                         "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                         "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024},
         "torch_dtype": "bfloat16", "vision_config": VISION},
        27_009_346_304,
    ),
    "gemma-4-31B-it": (
        {"architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16", "model_type": "gemma4",
         "audio_config": None,
         "text_config": {"attention_k_eq_v": True, "final_logit_softcapping": 30.0, "hidden_size": 5376,
                         "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
                         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
                         "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
                         "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
                         "sliding_window": 1024, "use_bidirectional_attention": "vision"},
         "vision_config": {"model_type": "gemma4_vision"}},
        30_697_345_340,
    ),
    "gemma-4-E4B-it": (
        {"architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16", "model_type": "gemma4",
         "audio_config": {"model_type": "gemma4_audio"},
         "text_config": {"final_logit_softcapping": 30.0, "hidden_size": 2560, "intermediate_size": 10240,
                         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
                         "model_type": "gemma4_text", "num_hidden_layers": 42, "num_key_value_heads": 2,
                         "num_kv_shared_layers": 18},
         "vision_config": {"model_type": "gemma4_vision"}},
        7_463_013_418,
    ),
    "Mistral-Small-3.1-24B-Instruct-2503": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
         "text_config": {"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768,
                         "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
                         "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                         "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072},
         "torch_dtype": "bfloat16", "vision_config": {"model_type": "pixtral"}},
        23_572_403_200,
    ),
    "Ministral-3-3B-Instruct-2512": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "model_type": "mistral3",
         "quantization_config": {"activation_scheme": "static", "dequantize": False,
                                 "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector",
                                                            "lm_head"],
                                 "quant_method": "fp8", "weight_block_size": None},
         "text_config": {"head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 9216,
                         "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
                         "num_hidden_layers": 26, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                         "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0,
                                             "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                                             "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                                             "rope_type": "yarn", "type": "yarn"},
                         "sliding_window": None, "tie_word_embeddings": True, "vocab_size": 131072},
         "vision_config": {"model_type": "pixtral"}},
        3_429_006_336,
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_act": "silu", "hidden_size": 3584,
         "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
         "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-6, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
         "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "use_sliding_window": False, "vision_config": {"depth": 32}, "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen3-VL-8B-Instruct": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
         "text_config": {"attention_bias": False, "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu",
                         "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 262144,
                         "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
                         "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
                         "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                          "rope_type": "default"},
                         "rope_theta": 5000000, "vocab_size": 151936},
         "vision_config": {"depth": 27}},
        8_190_735_360,
    ),
    "Qwen3.5-0.8B": (
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
         "text_config": {"dtype": "bfloat16", "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
                         "intermediate_size": 3584, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
                         "max_position_embeddings": 262144, "model_type": "qwen3_5_text", "num_attention_heads": 8,
                         "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                         "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                                             "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                                             "rope_type": "default"},
                         "vocab_size": 248320},
         "vision_config": {"depth": 12}},
        752_393_024,
    ),
    "Qwen3.5-35B-A3B": (
        {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
         "text_config": {"dtype": "bfloat16", "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
                         "linear_num_key_heads": 16, "linear_num_value_heads": 32, "max_position_embeddings": 262144,
                         "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "num_attention_heads": 16,
                         "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
                         "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                         "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                                             "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                                             "rope_type": "default"},
                         "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 248320},
         "tie_word_embeddings": False, "vision_config": {"depth": 27}},
        34_660_610_688,
    ),
}  # fmt: skip


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The published config with fields of its `text_config` replaced."""
    config = PUBLISHED[name][0]
    return {**config, "text_config": {**config["text_config"], **changes}}


def arch_of(name: str, **changes: Any) -> Arch:
    return describe(config_of(name, **changes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_that_of_the_text_alone(name: str) -> None:
    config, count = PUBLISHED[name]
    arch = describe(config)
    assert weights(arch).num_elements == count
    assert arch.dtype == "bfloat16"


def test_gemma3() -> None:
    arch = arch_of("gemma-3-4b-it")
    assert (arch.architecture, arch.num_heads, arch.num_kv_heads, arch.head_dim) == ("Gemma3ForCausalLM", 8, 4, 256)
    assert (arch.vocab_size, arch.max_positions, arch.tie_embeddings) == (262208, 131072, True)
    assert arch.windows == (((1024,) * 5 + (None,)) * 6)[:34]
    assert set(arch.ropes) == {Rope(1e4, 256), Rope(1e6, 256, LinearScaling(8.0))}
    assert arch_of("gemma-3-27b-it").attention_scale == 168**-0.5


def test_ministral3() -> None:
    """Its instruct model is published in FP8, as transformers stores it."""
    arch = arch_of("Ministral-3-3B-Instruct-2512")
    assert (arch.windows, arch.max_positions, arch.tie_embeddings) == ((None,) * 26, 262144, True)
    assert set(arch.ropes) == {Rope(1e6, 128, YarnScaling(16.0, 16384, 32.0, 1.0, True), 1.0, QueryGrowth(0.1, 16384))}
    assert arch.stored == Stored(Fp8(Scales.TENSOR, "weight_scale_inv", "activation_scale"))


def test_positions_in_a_text_are_one_number() -> None:
    """So M-RoPE, which turns frequencies by three positions, is the default rope."""
    for name, theta in (("Qwen2.5-VL-7B-Instruct", 1e6), ("Qwen3-VL-8B-Instruct", 5e6)):
        assert set(describe(PUBLISHED[name][0]).ropes) == {Rope(theta, 128)}


def test_fields_of_the_whole_that_the_text_part_lacks() -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["vision_tower"]}
    config = {**config_of("gemma-3-4b-it"), "quantization_config": quantization, "tie_word_embeddings": False}
    arch = describe(config)
    assert arch.stored is not None and not arch.tie_embeddings
    assert text_config(config)["eos_token_id"] == [1, 106]
    assert text_config(text_config(config)) == text_config(config)


@pytest.mark.parametrize(
    "listed",
    [
        "model.language_model.layers.0.mlp.down_proj",
        "language_model.model.layers.0.mlp.down_proj",
        r"re:language_model\.model\.layers\.0\.mlp\.down_proj$",
        "re:model.language_model.layers.0.*down_proj",
    ],
)
def test_modules_are_listed_by_the_names_of_the_whole(listed: str) -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": [listed]}
    stored = describe({**config_of("gemma-3-4b-it"), "quantization_config": quantization}).stored
    assert stored is not None
    assert stored.exceptions == (("model.layers.0.mlp.down_proj", None),)


OLD = {"language_model.model.norm.weight": 1, "language_model.lm_head.weight": 2, "vision_tower.a": 3}
NEW = {"model.language_model.norm.weight": 1, "lm_head.weight": 2, "model.vision_tower.a": 3}


@pytest.mark.parametrize("found", [OLD, NEW])
def test_tensors_have_the_names_of_a_text_model(found: dict[str, int]) -> None:
    text, others = text_tensors(found)
    assert text == {"model.norm.weight": 1, "lm_head.weight": 2}
    assert list(others.values()) == [3]


def test_a_tensor_of_no_known_part_stays() -> None:
    assert text_tensors({"speech.a": 1, "model.norm.weight": 2, "model.visual.b": 3}) == (
        {"speech.a": 1, "model.norm.weight": 2},
        {"model.visual.b": 3},
    )
    with pytest.raises(ArchError, match=r"two tensors are model\.norm\.weight of the text part"):
        text_tensors({**OLD, "model.language_model.norm.weight": 4})


@pytest.mark.parametrize(
    ("text", "whole", "has_head", "expected"),
    [(None, True, True, False), (None, False, False, True), (True, False, True, True), (False, True, False, True)],
)
def test_the_files_decide_whether_the_head_is_the_embedding(
    text: bool | None, whole: bool, has_head: bool, expected: bool
) -> None:
    config = {"text_config": {"tie_word_embeddings": text}, "tie_word_embeddings": whole}
    assert is_tied(config, {"model.norm.weight": 1, **({"lm_head.weight": 2} if has_head else {})}) is expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("gemma-3-4b-it", model_type="t5gemma"), "model_type of text_config must be one of gemma3_text, but"),
        (config_of("gemma-3-4b-it", model_type=["x"]), "model_type of text_config must be one of gemma3_text, but"),
        ({**config_of("gemma-3-4b-it"), "text_config": [1]}, "text_config must be an object, but it is list"),
        (config_of("gemma-3-4b-it", layer_types=["full_attention"] * 33), "layer_types must be a list of 34, each one"),
        (
            {"architectures": ["LlavaForConditionalGeneration"]},
            "unknown architecture .*; known are: .*, Mistral3ForCon",
        ),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        describe(config)
