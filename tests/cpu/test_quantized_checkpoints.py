"""Quantized checkpoints as models: each convention gives the logits of its dequantized weights, the plan is what layers
hold, and damage is refused by the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.quality.checkpoint_formats import FORMATS, FP8_FORMATS, Format
from benchmarks.quality.formats import exact
from inferd.engine.api.checkpoint import Checkpoint as Files
from inferd.engine.api.errors import ModelError
from inferd.engine.api.memory.planner import weight_lines
from inferd.engine.api.memory.precision import Precision, stored_as
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import describe, weights
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load, recipe_of
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.engine.quant.checkpoints.registry import READERS
from tests.cpu.checkpoints import Case, load_transformers, read_config
from tests.cpu.paging import prompt_logits
from tests.cpu.quantized_checkpoints import CONFIG, Saved, config_json, save, table_of_the_docs

IS_RECORDED = False

Change = Callable[[dict[str, Tensor]], Any]
IDS = list(range(3, 90, 2))
ROUNDING = {
    "W4A16": 0.018,
    "W4A16, asymmetric, with the head": 0.021,
    "W8A16, a channel, asymmetric": 0.016,
    "W8A8": 0.014,
    "mixed": 0.017,
    "GPTQ": 0.018,
    "GPTQ, an order for each module": 0.016,
    "GPTQ, one order": 0.017,
    "GPTQ v2, dynamic": 0.021,
    "AWQ": 0.021,
    "AutoRound": 0.018,
    "NVFP4": 0.012,
    "NVFP4 of ModelOpt": 0.010,
    "MXFP4": 0.026,
}
"""Distance by which rounding activations to 8 bits moves the logits: `error` of the tests (AMD Zen 3, 2026-11-23)."""
TOLERANCE = 1.5
"""Maximum distance of the logits, in units of `ROUNDING`: 0.010 to 0.026.
One wrong tensor moves the logits by 3.7 to 60 units: those of NVFP4 of ModelOpt by at least 0.0605, or 6.2 units."""


@pytest.fixture(params=FORMATS, ids=lambda checkpoint: checkpoint.name)
def checkpoint(request: pytest.FixtureRequest) -> Format:
    chosen: Format = request.param
    return chosen


def loaded(directory: Path, dtype: torch.dtype = torch.float32, *, as_declared: bool = False) -> Decoder:
    files = Files.read(directory)
    arch = ModelFacts.of(files).arch
    decoder = Decoder(arch, dtype, "cpu", recipe=recipe_of(arch, "none", dtype, as_declared=as_declared))
    load(decoder, files.tensors)
    return decoder


def exactly(directory: Path) -> Decoder:
    """A model whose activations are not rounded."""
    files = Files.read(directory)
    arch = ModelFacts.of(files).arch
    decoder = Decoder(arch, torch.float32, "cpu", recipe=exact(recipe_of(arch, "none", torch.float32)))
    load(decoder, files.tensors)
    return decoder


def oracle(saved: Saved, change: Callable[[Any], None] | None = None, **sizes: int) -> Tensor:
    """Logits of transformers with the dequantized weights, in fp32. `change`: what to do with the model before."""
    own = {name: value for name, value in CONFIG.items() if name not in ("architectures", "dtype")}
    config = LlamaConfig(**own | sizes)
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(saved.plain)
    if change is not None:
        change(model)
    with torch.inference_mode():
        logits: Tensor = model.eval()(torch.tensor([IDS])).logits[0]
    return logits


def error(found: Tensor, expected: Tensor) -> float:
    """Root of the mean squared distance, relative to that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def test_logits_are_those_of_the_dequantized_weights(checkpoint: Format, tmp_path: Path) -> None:
    expected = oracle(save(checkpoint, tmp_path))
    decoder = loaded(tmp_path)
    assert error(prompt_logits(decoder, IDS, [len(IDS)]), expected) < TOLERANCE * ROUNDING[checkpoint.name]


def round_inputs(model: Any) -> None:
    """Give each linear layer activations of 8 bits with one scale a token."""

    def rounded(layer: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scales = inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / scales).round() * scales,)

    for layer in model.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(rounded)


