"""Faults around the engine, by seed: crashes, hangs, lost frames, and how the callers behave.

`scenario` says what is asked and how tight the engine is. A seed means the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from msgspec import structs

from tests.sim.oracle import Job
from tests.sim.scenario import Scenario, make_scenario

TICK_S = 0.003
"""Seconds of a tick, about a step. Requests arrive and grammars are compiled in ticks."""
STEP_FAULTS = ("kill", "memory", "kill before", "kill after", "kill and lose", "hang", "stop", "pause", "slow")
"""Faults in a step of an engine. The process is killed when the step is launched, or an allocation fails then. It is
killed before the results are sent. It is killed afterwards, and the results arrive or are lost. The step never ends.
The process is suspended for ever, or for less than a hang. A step takes longer than any allowed stop. Besides these,
"starve": the process waits for a processor, for up to five minutes."""
FRAME_FAULTS = ("lose", "repeat", "cut", "flip", "stale", "delay")
"""Faults of a frame: lost, repeated, cut short, with a wrong bit, replaced by one of an earlier engine, or late. A
quarter of the lost ones lose all frames behind them as well ("mute"), so that no later number shows the gap."""
START_FAULTS = ("killed", "refuses", "silent")
"""Faults of a start: the process is killed, reports that it cannot start, or hangs."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one engine."""

    what: str
    where: str
    """"step", "start", or the direction of a frame: "in" to the engine, "out" to the server."""
    at: int
    """Number of the step of this engine, or of the frame, from 0."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of one choice, and what it does besides reading the answer."""

    job: Job
    pause_s: float = 0.0
    """Longest pause between two reads."""
    abort_s: float | None = None
    """Seconds from its arrival after which it disconnects."""
    stops_after: int | None = None
    """Number of tokens after which it finds a stop string."""
    kills_at: int | None = None
    """The position of its text whose computation crashes the engine."""
    choice_of: str = ""
    """The request of which this is a further choice. They are submitted together and read separately."""


@dataclass(frozen=True, slots=True)
class FrontScenario:
    seed: int
    core: Scenario
    """Limits of the engine, and the positions of NaN logits. Its jobs are the callers'."""
    callers: tuple[Caller, ...]
    lives: dict[int, tuple[Fault, ...]] = field(default_factory=dict)
    """Faults by engine epoch, of the first replica."""
    num_replicas: int = 1
    other_lives: dict[int, tuple[Fault, ...]] = field(default_factory=dict)
    """Faults by engine epoch, of each further replica."""
    wall_jumps_s: tuple[tuple[float, float], ...] = ()
    """(time, seconds) of each jump of the wall clock."""
    resets_s: tuple[float, ...] = ()
    """Times at which the prefix cache is dropped."""
    outage_grace_s: float = 10.0
    max_waiting: int = 2048
    has_standby: bool = False
    aborts_all_s: float | None = None
    """Time at which all running requests are aborted, as by a second signal."""
    has_tier: bool = False
    """Whether a tier below the pool keeps what engines compute."""


def make_front_scenario(seed: int) -> FrontScenario:
    """The scenario of `seed`."""
    rng = Random(f"front {seed}")
    core = make_scenario(seed)
    jobs = tuple(replace(job, num_emitted=0) for job in core.jobs)
    core = replace(core, jobs=jobs)
    callers = _with_poison(rng, tuple(_caller(rng, core, job) for job in jobs))
    callers = _with_choices(Random(f"choices {seed}"), callers)
    kind = rng.random()
    return FrontScenario(
        seed=seed,
        core=core,
        callers=callers,
        lives=_with_starvation(
            Random(f"starve {seed}"),
            _crash_loop(rng) if kind < 0.04 else _many_deaths(rng) if kind < 0.14 else _lives(rng),
        ),
        wall_jumps_s=tuple((rng.random(), rng.choice((-3600.0, 3600.0))) for _ in range(rng.choice((0, 1, 3)))),
        resets_s=tuple(rng.random() for _ in range(rng.choice((0, 0, 0, 2)))),
        outage_grace_s=rng.choice((0.0, 0.3, 10.0, 10.0)),
        max_waiting=rng.choice((2048, 2048, 3)),
        has_standby=rng.random() < 0.3,
        aborts_all_s=rng.random() if rng.random() < 0.04 else None,
        **_replicas(Random(f"replicas {seed}")),
    )


def make_left_scenario(seed: int) -> FrontScenario:
    """A front scenario with many crashes of one replica, whose engines find what the ones before left: also what
    others asked, each for itself alone."""
    scenario, rng = make_front_scenario(seed), Random(f"left {seed}")
    limits = replace(scenario.core.limits, hash_bits=None)
    callers = [caller for caller in scenario.callers if caller.kills_at is None]
    again = [
        replace(
            caller,
            job=replace(
                caller.job,
                request_id=f"{caller.job.request_id}-{number}",
                arrival_tick=caller.job.arrival_tick + rng.randint(0, 60),
                cache_salt=f"of {caller.job.request_id}-{number}",
                nan_position=None,
            ),
            abort_s=rng.choice((0.0, 0.002, 0.005, 0.01, 0.03)) if rng.random() < 0.3 else None,
        )
        for caller in callers
        if not caller.choice_of and rng.random() < 0.7
        for number in range(2)
    ]
    return replace(
        scenario,
        core=replace(scenario.core, limits=limits),
        callers=(*callers, *again),
        lives={life: (Fault("kill", "step", rng.randint(2, 12)),) for life in range(12)},
        num_replicas=1,
        other_lives={},
        max_waiting=2048,
        aborts_all_s=None,
        has_tier=rng.random() < 0.7,
    )


