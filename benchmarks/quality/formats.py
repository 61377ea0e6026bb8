"""Measures every format of quantized checkpoints and every type of GGUF blocks, on the weights of a real model.

    pip install --no-deps compressed-tensors loguru gguf
    python -m benchmarks.quality.formats --dir DIR [--only Q4_K] [--num-windows N] [--write FILE]
    python -m benchmarks.quality.formats --dir DIR --speed [--only Q4_K] [--rounds 3] [--write FILE]

The two packages read the files independently. The second command writes the files into DIR, several GB, and measures
them. The third times decode steps of 1 and of 8 rows from them. Weights are rounded to the nearest numbers, without
calibration, so most writers lose less. `weights` says in which order they lie.

KL and NLL compare the served file, computed in float32, with the model in float32. "Readers" is the perplexity of our
reading of the file relative to that of an independent reader's, with exact activations. "Activations" is what
quantizing the activations to 8 bits adds to the perplexity.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.machine import place
from benchmarks.quality import independent, packing
from benchmarks.quality.__main__ import Progress
from benchmarks.quality.checkpoint_formats import FORMATS, FP8_FORMATS, Format
from benchmarks.quality.gguf_blocks import PACKS, Pack, as_q8_0
from benchmarks.quality.gguf_files import convert
from benchmarks.quality.material import Material
from benchmarks.quality.measure import Model, Reference
from benchmarks.quality.packing import NearestNumbers, Tensors
from benchmarks.quality.weights import EMBEDDING, Weights, shuffled, widened
from benchmarks.step import measured
from benchmarks.tables import Cell, markdown
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.locate import locate
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.gguf.types import PLAIN
from inferd.engine.models.loader import recipe_of
from inferd.engine.quant.fp8 import StoredFp8
from inferd.engine.quant.recipe import Recipe
from inferd.engine.quant.scheme import Apply, Scheme
from inferd.engine.quant.stored_schemes import Joined, StoredIntegers
from inferd.kernels.cpu import library, native
from inferd.kernels.ops.quantized import Matrix

COLUMNS = ("format", "bytes a weight", "NLL - float32's", "KL", "readers", "activations")
_NUM_THREADS = 2
_NUM_ROWS = (1, 8)


# -- exact activations -------------------------------------------------------------------------------------------------


class ExactIntegers(StoredIntegers):
    """The weights that a checkpoint's integers stand for, with exact activations."""

    def _linear(
        self,
        out_dtype: torch.dtype | None,
        rows: slice,
        bias: Tensor | None,
        order: Tensor | None,
        tensors: dict[str, Tensor],
    ) -> Apply:
        own = {name: tensor[rows] for name, tensor in tensors.items()}
        matrix = Matrix(
            own["q"], own["scales"], None, own.get("zeros"), own.get("minimums"), table=self.layout.table
        )  # fmt: skip
        weight = matrix.dequantized().float()
        if order is not None:
            ordered = torch.empty_like(weight)
            ordered[:, order.long()] = weight
            weight = ordered
        return lambda x: functional.linear(x, weight, None if bias is None else bias[rows])


class ExactFp8(StoredFp8):
    """The weights that a checkpoint's 8-bit floats stand for, with exact activations."""

    def bind(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        input_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Apply:
        plain = weight.float() * packing.widened(weight_scale, weight.shape)
        return lambda x: functional.linear(x, plain, bias)


def exact(recipe: Recipe) -> Recipe:
    """The recipe of a quantized checkpoint, with exact activations."""
    exceptions = {matrix: _exact(scheme) for matrix, scheme in recipe.exceptions.items()}
    return Recipe(_exact(recipe.layers), _exact(recipe.head), exceptions, recipe.dense, recipe.narrow)


def _exact(scheme: Scheme) -> Scheme:
    match scheme:
        case StoredIntegers(dtype, layout, modules):
            return ExactIntegers(dtype, layout, modules)
        case StoredFp8(dtype, has_blocks, has_input_scale):
            return ExactFp8(dtype, has_blocks, has_input_scale)
        case Joined(parts):
            return Joined(tuple((_exact(part), num_rows) for part, num_rows in parts))
    return scheme


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """A file of one format, or a directory."""

    path: Path
    bytes_a_weight: float
    """Bytes of the quantized matrices in the file, by their weights."""

    def checkpoint(self) -> Checkpoint:
        return Checkpoint.read(self.path, keeps_blocks=True)


def write_bfloat16(weights: Weights, directory: Path) -> Written:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in weights.tensors.items()}
    return Written(weights.save(directory, tensors), 2.0)


