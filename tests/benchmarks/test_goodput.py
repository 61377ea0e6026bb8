"""Policies schedule loads, and runs are scored. A run ends as soon as nothing can change its score."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import goodput
from benchmarks.costed_device import CostedMachine, LinearCost
from benchmarks.goodput import REFUSING, TARGETS, Arrival, RequestTimes, Setting, arrivals, policies, run
from benchmarks.slo import SETTINGS, Job, Sweep
from inferd.engine.api.wire.messages import StepModel
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts

COSTS = PriorCosts(Coefficients(4e-3, 1e-5, 1e-8), Coefficients(4e-3, 2.5e-5, 1e-8, 4e-10))
SETTING: Setting = replace(SETTINGS["h200"], window_s=4.0, rates=(8, 30), seeds=(1,), max_num_seqs=32)


def machine() -> CostedMachine:
    return CostedMachine(LinearCost(COSTS), COSTS, num_blocks=4000)


@pytest.mark.parametrize("policy", list(policies(SETTING)))
def test_what_is_decided_early_is_what_it_comes_to(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running the load to its last token gives the same counts."""
    early = run(SETTING, machine(), policy, 30, 1)
    monkeypatch.setattr(goodput._Run, "is_over", _has_ended)
    assert run(SETTING, machine(), policy, 30, 1).shares == early.shares
    assert early.num_requests == len(arrivals(SETTING, 30, 1)) > early.num_met
    assert sum(early.shares) == pytest.approx(1.0)
    assert (early.num_shed > 0) == (policy in (TARGETS, REFUSING)), "who has no target is never refused"


def _has_ended(self: goodput._Run, now_s: float) -> bool:
    del now_s
    return len(self.times) == len(self._load) and not self._core._live


def test_a_score_by_hand() -> None:
    """TTFT 0.2 s, TPOT 30 ms, answers of 11 tokens."""
    coming = [Arrival(1.0, 100, 11)] * 7
    times = [
        RequestTimes(first_s=1.2, last_s=1.499, num_tokens=11),
        RequestTimes(first_s=1.201, last_s=1.3, num_tokens=11),
        RequestTimes(first_s=1.1, last_s=1.401, num_tokens=11),
        RequestTimes(first_s=1.1, last_s=1.2, num_tokens=10),
        RequestTimes(),
        RequestTimes(is_refused=True),
        RequestTimes(first_s=1.0, last_s=1.0, num_tokens=11),
    ]
    score = goodput._score(SETTING, coming, times, StepModel())
    assert (score.num_met, score.num_shed, score.num_late, score.num_slow) == (2, 1, 2, 2)
    assert score.goodput == 2 / SETTING.window_s


def test_what_a_sweep_comes_to() -> None:
    """Two loads; the best fixed setting differs between them."""
    setting = replace(SETTING, rates=(10, 20))
    some = run(setting, machine(), TARGETS, 8, 1)
    goodputs = {TARGETS: (9.0, 12.0), REFUSING: (9.0, 9.0), "chunks of 512": (8.0, 2.0), "chunks of 2,048": (7.0, 4.0)}
    scores = {
        Job(policy, rate, 1): replace(some, num_requests=40, goodput=goodputs.get(policy, (1.0, 1.0))[i])
        for policy in policies(setting)
        for i, rate in enumerate(setting.rates)
    }
    found = Sweep(setting, scores)
    assert [found.ratio(rate, 1) for rate in setting.rates] == [9 / 8, 3.0]
    knee = found.knee(1)
    assert (knee.policy, knee.rate, knee.peak, knee.arrival_rate) == ("chunks of 512", 10, 8.0, 40 / setting.window_s)
    assert (knee.by_targets, knee.peak_by_targets) == (9.0, 12.0)