def _replicas(rng: Random) -> dict[str, Any]:
    """In a third of the scenarios there are two replicas, each with faults of its own."""
    if rng.random() >= 0.33:
        return {}
    return {"num_replicas": 2, "other_lives": _crash_loop(rng) if rng.random() < 0.04 else _lives(rng)}


def _caller(rng: Random, core: Scenario, job: Job) -> Caller:
    aborts = [tick for tick, request_id in core.aborts if request_id == job.request_id]
    return Caller(
        job,
        pause_s=rng.choice((0.0, 0.0, 0.0, 0.01, 0.2)),
        abort_s=max(0, aborts[0] - job.arrival_tick) * TICK_S if aborts else None,
        stops_after=rng.randint(1, 6) if rng.random() < 0.1 else None,
    )


def _with_poison(rng: Random, callers: tuple[Caller, ...]) -> tuple[Caller, ...]:
    """In a quarter of the scenarios one or two requests crash any engine that computes a certain position of theirs.
    Each of them is sent once more, much later."""
    if rng.random() >= 0.25:
        return callers
    poisons = rng.sample(range(len(callers)), min(len(callers), rng.choice((1, 1, 2))))
    again = []
    changed = list(callers)
    for index in poisons:
        caller = callers[index]
        kills_at = max(0, len(caller.job.prompt_ids) + rng.choice((-2, -1, 0, 0, 1, 3)))
        changed[index] = replace(caller, kills_at=kills_at, abort_s=None, stops_after=None)
        like = replace(
            caller.job,
            request_id=f"{caller.job.request_id}-like",
            params=structs.replace(caller.job.params, seed=caller.job.params.seed + 17),
            arrival_tick=caller.job.arrival_tick + 20_000,
            nan_position=None,
        )
        again.append(Caller(like, kills_at=kills_at))
    return (*changed, *again)


def _with_choices(rng: Random, callers: tuple[Caller, ...]) -> tuple[Caller, ...]:
    """In half of the scenarios a fifth of the requests have further choices, each with a seed of its own."""
    if rng.random() < 0.5:
        return callers
    further = []
    for caller in callers:
        if caller.kills_at is None and rng.random() < 0.2:
            for i in range(1, rng.choice((2, 3, 5))):
                job = replace(
                    caller.job,
                    request_id=f"{caller.job.request_id}-choice-{i}",
                    params=structs.replace(caller.job.params, seed=caller.job.params.seed + 1_000 + i),
                    nan_position=None,
                )
                abort_s = rng.random() * 0.1 if rng.random() < 0.2 else None
                further.append(Caller(job, abort_s=abort_s, choice_of=caller.job.request_id))
    return (*callers, *further)


def _lives(rng: Random) -> dict[int, tuple[Fault, ...]]:
    """Faults of the first few engines, or none."""
    num_disturbed = rng.choice((0, 1, 2, 2, 3, 4))
    return {epoch: _faults(rng, epoch) for epoch in range(num_disturbed)}


def _faults(rng: Random, epoch: int) -> tuple[Fault, ...]:
    """Faults of one engine: one that may end it, and some that do not."""
    faults = []
    for _ in range(rng.choice((1, 1, 2))):
        draw = rng.random()
        if draw < 0.1 and epoch:
            faults.append(Fault(rng.choice(START_FAULTS), "start", 0))
        elif draw < 0.65:
            faults.append(Fault(rng.choice(STEP_FAULTS), "step", _early(rng, 0)))
        else:
            what = "stale" if epoch and rng.random() < 0.3 else rng.choice(FRAME_FAULTS)
            fault = Fault(what, rng.choice(("in", "out", "out")), _early(rng, 1))
            is_mute = what == "lose" and fault.at % 4 == 3
            faults.append(replace(fault, what="mute") if is_mute else fault)
    return tuple(faults)


def _early(rng: Random, first: int) -> int:
    return first + rng.choice((rng.randint(0, 3), rng.randint(0, 20), rng.randint(0, 80)))


def _with_starvation(rng: Random, lives: dict[int, tuple[Fault, ...]]) -> dict[int, tuple[Fault, ...]]:
    """In a fifth of the scenarios one engine waits for a processor in one of its steps, besides its other faults."""
    if rng.random() >= 0.2:
        return lives
    epoch = rng.choice((0, 0, 1))
    return {**lives, epoch: (*lives.get(epoch, ()), Fault("starve", "step", _early(rng, 0)))}


def _many_deaths(rng: Random) -> dict[int, tuple[Fault, ...]]:
    """More crashes than a crash loop allows, each after some steps. Tokens delivered in between keep the server
    restarting engines."""
    last = rng.choice((8, 30))
    kinds = ("kill", "kill before", "kill after", "kill and lose", "kill and lose")
    return {life: (Fault(rng.choice(kinds), "step", rng.randint(1, last)),) for life in range(12)}


def _crash_loop(rng: Random) -> dict[int, tuple[Fault, ...]]:
    """A crash loop: the first engine dies in a step and none after it starts serving, more often than allowed."""
    first = Fault("kill", "step", rng.randint(0, 8))
    starts = {life: (Fault(rng.choice(("killed", "refuses")), "start", 0),) for life in range(1, 9)}
    return {0: (first,), **starts}
