"""What goes wrong around the engine, by seed: how each of its lives is disturbed, who kills it, what the callers do.

Beside `scenario`, which says what is asked and how tight the engine is. A seed means the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from msgspec import structs

from tests.sim.oracle import Job
from tests.sim.scenario import Scenario, make_scenario

TICK_S = 0.003
"""About a step: in which requests arrive, and grammars are compiled."""
STEP_FAULTS = ("kill", "memory", "kill before", "kill after", "kill and lose", "hang", "stop", "pause", "slow")
"""In a step of an engine: the process is killed when it is launched, or an allocation fails then; it is killed before
the results are sent, or after, when they arrive all the same or are lost with it; the step never ends; the process
stands still for ever, or for so long as is no hang; a step takes longer than any silence may."""
FRAME_FAULTS = ("lose", "repeat", "cut", "flip", "stale", "delay")
"""To a frame: lost, twice, cut short, a bit is wrong, or its place is taken by that of an engine before; or late. Of
those that are lost a quarter is with all that come behind it ("mute"): no later number tells of it."""
START_FAULTS = ("killed", "refuses", "silent")
"""To a start: the process is killed, says that it cannot start, or stands still for ever."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one life."""

    what: str
    where: str
    """"step", "start", or the way of a frame: "in" to the engine, "out" to the server."""
    at: int
    """Which step of its life, or which frame, from 0."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks for one choice, and what it does beside reading the answer."""

    job: Job
    pause_s: float = 0.0
    """Between two reads, at most."""
    abort_s: float | None = None
    """From its arrival on: it goes away."""
    stops_after: int | None = None
    """Tokens in which it finds a stop string."""
    kills_at: int | None = None
    """The position of its text whose computation ends the engine."""
    choice_of: str = ""
    """The request of which it is a further choice: submitted with it, and read by itself."""


@dataclass(frozen=True, slots=True)
class FrontScenario:
    seed: int
    core: Scenario
    """How tight the engine is, and where logits are NaN. Its jobs are the callers'."""
    callers: tuple[Caller, ...]
    lives: dict[int, tuple[Fault, ...]] = field(default_factory=dict)
    """By generation."""
    wall_jumps_s: tuple[tuple[float, float], ...] = ()
    """(when, by how much) the wall clock jumps."""
    resets_s: tuple[float, ...] = ()
    """When the prefix cache is dropped."""
    outage_grace_s: float = 10.0
    max_waiting: int = 2048
    has_standby: bool = False
    aborts_all_s: float | None = None
    """When all that runs is aborted, as a second signal does."""


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
        lives=_crash_loop(rng) if kind < 0.04 else _many_deaths(rng) if kind < 0.14 else _lives(rng),
        wall_jumps_s=tuple((rng.random(), rng.choice((-3600.0, 3600.0))) for _ in range(rng.choice((0, 1, 3)))),
        resets_s=tuple(rng.random() for _ in range(rng.choice((0, 0, 0, 2)))),
        outage_grace_s=rng.choice((0.0, 0.3, 10.0, 10.0)),
        max_waiting=rng.choice((2048, 2048, 3)),
        has_standby=rng.random() < 0.3,
        aborts_all_s=rng.random() if rng.random() < 0.04 else None,
    )


def _caller(rng: Random, core: Scenario, job: Job) -> Caller:
    aborts = [tick for tick, request_id in core.aborts if request_id == job.request_id]
    return Caller(
        job,
        pause_s=rng.choice((0.0, 0.0, 0.0, 0.01, 0.2)),
        abort_s=max(0, aborts[0] - job.arrival_tick) * TICK_S if aborts else None,
        stops_after=rng.randint(1, 6) if rng.random() < 0.1 else None,
    )


def _with_poison(rng: Random, callers: tuple[Caller, ...]) -> tuple[Caller, ...]:
    """In a quarter of the scenarios one request or two end whatever engine computes some position of theirs; each asks
    for the same once more, long after."""
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
    """None disturbed, or the first few."""
    num_disturbed = rng.choice((0, 1, 2, 2, 3, 4))
    return {epoch: _faults(rng, epoch) for epoch in range(num_disturbed)}


def _faults(rng: Random, epoch: int) -> tuple[Fault, ...]:
    """One that may end the life, and some that may not."""
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


def _many_deaths(rng: Random) -> dict[int, tuple[Fault, ...]]:
    """More engines end than may in a crash loop, each after some steps: what was delivered keeps others coming."""
    last = rng.choice((8, 30))
    kinds = ("kill", "kill before", "kill after", "kill and lose", "kill and lose")
    return {life: (Fault(rng.choice(kinds), "step", rng.randint(1, last)),) for life in range(12)}


def _crash_loop(rng: Random) -> dict[int, tuple[Fault, ...]]:
    """The first engine dies in a step, and none after it gets as far as serving, more often than may be."""
    first = Fault("kill", "step", rng.randint(0, 8))
    starts = {life: (Fault(rng.choice(("killed", "refuses")), "start", 0),) for life in range(1, 9)}
    return {0: (first,), **starts}
