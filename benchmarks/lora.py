"""Times decode steps in which every row has a LoRA adapter of its own, beside the same steps without adapters.

    python -P benchmarks/lora.py --dir DIR [--model 135m,0.6b,smollm2] [--precision bf16,stored] [--rank 8,16]
                                 [--modules q_proj+v_proj,all] [--rows 8]

A step runs the layers, the head and the choice of the likeliest token, without scheduler and wire. Steps of both kinds
take turns in one process, because machines drift: "speed" is the median over pairs. The adapters hold random numbers.
"by bytes" is the weights' share of all bytes that a step with adapters reads, which bounds its speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.checkpoints import SHAPES, ensure
from benchmarks.machine import place

_CONTEXT = 128
_DURATION_S = 4.0
"""Seconds that steps of both kinds are measured."""


def measure(model: Path, precision: str, rank: int, modules: str, num_rows: int) -> dict[str, float]:
    """In a process of its own. The precision `stored` is that of the file."""
    import torch  # noqa: PLC0415

    from inferd.engine.api.checkpoint import Checkpoint  # noqa: PLC0415
    from inferd.engine.api.config import AskedConfig  # noqa: PLC0415
    from inferd.engine.api.machine.cpu import Machine  # noqa: PLC0415
    from inferd.engine.api.model import ModelFacts  # noqa: PLC0415
    from inferd.engine.api.resolve import resolve  # noqa: PLC0415
    from inferd.engine.api.wire.params import Adapter, SamplingParams  # noqa: PLC0415
    from inferd.engine.arch.registry import weights  # noqa: PLC0415
    from inferd.engine.lora.adapters import Update  # noqa: PLC0415
    from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate  # noqa: PLC0415
    from inferd.engine.worker.load import load_worker  # noqa: PLC0415

    is_stored = precision == "stored"
    asked = AskedConfig(
        model_path=str(model), device="cpu", max_num_seqs=2 * num_rows, max_model_len=512, keeps_blocks=is_stored,
        dtype="auto" if is_stored else "bfloat16", max_loras=num_rows, max_lora_rank=rank,
    )  # fmt: skip
    facts = ModelFacts.of(Checkpoint.read(model, keeps_blocks=is_stored))
    config, planned, _ = resolve(asked, facts, Machine.detect())
    runner, ready = load_worker(config, time.monotonic(), lambda phase: None)
    assert runner.model.adapters is not None
    names, num_bytes = modules.split("+"), 0
    for index in range(num_rows):
        updates = [
            Update(matrix, part, torch.randn(rank, own.in_size), torch.randn(own.out_size, rank) * 0.01, 1.0)
            for matrix, all_own in weights(facts.arch).modules().items()
            for part, own in enumerate(all_own)
            if modules == "all" or own.name.rpartition(".")[2] in names
        ]
        runner.model.adapters.put(index, updates)
        size = getattr(torch, config.lora_dtype).itemsize
        num_bytes += sum(update.a.numel() + update.b.numel() for update in updates) * size
    blocks_each = ready.num_blocks // (2 * num_rows)
    for slot in range(2 * num_rows):
        adapter = None if slot < num_rows else Adapter(slot - num_rows, "")
        params = SamplingParams(max_tokens=300, seed=0, temperature=0.0, adapter=adapter)
        blocks = tuple(range(slot * blocks_each, (slot + 1) * blocks_each))[: 512 // ready.block_size]
        admission = Admission(slot, str(slot), tuple(range(_CONTEXT)), _CONTEXT, params)
        runner.execute(
            StepPlan(slot, (admission,), (TableUpdate(slot, 0, 0, blocks),), (Row(slot, 0, _CONTEXT, True),))
        )
    plans = [
        StepPlan(0, (), (), tuple(Row(first + row, _CONTEXT, 1, True) for row in range(num_rows)))
        for first in (0, num_rows)
    ]
    taken_s: tuple[list[float], list[float]] = [], []
    for _ in range(3):
        for plan in plans:
            runner.execute(plan)
    until_s = time.perf_counter() + _DURATION_S
    while time.perf_counter() < until_s:
        for plan, times_s in zip(plans, taken_s, strict=True):
            started_s = time.perf_counter()
            runner.execute(plan)
            times_s.append(time.perf_counter() - started_s)
    plain, adapted = (statistics.median(times_s) for times_s in taken_s)
    runner.close()
    return {
        "plain_ms": plain * 1e3,
        "adapted_ms": adapted * 1e3,
        "ratio": statistics.median(one / other for one, other in zip(*taken_s, strict=True)),
        "best": min(taken_s[0]) / min(taken_s[1]),
        "floor": planned.weights_bytes / (planned.weights_bytes + num_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where random checkpoints are kept")
    parser.add_argument("--model", default="135m,0.6b")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rank", default="8,16")
    parser.add_argument("--modules", default="q_proj+v_proj,all")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        given = json.loads(asked.child)
        print(json.dumps(measure(Path(given.pop("model")), **given)))
        return
    from inferd.engine.api.locate import locate  # noqa: PLC0415
    from inferd.engine.api.process.engine_process import ENVIRONMENT  # noqa: PLC0415

    print(f"{place()}\n", flush=True)
    rows: list[list[tables.Cell]] = []
    for name in asked.model.split(","):
        model = ensure(asked.dir, name) if name in SHAPES else locate(name)
        for precision in asked.precision.split(","):
            for modules in asked.modules.split(","):
                for rank in map(int, asked.rank.split(",")):
                    given = {"model": str(model), "precision": precision, "rank": rank, "modules": modules}
                    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child"]
                    command.append(json.dumps({**given, "num_rows": asked.rows}))
                    done = subprocess.run(
                        command, stdout=subprocess.PIPE, check=True, env={**ENVIRONMENT, **os.environ}
                    )
                    found = json.loads(done.stdout.splitlines()[-1])
                    rows.append([name, precision, modules, rank, *found.values()])
                    print(rows[-1], file=sys.stderr, flush=True)
    columns = ["model", "precision", "modules", "rank", "ms without", "ms with", "speed", "of best", "by bytes"]
    print(tables.markdown(columns, rows))


if __name__ == "__main__":
    main()
