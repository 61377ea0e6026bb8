"""Libraries beside each other without HTTP: the same batches, in turn, in one run.

    python -m benchmarks.encoders.in_process --model FOLDER --files FILES \\
        --python sentence-transformers=PYTHON --python onnxruntime=PYTHON --python openvino=PYTHON \\
        [--precision fp32] [--rounds 7] [--out benchmarks/results/encoders.md]

Each library has a process of its own, which waits while another computes. `export.py` makes FILES. inferd runs in this
Python, with the environment of its engine. The lowest cosine with sentence-transformers in fp32 shows that all compute
the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import place
from benchmarks.tables import Cell, markdown
from inferd.engine.api.process.engine_process import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "1 x 16": [16],
    "1 x 128": [128],
    "1 x 512": [512],
    "32 x 16": [16] * 32,
    "32 x 128": [128] * 32,
    "32 x 512": [512] * 32,
    "32 x 8-200": [8 + 192 * (i * 7 % 32) // 31 for i in range(32)],
}
RERANKED = {"8 x 300": [300] * 8, "1 x 300": [300]}
LIBRARIES = {
    "fp32": (("inferd", "fp32"), ("sentence-transformers", "fp32"), ("onnxruntime", "fp32"), ("openvino", "fp32")),
    "int8": (("inferd", "int8"), ("onnxruntime", "int8"), ("openvino", "int8"), ("openvino", "static")),
    "bf16": (("inferd", "bf16"), ("sentence-transformers", "bf16"), ("openvino", "bf16")),
}
_SETTLE_S = 0.05
"""Other libraries' threads stop spinning within this time."""


class Worker:
    """One library's process."""

    def __init__(self, python: str, library: str, folder: Path, files: Path, precision: str) -> None:
        self.name = library if precision in ("fp32", "bf16") else f"{library} {precision}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        environment |= ENVIRONMENT if library == "inferd" else {}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.encoders.worker", library, str(folder), str(files), precision],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True,
        )  # fmt: skip
        self._read()

    def ask(self, lengths: Sequence[int], runs: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"lengths": list(lengths), "seed": 7, "runs": runs}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; run its worker by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(workers: Sequence[Worker], lengths: Sequence[int], rounds: int, budget_s: float) -> list[list[float]]:
    """Seconds of the batch by worker and round. Short batches run several times a round, of which the median counts."""
    once = max(min(worker.ask(lengths, 2)["seconds"]) for worker in workers)
    runs = max(1, min(30, int(0.1 / once)))
    rounds = max(3, min(rounds, int(budget_s / (once * runs * len(workers)))))
    seconds: list[list[float]] = [[] for _ in workers]
    for turn in range(rounds):
        for i in range(len(workers)):
            own = (i + turn) % len(workers)
            time.sleep(_SETTLE_S)
            seconds[own].append(statistics.median(workers[own].ask(lengths, runs)["seconds"]))
    return seconds


def row_of(name: str, num_texts: int, workers: Sequence[Worker], seconds: list[list[float]]) -> list[Cell]:
    """Texts a second by library, and the ratio of the first to the best other: the median of the rounds' ratios."""
    rates = [num_texts / statistics.median(own) for own in seconds]
    best = max(range(1, len(workers)), key=lambda i: rates[i])
    ratios = [theirs / ours for ours, theirs in zip(seconds[0], seconds[best], strict=True)]
    return [name, *rates, f"{statistics.median(ratios):.2f}", workers[best].name]


def lowest_cosine(first: list[list[float]], second: list[list[float]]) -> float:
    a, b = np.array(first), np.array(second)
    if a.shape[1] == 1:
        return float(np.abs(a - b).max())
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def run(precision: str, asked: argparse.Namespace, pythons: dict[str, str]) -> str:
    chosen = [own for own in LIBRARIES[precision] if own[0] in pythons]
    workers = [Worker(pythons[name], name, asked.model, asked.files, own) for name, own in chosen]
    true = Worker(pythons["sentence-transformers"], "sentence-transformers", asked.model, asked.files, "fp32")
    shapes = RERANKED if asked.rerank else SHAPES
    lengths = [32, 64, 17]
    expected = true.ask(lengths, 1)["vectors"]
    true.end()
    check = [lowest_cosine(worker.ask(lengths, 1)["vectors"], expected) for worker in workers]
    rows = []
    for name, own in shapes.items():
        if asked.shape and name not in asked.shape:
            continue
        seconds = measure(workers, own, asked.rounds, asked.budget)
        rows.append(row_of(name, len(own), workers, seconds))
        print(*rows[-1], file=sys.stderr, flush=True)
    for worker in workers:
        worker.end()
    word = "largest difference of a logit" if asked.rerank else "lowest cosine"
    figures = ", ".join(f"{worker.name} {value:.5f}" for worker, value in zip(workers, check, strict=True))
    table = markdown(["texts x tokens", *(worker.name for worker in workers), "ratio", "to"], rows)
    return f"{asked.model.name}, {precision}; {word} to torch in fp32: {figures}\n\n{table}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--python", action="append", default=[], metavar="LIBRARY=PYTHON")
    parser.add_argument("--precision", action="append", choices=LIBRARIES)
    parser.add_argument("--shape", action="append", help="only these rows")
    parser.add_argument("--rerank", action="store_true", help="the batches of a reranker")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=8.0, help="seconds a row, if three rounds fit")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    pythons = {"inferd": sys.executable, **dict(own.split("=", 1) for own in asked.python)}
    tables = [run(precision, asked, pythons) for precision in asked.precision or ("fp32", "int8")]
    text = f"Texts a second ({place()}).\n\n" + "\n".join(tables)
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
