"""Configs and tensors of draft heads in both formats, and what is refused by name at start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.draft import read_draft
from inferd.engine.api.errors import ConfigError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.speculation import check_draft, check_draft_length, check_served
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.draft_heads import layers_read_by
from inferd.engine.arch.registry import as_found, describe, describe_mtp_layer, weights
from inferd.server.commands.plan import build
from inferd.server.config.settings import Settings
from tests.arch.test_describe import LLAMA

SERVED = describe(LLAMA)
LAYER: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 2048,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
ORIGINAL = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float16", "draft_vocab_size": 32000, **LAYER}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0",
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": {**LAYER, "head_dim": 64},
}
MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 32768, "max_window_layers": 32, "model_type": "mimo", "num_attention_heads": 32,
    "head_dim": 128, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 640000,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151680, "attention_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
TENSORS = {
    "fc": (2048, 6144),
    "layer.hidden_norm": (2048,),
    "layer.input_layernorm": (2048,),
    "layer.mlp.down_proj": (2048, 8192),
    "layer.mlp.gate_proj": (8192, 2048),
    "layer.mlp.up_proj": (8192, 2048),
    "layer.post_attention_layernorm": (2048,),
    "layer.self_attn.k_proj": (512, 4096),
    "layer.self_attn.o_proj": (2048, 2048),
    "layer.self_attn.q_proj": (2048, 4096),
    "layer.self_attn.v_proj": (512, 4096),
    "lm_head": (32000, 2048),
    "norm": (2048,),
}


def stored(layer: str, body: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in TENSORS.items():
        prefix = "" if name == "lm_head" else body
        shapes[f"{prefix}{name.replace('layer.', layer)}.weight"] = shape
    return shapes | {f"{body}d2t": (32000,), f"{body}t2d": (128256,)}


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (ORIGINAL, stored("midlayer.")),
        (SPECULATORS, stored("layers.0.")),
        # The names of an embedding model get a prefix, and such a head looks like one.
        (SPECULATORS, stored("layers.0.", "model.") | {"model.embed_tokens.weight": (128256, 2048)}),
    ],
    ids=["original", "speculators", "with an embedding"],
)
def test_both_formats_are_read(config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    head = as_found(describe(config), dict.fromkeys(tensors, "BF16"))
    assert head.draft_head is not None and head.num_layers == 1
    assert not weights(head).compare(tensors)
    assert head.draft_head.has_embedding == (len(tensors) > 15)
    without = {name: shape for name, shape in tensors.items() if not name.endswith(("t2d", "d2t"))}
    assert weights(head).compare(without).missing == tuple(name for name in tensors if name.endswith("d2t"))
    assert head.draft_head.norms_residual == (config is SPECULATORS)
    check_draft(SERVED, head, 1)
    check_draft_length(SERVED, head, 131072)


@pytest.mark.parametrize(
    ("named", "read"),
    [
        ({}, (2, 8, 13)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5, 16]}, (0, 5, 16)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 12]}}, (2, 8, 13)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 8, 13)),
    ],
)
def test_layers_are_those_of_the_config(named: dict[str, Any], read: tuple[int, ...]) -> None:
    head = describe(ORIGINAL | named).draft_head
    assert head is not None and layers_read_by(head, SERVED.num_layers) == read


def refusals() -> list[tuple[dict[str, Any], str]]:
    return [
        ({"hidden_size": 4096}, "reads hidden states of 4096 numbers, but those of the served model have 2048; give"),
        ({"target_hidden_size": 2048, "hidden_size": 1024}, "must have the hidden size of the served model, 2048, but"),
        ({"vocab_size": 32000}, "the draft head must have the vocabulary of the served model, 128256 tokens, but has"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 17]}, "behind 17 layers, but the served model has 16; give a head"),
    ]


@pytest.mark.parametrize(("changes", "message"), refusals())
def test_a_head_of_another_model_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    head = describe(ORIGINAL | changes)
    with pytest.raises(ConfigError, match=message):
        check_draft(SERVED, head, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle"}, "speculators_model_type must be eagle3, but it is 'eagle'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1 for a draft head, but it is 2"),
        ({"draft_vocab_size": 200000}, "draft_vocab_size must be at most 128256, but it is 200000"),
        ({"eagle_aux_hidden_state_layer_ids": [1.5]}, "must be a list of 1 to 64 whole numbers, but it is"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "must be a list of 1 to 64 whole numbers, but it is"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent from a draft head"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        describe(ORIGINAL | changes)


def test_a_head_drafts_in_one_process_and_is_not_served() -> None:
    head = describe(ORIGINAL)
    with pytest.raises(ConfigError, match="a draft head runs in one process, but tensor_parallel_size is 2; give"):
        check_draft(SERVED, head, 2)
    with pytest.raises(ConfigError, match="LlamaForCausalLMEagle3 is a draft head, which drafts for another model"):
        check_served(head)
    check_served(SERVED)


def test_a_small_model_has_no_layers_to_read_by_default() -> None:
    head: Arch = describe(ORIGINAL)
    with pytest.raises(ConfigError, match=r"behind -1 layers, but the served model has 2; give a head"):
        check_draft(describe(LLAMA | {"num_hidden_layers": 2}), head, 1)


def test_an_mtp_layer_is_part_of_the_served_checkpoint() -> None:
    served = describe(MIMO)
    layer = describe_mtp_layer(MIMO)
    shapes = {source.tensor: source.shape for one in (served, layer) for source in weights(one).sources}
    # A second layer is not used.
    shapes["model.mtp_layers.1.input_proj.weight"] = (4096, 8192)
    assert not weights(served).compare(shapes)
    own = {name: shape for name, shape in shapes.items() if name.startswith("model.mtp_layers.0.")}
    assert not weights(layer).compare(own) and len(own) == 16
    assert own["model.mtp_layers.0.input_proj.weight"] == (4096, 8192)
    assert own["model.mtp_layers.0.self_attn.q_proj.weight"] == (4096, 4096)
    check_draft(served, layer, 1)


def test_mtp_is_refused_by_name_without_such_a_layer(tmp_path: Path) -> None:
    known = "Glm4MoeForCausalLM, MiMoForCausalLM"
    words = f"--speculative mtp: LlamaForCausalLM has no MTP layers that can draft; .* are: {known}; give --speculative"
    with pytest.raises(ConfigError, match=words):
        read_draft("mtp", EMBEDDED_PATH, keeps_blocks=False)
    shape = LAYER | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "architectures": ["MiMoForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(header(["model.norm.weight"]))
    with pytest.raises(ConfigError, match=r"holds no MTP layer: no tensor's name begins with model\.mtp_layers"):
        read_draft("mtp", tmp_path, keeps_blocks=False)
    with pytest.raises(ArchError, match="the MTP layer of a quantized checkpoint of MiMoForCausalLM is not supported"):
        describe_mtp_layer(MIMO | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}})


def test_an_mtp_layer_is_planned_by_config_json_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    for path in (tmp_path, tmp_path / "config.json"):
        report = build(Settings(model=str(path), speculative="mtp"), Machine(2, 2**36, 2**36, True), context=1024)
        sizes = {part.name: part.num_bytes for part in report.plan.weights}
        assert sizes["draft attention"] * 36 == sizes["attention"]
        assert sizes["draft projection"] == 4096 * 8192 * 2 and "draft head" not in sizes
        assert report.plan.kv_bytes == 37 * 2 * 8 * 128 * 2 * 1024


def header(names: Sequence[str]) -> bytes:
    """A safetensors file with tensors of one number."""
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))
