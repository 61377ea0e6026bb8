"""quantization_config: the formats that are read, and every value that is refused, with its name."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.formats import Fp8, Scales
from inferd.engine.arch.registry import describe, weights
from inferd.engine.arch.stored import Fp8Layout, Stored

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 384,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "vocab_size": 100,
}  # fmt: skip
PART = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax", "group_size": None}
ROWS, TOKENS = PART | {"strategy": "channel"}, PART | {"strategy": "token", "dynamic": True}
PER_TENSOR = PART | {"strategy": "tensor"}
BLOCKS = PART | {"strategy": "block", "block_structure": [128, 128]}
GROUPS = PART | {"strategy": "group", "group_size": 128, "dynamic": True}
AUTO = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BY_ROW = Fp8(Scales.ROW, "weight_scale")
DEEPSEEK = AUTO | {"fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def arch_of(quantization: object, **changes: Any) -> Arch:
    return describe(BASE | changes | {"quantization_config": quantization})


def compressed(weights: object = ROWS, inputs: object = TOKENS, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    } | changes  # fmt: skip


def targeted(targets: list[str]) -> dict[str, Any]:
    """Ten groups with these targets."""
    group = compressed()["config_groups"]["group_0"] | {"targets": targets}
    return compressed(config_groups={f"group_{number}": group for number in range(10)})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AUTO_ROUND = GPTQ | {"quant_method": "auto-round"}


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        (None, None),
        (AUTO, Stored(Fp8(Scales.TENSOR, "weight_scale"))),
        (AUTO | {"activation_scheme": "static"}, Stored(Fp8(Scales.TENSOR, "weight_scale", "input_scale"))),
        (AUTO | {"weight_block_size": None}, Stored(Fp8(Scales.TENSOR, "weight_scale_inv"))),
        (
            AUTO | {"activation_scheme": "static", "weight_block_size": None},
            Stored(Fp8(Scales.TENSOR, "weight_scale_inv", "activation_scale")),
        ),
        (DEEPSEEK, Stored(Fp8(Scales.BLOCK, "weight_scale_inv"))),
        (DEEPSEEK | {"modules_to_not_convert": None}, Stored(Fp8(Scales.BLOCK, "weight_scale_inv"))),
        (compressed(), Stored(BY_ROW)),
        (compressed(ignore=[]), Stored(BY_ROW, head=BY_ROW)),
        (compressed(ignore=["re:.*lm_head", "re:visual.*"]), Stored(BY_ROW)),
        (compressed(PER_TENSOR, PER_TENSOR), Stored(Fp8(Scales.TENSOR, "weight_scale", "input_scale"))),
        (compressed(ROWS, PER_TENSOR), Stored(Fp8(Scales.ROW, "weight_scale", "input_scale"))),
        (compressed(BLOCKS, GROUPS), Stored(Fp8(Scales.BLOCK, "weight_scale"))),
    ],
)
def test_what_is_read(quantization: object, stored: Stored | None) -> None:
    assert arch_of(quantization).stored == stored


def test_a_tied_head_is_not_quantized() -> None:
    stored = arch_of(compressed(ignore=[]), tie_word_embeddings=True).stored
    assert stored is not None and stored.head is None


LAYERS = [f"model.layers.{layer}" for layer in range(2)]
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("quantization", "plain"),
    [
        (AUTO | {"ignored_layers": ["lm_head"], "modules_to_not_convert": ["model.layers.0"]},
         [f"{LAYERS[0]}.{name}" for name in ATTENTION + MLP]),
        (AUTO | {"ignored_layers": ["o_proj"], "modules_to_not_convert": ["model.layers.1.mlp.down_proj"]},
         [*(f"{layer}.self_attn.o_proj" for layer in LAYERS), f"{LAYERS[1]}.mlp.down_proj"]),
        (DEEPSEEK | {"modules_to_not_convert": ["model.layers.1.mlp", "lm_head", "model.layers.1.mlp.gate"]},
         [f"{LAYERS[1]}.{name}" for name in MLP]),
        (compressed(ignore=["lm_head", "re:.*self_attn.*"]),
         [f"{layer}.{name}" for layer in LAYERS for name in ATTENTION]),
        (compressed(ignore=["lm_head", *(f"{LAYERS[1]}.self_attn.{name}_proj" for name in "qkv")]),
         [f"{LAYERS[1]}.self_attn.{name}_proj" for name in "qkv"]),
    ],
)  # fmt: skip
def test_some_layers_may_be_left_out(quantization: object, plain: list[str]) -> None:
    """Their tensors are expected unquantized, and all others with scales."""
    arch = arch_of(quantization)
    assert arch.stored is not None and dict(arch.stored.exceptions) == dict.fromkeys(plain)
    found = weights(arch)
    assert {source.module for source in found.quantized} == {
        module for layer in LAYERS for name in ATTENTION + MLP if (module := f"{layer}.{name}") not in plain
    }
    assert {f"{module}.weight" for module in plain} <= {source.tensor for source in found.sources}


def test_a_checkpoint_that_leaves_out_everything_is_not_quantized() -> None:
    assert arch_of(compressed(ignore=["lm_head", "model"])).stored is None
    assert arch_of(AUTO | {"ignored_layers": ["re:model.*"]}).stored is None
    only_head = arch_of(compressed(ignore=["model.layers"])).stored
    assert only_head == Stored(None, BY_ROW)


def test_what_is_said_of_a_kv_cache_changes_nothing() -> None:
    assert arch_of(compressed(kv_cache_scheme=PART)) == arch_of(compressed())
    assert arch_of(AUTO | {"kv_cache_quant_method": "fp8"}) == arch_of(AUTO)


def test_names_that_are_no_linear_layers_may_be_left_out() -> None:
    left_out = ["lm_head", "model.layers.0.input_layernorm", "model.norm", "re:model.layers.*.mlp.gate$"]
    assert arch_of(compressed(ignore=left_out)).stored == arch_of(compressed()).stored


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method must be one of fp8, compressed-tensors, gptq, awq, auto-round, "),
        ({}, "config.json lacks quant_method"),
        ([], "quantization_config must be an object"),
        (AUTO | {"activation_scheme": None}, "lacks activation_scheme"),
        (AUTO | {"activation_scheme": "none"}, "activation_scheme must be one of dynamic, static, but it is 'none'"),
        (AUTO | {"fmt": "e5m2"}, "fmt must be one of e4m3, but it is 'e5m2'"),
        (DEEPSEEK | {"scale_fmt": "ue8m0"}, "scale_fmt must be one of float, but it is 'ue8m0'"),
        (DEEPSEEK | {"weight_block_size": [64, 128]}, r"weight_block_size must be \[128, 128\], but it is \[64, 128\]"),
        (DEEPSEEK | {"activation_scheme": "static"}, "activation_scheme must be dynamic beside a weight_block_size"),
        (AUTO | {"ignored_layers": "lm_head"}, "ignored_layers must be a list of texts, but it is 'lm_head'"),
        (compressed(format="marlin-24"), "format must be one of float-quantized, naive-quantized, int-quantized, "),
        (compressed(transform_config={"config_groups": {"a": {}}}), "transform_config must be absent"),
        (compressed(sparsity_config={"format": "sparse-24"}), "format must be one of dense, but it is 'sparse-24'"),
        (compressed(config_groups={}), "config_groups must hold 1 to 1000 groups of modules"),
        (compressed(ROWS | {"type": "int"}), "weights: type must be one of float, but it is 'int'"),
        (compressed(ROWS | {"num_bits": 4}), "weights: num_bits must be 8, but it is 4"),
        (compressed(ROWS | {"symmetric": False}), "weights: symmetric must be true, but it is False"),
        (compressed(ROWS | {"dynamic": True}), "weights: dynamic must be false"),
        (compressed(ROWS | {"strategy": "group"}), "weights: strategy must be one of tensor, channel, block"),
        (compressed(ROWS, None), "input_activations must be an object: weights and activations are both in FP8"),
        (compressed(ROWS, TOKENS | {"dynamic": False}), "dynamic must be true: each token has its own scale"),
        (compressed(ROWS, PER_TENSOR | {"dynamic": True}), "dynamic must be false: one scale holds for all tokens"),
        (compressed(BLOCKS, TOKENS), "input_activations: strategy must be one of group, but it is 'token'"),
        (compressed(BLOCKS, GROUPS | {"group_size": 64}), "group_size must be 128"),
        (compressed(ignore=["re:(a+)+$"]), r"at most 3 wildcards \(\.\*\), but it holds '\(a\+\)\+\$'"),
        (compressed(ignore=["re:" + ".*" * 4]), r"at most 3 wildcards"),
        (compressed(ignore=[f"re:{'a' * 600}"]), r"at most 3 wildcards"),
        (compressed(ignore=["re:" + "(a|a)" * 20]), r"at most 3 wildcards"),
        (compressed(ignore=["re:" + "a?" * 30]), r"at most 3 wildcards"),
        (compressed(ignore=["re:(?=a)"]), r"at most 3 wildcards"),
        (compressed(ignore=[r"re:(a)\1"]), r"at most 3 wildcards"),
        (compressed(ignore=["re:(a"]), "an expression for modules is malformed: missing"),
        (compressed(ignore=["re:.*.*.*x"] * 100), "100 expressions for modules would take long to match: list names"),
        (compressed(ignore=["a"] * 10_001), "must hold at most 10000 names, but holds 10001"),
        (targeted(["re:.*.*.*x"] * 10), "100 expressions for modules would take long to match: list names"),
        (targeted(["a"] * 1_001), "targets must hold at most 10000 names, but holds 10010"),
        (GPTQ | {"modules_in_block_to_quantize": [["a"] * 10_001]}, "must hold at most 10000 names, but holds 10001"),
        (AUTO_ROUND | {"to_quant_block_names": ["a"] * 10_001}, "must hold at most 10000 names, but holds 10001"),
    ],
)  # fmt: skip
def test_what_is_refused(quantization: object, message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch_of(quantization)


@pytest.mark.parametrize("left_out", [["q_proj"], ["k_proj", "gate_proj"], ["v_proj", "up_proj"]])
def test_a_fused_matrix_of_different_formats_has_parts(left_out: list[str]) -> None:
    parts = weights(arch_of(AUTO | {"ignored_layers": left_out})).parts()
    fp8 = Fp8Layout()
    split = {
        "q_proj": [(256, None), (256, fp8)],
        "k_proj": [(256, fp8), (128, None), (128, fp8)],
        "v_proj": [(384, fp8), (128, None)],
    }[left_out[0]]
    assert [(part.num_rows, part.layout) for part in parts["layers.1.attention.qkv"]] == split
    gate_up = {1: [fp8], 2: [None, fp8] if left_out[-1] == "gate_proj" else [fp8, None]}[len(left_out)]
    assert [part.layout for part in parts["layers.0.mlp.gate_up"]] == gate_up
    assert [part.layout for part in parts["layers.0.mlp.down"]] == [fp8]


def test_blocks_that_a_fused_matrix_would_cut_begin_a_part() -> None:
    """k begins at row 192, which is inside a block of 128. v begins at row 96 of the part that k begins."""
    parts = weights(arch_of(DEEPSEEK, head_dim=48)).parts()
    assert [part.num_rows for part in parts["layers.0.attention.qkv"]] == [192, 96, 96]
    assert [part.num_rows for part in weights(arch_of(AUTO, head_dim=48)).parts()["layers.0.attention.qkv"]] == [384]


@pytest.mark.parametrize(
    "quantization",
    [AUTO | {"activation_scheme": "static"}, DEEPSEEK, compressed(ignore=[]), AUTO | {"ignored_layers": ["k_proj"]}],
)
def test_the_weight_map_fills_every_parameter_once(quantization: object) -> None:
    """Rows follow one another without overlap, which `parameters` asserts. All parts together are the whole matrix."""
    found, plain = weights(arch_of(quantization)), weights(arch_of(None))
    assert found.num_elements == plain.num_elements
    rows = {matrix: sum(part.num_rows for part in parts) for matrix, parts in found.parts().items()}
    assert rows == {matrix: sum(part.num_rows for part in parts) for matrix, parts in plain.parts().items()}


def test_shapes_of_one_number_are_alike_for_scales_and_for_nothing_else() -> None:
    found = weights(arch_of(AUTO))
    shapes: dict[str, tuple[int, ...]] = {source.tensor: source.shape for source in found.sources}
    shapes |= {name: tensor.shape for source in found.quantized for name, tensor in source.tensors.items()}
    for shape in ((), (1,), (1, 1)):
        one = {name: shape if name.endswith("weight_scale") else own for name, own in shapes.items()}
        assert not found.compare(one)
    odd = shapes | {"model.layers.0.mlp.up_proj.weight_scale": (2,), "model.norm.weight": (256, 1)}
    assert {name for name, _, _ in found.compare(odd).wrong_shape} == {
        "model.layers.0.mlp.up_proj.weight_scale", "model.norm.weight",
    }  # fmt: skip