def test_activations_as_the_checkpoint_declares(tmp_path: Path) -> None:
    """A number near the middle between two integers may be rounded either way."""
    form = next(form for form in FORMATS if form.name == "W8A8")
    saved = save(form, tmp_path)
    expected = oracle(saved, round_inputs)
    found = prompt_logits(loaded(tmp_path, as_declared=True), IDS, [len(IDS)])
    assert error(found, expected) < 2e-3
    assert error(prompt_logits(loaded(tmp_path), IDS, [len(IDS)]), expected) > 1e-2
    assert error(found, oracle(saved)) > 1e-2


@pytest.mark.parametrize("form", [*FORMATS, *FP8_FORMATS], ids=lambda form: form.name)
def test_with_exact_activations_the_logits_are_equal(form: Format, tmp_path: Path) -> None:
    """The recipe of `benchmarks.quality.formats`, which shows that nothing but the activations is rounded."""
    sizes = {"head_dim": 64}  # Matrices that are fused begin at a block of FP8.
    expected = oracle(save(form, tmp_path, **sizes), **sizes)
    assert error(prompt_logits(exactly(tmp_path), IDS, [len(IDS)]), expected) < 1e-5


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("form", [*FORMATS, *FP8_FORMATS], ids=lambda form: form.name)
def test_experts_in_every_format(form: Format, tmp_path: Path) -> None:
    """With exact activations, because rounded ones may choose other experts. Two experts exchanged are seen."""
    saved, plain = save(form, tmp_path, **EXPERTS), tmp_path / "plain"
    plain.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in saved.plain.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    model: Any = Qwen3MoeForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([IDS])).logits[0]
    assert error(prompt_logits(exactly(tmp_path), IDS, [len(IDS)]), expected) < 1e-5
    first, second = (f"model.layers.0.mlp.experts.{expert}.gate_proj." for expert in (0, 1))
    names = {name: name.replace(first, second) for name in saved.tensors if name.startswith(first)}
    names |= {other: name for name, other in names.items()}
    exchanged = {names.get(name, name): tensor for name, tensor in saved.tensors.items()}
    save_file(exchanged, tmp_path / "model.safetensors")
    assert error(prompt_logits(exactly(tmp_path), IDS, [len(IDS)]), expected) > 1e-3


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("form", [*FORMATS, *FP8_FORMATS], ids=lambda form: form.name)
def test_bits_of_experts_are_the_same_in_any_chunks(form: Format, tmp_path: Path) -> None:
    save(form, tmp_path, **EXPERTS)
    decoder = loaded(tmp_path, torch.bfloat16)
    whole = prompt_logits(decoder, IDS, [len(IDS)])
    assert torch.equal(prompt_logits(decoder, IDS, [1, 5, len(IDS) - 6]), whole)


NEIGHBOURS = ("W4A16", "GPTQ, one order", "AWQ", "FP8, a row", "FP8, blocks")


@pytest.mark.parametrize(
    "form", [form for form in (*FORMATS, *FP8_FORMATS) if form.name in NEIGHBOURS], ids=lambda form: form.name
)
def test_rows_of_heads_are_reordered_with_their_scales(form: Format, tmp_path: Path) -> None:
    """In a family whose rope turns neighbours in a head."""
    changes = {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 128, "rope_theta": 10000.0}
    saved = save(form, tmp_path, **changes)
    own = {name: value for name, value in (CONFIG | changes).items() if name not in ("architectures", "dtype")}
    model: Any = Ernie4_5ForCausalLM(Ernie4_5Config(**own))
    model.load_state_dict(saved.plain)
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([IDS])).logits[0]
    files = Files.read(tmp_path)
    arch = ModelFacts.of(files).arch
    recipe = exact(recipe_of(arch, "none", torch.float32))
    for turns_neighbours in (True, False):
        ropes = tuple(rope and replace(rope, turns_neighbours=turns_neighbours) for rope in arch.ropes)
        decoder = Decoder(replace(arch, ropes=ropes), torch.float32, "cpu", recipe=recipe)
        load(decoder, files.tensors)
        assert (error(prompt_logits(decoder, IDS, [len(IDS)]), expected) < 1e-5) is turns_neighbours


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_the_tolerance_sees_one_wrong_module(checkpoint: Format, module: str, tmp_path: Path) -> None:
    """In one of two layers, a tensor of the module has its rows in reverse. The logits move by twice the tolerance.

    The scales of q_proj in the last layer move them least, because attention in a random model hardly depends on them:
    by 3.7 units in GPTQ with an order for each module, and by 4.8 and more in the other models.
    """
    saved = save(checkpoint, tmp_path)
    expected, least = oracle(saved), 2 * TOLERANCE * ROUNDING[checkpoint.name]
    names = [n for layer in (0, 1) for n in saved.tensors if n.startswith(f"model.layers.{layer}.{module}.")]
    for name in names:
        tensor = saved.tensors[name]
        if tensor.dim() < 2 or min(tensor.shape) < 2 or torch.equal(tensor, tensor.flip(0)):
            continue
        save_file({**saved.tensors, name: tensor.flip(0)}, tmp_path / "model.safetensors")
        assert error(prompt_logits(loaded(tmp_path), IDS, [len(IDS)]), expected) > least, name