def write_checkpoint(form: Format, weights: Weights, directory: Path) -> Written:
    """Quantize every module that the format's config names. The head is one of them, or tied to the embedding."""
    num_bytes = num_weights = 0
    stored: Tensors = {}
    modules = dict(weights.matrices)
    if form.has_head:
        modules["lm_head"] = weights.tensors[EMBEDDING]
    for name, tensor in weights.tensors.items():
        if name.removesuffix(".weight") not in modules:
            stored[name] = tensor.to(torch.bfloat16)
    for module, weight in modules.items():
        write = form.writer(module)
        if write is None:
            stored[f"{module}.weight"] = weight.to(torch.bfloat16)
            continue
        tensors, _ = write(NearestNumbers(weight), *weight.shape)
        num_bytes += sum(tensor.nbytes for suffix, tensor in tensors.items() if suffix != "bias")
        num_weights += weight.numel()
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
    weights.save(directory, stored, quantization_config=form.quantization, tie_word_embeddings=not form.has_head)
    return Written(directory, num_bytes / num_weights)


def write_gguf(kind: str, weights: Weights, path: Path) -> Written:
    """All matrices of the layers in one type. The embedding is too if the type has no blocks, else it is in Q8_0."""
    embedding: Pack = PACKS[kind] if kind in PLAIN else as_q8_0

    def pack(name: str) -> Pack:
        return embedding if name == "token_embd.weight" else PACKS[kind]

    scratch = path.with_name("widened")
    if not scratch.exists():
        weights.save(scratch)
    convert(scratch, path, pack)
    sizes = [(PACKS[kind](weight[:8]), weight[:8].numel()) for weight in weights.matrices.values()]
    return Written(path, sum(len(own.data) for own, _ in sizes) / sum(count for _, count in sizes))


@dataclass(frozen=True, slots=True)
class Row:
    """One format: how to write its file, and how an independent reader reads it."""

    name: str
    file: str
    write: Callable[[Path], Written]
    read: Callable[[Path], tuple[Weights, dict[str, Tensor]]]
    """(the model without quantization, its tensors as the file holds them)."""
    as_declared: bool = False
    """Whether activations are quantized as the file declares."""


def rows(plain: Weights, wide: Weights) -> Iterator[Row]:
    """Every format. Types of blocks, and FP8, have a model whose matrices have multiples of 256 inputs."""
    yield Row("bfloat16", "bfloat16", partial(write_bfloat16, plain), partial(_checkpoint, plain))
    for number, form in enumerate(FORMATS):
        row = Row(
            form.name, f"checkpoint-{number}", partial(write_checkpoint, form, plain), partial(_checkpoint, plain)
        )  # fmt: skip
        yield row
        if form.quantization.get("format") == "int-quantized":
            yield replace(row, name=f"{form.name}, activations as declared", as_declared=True)
    for number, form in enumerate(FP8_FORMATS):
        yield Row(form.name, f"fp8-{number}", partial(write_checkpoint, form, wide), partial(_checkpoint, wide))
    for kind in PACKS:
        yield Row(kind, f"{kind}.gguf", partial(write_gguf, kind, wide), partial(_gguf, wide))


def _checkpoint(weights: Weights, path: Path) -> tuple[Weights, dict[str, Tensor]]:
    return weights, independent.dequantized(path)


def _gguf(weights: Weights, path: Path) -> tuple[Weights, dict[str, Tensor]]:
    return weights, independent.gguf_values(path, weights.config, list(weights.tensors))


