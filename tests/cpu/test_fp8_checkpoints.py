"""FP8 checkpoints: each convention gives the logits of its multiplied-out weights, and contradictions are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quality.packing import FP8_BLOCK
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.memory.planner import weight_lines
from inferd.engine.api.memory.precision import Precision
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import describe, weights
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load, recipe_of
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.engine.quant.recipe import Recipe
from inferd.engine.quant.scheme import Apply, FromWeight
from inferd.kernels.cpu import native
from inferd.kernels.ops.linear_fp8 import LINEAR_FP8, quantize_groups, quantize_rows, quantize_static
from tests.cpu.checkpoints import read_config
from tests.cpu.fp8_checkpoints import FORMATS, Format, Saved, plain_arch, save
from tests.cpu.paging import prompt_logits

IDS = list(range(3, 60, 2))
TOLERANCE = 1e-4
"""Tolerance relative to the largest logit. fp32 sums in another order sometimes move an activation across a boundary
between two 8-bit numbers."""


@pytest.fixture(params=FORMATS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Format:
    chosen: Format = request.param
    return chosen


@pytest.fixture(params=["cpp", "reference"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """C++ takes activations as they are, and the plain PyTorch quantizes them."""
    name: str = request.param
    if name == "cpp" and (reason := native.missing()):
        pytest.skip(reason)
    LINEAR_FP8.force(name)
    yield name
    LINEAR_FP8.force(None)


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    arch = describe(read_config(directory))
    decoder = Decoder(arch, dtype, "cpu", recipe=recipe_of(arch, "fp8", dtype))
    load(decoder, Checkpoint.read(directory).tensors)
    return decoder


class Multiplied(FromWeight):
    """The oracle: weights in fp32, and activations rounded by their quantization."""

    name = "multiplied out"

    def __init__(self, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._quantize = quantize

    def check(self, out_size: int, in_size: int) -> None:
        pass

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        def apply(x: Tensor) -> Tensor:
            q, scales = self._quantize(x)
            wide = scales.unsqueeze(1) if scales.dim() == 1 else scales.repeat_interleave(FP8_BLOCK, 1)[:, : x.shape[1]]
            return ((q.double() * wide.double()) @ weight.double().T).float()

        return apply


def oracle(form: Format, saved: Saved, implementation: str) -> Tensor:
    """Logits of the multiplied-out weights. If activations are quantized and have stored scales, each layer has its
    own."""
    arch = plain_arch(form)
    dynamic = Multiplied(quantize_groups if form.name.endswith("blocks") else quantize_rows)
    recipe = Recipe(dynamic, dynamic if form.has_head else exact())
    if implementation == "cpp":
        recipe = Recipe(exact(), exact())
    decoder = Decoder(arch, torch.float32, "cpu", recipe=recipe)
    if implementation == "reference":
        give_own_schemes(decoder, form, saved)
    parameters = decoder.parameters
    for source in weights(arch).sources:
        parameters[source.parameter].write(source.row, saved.plain[source.tensor])
    return prompt_logits(decoder, IDS, [len(IDS)])


def exact() -> Multiplied:
    return Multiplied(lambda x: (x, torch.ones(len(x))))


class ByRows(FromWeight):
    """The oracle of a fused matrix: each part of `rows[i]` rows has its own scheme."""

    name = "by rows"

    def __init__(self, parts: list[Multiplied], rows: list[int]) -> None:
        self._parts, self._rows = parts, rows

    def check(self, out_size: int, in_size: int) -> None:
        pass

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        weights = torch.split(weight, self._rows)
        applies = [part.bind(own, None) for part, own in zip(self._parts, weights, strict=True)]
        return lambda x: torch.cat([apply(x) for apply in applies], 1)


def give_own_schemes(decoder: Decoder, form: Format, saved: Saved) -> None:
    """Set schemes for matrices that are not quantized, and for those with stored scales of activations. A fused matrix
    uses the largest scale of its parts."""
    for index, layer in enumerate(decoder._layers):
        for linear, names in (
            (layer._attention._qkv, [f"self_attn.{part}_proj" for part in "qkv"]),
            (layer._attention._o, ["self_attn.o_proj"]),
            (layer._mlp._in, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer._mlp._down, ["mlp.down_proj"]),
        ):
            modules = [f"model.layers.{index}.{name}" for name in names]
            scheme = linear._scheme
            if form.input_scale is not None:
                scales = [float(saved.tensors[name]) for m in modules if (name := f"{m}.input_scale") in saved.tensors]
                scheme = Multiplied(quantize_static(max(scales, default=1.0)))
            assert isinstance(scheme, Multiplied)
            schemes = [exact() if module in form.plain else scheme for module in modules]
            linear._scheme = ByRows(schemes, [len(saved.plain[f"{module}.weight"]) for module in modules])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_logits_are_those_of_the_weights_multiplied_out(form: Format, implementation: str, tmp_path: Path) -> None:
    saved = save(form, tmp_path)
    expected = oracle(form, saved, implementation)
    assert error(prompt_logits(loaded(tmp_path), IDS, [len(IDS)]), expected) < TOLERANCE
    assert error(prompt_logits(loaded(tmp_path), IDS, [7, len(IDS) - 7]), expected) < TOLERANCE


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("module", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_the_tolerance_sees_one_wrong_scale(form: Format, module: str, implementation: str, tmp_path: Path) -> None:
    """One matrix's scales are a twentieth too large, in one of two layers. If there is another order, it is tried
    too."""
    saved = save(form, tmp_path)
    expected = oracle(form, saved, implementation)
    name = next(
        (name for layer in (1, 0) if (name := f"model.layers.{layer}.{module}.{form.weight_scale}") in saved.tensors),
        None,
    )
    if name is None:
        pytest.skip("is left out in both layers")
    for wrong in (saved.tensors[name] * 1.05, saved.tensors[name].flip(0) if saved.tensors[name].dim() else None):
        if wrong is None or torch.equal(wrong, saved.tensors[name]):
            continue
        save_file({**saved.tensors, name: wrong.contiguous()}, tmp_path / "model.safetensors")
        assert error(prompt_logits(loaded(tmp_path), IDS, [len(IDS)]), expected) > 3 * TOLERANCE


@pytest.mark.parametrize("implementation", ["reference"], indirect=True)
def test_other_activations_are_seen(implementation: str, tmp_path: Path) -> None:
    static = FORMATS[1]
    saved = save(static, tmp_path)
    expected = oracle(static, saved, implementation)
    name = "model.layers.0.self_attn.o_proj.input_scale"
    save_file({**saved.tensors, name: saved.tensors[name] * 1.1}, tmp_path / "model.safetensors")
    assert error(prompt_logits(loaded(tmp_path), IDS, [len(IDS)]), expected) > 3 * TOLERANCE


def test_bits_are_the_same_in_any_chunks(form: Format, tmp_path: Path) -> None:
    save(form, tmp_path)
    decoder = loaded(tmp_path, torch.bfloat16)
    whole = prompt_logits(decoder, IDS, [len(IDS)])
    for chunks in ([1] * len(IDS), [5, len(IDS) - 5]):
        assert torch.equal(prompt_logits(decoder, IDS, chunks), whole)


def test_the_plan_is_what_the_layers_hold(form: Format, tmp_path: Path) -> None:
    """Weights of one byte; scales of four, one for each row or block; matrices that are not quantized in the dtype."""
    saved = save(form, tmp_path)
    facts = ModelFacts.of(Checkpoint.read(tmp_path))
    assert facts.dtype == "bfloat16"
    assert facts.num_params == sum(tensor.numel() for tensor in saved.plain.values())
    held = 0
    for name, tensor in saved.tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == form.weight_scale:
            num_rows = saved.tensors[f"{module}.weight"].shape[0]
            held += 4 * (tensor.numel() if form.name.endswith("blocks") else num_rows)
        elif kind != form.input_scale:
            held += tensor.nbytes
    if facts.arch.tie_embeddings:
        held += saved.plain["model.embed_tokens.weight"].nbytes
    # Matrices that share a block row of scales would share it in the plan as well; none does here.
    assert sum(part.num_bytes for part in weight_lines(facts.arch, Precision("bfloat16", "fp8"))) == held


@contextmanager
def changed(form: Format, directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Iterator[None]:
    save(form, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    yield


K_PROJ = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")])
def test_scales_for_a_kv_cache_are_found_and_not_read(names: tuple[str, ...], tmp_path: Path) -> None:
    """In any convention, and with any values, the logits are those without such scales."""
    rows = FORMATS[3]
    save(rows, tmp_path)
    assert not ModelFacts.of(Checkpoint.read(tmp_path)).has_kv_scales
    expected = prompt_logits(loaded(tmp_path), IDS, [len(IDS)])
    more = {f"model.layers.{layer}.self_attn.{name}": torch.full((1,), 7.0) for layer in (0, 1) for name in names}
    with changed(rows, tmp_path, lambda tensors: tensors.update(more)):
        assert ModelFacts.of(Checkpoint.read(tmp_path)).has_kv_scales
        assert torch.equal(prompt_logits(loaded(tmp_path), IDS, [len(IDS)]), expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{K_PROJ}.weight_scale"), f"1 missing: {K_PROJ}.weight_scale"),
        (lambda t: t.update({f"{K_PROJ}.input_scale": torch.ones(())}), f"1 unexpected: {K_PROJ}.input_scale"),
        (lambda t: t.update({f"{K_PROJ}.weight": torch.zeros(128, 192)}),
         f"{K_PROJ}.weight is stored as F32; by config.json it is one of: F8_E4M3"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
         "lm_head.weight is stored as F8_E4M3; by config.json it is one of: F64, F32, F16, BF16"),
        (lambda t: t.update({f"{K_PROJ}.weight_scale": torch.ones(64, 1)}),
         rf"{K_PROJ}.weight_scale is \[64, 1\], by config.json \[128, 1\]"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_before_anything_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], match: str
) -> None:
    rows = FORMATS[3]
    with changed(rows, tmp_path, change), pytest.raises(ModelError, match=match):
        ModelFacts.of(Checkpoint.read(tmp_path))
    with pytest.raises(CheckpointError):
        loaded(tmp_path)


def test_fp8_weights_without_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    form = FORMATS[3]
    saved = save(form, tmp_path)
    only = {name: tensor for name, tensor in saved.tensors.items() if not name.endswith("_scale")}
    save_file(only, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(form.config_json() | {"quantization_config": None}))
    with pytest.raises(ModelError, match=r"down_proj.weight is stored as F8_E4M3; by config.json it is one of: F64"):
        ModelFacts.of(Checkpoint.read(tmp_path))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [0, -1])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, code: int, place: int) -> None:
    """Also in the last value of a file: the loader checks in parts."""
    name = "model.layers.1.mlp.down_proj.weight"
    with (
        changed(FORMATS[3], tmp_path, lambda t: t[name].view(torch.uint8).flatten()[place].fill_(code)),
        pytest.raises(CheckpointError, match=f"{name} must hold numbers, but holds NaN .*: the file is damaged or was"),
    ):
        loaded(tmp_path)


def test_the_largest_and_the_smallest_numbers_are_weights(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    codes = torch.tensor([0x7E, 0xFE, 0x00, 0x80, 0x01, 0x81], dtype=torch.uint8)
    with changed(FORMATS[3], tmp_path, lambda t: t[name].view(torch.uint8).flatten()[:6].copy_(codes)):
        assert prompt_logits(loaded(tmp_path), IDS, [len(IDS)]).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5, 0.0])
def test_scales_that_no_quantization_gives_are_refused(tmp_path: Path, bad: float) -> None:
    name = f"{K_PROJ}.weight_scale"
    with (
        changed(FORMATS[3], tmp_path, lambda tensors: tensors[name][5].fill_(bad)),
        pytest.raises(CheckpointError, match=f"{name} must hold finite numbers above 0, .* quantize the model anew"),
    ):
        loaded(tmp_path)