def test_bits_are_the_same_in_any_chunks(checkpoint: Format, tmp_path: Path) -> None:
    save(checkpoint, tmp_path)
    decoder = loaded(tmp_path, torch.bfloat16)
    whole = prompt_logits(decoder, IDS, [len(IDS)])
    for chunks in ([1] * len(IDS), [5, len(IDS) - 5]):
        assert torch.equal(prompt_logits(decoder, IDS, chunks), whole)


def test_the_plan_is_what_the_layers_hold(checkpoint: Format, tmp_path: Path) -> None:
    """Integers as they are packed; scales in their dtype, those of 8 bits wider; a byte or two for a zero point."""
    saved = save(checkpoint, tmp_path)
    facts = ModelFacts.of(Files.read(tmp_path))
    assert facts.dtype == "bfloat16" and facts.num_params == sum(tensor.numel() for tensor in saved.plain.values())
    wide = {torch.float8_e4m3fn: 4, torch.uint8: 2}
    is_symmetric = checkpoint.quantization.get("sym", False)
    held = 0
    for name, tensor in saved.tensors.items():
        match name.rpartition(".")[2]:
            case "weight_scale" | "scales":
                held += tensor.numel() * wide.get(tensor.dtype, tensor.element_size())
            case "qzeros" | "weight_zero_point":
                held += 0 if is_symmetric else 2 * tensor.nbytes
            case "weight" | "weight_packed" | "qweight":
                held += tensor.nbytes
    if checkpoint.quantization.get("desc_act"):
        held += CONFIG["num_hidden_layers"] * 4 * (3 * CONFIG["hidden_size"] + CONFIG["intermediate_size"])
    assert sum(part.num_bytes for part in weight_lines(facts.arch, Precision("bfloat16", "int4"))) == held


