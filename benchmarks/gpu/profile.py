"""The kernels of a step by time, with their launches and the gaps between them. Hardware counters of three kernels, if
Nsight Compute is there."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.attention import Paged
from benchmarks.gpu.bench import Bench, CannotRunError
from benchmarks.gpu.engine import CONTEXT, Loaded, decoding
from benchmarks.gpu.linears import cold_weights, few_rows
from benchmarks.gpu.models import STEP_TOKENS, greedy, new_ids, random_ids, run
from benchmarks.gpu.points import Case, Trial
from inferd.engine.api.wire.messages import StepOutput
from inferd.engine.core.loop import EngineCore

_TOP = 12
"""Kernels of a step with a line of their own."""
_WARM_STEPS, _STEPS = 8, 16


@dataclass(frozen=True, slots=True)
class Span:
    """One run of a kernel, in microseconds of the device's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The time of `num_steps` equal steps, by kernel."""

    spans: Sequence[Span]
    num_steps: int

    @property
    def wall_us(self) -> float:
        return max(span.end_us for span in self.spans) - min(span.start_us for span in self.spans)

    @property
    def busy_us(self) -> float:
        """Time in which at least one kernel ran."""
        busy, reached = 0.0, -float("inf")
        for span in sorted(self.spans, key=lambda span: span.start_us):
            busy += max(0.0, span.end_us - max(span.start_us, reached))
            reached = max(reached, span.end_us)
        return busy

    def by_kernel(self) -> list[tuple[str, int, float]]:
        """(kernel, launches, microseconds), the longest first."""
        found: dict[str, list[float]] = defaultdict(list)
        for span in self.spans:
            found[span.name].append(span.end_us - span.start_us)
        return sorted(((name, len(took), sum(took)) for name, took in found.items()), key=lambda line: -line[2])


def decode(bench: Bench, model: str, batches: Sequence[int]) -> None:
    """A decode step of each batch at a context of 1,024."""
    loaded = Loaded(bench, model, "bf16")
    context, (warm, steps) = bench.pick(CONTEXT, 40), bench.pick((_WARM_STEPS, _STEPS), (1, 2))
    for batch in bench.pick(batches, (1, 3)):
        # The first requests decode while the prompts of the last ones are computed.
        most_tokens = 2 * (batch * context // STEP_TOKENS + warm + steps)
        engine = loaded.engine(batch, context + most_tokens)
        if engine.num_seqs < batch:
            bench.emit(_case(model, f"decode {batch} x {context}", ""), Trial(note="does not fit the memory"))
            continue
        outputs: list[StepOutput | None] = []
        with decoding(engine, batch, context, most_tokens) as core:
            for _ in range(warm):
                core.step(0.0)
            spans = _watched(bench, partial(_run_steps, core, steps, outputs))
        num_tokens = sum(len(ids) for output in outputs for _, ids in new_ids(output))
        _report(
            bench, model, f"decode {batch} x {context}", Summary(spans, steps), abs(num_tokens / (batch * steps) - 1)
        )
        del engine


def _run_steps(core: EngineCore, steps: int, outputs: list[StepOutput | None]) -> None:
    outputs.extend(core.step(0.0) for _ in range(steps))


def prefill(bench: Bench, model: str, length: int) -> None:
    """The steps of one prompt, which ends with one drawn token."""
    length = bench.pick(length, 64)
    engine = Loaded(bench, model, "bf16").engine(1, length + 2)
    prompts = [random_ids(length, engine.vocab_size, index) for index in range(2)]
    with engine.core() as core:
        run(core, [greedy("warm", prompts[0], 2)])
        spans = _watched(bench, lambda: run(core, [greedy("prompt", prompts[1], 1)]))
    _report(bench, model, f"prefill {length}", Summary(spans, 1))


def _watched(bench: Bench, work: Callable[[], object]) -> list[Span]:
    """The kernels that the device ran during `work`; on the CPU the functions of torch."""
    on_gpu = bench.device.type == "cuda"
    activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if on_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
    with profile(activities=[activity]) as found:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == kind
    ]


def _case(model: str, point: str, kernel: str) -> Case:
    return Case(table="profile", labels={"model": model, "point": point, "kernel": kernel})