# -- measurements ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def quality(model: Path, directory: Path, only: list[str], num_windows: int | None) -> str:
    material = Material.of(model, num_windows, 0)
    plain = shuffled(Weights.read(model))
    wide = widened(plain)
    chosen = [row for row in rows(plain, wide) if not only or row.name in only]
    progress = Progress(len(material.windows) * (1 + 3 * len(chosen)))
    progress.label = "float32"
    checkpoint = Checkpoint.read(plain.save(directory / "float32", dtype="float32"))
    reference = Reference(checkpoint, material, progress.tick)
    base = _nll(reference.model, material, lambda: None)
    found: list[list[Cell]] = []
    for row in chosen:
        progress.label = row.name
        written = row.write(directory / row.file)
        arch = ModelFacts.of(written.checkpoint()).arch
        recipe = recipe_of(arch, "none", torch.float32, as_declared=row.as_declared)
        served = reference.compare(Model.load(written.checkpoint(), torch.float32, recipe), progress.tick)
        recipe = exact(recipe_of(arch, "none", torch.float32))
        ours = _nll(Model.load(written.checkpoint(), torch.float32, recipe), material, progress.tick)
        weights, tensors = row.read(written.path)
        is_tied = "lm_head.weight" not in tensors
        copy = weights.save(directory / "independent", tensors, dtype="float32", tie_word_embeddings=is_tied)
        theirs = _nll(Model.load(Checkpoint.read(copy), torch.float32), material, progress.tick)
        found.append([
            row.name, f"{written.bytes_a_weight:.3f}", f"{served.nll - base:+.4f}", f"{served.kl:.5f}",
            f"{math.expm1(ours - theirs):+.4%}", f"{math.expm1(served.nll - ours):+.3%}",
        ])  # fmt: skip
        print("", found[-1], file=sys.stderr, flush=True)
    num_tokens = sum(len(window) - 1 for window in material.windows)
    return f"{num_tokens:,} tokens of text, NLL of float32 {base:.4f}; {place()}\n\n" + markdown(COLUMNS, found)


def _nll(model: Model, material: Material, tick: Callable[[], None]) -> float:
    """Mean negative log probability of the text's tokens."""
    total = 0.0
    for window in material.windows:
        probabilities = torch.cat(list(model.log_probs(model.hidden(window)[:-1])))
        total -= float(probabilities.gather(1, torch.tensor(window[1:])[:, None]).sum())
        tick()
    return total / sum(len(window) - 1 for window in material.windows)


def speed(directory: Path, only: list[str], rounds: int) -> str:
    """Times decode steps for each file in `directory`, by turns, each in a process of its own. The time of a step is
    the least of the rounds' medians, because other programs only add to it."""
    empty = Weights({}, {})
    chosen = [row for row in rows(empty, empty) if not row.as_declared and (not only or row.name in only)]
    progress = Progress(rounds * len(chosen))
    least_ms = {row.name: dict.fromkeys(_NUM_ROWS, math.inf) for row in chosen}
    for _ in range(rounds):
        for row in chosen:
            progress.label = row.name
            found = measured(directory / row.file, "stored", _NUM_THREADS, list(_NUM_ROWS))
            for num_rows, figures in found.items():
                least_ms[row.name][num_rows] = min(least_ms[row.name][num_rows], figures["median_ms"])
            progress.tick()
            print("", row.name, found, file=sys.stderr, flush=True)
    columns = ["format", *(f"{unit}, {num_rows} rows" for num_rows in _NUM_ROWS for unit in ("ms", "tokens/s"))]
    cells: list[list[Cell]] = [
        [name, *(text for num_rows, ms in found.items() for text in (f"{ms:.2f}", f"{1e3 * num_rows / ms:.0f}"))]
        for name, found in least_ms.items()
    ]
    return f"{_NUM_THREADS} threads, {rounds} rounds; {place()}\n\n" + markdown(columns, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, as for inferd serve")
    parser.add_argument("--dir", type=Path, required=True, help="where the files are kept")
    parser.add_argument("--only", action="append", default=[], help="name of a format; may be given again")
    parser.add_argument("--num-windows", type=int, help="pieces of 512 tokens of the text; all by default")
    parser.add_argument("--speed", action="store_true", help="time decode steps from the files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="file for the table")
    asked = parser.parse_args()
    native.prepare(library.default_cache_dir())
    asked.dir.mkdir(parents=True, exist_ok=True)
    if asked.speed:
        table = speed(asked.dir, asked.only, asked.rounds)
    else:
        table = quality(locate(asked.model), asked.dir, asked.only, asked.num_windows)
    print(table)
    if asked.write is not None:
        asked.write.write_text(f"# Formats of {asked.model}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