@contextmanager
def changed(name: str, directory: Path, change: Change) -> Iterator[None]:
    chosen = next(checkpoint for checkpoint in FORMATS if checkpoint.name == name)
    save(chosen, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    yield


K = "model.layers.1.self_attn.k_proj"
OUT = "model.layers.0.self_attn.o_proj"


def filled(name: str, value: float) -> Change:
    """One number of a tensor replaced."""
    return lambda tensors: tensors[name].view(-1)[5:6].fill_(value)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("W4A16", filled(f"{K}.weight_scale", float("nan")), f"{K}.weight_scale must hold finite numbers other than 0"),
        ("W4A16", filled(f"{K}.weight_scale", float("inf")), f"{K}.weight_scale must hold finite numbers other than 0"),
        ("W4A16", filled(f"{K}.weight_scale", 0), f"{K}.weight_scale must hold finite numbers other than 0"),
        ("W4A16", lambda t: t[f"{K}.weight_shape"].fill_(128),
         rf"{K}.weight_shape is \[128, 128\], but by config.json the matrix is \[64, 128\]"),
        ("W8A8", filled(f"{K}.weight_scale", 0), f"{K}.weight_scale must hold finite numbers other than 0"),
        ("GPTQ", filled(f"{K}.scales", float("nan")), f"{K}.scales must hold finite numbers other than 0"),
        ("GPTQ", filled(f"{K}.qzeros", 0), f"{K}.qzeros must hold 7 only, because config.json says sym, but holds 0"),
        ("GPTQ", filled(f"{K}.g_idx", 1), f"{K}.g_idx must put 32 inputs into each group, but puts 31 to 33"),
        ("GPTQ", filled(f"{K}.g_idx", 4), f"{K}.g_idx must hold integers from 0 to 3, but holds 0 to 4"),
        ("GPTQ", filled(f"{K}.g_idx", -1), f"{K}.g_idx must hold integers from 0 to 3, but holds -1 to 3"),
        ("GPTQ", lambda t: t[f"{K}.g_idx"].copy_(t[f"{K}.g_idx"].flip(0)),
         f"{K}.g_idx orders the inputs, but config.json says that they have their own order"),
        ("GPTQ, one order", filled(f"{K}.g_idx", 2**31 - 1), f"{K}.g_idx must hold integers from 0 to 3"),
        ("GPTQ", filled(f"{K}.bias", 1), f"{K}.bias must hold 0 only, because this module has no bias"),
        ("AWQ", filled(f"{OUT}.scales", float("nan")), f"{OUT}.scales must hold finite numbers other than 0"),
        ("NVFP4", filled(f"{OUT}.weight_scale", float("nan")),
         f"{OUT}.weight_scale must hold finite numbers of at least 0"),
        ("NVFP4", lambda t: t[f"{OUT}.weight_scale"].view(torch.uint8).zero_(),
         f"{OUT}.weight_scale must hold finite numbers of at least 0, and others than 0"),
        ("NVFP4", lambda t: t[f"{OUT}.weight_global_scale"].zero_(),
         f"{OUT}.weight_global_scale must hold finite numbers above 0"),
        ("NVFP4 of ModelOpt", lambda t: t[f"{OUT}.weight_scale_2"].fill_(torch.inf), f"{OUT}.weight_scale_2 must"),
        ("MXFP4", filled(f"{OUT}.weight_scale", 255), f"{OUT}.weight_scale must hold powers of two, but holds NaN"),
    ],
)  # fmt: skip
def test_damage_is_refused_before_memory_is_taken(tmp_path: Path, name: str, change: Change, match: str) -> None:
    with changed(name, tmp_path, change):
        files = Files.read(tmp_path)
    arch = ModelFacts.of(files).arch
    decoder = Decoder(arch, torch.float32, "cpu", recipe=recipe_of(arch, "none", torch.float32))
    with pytest.raises(CheckpointError, match=match):
        load(decoder, files.tensors)
    assert all(parameter.missing_rows for parameter in decoder.parameters.values()), "weights were loaded"


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("W4A16", lambda t: t.pop(f"{K}.weight_scale"), f"1 missing: {K}.weight_scale"),
        ("W4A16", lambda t: t.update({f"{K}.weight_zero_point": torch.zeros(8, 4, dtype=torch.int32)}),
         f"1 unexpected: {K}.weight_zero_point"),
        ("W4A16", lambda t: t.update({f"{K}.weight_packed": t[f"{K}.weight_packed"][:, :-1]}),
         rf"{K}.weight_packed is \[64, 15\], by config.json \[64, 16\]"),
        ("W4A16", lambda t: t.update({f"{K}.weight_packed": t[f"{K}.weight_packed"].to(torch.int64)}),
         f"{K}.weight_packed is stored as I64; by config.json it is one of: I32"),
        ("W4A16", lambda t: t.update({f"{K}.weight_scale": t[f"{K}.weight_scale"][:, ::2]}),
         rf"{K}.weight_scale is \[64, 2\], by config.json \[64, 4\]"),
        ("GPTQ", lambda t: t.update({f"{K}.qweight": t[f"{K}.qweight"].T}),
         rf"{K}.qweight is \[64, 16\], by config.json \[16, 64\]"),
        ("GPTQ, one order", lambda t: t.pop(f"{K}.g_idx"), f"1 missing: {K}.g_idx"),
        ("AWQ", lambda t: t.update({f"{K}.qweight": t.pop(f"{OUT}.qweight")}), f"1 missing: {OUT}.qweight; 1 of"),
        ("AWQ", lambda t: t.pop(f"{OUT}.qzeros"), f"1 missing: {OUT}.qzeros"),
        ("MXFP4", lambda t: t.update({f"{OUT}.weight_scale": t[f"{OUT}.weight_scale"].float()}),
         f"{OUT}.weight_scale is stored as F32; by config.json it is one of: U8, F8_E8M0"),
    ],
)  # fmt: skip
def test_wrong_packing_is_refused_from_the_headers(tmp_path: Path, name: str, change: Change, match: str) -> None:
    with changed(name, tmp_path, change), pytest.raises(ModelError, match=match):
        ModelFacts.of(Files.read(tmp_path))


