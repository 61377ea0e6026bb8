"""Goodput of scheduling by targets, compared with fixed settings: chunks of three sizes, and prompts before everything.

    python -P benchmarks/slo.py [--setting h200|cpu] [--dir DIR] [--quick] [--out benchmarks/results]

Requests arrive at random (Poisson); prompts and answers have lognormal lengths; a seed draws all of them. A request
counts if its first token came within the TTFT target and its mean time for each token is within the TPOT target.
Goodput is the number of such requests divided by the seconds in which requests arrived. A refused request does not
count.

`h200` runs the real core and scheduler on a virtual H200, whose step times are computed from floors and not measured.
`cpu` is measured: the real worker on this machine, a random checkpoint, the monotonic clock, in one process and without
HTTP. Each run then takes as long as its requests arrive. The runs of one load follow each other, so that other work of
the machine affects all policies alike.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoints import Shape, ensure
from benchmarks.costed_device import H200, CostedMachine, RooflineCost
from benchmarks.goodput import BLOCK_SIZE, REFUSING, TARGETS, Machine, Score, Setting, policies, run
from benchmarks.machine import place
from benchmarks.svg import line_chart
from benchmarks.tables import Cell, markdown
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts

UNDER = 0.98
"""Share of the best fixed setting's goodput below which a policy counts as behind."""

_LLAMA_8B = Shape(
    model_type="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
)  # fmt: skip


def _h200(setting: Setting, directory: Path) -> Machine:
    del setting, directory
    seed = PriorCosts(Coefficients(4.2e-3, 1e-7, 3.4e-8), Coefficients(4.2e-3, 2.2e-5, 3.4e-8, 3.8e-10))
    return CostedMachine(RooflineCost(_LLAMA_8B, H200), seed, num_blocks=28_000)


def _this_cpu(setting: Setting, directory: Path) -> Machine:
    """A machine with torch, which the other setting does not need."""
    from benchmarks.real_device import RealMachine  # noqa: PLC0415

    return RealMachine.load(
        ensure(directory, "12m"),
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=max(setting.max_num_batched_tokens, *setting.chunks),
        block_size=BLOCK_SIZE,
    )


