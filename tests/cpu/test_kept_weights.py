"""A decoder that gets packed weights from an earlier start computes the same bits, in every scheme and kind of layer.
To read weights that were not kept is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.quality.checkpoint_formats import FORMATS, Format
from benchmarks.quality.gguf_blocks import Pack, as_q2_k, as_q3_k, as_q4_0
from benchmarks.quality.gguf_files import convert
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.weight_cache import Entry
from inferd.engine.layers.linear import Linear
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.kept import Kept, NotKeptError, PackedWatch
from inferd.engine.models.loader import load, recipe_of
from inferd.kernels.cpu import native
from inferd.kernels.ops.linear_int8 import quantize as int8
from tests.cpu.cases import CASES, HYBRIDS
from tests.cpu.checkpoints import Case
from tests.cpu.paging import prompt_logits
from tests.cpu.quantized_checkpoints import save

IDS = list(range(3, 60, 2))
NARROW = {
    "float32": (torch.float32, None),
    "narrow": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, None),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.missing():
        pytest.skip(f"only C++ kernels pack weights: {native.missing()}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def builder(directory: Path, quantization: str, dtype: str) -> tuple[Callable[[], Decoder], Checkpoint]:
    checkpoint = Checkpoint.read(directory, keeps_blocks=directory.suffix == ".gguf")
    arch = ModelFacts.of(checkpoint).arch
    own, narrow = NARROW[dtype]
    recipe = recipe_of(arch, quantization, own, narrow=narrow)
    return lambda: Decoder(arch, own, "cpu", recipe=recipe), checkpoint


def recorded(build: Callable[[], Decoder], checkpoint: Checkpoint) -> Decoder:
    """A decoder whose packed weights are written."""
    entry, watch, decoder = Entry("model", 1), PackedWatch(), build()
    assert entry.open() is None
    with watch.watching(decoder.parameters):
        load(decoder, checkpoint.tensors_of(decoder.arch))
    assert not watch.failure
    entry.write(*watch.contents("model"))
    return decoder


def given(build: Callable[[], Decoder]) -> Decoder:
    mapped = Entry("model", 1).open()
    assert mapped is not None
    decoder = build()
    Kept(mapped).fill(decoder.parameters)
    return decoder


def check(directory: Path, quantization: str, dtype: str) -> None:
    build, checkpoint = builder(directory, quantization, dtype)
    first = recorded(build, checkpoint)
    expected = prompt_logits(first, IDS, (len(IDS),))
    assert torch.equal(prompt_logits(given(build), IDS, (len(IDS),)), expected)
    assert expected.isfinite().all()


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
@pytest.mark.parametrize("case", [*CASES, *HYBRIDS], ids=lambda case: case.name)
def test_every_family_has_the_same_bits(case: Case, quantization: str, dtype: str, tmp_path: Path) -> None:
    case.save(tmp_path)
    check(tmp_path, quantization, dtype)


def test_four_bits_have_the_same_bits(tmp_path: Path) -> None:
    Case("llama", "llama", {"attention_bias": True, "intermediate_size": 128}).save(tmp_path)
    check(tmp_path, "int4", "float32")


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
def test_quantized_checkpoints_have_the_same_bits(stored: Format, tmp_path: Path) -> None:
    save(stored, tmp_path)
    check(tmp_path, "none", "float32")


@pytest.mark.parametrize("pack", [as_q2_k, as_q3_k, as_q4_0], ids=lambda pack: pack.__name__)
def test_blocks_of_a_gguf_file_have_the_same_bits(pack: Pack, tmp_path: Path) -> None:
    Case("llama", "llama", {"tie_word_embeddings": True, "hidden_size": 256, "intermediate_size": 256}).save(tmp_path)
    check(convert(tmp_path, tmp_path / "model.gguf", lambda _: pack), "none", "float32")


def saved(tmp_path: Path) -> tuple[Callable[[], Decoder], Checkpoint]:
    Case("llama", "llama", {"attention_bias": True}).save(tmp_path)
    return builder(tmp_path, "int8", "float32")


def test_a_layer_that_reads_weights_as_it_likes_gets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It reads the bias when it is bound. So the bias is kept, and the other parameters are not."""
    build, checkpoint = saved(tmp_path)
    whole = Linear._take

    def take(self: Linear, name: str, tensor: Tensor) -> None:
        whole(self, name, tensor.abs() if name == "bias" else tensor)

    monkeypatch.setattr(Linear, "_take", take)
    expected = prompt_logits(recorded(build, checkpoint), IDS, (len(IDS),))
    assert torch.equal(prompt_logits(given(build), IDS, (len(IDS),)), expected)


