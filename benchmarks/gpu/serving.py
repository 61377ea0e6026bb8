"""The engine from start to service: from a checkpoint in the page cache to the first token, and over HTTP."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import floors
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import MODELS, checkpoint
from benchmarks.gpu.points import Case, Trial
from benchmarks.roofline import Load

LOADS = (
    Load(num_clients=1, num_requests=3, input_len=1024, output_len=128),
    Load(num_clients=32, num_requests=64, input_len=1024, output_len=128),
    Load(num_clients=256, num_requests=512, input_len=1024, output_len=128),
)
_TINY = (Load(num_clients=2, num_requests=3, input_len=32, output_len=4),)
_STARTS = 2


def start(bench: Bench, model: str) -> None:
    """Seconds from the start of the engine's process to its first token, twice. The first compiles kernels that are not
    cached."""
    for run in range(_STARTS):
        labels = {"model": model, "start": "first" if run == 0 else "again"}
        goal = floors.goal(model, "bf16", "start")

        def trial() -> Trial:
            path = checkpoint(MODELS[bench.pick(model, "smoke")], bench.device)
            started_s = time.perf_counter()
            command = [sys.executable, "-P", "-m", "benchmarks.gpu.serving", str(path), bench.device.type]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seconds = time.perf_counter() - started_s
            phases = (line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith("phase "))
            figures = {f"{name.removeprefix('phase ')} s": float(value) for name, value in phases}
            return Trial(seconds=seconds, figures=figures)

        bench.measure(Case(table="engine start", labels=labels, goal=goal), trial)


def http(bench: Bench, model: str) -> None:
    """The load generator on the same machine, through the server."""
    for load in bench.pick(LOADS, _TINY):
        labels = {
            "model": model,
            "clients": str(load.num_clients),
            "tokens": f"{load.input_len} in, {load.output_len} out",
        }
        shape = MODELS[bench.pick(model, "smoke")].shape
        phases = floors.load_phases(shape, "bf16", load.num_clients, load.num_requests, load.input_len, load.output_len)
        amount = float(load.num_requests * load.output_len)
        case = Case(table="over HTTP", labels=labels, phases=phases, amount=amount)
        bench.measure(case, partial(_served, bench, model, load))


def _served(bench: Bench, model: str, load: Load) -> Trial:
    # Imported late, so that without the server's packages only this row fails.
    import fastapi  # noqa: F401, PLC0415

    from benchmarks.daemon import running  # noqa: PLC0415
    from inferd.server.commands.bench.options import Fixed, LoadOptions  # noqa: PLC0415
    from inferd.server.commands.bench.report import failures, summarize  # noqa: PLC0415
    from inferd.server.commands.bench.session import measure  # noqa: PLC0415

    chosen = MODELS[bench.pick(model, "smoke")]
    path = checkpoint(chosen, bench.device)
    program = "from inferd.server.cli import main; main()"
    longest = str(load.input_len + load.output_len)
    command = [sys.executable, "-P", "-c", program, "serve", str(path), "--device", bench.device.type]
    command += ["--max-model-len", longest]
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder) / "log") as daemon:
        for warmup, count in ((True, load.num_clients), (False, load.num_requests)):
            options = LoadOptions(
                base_url=daemon.url,
                num_requests=count,
                concurrency=load.num_clients,
                input_len=Fixed(load.input_len),
                output_len=Fixed(min(8, load.output_len) if warmup else load.output_len),
                seed=count + warmup,
                warmup=0,
                vocab_size=chosen.shape.vocab_size,
            )
            finished = measure(options).run
        report = summarize(finished)
        figures = {"ready s": daemon.ready_s}
    if report.ttft_s is not None and report.tpot_s is not None:
        figures |= {"TTFT p50 ms": report.ttft_s.p50 * 1e3, "TTFT p99 ms": report.ttft_s.p99 * 1e3}
        figures |= {"TPOT p50 ms": report.tpot_s.p50 * 1e3}
    seconds = report.num_output_tokens / report.output_tokens_per_s if report.output_tokens_per_s else None
    note = failures(finished.outcomes) if report.num_failed else ""
    return Trial(seconds=seconds, error=float(report.num_failed), tolerance=0.0, figures=figures, note=note)


def _start_engine(path: str, device: str) -> None:
    """The start of the engine's process until it is ready, including the prompts and the token that warm it up."""
    from inferd.engine.api.checkpoint import Checkpoint  # noqa: PLC0415
    from inferd.engine.api.config import AskedConfig  # noqa: PLC0415
    from inferd.engine.api.machine.cpu import Machine  # noqa: PLC0415
    from inferd.engine.api.model import ModelFacts  # noqa: PLC0415
    from inferd.engine.api.resolve import resolve  # noqa: PLC0415
    from inferd.engine.worker.load import load_worker  # noqa: PLC0415

    started_s = time.monotonic()
    asked = AskedConfig(model_path=path, device=device, max_model_len=1024)  # type: ignore[arg-type]
    config, _, _ = resolve(asked, ModelFacts.of(Checkpoint.read(Path(path))), Machine.detect())
    load_worker(config, started_s, lambda phase: print(f"phase {phase.name} {phase.duration_s:.3f}", flush=True))


def main(arguments: Sequence[str]) -> int:
    _start_engine(arguments[0], arguments[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