GPT_OSS = Case(
    "gpt-oss", "gpt_oss",
    {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16,
     "sliding_window": 20},
)  # fmt: skip


def packed_experts(directory: Path) -> Tensor:
    """Packs random numbers in MXFP4 into the experts of a checkpoint, and returns the logits of transformers with the
    weights that it reads from them."""
    GPT_OSS.save(directory)
    file = directory / "model.safetensors"
    dense, packed = load_file(file), load_file(file)
    for name in [name for name in dense if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, in_size, out_size = dense[name].shape
        blocks = torch.randint(0, 256, (num_experts, out_size, in_size // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 125, (num_experts, out_size, in_size // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(dense, file, {"format": "pt"})
    with torch.inference_mode():
        logits: Tensor = load_transformers(directory, torch.float32)(torch.tensor([IDS])).logits[0]
    save_file(packed, file, {"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    config = read_config(directory) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return logits


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    expected = packed_experts(tmp_path)

    def found() -> Tensor:
        files = Files.read(tmp_path)
        arch = ModelFacts.of(files).arch
        decoder = Decoder(arch, torch.float32, "cpu", recipe=exact(recipe_of(arch, "none", torch.float32)))
        load(decoder, files.tensors_of(arch))
        return prompt_logits(decoder, IDS, [len(IDS)])

    assert error(found(), expected) < 1e-5
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"

    def with_changes(**changes: Tensor) -> None:
        changed = {f"{name}_{kind}": tensor for kind, tensor in changes.items()}
        save_file(tensors | changed, tmp_path / "model.safetensors", {"format": "pt"})

    with_changes(blocks=tensors[f"{name}_blocks"].flip(1))
    assert error(found(), expected) > 0.01
    with_changes(scales=torch.full_like(tensors[f"{name}_scales"], 255))
    with pytest.raises(CheckpointError, match=r"experts.0.down_proj.weight_scale must hold powers of two"):
        found()
    with_changes(scales=tensors[f"{name}_scales"][:, :, :2].contiguous())
    with pytest.raises(ModelError, match=r"experts.0.down_proj.weight_scale is \[64, 2\], by config.json \[64, 3\]"):
        found()


def test_zero_points_of_version_1_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """A zero point of 0 is stored as 15, and the subtraction of 1 from each place takes 1 more from the next."""
    words = {"GPTQ, an order for each module": 0x76543210}
    name, whole = next(iter(words.items()))
    stored = whole - 0x11111111

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{OUT}.qzeros"].fill_(stored)

    with changed(name, tmp_path, change):
        arch = ModelFacts.of(Files.read(tmp_path)).arch
        source = next(source for source in weights(arch).quantized if source.module == OUT)
        tensors = load_file(tmp_path / "model.safetensors")
        own = {suffix: tensors[f"{OUT}.{suffix}"] for suffix in ("qweight", "qzeros", "scales", "g_idx")}
        zeros = next(rows.values for rows in READERS["gptq"].read(source, own) if rows.name == "zeros")
    assert zeros[:8, 0].tolist() == list(range(8)) and torch.equal(zeros, zeros[:8, :1].repeat(16, 4))


def test_the_table_in_the_docs_has_every_checkpoint() -> None:
    """Bytes are those of the default format's integers, scales and zero points, for rows of 4,096 inputs."""
    stated = table_of_the_docs("name")
    assert list(stated) == [form.name for form in FORMATS]
    for form in FORMATS:
        stored = describe(config_json(form)).stored
        assert stored is not None and stored.layers is not None
        held = replace(stored_as(stored.layers.layout), column_bytes=0).num_bytes(1, 4096).value / 4096
        assert abs(float(stated[form.name]["bytes a weight"]) - held) <= 0.0005, form.name
        assert float(stated[form.name]["KL"]) > 0, form.name


def test_the_table_of_fp8_has_every_checkpoint() -> None:
    stated = table_of_the_docs("name of FP8")
    assert list(stated) == [form.name for form in FP8_FORMATS]
    for form in FP8_FORMATS:
        stored = describe(config_json(form)).stored
        assert stored is not None and stored.layers is not None
        held = stored_as(stored.layers.layout).num_bytes(4096, 4096).value / 4096**2
        assert abs(float(stated[form.name]["bytes a weight"]) - held) <= 0.0005, form.name
        assert float(stated[form.name]["KL"]) > 0, form.name
