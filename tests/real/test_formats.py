"""Quantized files of the real model have the perplexity of their weights, dequantized by the plain formulas of AutoAWQ
and llama.cpp. Wrong conventions break that bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality import independent
from benchmarks.quality.checkpoint_formats import AWQ, Format
from benchmarks.quality.formats import exact, write_checkpoint
from benchmarks.quality.gguf_blocks import Stored, as_bf16, as_q4_0
from benchmarks.quality.gguf_files import convert
from benchmarks.quality.measure import Model
from benchmarks.quality.packing import awq
from benchmarks.quality.weights import Weights, shuffled
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.model import ModelFacts
from inferd.engine.models.loader import recipe_of
from tests.real.conftest import Recording

BOUND = 0.001
"""Maximum relative difference of the perplexity. `benchmarks.quality.formats` measured at most 0.0001."""
NUM_TOKENS = 128
LAYERS = (0, 24)
"""Layers that are quantized. The others stay in bfloat16, because loading takes time."""

Change = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def weights(gguf: Path) -> Weights:
    found = shuffled(Weights.read(gguf))
    return replace(found, tensors={name: tensor.to(torch.bfloat16).float() for name, tensor in found.tensors.items()})


def perplexity(path: Path, recording: Recording) -> float:
    """With exact activations, so that nothing but the reading differs."""
    checkpoint, ids = Checkpoint.read(path, keeps_blocks=True), recording.windows[0].ids
    recipe = exact(recipe_of(ModelFacts.of(checkpoint).arch, "none", torch.float32))
    model = Model.load(checkpoint, torch.float32, recipe)
    found = torch.cat(list(model.log_probs(model.hidden(ids[:NUM_TOKENS]))))
    return math.exp(-float(found.gather(1, torch.tensor(ids[1 : NUM_TOKENS + 1])[:, None]).mean()))


def is_quantized(name: str) -> bool:
    return any(f".{layer}." in name for layer in LAYERS)


def as_awq(weights: Weights, directory: Path, change: Mapping[str, Change]) -> tuple[Path, dict[str, Tensor]]:
    """(a checkpoint with changed tensors, the weights of the unchanged one)."""
    others = [f"layers.{layer}." for layer in range(weights.config["num_hidden_layers"]) if layer not in LAYERS]
    form = Format("AWQ", {**AWQ, "modules_to_not_convert": others}, awq(32), dict.fromkeys(others))
    write_checkpoint(form, weights, directory)
    plain = independent.dequantized(directory)
    stored = load_file(directory / "model.safetensors")
    for name, tensor in stored.items():
        stored[name] = change.get(name.rpartition(".")[2], unchanged)(tensor)
    weights.save(directory, stored, quantization_config=form.quantization)
    return directory, plain


def as_gguf(weights: Weights, directory: Path, change: Mapping[str, Change]) -> tuple[Path, dict[str, Tensor]]:
    """The same as a GGUF file, whose matrices of some layers are in Q4_0."""
    plain = dict(weights.tensors)

    def pack(name: str) -> Callable[[Tensor], Stored]:
        return packed if name.startswith("blk.") and is_quantized(name) else as_bf16

    def packed(values: Tensor) -> Stored:
        stored = as_q4_0(values)
        blocks = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(-1, 18)
        return stored._replace(data=change.get("blocks", unchanged)(blocks).numpy().tobytes())

    for module, weight in weights.matrices.items():
        if is_quantized(module):
            plain[f"{module}.weight"] = q4_0(as_q4_0(weight))
    return convert(weights.save(directory), directory / "model.gguf", pack), plain


def q4_0(stored: Stored) -> Tensor:
    """A scale in fp16, and 16 bytes: their low halves are the first 16 numbers. Numbers are stored + 8."""
    blocks = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(-1, 18)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    numbers = torch.cat([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
    return ((numbers.float() - 8) * scales).view(stored.shape)


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def swapped_halves(words: Tensor) -> Tensor:
    """The two halves of each byte in the other order."""
    packed = words.contiguous().view(torch.uint8)
    return ((packed << 4) | (packed >> 4)).view(words.dtype)


def next_zero_points(words: Tensor) -> Tensor:
    """Zero points that are larger by 1, as in version 1 of GPTQ."""
    return words + 0x11111111


def in_pairs(blocks: Tensor) -> Tensor:
    """Blocks whose bytes hold neighbours, instead of numbers that are 16 apart."""
    numbers = torch.stack([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 2).flatten(1)
    return torch.cat([blocks[:, :2], numbers[:, :16] | (numbers[:, 16:] << 4)], 1)


def less_one(blocks: Tensor) -> Tensor:
    """Numbers that are stored + 7."""
    low, high = ((part & 15).clamp(min=1) - 1 for part in (blocks[:, 2:], blocks[:, 2:] >> 4))
    return torch.cat([blocks[:, :2], low | (high << 4)], 1)


Make = Callable[[Weights, Path, Mapping[str, Change]], tuple[Path, dict[str, Tensor]]]


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(
    ("make", "tensor", "change"),
    [
        (as_awq, "qweight", swapped_halves),
        (as_awq, "qzeros", next_zero_points),
        (as_gguf, "blocks", in_pairs),
        (as_gguf, "blocks", less_one),
    ],
)
def test_the_perplexity_is_that_of_the_dequantized_weights(
    make: Make, tensor: str, change: Change, weights: Weights, recording: Recording, tmp_path: Path
) -> None:
    """That of a file in which one convention is wrong is not."""
    stored, plain = make(weights, tmp_path / "stored", {})
    expected = perplexity(weights.save(tmp_path / "plain", plain, dtype="float32"), recording)
    assert abs(perplexity(stored, recording) / expected - 1) < BOUND
    wrong, _ = make(weights, tmp_path / "stored", {tensor: change})
    assert abs(perplexity(wrong, recording) / expected - 1) > BOUND
