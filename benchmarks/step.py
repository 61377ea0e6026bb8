"""Times decode steps of the engine's worker on this processor, beside the time that their weights need.

    python -P benchmarks/step.py --dir DIR [--model 135m,0.6b] [--precision int8,int4,bf16] [--threads 1,2] [--rows 1,8]

`--threads 2,2x2` compares one process of two threads with two ranks that have two threads together.

A step runs the layers, the head and the choice of the likeliest token, without scheduler and wire. The floor is the
bytes of the weights without scales, divided by the read bandwidth that `machine.py` measures first; at many rows
products bound a step instead. Each process measures one precision with one number of threads, in the environment of an
engine. Processes of different numbers of threads take turns, because machines drift.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.checkpoints import SHAPES, ensure
from benchmarks.machine import describe, measure_machine, place
from benchmarks.peers import rates_of
from benchmarks.roofline import WEIGHT_BYTES, Cost, decode_step_s

_CONTEXT = 128
_DURATION_S = 1.0
"""Seconds that steps of one number of rows are measured in one process."""

Steps = dict[int, dict[str, float]]
"""Number of rows -> figures of a step."""


def measure(model: Path, precision: str, num_threads: int, rows: list[int], num_ranks: int = 1) -> Steps:
    """In a process of its own, and one for each other rank. The precision `stored` is that of the file."""
    from inferd.engine.api.checkpoint import Checkpoint  # noqa: PLC0415
    from inferd.engine.api.config import AskedConfig  # noqa: PLC0415
    from inferd.engine.api.machine.cpu import Machine  # noqa: PLC0415
    from inferd.engine.api.model import ModelFacts  # noqa: PLC0415
    from inferd.engine.api.resolve import resolve  # noqa: PLC0415
    from inferd.engine.api.wire.params import SamplingParams  # noqa: PLC0415
    from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate  # noqa: PLC0415
    from inferd.engine.worker.load import load_worker  # noqa: PLC0415

    is_stored = precision == "stored"
    kept: Any = "none" if precision in ("bf16", "stored") else precision
    asked = AskedConfig(
        model_path=str(model), device="cpu", max_num_seqs=max(rows), max_model_len=4096, num_threads=num_threads,
        tensor_parallel_size=num_ranks, quantization=kept, keeps_blocks=is_stored,
        dtype="auto" if is_stored else "bfloat16",
    )  # fmt: skip
    facts = ModelFacts.of(Checkpoint.read(model, keeps_blocks=is_stored))
    config, _, _ = resolve(asked, facts, Machine.detect())
    runner, ready = load_worker(config, time.monotonic(), lambda phase: None)
    num_blocks = ready.num_blocks // max(rows)
    params = SamplingParams(max_tokens=4000, seed=0, temperature=0.0)
    found: Steps = {}
    for slot in range(max(rows)):
        blocks = tuple(range(slot * num_blocks, (slot + 1) * num_blocks))[: 4096 // ready.block_size]
        admission = Admission(slot, str(slot), tuple(range(_CONTEXT)), _CONTEXT, params)
        prompt = StepPlan(slot, (admission,), (TableUpdate(slot, 0, 0, blocks),), (Row(slot, 0, _CONTEXT, True),))
        runner.execute(prompt)
    for num_rows in rows:
        plan = StepPlan(0, (), (), tuple(Row(slot, _CONTEXT, 1, True) for slot in range(num_rows)))
        for _ in range(3):
            runner.execute(plan)
        taken_s, busy_s, until_s = [], time.process_time(), time.perf_counter() + _DURATION_S
        while time.perf_counter() < until_s:
            started_s = time.perf_counter()
            runner.execute(plan)
            taken_s.append(time.perf_counter() - started_s)
        found[num_rows] = {
            "median_ms": statistics.median(taken_s) * 1e3,
            "best_ms": min(taken_s) * 1e3,
            "cores": (time.process_time() - busy_s) / sum(taken_s),
        }
    runner.close()
    return found


def measured(model: Path, precision: str, num_threads: int, rows: list[int], num_ranks: int = 1) -> Steps:
    from inferd.engine.api.process.engine_process import ENVIRONMENT  # noqa: PLC0415

    given = {"model": str(model), "precision": precision, "num_threads": num_threads, "rows": rows}
    given["num_ranks"] = num_ranks
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", json.dumps(given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**ENVIRONMENT, **os.environ})
    return {int(num_rows): figures for num_rows, figures in json.loads(done.stdout.splitlines()[-1]).items()}


def _rows_of_table(asked: argparse.Namespace) -> Iterator[list[tables.Cell]]:
    machine = measure_machine()
    print(f"{place()}\n{describe(machine)}\n", flush=True)
    num_rows = [int(number) for number in asked.rows.split(",")]
    threads = asked.threads.split(",")
    for name in asked.model.split(","):
        shape, model = SHAPES[name], ensure(asked.dir, name)
        for precision in asked.precision.split(","):
            cost = Cost(shape.num_body_params, shape.num_head_params, WEIGHT_BYTES[precision], 0)
            rounds = [
                {text: measured(model, precision, *_threads(text, num_rows)) for text in threads}
                for _ in range(asked.rounds)
            ]
            for number in num_rows:
                floor_ms = decode_step_s(rates_of(machine, precision), cost, number, 0) * 1e3
                row: list[tables.Cell] = [name, precision, number, floor_ms]
                for count in threads:
                    median = statistics.median(found[count][number]["median_ms"] for found in rounds)
                    best = min(found[count][number]["best_ms"] for found in rounds)
                    cores = statistics.median(found[count][number]["cores"] for found in rounds)
                    row += [median, best, cores, median / floor_ms]
                print(row, file=sys.stderr, flush=True)
                yield row


def _threads(text: str, num_rows: list[int]) -> tuple[int, list[int], int]:
    """(threads, rows, ranks) of "2", or of "2x2" for two ranks."""
    count, _, num_ranks = text.partition("x")
    return int(count), num_rows, int(num_ranks or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where random checkpoints are kept")
    parser.add_argument("--model", default="135m")
    parser.add_argument("--precision", default="int8,int4,bf16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        given = json.loads(asked.child)
        print(json.dumps(measure(Path(given.pop("model")), **given)))
        return
    rows = list(_rows_of_table(asked))
    columns = ["model", "precision", "rows", "floor ms"]
    for count in asked.threads.split(","):
        columns += [f"ms, {count} threads", "best", "cores", "of floor"]
    print(tables.markdown(columns, rows))


if __name__ == "__main__":
    main()
