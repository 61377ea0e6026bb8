"""The latency and shares of tenants beside one that asks for a hundred times as much. The real core and scheduler run
on a virtual H200, whose step times are computed from floors and not measured.

    python benchmarks/fairness.py [--seconds 240] [--seed 1]

Requests arrive at random (Poisson); prompts and answers have lognormal lengths; a seed draws all of them. First the
small tenants are served alone, then beside the large one. Then all tenants ask for more than the machine can give, each
with other lengths of prompts and answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goodput import BLOCK_SIZE, Arrival, Setting, arrivals
from benchmarks.slo import SETTINGS
from benchmarks.tables import Cell, markdown
from inferd.engine.api.wire.messages import StepOutput, Submit
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.fairness.fair import OUTPUT_COST, PROMPT_COST
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler

SHARED = replace(SETTINGS["h200"], max_num_seqs=64)
"""64 slots. If a flood decodes in all of them, prompts keep two thirds of a step within the TPOT target. Of 256 slots
the flood would hold half, as many as its prompts keep busy. Prompts would keep somewhat more than half of a step."""
MOST_WAITING = 2000
"""Waiting requests of one tenant. More are not sent, because a server would refuse them."""

Loads = Mapping[str, Sequence[Arrival]]


def poisson(setting: Setting, rate: float, seconds: float, seed: str) -> list[Arrival]:
    """A tenant's requests, `rate` a second on average."""
    return arrivals(replace(setting, window_s=seconds), rate, seed)


def percentile(values: Sequence[float], share: float) -> float:
    """The number that a share of `values` does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass(slots=True)
class Served:
    """First-token times and cost of each tenant."""

    ttfts_s: dict[str, list[float]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    """Tokens, weighted as for fair shares."""


class _Tenants:
    """Submits requests to a core and counts its results."""

    def __init__(self, core: EngineCore, setting: Setting, loads: Loads) -> None:
        self.served = Served({name: [] for name in loads}, dict.fromkeys(loads, 0.0))
        self._core, self._setting = core, setting
        self._arrivals = sorted(
            ((name, arrival) for name, load in loads.items() for arrival in load), key=lambda one: one[1].at_s
        )
        self._next = 0
        self._begun: set[str] = set()
        self._waiting = dict.fromkeys(loads, 0)

    @property
    def next_s(self) -> float | None:
        """Time of the next arrival."""
        return self._arrivals[self._next][1].at_s if self._next < len(self._arrivals) else None

    def send(self, now_s: float) -> None:
        """Submit all requests that have arrived by now."""
        while (at_s := self.next_s) is not None and at_s <= now_s:
            tenant, arrival = self._arrivals[self._next]
            if self._waiting[tenant] < MOST_WAITING:
                self._waiting[tenant] += 1
                submit = Submit(
                    request_id=str(self._next),
                    prompt_ids=(1,) * arrival.num_prompt,
                    params=SamplingParams(max_tokens=arrival.num_output, seed=0),
                    scheduling=SchedulingParams(arrival_s=at_s, tpot_target_s=self._setting.tpot_s, tenant=tenant),
                )
                self._core.submit(submit, now_s)
            self._next += 1

    def take(self, output: StepOutput | None, now_s: float) -> None:
        """Count the results of a step that ended at `now_s`."""
        for delta in output.deltas if output is not None else ():
            tenant, arrival = self._arrivals[int(delta.request_id)]
            if delta.request_id not in self._begun:
                self._begun.add(delta.request_id)
                self._waiting[tenant] -= 1
                self.served.ttfts_s[tenant].append(now_s - arrival.at_s)
                self.served.cost[tenant] += PROMPT_COST * arrival.num_prompt
            self.served.cost[tenant] += OUTPUT_COST * len(delta.token_ids)


def run(setting: Setting, loads: Loads, seconds: float, seed: int = 1) -> Served:
    """Results up to the end of `seconds`; an overload is not finished by then."""
    limits = SchedulerConfig(
        max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=setting.max_num_batched_tokens, max_model_len=1 << 17
    )
    machine = setting.open(setting, Path())
    cache = KVCache(machine.num_blocks, BLOCK_SIZE, step_tokens=setting.max_num_batched_tokens, shares_prefixes=False)
    device, clock = machine.begin(seed)
    core = EngineCore(Scheduler(limits, cache, machine.seed), device, vocab_size=8, clock=clock)
    tenants = _Tenants(core, setting, loads)
    while clock() < seconds:
        if not core.has_work:
            if tenants.next_s is None:
                break
            clock.wait_until(tenants.next_s)
        tenants.send(clock())
        output = core.step(clock())
        tenants.take(output, clock())
    return tenants.served


def flooded(setting: Setting, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """TTFTs of three small tenants: alone, and beside one that asks for a hundred times as much as each."""
    few = {f"t{i}": poisson(setting, 0.7, seconds, f"{seed} {i}") for i in range(3)}
    beside = {**few, "flood": poisson(setting, 70.0, seconds, f"{seed} flood")}
    runs = [run(setting, loads, seconds, seed) for loads in (few, beside)]
    alone, among = ([at_s for tenant in few for at_s in ran.ttfts_s[tenant]] for ran in runs)
    return alone, among


def share_errors(setting: Setting, seconds: float, seed: int) -> dict[str, float]:
    """How far the share of each of three tenants is from a third, relative to a third. All ask for more than there is,
    one for three times as much as the others. Prompts have 300, 1,000 and 3,000 tokens, answers 400, 150 and 20."""
    kinds = {
        "prompts of 1,000": (setting, 150.0),
        "prompts of 300": (replace(setting, prompt=(300, 0.9, 7000), output=(400, 0.8, 1000)), 50.0),
        "prompts of 3,000": (replace(setting, prompt=(3000, 0.5, 7000), output=(20, 0.8, 1000)), 50.0),
    }
    loads = {name: poisson(kind, rate, seconds, f"{seed} {name}") for name, (kind, rate) in kinds.items()}
    cost = run(setting, loads, seconds, seed).cost
    fair = sum(cost.values()) / len(cost)
    return {name: abs(given / fair - 1.0) for name, given in cost.items()}


def report(seconds: float, seed: int) -> str:
    """Two Markdown tables."""
    rows: list[list[Cell]] = []
    for num_slots in (64, 256):
        alone, beside = flooded(replace(SHARED, max_num_seqs=num_slots), seconds, seed)
        for share in (0.5, 0.9, 0.99):
            values = percentile(alone, share), percentile(beside, share)
            cells = (f"{values[0] * 1e3:.0f}", f"{values[1] * 1e3:.0f}", f"{values[1] / values[0]:.2f}")
            rows.append([f"{num_slots}", f"p{share * 100:g}", *cells])
    errors = share_errors(SHARED, min(seconds, 60.0), seed)
    return "\n\n".join(
        (
            f"{SHARED.about}. TPOT target {SHARED.tpot_s * 1e3:g} ms, {seconds:g} s of arrivals; TTFT in ms of three "
            "small tenants with 0.7 requests/s each, while another sends 70.",
            markdown(["slots", "TTFT", "alone", "beside the flood", "ratio"], rows),
            "Three tenants under overload, and the distance of each from its share of tokens:",
            markdown(["tenant", "error"], [[name, f"{error:.1%}"] for name, error in errors.items()]),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print(report(asked.seconds, asked.seed))


if __name__ == "__main__":
    main()