SETTINGS = {
    "h200": Setting(
        name="h200",
        about="Llama-3.1-8B in bfloat16 on one H200: computed from floors (80% of 4.8 TB/s, 70% of 989 TFLOP/s), "
        "not measured",
        open=_h200,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        chunks=(512, 2048, 8192),
        ttft_s=0.2,
        tpot_s=0.03,
        prompt=(1000, 0.9, 7000),
        output=(150, 0.8, 1000),
        rates=(4, 8, 12, 14, 16, 18, 20, 22, 24, 28, 32),
        window_s=60.0,
        seeds=(1, 2, 3),
    ),
    "cpu": Setting(
        name="cpu",
        about="The engine's worker with a random Llama of 12 million parameters in bfloat16 on this machine's "
        "processor",
        open=_this_cpu,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        chunks=(512, 2048, 8192),
        ttft_s=0.5,
        tpot_s=0.05,
        prompt=(600, 0.9, 3000),
        output=(40, 0.8, 200),
        rates=(3, 5, 7, 8, 9, 11, 14),
        window_s=16.0,
        seeds=(1,),
        is_measured=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    policy: str
    rate: float
    seed: int


def sweep(setting: Setting, directory: Path) -> dict[Job, Score]:
    """All runs; those of one load and seed follow each other."""
    loads = product(setting.rates, setting.seeds)
    jobs = [Job(policy, rate, seed) for rate, seed in loads for policy in policies(setting)]
    machine = setting.open(setting, directory)
    one = partial(_run_job, setting, machine)
    try:
        if machine.num_at_once > 1:
            with ProcessPoolExecutor(machine.num_at_once) as pool:
                return dict(_printed(jobs, pool.map(one, jobs)))
        # A warm-up: the first steps of a process touch memory and are recorded, and belong to no run.
        _run_job(replace(setting, window_s=min(2.0, setting.window_s)), machine, Job(TARGETS, max(setting.rates), 0))
        return dict(_printed(jobs, map(one, jobs)))
    finally:
        machine.close()


def _run_job(setting: Setting, machine: Machine, job: Job) -> Score:
    return run(setting, machine, job.policy, job.rate, job.seed)


def _printed(jobs: Sequence[Job], scores: Iterable[Score]) -> Iterator[tuple[Job, Score]]:
    """Print a line for each run that ends."""
    began_s = monotonic()
    for i, (job, score) in enumerate(zip(jobs, scores, strict=True), 1):
        met, shed, late, slow = score.shares
        print(
            f"[{i}/{len(jobs)}, {monotonic() - began_s:.0f} s] {job.rate:g}/s, {job.policy}: {score.goodput:.2f} "
            f"(met {met:.0%}, refused {shed:.0%}, late {late:.0%}, slow {slow:.0%})",
            file=sys.stderr,
            flush=True,
        )
        yield job, score


@dataclass(frozen=True, slots=True)
class Knee:
    """The load at which fixed settings serve the most, for one seed."""

    policy: str
    rate: float
    peak: float
    """The best fixed setting's goodput at that load. No fixed setting has more at any load."""
    arrival_rate: float
    """Requests per second that arrive at that load, the most that any policy can serve."""
    by_targets: float
    """Goodput by targets at that load."""
    peak_by_targets: float
    """Goodput by targets at its own best load."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep."""

    setting: Setting
    scores: Mapping[Job, Score]

    @property
    def policies(self) -> Sequence[str]:
        return tuple(policies(self.setting))

    def goodput(self, policy: str, rate: float) -> float:
        """The median over the seeds."""
        return median(self.scores[Job(policy, rate, seed)].goodput for seed in self.setting.seeds)

    def best_fixed(self, rate: float, seed: int) -> Job:
        fixed = [Job(policy, rate, seed) for policy in self.policies if policy not in (TARGETS, REFUSING)]
        return max(fixed, key=lambda job: self.scores[job].goodput)

    def ratio(self, rate: float, seed: int) -> float:
        """Goodput by targets, relative to the best fixed setting's."""
        best = self.scores[self.best_fixed(rate, seed)].goodput
        ours = self.scores[Job(TARGETS, rate, seed)].goodput
        return _ratio(ours, best)

    def knee(self, seed: int) -> Knee:
        fixed = [self.best_fixed(rate, seed) for rate in self.setting.rates]
        job = max(fixed, key=lambda job: self.scores[job].goodput)
        ours = [self.scores[Job(TARGETS, rate, seed)].goodput for rate in self.setting.rates]
        return Knee(
            job.policy,
            job.rate,
            self.scores[job].goodput,
            self.scores[job].num_requests / self.setting.window_s,
            self.scores[Job(TARGETS, job.rate, seed)].goodput,
            max(ours),
        )

    def shares(self, policy: str, rate: float) -> tuple[float, ...]:
        """Shares met, refused, late and slow, as the mean over the seeds."""
        each = [self.scores[Job(policy, rate, seed)].shares for seed in self.setting.seeds]
        return tuple(sum(column) / len(each) for column in zip(*each, strict=True))


def report(found: Sweep) -> str:
    """Two Markdown tables and their summary."""
    setting = found.setting
    about = f"{setting.about}: measured ({place()})" if setting.is_measured else setting.about
    seeds = "one seed" if len(setting.seeds) == 1 else f"medians of {len(setting.seeds)} seeds"
    return "\n\n".join(
        (
            f"{about}. TTFT {setting.ttft_s * 1e3:g} ms, TPOT {setting.tpot_s * 1e3:g} ms; prompts of "
            f"{setting.prompt[0]:g} and answers of {setting.output[0]:g} tokens in the median (lognormal, sigma "
            f"{setting.prompt[1]:g} and {setting.output[1]:g}; at most {setting.prompt[2]:,} and "
            f"{setting.output[2]:,}), {setting.window_s:g} s of arrivals; {seeds}.",
            "Goodput, requests a second within both targets:",
            _goodputs(found),
            *_sentences(found),
            "Of all requests, by targets and by the fixed setting that does best at each load, and the step-time "
            "model's error:",
            _reasons(found),
        )
    )


def _goodputs(found: Sweep) -> str:
    setting = found.setting
    rows: list[list[Cell]] = []
    for rate in setting.rates:
        ratios = [found.ratio(rate, seed) for seed in setting.seeds]
        rows.append([f"{rate:g}", *(found.goodput(policy, rate) for policy in found.policies), _ranged(ratios)])
    return markdown(["requests/s", *found.policies, "to the best"], rows)


def _sentences(found: Sweep) -> Iterator[str]:
    setting = found.setting
    knees = [found.knee(seed) for seed in setting.seeds]
    names = sorted({f"{knee.policy} at {knee.rate:g} requests/s" for knee in knees})
    there = _ranged([_ratio(knee.by_targets, knee.peak) for knee in knees])
    all_of_it = _ranged([_ratio(knee.arrival_rate, knee.peak) for knee in knees])
    at_most = _ranged([_ratio(knee.peak_by_targets, knee.peak) for knee in knees])
    yield (
        f"Best fixed setting: {' or '.join(names)}, {_ranged([knee.peak for knee in knees])} requests a second. At "
        f"that load targets give {there} times as much, and serving all requests would be {all_of_it} times; "
        f"at the load at which they serve the most, {at_most} times."
    )
    ratios = {(rate, seed): found.ratio(rate, seed) for rate, seed in product(setting.rates, setting.seeds)}
    least = min(ratios, key=lambda where: ratios[where])
    num_under = sum(ratio < UNDER for ratio in ratios.values())
    yield (
        f"The least ratio of targets to the best fixed setting of a load and seed is {ratios[least]:.3f}, at "
        f"{least[0]:g} requests/s; {num_under} of {len(ratios)} are below {UNDER:g}."
    )


def _reasons(found: Sweep) -> str:
    setting = found.setting
    rows: list[list[Cell]] = []
    for rate in setting.rates:
        fixed = max(
            (policy for policy in found.policies if policy not in (TARGETS, REFUSING)),
            key=lambda policy: found.goodput(policy, rate),
        )
        shares = (*found.shares(TARGETS, rate), *found.shares(fixed, rate)[2:])
        ours = [found.scores[Job(TARGETS, rate, seed)] for seed in setting.seeds]
        errors = (median(score.error_p50 for score in ours), median(score.error_p95 for score in ours))
        rows.append([f"{rate:g}", *(f"{100 * share:.0f}%" for share in shares), *(f"{error:.1%}" for error in errors)])
    columns = ["requests/s", "met", "refused", "late", "slow", "fixed: late", "slow", "error p50", "p95"]
    return markdown(columns, rows)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else inf


def _ranged(values: Sequence[float]) -> str:
    """The median, with the lowest and highest value."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def quick(setting: Setting) -> Setting:
    """Two loads of a few seconds, with short prompts if it is measured: shows that the setting runs."""
    setting = replace(setting, rates=setting.rates[1:5:3], window_s=setting.window_s / 16, seeds=(1,))
    if not setting.is_measured:
        return setting
    (prompt, sigma, most), (output, output_sigma, most_output) = setting.prompt, setting.output
    return replace(setting, prompt=(prompt / 8, sigma, most // 8), output=(output / 4, output_sigma, most_output // 4))


def _rate(text: str) -> float:
    """A rate; whole numbers stay integers, because the text of a rate is part of a load's seed."""
    return int(text) if text.isdecimal() else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="h200")
    parser.add_argument("--seeds", help="comma list; default: those of the setting")
    parser.add_argument("--rates", help="comma list of requests a second; default: those of the setting")
    parser.add_argument("--dir", type=Path, help="folder of the cpu setting's checkpoint; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="two loads of a few seconds: shows that it runs")
    parser.add_argument("--out", type=Path, help="folder for the table and the plot")
    asked = parser.parse_args()
    setting = SETTINGS[asked.setting]
    if asked.quick:
        setting = quick(setting)
    if asked.seeds:
        setting = replace(setting, seeds=tuple(int(seed) for seed in asked.seeds.split(",")))
    if asked.rates:
        setting = replace(setting, rates=tuple(_rate(text) for text in asked.rates.split(",")))
    with tempfile.TemporaryDirectory() as temporary:
        found = Sweep(setting, sweep(setting, asked.dir or Path(temporary)))
    text = report(found)
    print(text)
    if asked.out is not None:
        lines = {policy: [found.goodput(policy, rate) for rate in setting.rates] for policy in found.policies}
        chart = line_chart(setting.rates, lines, "requests arriving per second", "requests a second within targets")
        (asked.out / f"slo_{setting.name}.svg").write_text(chart)
        (asked.out / f"slo_{setting.name}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