def test_values_that_an_operation_changes_are_kept_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build, checkpoint = saved(tmp_path)
    whole = Linear._take
    monkeypatch.setattr(
        Linear, "_take", lambda self, name, tensor: whole(self, name, tensor.mul_(2) if name == "bias" else tensor)
    )
    expected = prompt_logits(recorded(build, checkpoint), IDS, (len(IDS),))
    assert torch.equal(prompt_logits(given(build), IDS, (len(IDS),)), expected)


def test_weights_that_were_not_kept_are_never_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code of the later start differs, which the name of an entry rules out otherwise."""
    build, checkpoint = saved(tmp_path)
    recorded(build, checkpoint)
    whole = Linear._take
    with monkeypatch.context() as changed:
        changed.setattr(Linear, "_take", lambda self, name, tensor: whole(self, name, tensor * 2))
        with pytest.raises(NotKeptError, match="mul"):
            given(build)
    quantize = int8.cpp

    def eager(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        q, scales = quantize(weight, group_size)
        return q, scales + 0

    monkeypatch.setattr("inferd.kernels.ops.linear_int8.QUANTIZE_INT8.resolve", lambda _: eager, raising=False)
    with pytest.raises(NotKeptError, match="add"):
        given(build)


def test_what_reads_computed_weights_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build, checkpoint = saved(tmp_path)
    quantize = int8.cpp

    def eager(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        q, scales = quantize(weight, group_size)
        return q, scales + 0

    monkeypatch.setattr("inferd.kernels.ops.linear_int8.QUANTIZE_INT8.resolve", lambda _: eager, raising=False)
    watch, decoder = PackedWatch(), build()
    with watch.watching(decoder.parameters):
        load(decoder, checkpoint.tensors_of(decoder.arch))
    assert "reads what was computed from weights" in watch.failure


def test_a_kernel_that_is_called_with_weights_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build, checkpoint = saved(tmp_path)
    recorded(build, checkpoint)
    whole = Linear._take

    def take(self: Linear, name: str, tensor: Tensor) -> None:
        if tensor.dim() == 2:
            _direct(tensor)
        whole(self, name, tensor)

    monkeypatch.setattr(Linear, "_take", take)
    with pytest.raises(NotKeptError, match=r"outside of pages\.filled"):
        given(build)


def _direct(weight: Tensor) -> None:
    """Quantizes as a kernel outside of `pages.scratch`."""
    q, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty((weight.shape[0], 1), dtype=torch.bfloat16)
    native.function("inferd_linear_int8_quantize")(
        weight.data_ptr(), 0, scales.numel(), weight.shape[1], q.data_ptr(), scales.data_ptr(), 1
    )


def test_other_parameters_and_other_sizes_are_refused(tmp_path: Path) -> None:
    build, checkpoint = saved(tmp_path)
    recorded(build, checkpoint)
    mapped = Entry("model", 1).open()
    assert mapped is not None
    parameters = dict(copy.copy(build().parameters))
    parameters.pop("layers.0.mlp.down.weight")
    with pytest.raises(NotKeptError, match=r"there is no parameter layers\.0\.mlp\.down\.weight"):
        Kept(mapped).fill(parameters)
    other = tmp_path / "other"
    other.mkdir()
    Case("llama", "llama", {"attention_bias": True, "intermediate_size": 96}).save(other)
    with pytest.raises(NotKeptError, match="is asked for"):
        given(builder(other, "int8", "float32")[0])
