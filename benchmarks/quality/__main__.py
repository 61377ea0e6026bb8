"""How far each precision is from float32 on a real model: one row for each --quantization, dtype and format of K and V.

    python -m benchmarks.quality [--model smollm2] [--only int8] [--num-windows N] [--num-chats N] [--write FILE]
    python -m benchmarks.quality --model FILE.gguf --only 'float32, int8 KV' --only 'float32, fp8 KV'

NLL is the mean negative log probability of the tokens of text.txt. KL is the divergence of the next-token distribution
from float32's. Flips are tokens of float32's greedy answers to chats.txt that would not be chosen. `--write` puts the
table, the machine and the date into a file. The second line tells what K and V in 8 bits cost a model of yours. It
needs 4 bytes of memory for each weight.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.machine import place
from benchmarks.quality.material import Material
from benchmarks.quality.measure import Model, Quality, Reference
from benchmarks.quality.schemes import SHUFFLED_INT4, SYMMETRIC_INT4
from benchmarks.tables import Cell, markdown
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.locate import locate
from inferd.engine.quant.recipe import Recipe
from inferd.kernels.cpu import library, native

FP8 = torch.float8_e4m3fn
ROWS: tuple[tuple[str, str | Recipe, torch.dtype, torch.dtype | None], ...] = (
    ("bfloat16", "none", torch.bfloat16, None),
    ("bfloat16, fp8 KV", "none", torch.bfloat16, FP8),
    ("float32, fp8 KV", "none", torch.float32, FP8),
    ("bfloat16, int8 KV", "none", torch.bfloat16, torch.int8),
    ("float32, int8 KV", "none", torch.float32, torch.int8),
    ("int8, float32", "int8", torch.float32, None),
    ("int8, bfloat16", "int8", torch.bfloat16, None),
    ("int4, float32", SHUFFLED_INT4, torch.float32, None),
    ("int4, bfloat16", SHUFFLED_INT4, torch.bfloat16, None),
    ("symmetric int4, float32", SYMMETRIC_INT4, torch.float32, None),
    ("fp8, float32", "fp8", torch.float32, None),
    ("fp8, bfloat16", "fp8", torch.bfloat16, None),
)
"""(name, quantization, dtype of activations, dtype of K and V). `schemes` says why int4 has a recipe of its own."""
COLUMNS = ("precision", "NLL", "NLL - float32's", "KL", "flips", "whole answers")


class Progress:
    """A bar on stderr."""

    def __init__(self, num_ticks: int) -> None:
        self._num_ticks, self._done, self._started_s, self.label = num_ticks, 0, time.monotonic(), ""

    def tick(self) -> None:
        self._done += 1
        share = self._done / self._num_ticks
        left_s = (time.monotonic() - self._started_s) * (1 / share - 1)
        bar = "#" * int(30 * share)
        print(f"\r[{bar:30}] {share:4.0%}, {left_s:4.0f} s left: {self.label:24}", end="", file=sys.stderr, flush=True)


@torch.inference_mode()
def measure(model: Path, only: Sequence[str], num_windows: int | None, num_chats: int | None) -> str:
    """The table of all rows, or of those whose names contain one of `only`."""
    checkpoint, material = Checkpoint.read(model), Material.of(model, num_windows, num_chats)
    rows = [row for row in ROWS if not only or any(part in row[0] for part in only)]
    each = len(material.windows) + len(material.prompts)
    progress = Progress(len(material.windows) + each * (len(rows) + 1))
    progress.label = "float32"
    reference = Reference(checkpoint, material, progress.tick)
    exact = reference.compare(reference.model, progress.tick)
    found = [("float32", exact)]
    for name, quantization, dtype, kv_dtype in rows:
        progress.label = name
        if (quantization, dtype) == ("none", torch.float32) and kv_dtype is not None:
            other = reference.model.with_kv(kv_dtype)
        else:
            other = Model.load(checkpoint, dtype, quantization, kv_dtype)
        found.append((name, reference.compare(other, progress.tick)))
    print(file=sys.stderr)
    num_tokens = sum(len(window) - 1 for window in material.windows)
    head = (
        f"{num_tokens:,} tokens of text, {reference.num_answer_tokens:,} tokens of {len(material.prompts)} greedy "
        f"answers; {place()}\n\n"
    )
    return head + markdown(COLUMNS, [_cells(name, quality, exact, len(material.prompts)) for name, quality in found])


def _cells(name: str, quality: Quality, exact: Quality, num_chats: int) -> list[Cell]:
    return [
        name,
        f"{quality.nll:.4f}",
        f"{quality.nll - exact.nll:+.4f}",
        f"{quality.kl:.5f}",
        f"{quality.num_flips}",
        f"{quality.num_equal} of {num_chats}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for inferd serve")
    parser.add_argument("--only", action="append", default=[], help="part of a row's name; may be given again")
    parser.add_argument("--num-windows", type=int, help="pieces of 512 tokens of the text; all by default")
    parser.add_argument("--num-chats", type=int, help="number of chats; all by default")
    parser.add_argument("--write", type=Path, help="file for the table")
    asked = parser.parse_args()
    native.prepare(library.default_cache_dir())
    table = measure(locate(asked.model), asked.only, asked.num_windows, asked.num_chats)
    print(table)
    if asked.write is not None:
        asked.write.write_text(f"# Quality of {asked.model}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