def _report(bench: Bench, model: str, point: str, found: Summary, error: float = 0.0) -> None:
    """`error`: share of the tokens that the steps should have given and did not."""
    if not found.spans:
        bench.emit(_case(model, point, ""), Trial.missing("the profiler saw no kernel"))
        return
    lines = found.by_kernel()
    steps = found.num_steps
    whole = {"launches": len(found.spans) / steps, "busy %": 100 * found.busy_us / found.wall_us}
    all_of_it = Trial(seconds=found.wall_us / steps / 1e6, error=error, tolerance=0.0, figures=whole)
    bench.emit(_case(model, point, "all"), all_of_it)
    others = lines[_TOP:]
    if others:
        rest = (f"{len(others)} others", sum(count for _, count, _ in others), sum(us for *_, us in others))
        lines = [*lines[:_TOP], rest]
    for name, count, us in lines:
        figures = {"launches": count / steps, "busy %": 100 * us / found.wall_us}
        bench.emit(_case(model, point, _short(name)), Trial(seconds=us / steps / 1e6, figures=figures))


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:77]}..."


# -- counters ----------------------------------------------------------------------------------------------------------

_METRICS = {
    "memory %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "shared memory %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "tensor cores %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "us": "gpu__time_duration.sum",
}
"""Columns of the table, and what Nsight Compute calls them."""
_SKIPPED = 2
"""First launches, which load code and fill caches."""


def _few_rows_product(bench: Bench) -> Callable[[], object]:
    weights = list(cold_weights(bench, *bench.pick((4096, 28_672), (64, 64))))
    x = torch.randn(1, weights[0].shape[1], dtype=torch.bfloat16, device=bench.device)
    products = [few_rows(weight) for weight in weights]
    return lambda: [product(x) for product in products]


def _attention(bench: Bench, rows: Sequence[tuple[int, int]]) -> Callable[[], object]:
    paged = Paged.make(rows, 4, bench.device)
    return lambda: [paged.attend(paged.batch(False), layer) for layer in range(4)]


_COUNTED: Mapping[str, tuple[str, Callable[[Bench], Callable[[], object]]]] = {
    "few rows, 1 x 4096 x 28672": ("_few_rows", _few_rows_product),
    "decode attention, 64 x 4096": ("_attend", lambda bench: _attention(bench, [(bench.pick(4095, 50), 1)] * 64)),
    "prefill attention, 8192": ("_attend", lambda bench: _attention(bench, [(0, bench.pick(8192, 70))])),
}
"""By name: part of the kernel's name, and what makes its launches."""


def launch(bench: Bench, name: str) -> None:
    """Launch one of the counted kernels several times."""
    work = _COUNTED[name][1](bench)
    for _ in range(_SKIPPED):
        work()


def counters(bench: Bench) -> None:
    """How busy three kernels keep the parts of a multiprocessor."""
    for name, (kernel, _) in _COUNTED.items():
        bench.measure(Case(table="counters", labels={"kernel": name}), partial(_counted, bench, name, kernel))


def _counted(bench: Bench, name: str, kernel: str) -> Trial:
    if bench.device.type != "cuda":
        return Trial(note="only a GPU has counters")
    tool = shutil.which("ncu")
    if tool is None:
        raise CannotRunError("Nsight Compute (ncu) is not installed")
    asked = [f"--kernel-name=regex:.*{kernel}.*", f"--launch-skip={_SKIPPED}", "--launch-count=1"]
    # The clocks stay as the machine's owner has set them.
    options = [*asked, "--clock-control=none", "--csv", "--page=raw", f"--metrics={','.join(_METRICS.values())}"]
    code = (
        "from benchmarks.gpu.bench import Bench; from benchmarks.gpu.profile import launch; "
        f"launch(Bench('cuda', print), {name!r})"
    )
    command = [tool, *options, sys.executable, "-P", "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    figures = read_counters(done.stdout.splitlines())
    if "ERR_NVGPUCTRPERM" in done.stdout:
        raise CannotRunError("the driver lets only administrators read counters")
    return Trial(figures=figures) if figures else Trial.missing(f"no counters: {done.stdout.strip()[-300:]}")


def read_counters(lines: Iterable[str]) -> dict[str, float]:
    """Figures of the first launch in the output of `ncu --csv --page raw`: a line of names, a line of units, then one
    for each launch. Lines before the names are the program's and the profiler's."""
    table = [line for line in lines if line.startswith('"')]
    rows = list(csv.reader(table))
    if len(rows) < 3:
        return {}
    names, units, values = rows[:3]
    found: dict[str, float] = {}
    for column, metric in _METRICS.items():
        if metric in names:
            at = names.index(metric)
            value = float(values[at].replace(",", ""))
            found[column] = value / 1e3 if units[at] in ("ns", "nsecond") else value
    return found
