"""Goodput of scheduling by targets, and of fixed settings: the real core and scheduler before a device that takes as
long as an H200 would, computed from floors and not measured.

    python benchmarks/slo.py [--quick] [--out benchmarks/results]

Requests come at random (Poisson), prompts and answers have lognormal lengths, all by a seed. A request counts when its
first token came within the TTFT target and its mean time a token within the TPOT target; goodput is such requests a
second of the time in which requests came. One that was refused counts nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoints import Shape
from benchmarks.costed_device import H200, CostedDevice, RooflineCost, StepCost, VirtualClock
from benchmarks.svg import line_chart
from benchmarks.tables import Cell, markdown
from inferd.engine.api.messages import StepOutput, Submit
from inferd.engine.api.params import SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core import EngineCore
from inferd.engine.sched.draft import PlanDraft
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import StepPlan
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.sched.step_time import Coefficients, Seed

_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A machine, what is asked of it, and how much at most."""

    name: str
    about: str
    cost: StepCost
    seed: Seed
    """What the step-time model starts from."""
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Of the scheduler that goes by targets."""
    chunks: Sequence[int]
    """Fixed settings."""
    ttft_s: float
    tpot_s: float
    prompt: tuple[float, float, int]
    """Median, standard deviation of the logarithm, and most tokens."""
    output: tuple[float, float, int]
    rates: Sequence[float]
    """Requests a second."""
    window_s: float
    """How long requests come."""


_LLAMA_8B = Shape(
    model_type="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
)  # fmt: skip

SETTINGS = {
    "h200": Setting(
        name="h200",
        about="Llama-3.1-8B in bfloat16 on one H200: computed from floors (80% of 4.8 TB/s, 70% of 989 TFLOP/s), "
        "not measured",
        cost=RooflineCost(_LLAMA_8B, H200),
        seed=Seed(Coefficients(4.2e-3, 1e-7, 3.4e-8), Coefficients(4.2e-3, 2.2e-5, 3.4e-8, 3.8e-10)),
        num_blocks=28_000,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        chunks=(512, 2048, 8192),
        ttft_s=0.2,
        tpot_s=0.03,
        prompt=(1000, 0.9, 7000),
        output=(150, 0.8, 1000),
        rates=(4, 8, 12, 14, 16, 18, 20, 22, 24, 28, 32),
        window_s=60.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class Told:
    """What one request was given."""

    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """What a run came to."""

    num_requests: int
    num_met: int
    num_shed: int
    num_late: int
    """Served, with the first token too late."""
    num_slow: int
    """Served in time, and too slow a token."""
    goodput: float
    """Requests a second."""
    error_p50: float
    error_p95: float

    @property
    def share_met(self) -> float:
        return self.num_met / self.num_requests


class PrefillFirst(Scheduler):
    """While a prompt is to be computed nobody decodes: the lowest TTFT that a server without load has."""

    def schedule(self, now: float) -> StepPlan | None:
        is_behind = any(entry.request.num_pending > 1 for entry in self._running)
        is_startable = bool(len(self._waiting) and self._free_slots)
        if not is_behind and not is_startable:
            return super().schedule(now)
        draft = PlanDraft(self.latency.for_step([], now))
        for entry in list(self._running):
            if entry.request.num_pending > 1:
                self._continue(entry, entry.request.num_pending, draft)
        self._admit_waiting(draft, now)
        if not draft.rows:
            return super().schedule(now)
        plan = draft.finish(self._num_steps)
        self.latency.launched(plan.rows, has_prompts=True)
        self._num_steps += 1
        self._launched.append((plan, draft.entries))
        return plan


def arrivals(setting: Setting, rate: float, seed: int | str) -> list[Arrival]:
    """In order of time."""
    random = Random(f"{seed} {rate}")
    now_s, coming = 0.0, list[Arrival]()
    while (now_s := now_s + random.expovariate(rate)) < setting.window_s:
        coming.append(Arrival(now_s, _length(random, setting.prompt), _length(random, setting.output)))
    return coming


def _length(random: Random, lengths: tuple[float, float, int]) -> int:
    median, sigma, most = lengths
    return max(2, min(most, round(median * random.lognormvariate(0.0, sigma))))


@dataclass(frozen=True, slots=True)
class Policy:
    """How a run is scheduled."""

    kind: type[Scheduler]
    step_tokens: int
    has_ttft: bool = False
    has_tpot: bool = False


TARGETS, REFUSING = "targets", "TTFT alone"
"""By both targets; and by one, which orders and refuses, with the fixed chunks in the middle."""


def policies(setting: Setting) -> Mapping[str, Policy]:
    """By name; all but the first two are fixed settings."""
    middle = setting.chunks[len(setting.chunks) // 2]
    return {
        TARGETS: Policy(Scheduler, setting.max_num_batched_tokens, has_ttft=True, has_tpot=True),
        REFUSING: Policy(Scheduler, middle, has_ttft=True),
        **{f"chunks of {size:,}": Policy(Scheduler, size) for size in setting.chunks},
        "prefill first": Policy(PrefillFirst, max(setting.chunks)),
    }


def run(setting: Setting, policy: str, rate: float, seed: int) -> Score:
    """All requests of one load through one policy, to the last token."""
    chosen = policies(setting)[policy]
    limits = SchedulerConfig(
        max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=chosen.step_tokens, max_model_len=1 << 17
    )
    cache = KVCache(setting.num_blocks, _BLOCK_SIZE, step_tokens=chosen.step_tokens, shares_prefixes=False)
    clock = VirtualClock()
    core = EngineCore(
        chosen.kind(limits, cache, setting.seed), CostedDevice(setting.cost, clock, seed), vocab_size=8, clock=clock
    )
    coming, told = arrivals(setting, rate, seed), dict[str, Told]()
    next_one = 0
    while next_one < len(coming) or core.has_work:
        if not core.has_work:
            clock.now_s = max(clock.now_s, coming[next_one].at_s)
        while next_one < len(coming) and coming[next_one].at_s <= clock.now_s:
            told[str(next_one)] = Told()
            core.submit(_submit(setting, coming[next_one], str(next_one), chosen), clock.now_s)
            next_one += 1
        output = core.step(clock.now_s)
        _take(output, told, clock.now_s)
    return _score(setting, core, coming, list(told.values()))


def _submit(setting: Setting, arrival: Arrival, name: str, policy: Policy) -> Submit:
    return Submit(
        request_id=name,
        prompt_ids=(1,) * arrival.num_prompt,
        params=SamplingParams(max_tokens=arrival.num_output, seed=0),
        arrival_s=arrival.at_s,
        ttft_target_s=setting.ttft_s if policy.has_ttft else None,
        tpot_target_s=setting.tpot_s if policy.has_tpot else None,
    )


def _take(output: StepOutput | None, told: dict[str, Told], now_s: float) -> None:
    """`now_s`: when the step was over."""
    for delta in output.deltas if output is not None else ():
        if delta.token_ids:
            one = told[delta.request_id]
            one.first_s = now_s if one.first_s is None else one.first_s
            one.last_s, one.num_tokens = now_s, one.num_tokens + len(delta.token_ids)


def _score(setting: Setting, core: EngineCore, coming: Sequence[Arrival], told: Sequence[Told]) -> Score:
    num_met = num_late = num_slow = 0
    for arrival, one in zip(coming, told, strict=True):
        if one.first_s is None:
            continue
        if one.first_s - arrival.at_s > setting.ttft_s:
            num_late += 1
        elif one.last_s - one.first_s > setting.tpot_s * (one.num_tokens - 1):
            num_slow += 1
        else:
            num_met += 1
    stats = core.stats()
    return Score(
        len(coming), num_met, stats.num_shed, num_late, num_slow, num_met / setting.window_s,
        stats.step_model.error_p50, stats.step_model.error_p95,
    )  # fmt: skip


def sweep(setting: Setting, seed: int) -> dict[str, list[Score]]:
    """Policy -> score by rate."""
    jobs = [(setting, policy, rate, seed) for policy in policies(setting) for rate in setting.rates]
    with ProcessPoolExecutor(2) as pool:
        scores = list(pool.map(run, *zip(*jobs, strict=True)))
    size = len(setting.rates)
    return {policy: scores[i * size : (i + 1) * size] for i, policy in enumerate(policies(setting))}


def report(setting: Setting, scores: Mapping[str, Sequence[Score]]) -> str:
    """Two tables and what they come to, as Markdown."""
    fixed = {policy: row for policy, row in scores.items() if policy not in (TARGETS, REFUSING)}
    peaks = {policy: max(score.goodput for score in row) for policy, row in scores.items()}
    best = max(fixed, key=lambda policy: peaks[policy])
    knee = max(range(len(setting.rates)), key=lambda i: fixed[best][i].goodput)
    ratios = [ours.goodput / max(row[i].goodput for row in fixed.values()) for i, ours in enumerate(scores[TARGETS])]
    columns = ["requests/s", *scores, "to the best"]
    rows: list[list[Cell]] = [
        [f"{rate:g}", *(row[i].goodput for row in scores.values()), ratios[i]] for i, rate in enumerate(setting.rates)
    ]
    detail: list[list[Cell]] = [
        [
            f"{rate:g}",
            *(f"{100 * share:.0f}%" for share in _shares(score)),
            f"{score.error_p50:.1%}",
            f"{score.error_p95:.1%}",
        ]
        for rate, score in zip(setting.rates, scores[TARGETS], strict=True)
    ]
    return "\n\n".join(
        (
            f"{setting.about}. TTFT {setting.ttft_s * 1e3:g} ms, TPOT {setting.tpot_s * 1e3:g} ms; prompts of "
            f"{setting.prompt[0]:g} and answers of {setting.output[0]:g} tokens in the median (lognormal, sigma "
            f"{setting.prompt[1]:g} and {setting.output[1]:g}), {setting.window_s:g} s of arrivals.",
            "Goodput, requests a second within both targets:",
            markdown(columns, rows),
            f"Best fixed setting: {best}, {peaks[best]:.2f} at most, at {setting.rates[knee]:g} requests/s. There "
            f"targets give {scores[TARGETS][knee].goodput:.2f} ({ratios[knee]:.2f}x), and at most "
            f"{peaks[TARGETS]:.2f} ({peaks[TARGETS] / peaks[best]:.2f}x); the least ratio to the best fixed "
            f"setting of each load is {min(ratios):.2f}.",
            "By targets, of all requests, and the step-time model's error:",
            markdown(["requests/s", "met", "refused", "late", "slow", "error p50", "p95"], detail),
        )
    )


def _shares(score: Score) -> tuple[float, ...]:
    counts = (score.num_met, score.num_shed, score.num_late, score.num_slow)
    return tuple(count / score.num_requests for count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="h200")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two loads of a few seconds: shows that it runs")
    parser.add_argument("--out", type=Path, help="folder that the table and the plot are written to")
    asked = parser.parse_args()
    setting = SETTINGS[asked.setting]
    if asked.quick:
        setting = replace(setting, rates=setting.rates[1:5:3], window_s=5.0)
    scores = sweep(setting, asked.seed)
    text = report(setting, scores)
    print(text)
    if asked.out is not None:
        lines = {policy: [score.goodput for score in row] for policy, row in scores.items()}
        chart = line_chart(setting.rates, lines, "requests a second that come", "requests a second within targets")
        (asked.out / f"slo_{setting.name}.svg").write_text(chart)
        (asked.out / f"slo_{setting.name}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
